"""Functions with derivatives of their own, where those take fewer operations than autograd's."""

from __future__ import annotations

from typing import Any

import torch


def derived(function: type[torch.autograd.Function], *args: Any) -> Any:
    """function.apply(*args), without its search for default arguments, which takes as long as ten operations
    on a small network's tensors."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return function.apply(*args)
    return super(torch.autograd.Function, function).apply(*args)  # type: ignore[misc]

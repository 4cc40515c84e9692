"""The row of a table that an operation falls under, and whose operation it is."""

from __future__ import annotations

from collections.abc import Container
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from .base import Function

_TORCH = dict(vars(torch))
"""The functions of torch as the tables know them; other packages may exchange some for their own later."""


def in_torch(function: Function | str) -> Function | None:
    """The function of `torch` with the same name as a tensor method or a function such as F.max_pool2d."""
    if isinstance(function, str):
        return _TORCH.get(function)
    if isinstance(function, torch._ops.OpOverload):
        return _TORCH.get(function._opname)
    inside = str(getattr(function, "__module__", None)).startswith("torch.")
    return _TORCH.get(function.__name__) if inside else None


def row(keys: Container[object], module: nn.Module) -> type[nn.Module] | None:
    """The key that applies to a module: its own type, or a base class whose `forward` it inherits."""
    kind = type(module)
    for base in kind.__mro__:
        if base in keys and (base is nn.Module or getattr(base, "forward", None) is kind.forward):
            return base
    return None


def is_torchs_own(module: nn.Module) -> bool:
    """Whether a module's `forward` was written by torch; that of a traced network was not."""
    return type(module).__module__.startswith("torch.") and not isinstance(module, torch.fx.GraphModule)


def is_foreign(operation: object) -> bool:
    """Whether an operation is a function, or a class that is called, from neither torch nor Python."""
    home = str(getattr(operation, "__module__", None)).partition(".")[0]
    is_layer = isinstance(operation, nn.Module) or (
        isinstance(operation, type) and issubclass(operation, nn.Module)
    )
    return (
        callable(operation)
        and not is_layer
        and home not in ("torch", "_operator", "builtins", "math", "None")
    )

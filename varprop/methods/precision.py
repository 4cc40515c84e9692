"""Passes of float16 networks, which are computed in single precision."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ..gaussian import Gaussian
from ..substitution import substituted


def needs_single(module: nn.Module, args: Iterable[Any] = ()) -> bool:
    """Whether an input is random in float16, or the module and a plain input are in float16.

    Under autocast the weights and the variances have single precision, and nothing is needed.
    """
    for a in args:
        if isinstance(a, Gaussian) and a.mean.dtype is a.var.dtype is torch.float16:
            return True
        if isinstance(a, Tensor) and a.dtype is torch.float16 and is_float16(module):
            return True
    return False


def is_float16(module: nn.Module) -> bool:
    return next((p.dtype is torch.float16 for p in module.parameters()), False)


def in_single(function: Callable[..., Any], module: nn.Module, *args: Any, **options: Any) -> Any:
    """function(module, *args) with float16 as float32, whose range and digits moments need.

    In float16, the second moment of a mean of 256 overflows, and a variance of exp(-17) is zero. The result
    stays in single precision; gradients reach the float16 weights.
    """
    named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    single = {name: _single(value) for name, value in named.items() if value.dtype is torch.float16}
    result = substituted(module, single, function, *map(_single, args), **options)
    with torch.no_grad():
        for name, buffer in module.named_buffers():  # running statistics have moved in the copy
            if name in single:
                buffer.copy_(single[name])
    return result


def _single(value: Any) -> Any:
    if isinstance(value, Gaussian):
        return value.map(_single)
    return value.float() if isinstance(value, Tensor) and value.dtype is torch.float16 else value

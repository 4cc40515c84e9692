"""Pooling: averages, exact for independent entries, and maxima, where methods differ."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial, reduce
from itertools import product

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ... import moments
from ...gaussian import Activation, Gaussian, mean_of
from ...posterior import Layer
from ..base import Method, NoRuleError
from ..facts import Rule, Table, on_random, rule
from ..noise import of_averages

AVERAGE_POOLS = (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)
ADAPTIVE_AVERAGE_POOLS = (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d)
MAX_POOLS = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)
ADAPTIVE_MAX_POOLS = (nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d)
_FAMILIES = (AVERAGE_POOLS, ADAPTIVE_AVERAGE_POOLS, MAX_POOLS, ADAPTIVE_MAX_POOLS)


def dimensions(module: nn.Module) -> int:
    """The number of dimensions that a pooling layer slides over."""
    return next(n for family in _FAMILIES for n, kind in enumerate(family, 1) if isinstance(module, kind))


def per_dimension(value: int | Sequence[int], n: int) -> tuple[int, ...]:
    return (value,) * n if isinstance(value, int) else tuple(value)


# --------------------------------------------------------------------------------------------------- averages


@on_random("exact", 12, noise=of_averages)
def average(method: Method, module: Layer, x: Gaussian) -> Gaussian:
    """The mean over each window (Eq. 12); windows cut off by the border or padding average fewer entries."""
    n = dimensions(module)
    divisor = getattr(module, "divisor_override", None)
    if divisor is not None:
        return moments.average(x, module, divisor)
    kernel, stride, padding = (
        per_dimension(a, n) for a in (module.kernel_size, module.stride, module.padding)
    )
    if not module.ceil_mode and (module.count_include_pad or not any(padding)):
        return moments.average(x, module, math.prod(kernel))
    outputs = module(x.mean).shape[-n:]
    lengths = []
    for size, out, k, step, pad in zip(x.shape[-n:], outputs, kernel, stride, padding, strict=True):
        start = torch.arange(out, device=x.mean.device) * step - pad
        end = (start + k).clamp(max=size + pad)
        if not module.count_include_pad:
            start, end = start.clamp(min=0), end.clamp(max=size)
        lengths.append(end - start)
    return moments.average(x, module, _window_sizes(lengths, x))


@on_random("exact", 12, noise=of_averages)
def adaptive_average(method: Method, module: nn.Module, x: Gaussian) -> Gaussian:
    n = dimensions(module)
    lengths = []
    for size, out in zip(x.shape[-n:], module(x.mean).shape[-n:], strict=True):
        i = torch.arange(out, device=x.mean.device)
        lengths.append(-((-(i + 1) * size) // out) - (i * size) // out)
    return moments.average(x, module, _window_sizes(lengths, x))


def _window_sizes(lengths: list[Tensor], x: Gaussian) -> Tensor:
    size = torch.ones((), dtype=x.mean.dtype, device=x.mean.device)
    for length in lengths:
        size = size.unsqueeze(-1) * length
    return size


# ----------------------------------------------------------------------------------------------------- maxima

_MAX_POOL = {1: F.max_pool1d_with_indices, 2: F.max_pool2d_with_indices, 3: F.max_pool3d_with_indices}


@on_random("approximate", 10)
def winner_pool(method: Method, module: Layer, x: Gaussian) -> Gaussian:
    """The largest mean of each window with the variance of that entry (Eq. 10): one search gives both."""
    n = dimensions(module)
    options = module.kernel_size, module.stride, module.padding, module.dilation, module.ceil_mode
    mean, winners = _MAX_POOL[n](x.mean, *options)
    return Gaussian.of(mean, x.var.flatten(-n).gather(-1, winners.flatten(-n)).view_as(mean))


@on_random("approximate", 11)
def clark_pool(method: Method, module: nn.Module, x: Gaussian) -> Gaussian:
    """The maximum of each window, two entries at a time, each result treated as normal again (Eq. 11)."""
    return _by_pairs(module, x)


@on_random("approximate", 9)
def anchored_pool(method: Method, module: nn.Module, x: Gaussian) -> Gaussian:
    """The largest mean of each window, with the mean squared deviation of the maximum from it (Eq. 9)."""
    return moments.anchor(module(x.mean), _by_pairs(module, x))


def _by_pairs(module: Layer, x: Gaussian) -> Gaussian:
    n = dimensions(module)
    outputs, sizes = module(x.mean).shape[-n:], x.shape[-n:]
    options = (module.kernel_size, module.stride, module.padding, module.dilation)
    kernel, stride, padding, dilation = (per_dimension(a, n) for a in options)
    device = x.mean.device
    starts = [
        torch.arange(out, device=device) * step - pad
        for out, step, pad in zip(outputs, stride, padding, strict=True)
    ]

    def entry(offset: tuple[int, ...]) -> Gaussian:
        """The entry of every window at one offset; outside the input, a constant smaller than any entry."""
        inside = torch.ones((), dtype=torch.bool, device=device)
        picked = x
        for axis, (start, step, size, o) in enumerate(zip(starts, dilation, sizes, offset, strict=True), -n):
            index = start + o * step
            picked = picked.map(partial(torch.index_select, dim=axis, index=index.clamp(0, size - 1)))
            inside = inside.unsqueeze(-1) & (index >= 0) & (index < size)
        lowest = torch.finfo(x.mean.dtype).min / 4
        return Gaussian.of(torch.where(inside, picked.mean, lowest), torch.where(inside, picked.var, 0.0))

    return reduce(moments.maximum, map(entry, product(*map(range, kernel))))


@rule("as its layer")
def adaptive_max(method: Method, module: nn.Module, x: Activation) -> Activation:
    """The maximum over windows of equal size, by the method's rule for max-pooling."""
    n = dimensions(module)
    sizes, outputs = x.shape[-n:], module(mean_of(x)).shape[-n:]
    if any(size % out for size, out in zip(sizes, outputs, strict=True)):
        raise NoRuleError(
            f"{method.name} has no rule for {type(module).__name__} with windows of several sizes, from "
            f"{tuple(sizes)} to {tuple(outputs)}; choose an output size that divides the input size."
        )
    return method(MAX_POOLS[n - 1](tuple(size // out for size, out in zip(sizes, outputs, strict=True))), x)


def max_pools_by(rule: Rule) -> Table:
    """Table entries that give one rule to all max-pooling layers."""
    return dict.fromkeys(MAX_POOLS, rule)


POOLING: Table = {
    **dict.fromkeys(AVERAGE_POOLS, average),
    **dict.fromkeys(ADAPTIVE_AVERAGE_POOLS, adaptive_average),
    **dict.fromkeys(ADAPTIVE_MAX_POOLS, adaptive_max),
}
"""The pooling layers that all methods share."""

"""Rules for functions that move, join, choose and average the entries of values."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ..gaussian import Activation, Gaussian, as_gaussian, mean_of, move
from ..methods.base import Function, Method, Value, missing
from ..methods.facts import rule
from ..methods.noise import of_averages
from .arithmetic import times


@rule("exact")
def moves(method: Method, function: Function, x: Activation, *args: Value, **options: Value) -> Activation:
    """A function that only moves, repeats or sums entries; other random arguments only give a shape."""
    others = [mean_of(a) for a in args]
    return move(lambda t: function(t, *others, **options), x)


@rule("exact", gain=lambda call: 1.0)
def unchanged(method: Method, function: Function, x: Gaussian, *args: Value, **options: Value) -> Gaussian:
    """A function that leaves every entry in its place, such as a copy or a change of type."""
    return x.map(lambda t: function(t, *map(mean_of, args), **options))


@rule("plain")
def metadata(method: Method, function: Function, x: Gaussian, *args: Value, **options: Value) -> Value:
    """A property of a tensor: its shape, type or device, or a constant tensor made from them."""
    return function(x.mean, *args, **options)


@rule("plain")
def attribute(method: Method, function: Function, x: Value, name: str) -> Value:
    if isinstance(x, tuple):
        return getattr(x, name)
    if name == "data":
        return x.detach()
    if name in ("T", "mT"):
        return x.map(lambda t: getattr(t, name))
    if name not in ("shape", "dtype", "device", "ndim"):
        raise missing(method, f"{name}")
    return getattr(x.mean, name)


@rule("exact")
def item(method: Method, function: Function, x: Value, index: Value) -> Value:
    return x.map(lambda t: t[index]) if isinstance(x, Gaussian) else x[index]


@rule("exact")
def parts(
    method: Method, function: Function, x: Gaussian, *args: Value, **options: Value
) -> tuple[Gaussian, ...]:
    means, variances = function(x.mean, *args, **options), function(x.var, *args, **options)
    return tuple([Gaussian.of(m, v) for m, v in zip(means, variances, strict=True)])


@rule("exact")
def joined(method: Method, function: Function, tensors: Value, *args: Value, **options: Value) -> Gaussian:
    """Several values joined into one; deterministic ones have zero variance."""
    variances = [x.var if isinstance(x, Gaussian) else torch.zeros_like(x) for x in tensors]
    mean = function([mean_of(x) for x in tensors], *args, **options)
    return Gaussian.of(mean, function(variances, *args, **options))


def _chosen(method: Method, condition: Value, a: Value, b: Value) -> Gaussian:
    """An elementwise choice between two values by a deterministic condition."""
    if isinstance(condition, Gaussian):
        raise missing(method, torch.where, " with a random condition")
    mean = torch.where(condition, mean_of(a), mean_of(b))
    a_var, b_var = (x.var if isinstance(x, Gaussian) else 0.0 for x in (a, b))
    return Gaussian.of(mean, torch.where(condition, a_var, b_var).expand_as(mean))


@rule("exact")
def where(method: Method, function: Function, condition: Value, input: Value, other: Value) -> Gaussian:
    return _chosen(method, condition, input, other)


@rule("exact")
def kept_where(method: Method, function: Function, x: Value, condition: Value, other: Value) -> Gaussian:
    """x.where(condition, other)."""
    return _chosen(method, condition, x, other)


@rule("exact")
def filled_where(method: Method, function: Function, x: Value, mask: Value, value: Value) -> Gaussian:
    """x.masked_fill(mask, value)."""
    return _chosen(method, mask, value, x)


@rule("exact")
def looked_up(
    method: Method, function: Function, index: Tensor, table: Gaussian, *args: Value, **options: Value
) -> Gaussian:
    """Rows of a random table."""
    if len(args) > 1 or options.get("max_norm") is not None:
        raise missing(method, function, " with max_norm")
    return table.map(lambda t: F.embedding(index, t))


@rule("exact")
def written(method: Method, function: Function, x: Value, index: Value, value: Value) -> Gaussian:
    """x with a value written at an index."""
    x_var, value_var = (
        a.var if isinstance(a, Gaussian) else torch.zeros_like(torch.as_tensor(a)) for a in (x, value)
    )
    return Gaussian.of(function(mean_of(x), index, mean_of(value)), function(x_var, index, value_var))


@rule("exact", takes_independent=True)
def scattered(
    method: Method, function: Function, x: Value, dim: int, index: Tensor, source: Value, *, alpha: float = 1
) -> Gaussian:
    """x with entries of a source added where an index says, as messages arrive at the nodes of a graph."""
    add: Function = getattr(torch, function.__name__.rstrip("_"))  # not in place
    a, b = as_gaussian(x), as_gaussian(times(source, alpha))
    return Gaussian.of(add(a.mean, dim, index, b.mean), add(a.var, dim, index, b.var))


@rule("exact", 12, noise=of_averages)
def average(method: Method, function: Function, x: Gaussian, *args: Value, **options: Value) -> Gaussian:
    """The mean of independent entries (Eq. 12)."""
    mean = function(x.mean, *args, **options)
    return Gaussian.of(mean, function(x.var, *args, **options) * (mean.numel() / x.mean.numel()))


@rule("exact")
def padded(
    method: Method, function: Function, x: Gaussian, pad: Value, mode: str = "constant", value: Value = None
) -> Gaussian:
    """A constant border has no variance; any other border repeats entries, treated as independent."""
    return Gaussian.of(function(x.mean, pad, mode, value), function(x.var, pad, mode))

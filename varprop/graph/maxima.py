"""Rules for functions that take the larger of two values or the largest along a dimension."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from .. import moments
from ..gaussian import Activation, Gaussian, as_gaussian
from ..methods.base import Function, Method, Value
from ..methods.facts import Rule, Table

OfTwo = Callable[[Gaussian, Gaussian], Gaussian]
Along = Callable[[Gaussian, int], Gaussian]


class Extremes(NamedTuple):
    """What torch.max returns along a dimension. The index of the largest entry is random, so it is None."""

    values: Gaussian
    indices: None = None


def _larger(
    of_two: OfTwo, sign: float, method: Method, function: Function, a: Activation, b: Activation
) -> Activation:
    """The larger of two independent values, or the smaller for a sign of -1; for a = b, a itself."""
    return a if a is b else of_two(as_gaussian(a).times(sign), as_gaussian(b).times(sign)).times(sign)


def _largest(
    along: Along,
    sign: float,
    method: Method,
    function: Function,
    x: Gaussian,
    dim: int | tuple[int, ...] | None = None,
    keepdim: bool = False,
) -> Gaussian:
    """The largest (or smallest) of independent entries along some dimensions or of all entries."""
    n = len(x.shape)
    dims = sorted(d % n for d in ((dim,) if isinstance(dim, int) else dim or range(n)))
    moved = x.times(sign).map(lambda t: t.movedim(dims, list(range(-len(dims), 0))).flatten(-len(dims)))
    shape = [1 if d in dims else size for d, size in enumerate(x.shape) if keepdim or d not in dims]
    return along(moved, -1).times(sign).map(lambda t: t.view(shape))


def _either(
    of_two: OfTwo,
    along: Along,
    sign: float,
    method: Method,
    function: Function,
    x: Activation,
    *args: Value,
    **options: Value,
) -> Value:
    """torch.max and torch.min, of two values, of all entries, or along a dimension."""
    other = args[0] if args else options.get("other")
    if isinstance(other, Tensor | Gaussian):
        return _larger(of_two, sign, method, function, x, other)
    values = _largest(along, sign, method, function, as_gaussian(x), *args, **options)
    return Extremes(values) if args or options else values


def anchored_larger(a: Gaussian, b: Gaussian) -> Gaussian:
    """The larger mean, with the mean squared deviation of the maximum from it (Eq. 9)."""
    return moments.anchor(moments.winner(a, b).mean, moments.maximum(a, b))


def anchored_largest(x: Gaussian, dim: int) -> Gaussian:
    return moments.anchor(x.mean.amax(dim), moments.largest(x, dim))


def maxima_by(of_two: OfTwo, along: Along, pair: tuple[str, int], several: tuple[str, int]) -> Table:
    """Table entries for all functions that take a maximum or minimum, from a method's moments.

    :param pair: kind and equation of the maximum of two values.
    :param several: kind and equation of the maximum along a dimension.
    """
    rows: Table = {}
    for sign, names in ((1.0, "maximum amax max"), (-1.0, "minimum amin min")):
        two, whole, both = (getattr(torch, name) for name in names.split())
        rows[two] = Rule(partial(_larger, of_two, sign), *pair, takes_independent=True)
        rows[whole] = Rule(partial(_largest, along, sign), *several)
        rows[both] = Rule(partial(_either, of_two, along, sign), *pair, takes_independent=True)
    return rows

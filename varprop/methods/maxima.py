"""The larger of two values, and the largest along a dimension, as functions: rules from a method's own moments of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..gaussian import Activation, Gaussian, as_gaussian
from .base import Method, Rule


class Extremes(NamedTuple):
    """What torch.max returns along a dimension. Which entry is the largest is random, so that there are no indices."""

    values: Gaussian
    indices: None = None


def larger(
    of_two: Callable[[Gaussian, Gaussian], Gaussian],
    sign: float,
    method: Method,
    function: Any,
    a: Activation,
    b: Activation,
) -> Activation:
    """The larger of two independent values, or with a sign of -1 the smaller; of one and the same, itself."""
    return a if a is b else of_two(as_gaussian(a).times(sign), as_gaussian(b).times(sign)).times(sign)


def largest(
    along: Callable[[Gaussian, int], Gaussian],
    sign: float,
    method: Method,
    function: Any,
    x: Gaussian,
    dim: int | tuple[int, ...] | None = None,
    keepdim: bool = False,
) -> Gaussian:
    """The largest (smallest) of independent entries along dimensions, or of all."""
    dims = sorted(d % len(x.shape) for d in ((dim,) if isinstance(dim, int) else dim or range(len(x.shape))))
    moved = x.times(sign).map(lambda t: t.movedim(dims, list(range(-len(dims), 0))).flatten(-len(dims)))
    kept = (
        [1 if d in dims else n for d, n in enumerate(x.shape)]
        if keepdim
        else [n for d, n in enumerate(x.shape) if d not in dims]
    )
    return along(moved, -1).times(sign).map(lambda t: t.view(kept))


def either(
    two: Rule, one: Rule, method: Method, function: Any, x: Activation, *args: Any, **kwargs: Any
) -> Any:
    """torch.max and torch.min: of two values, of all entries, or along a dimension."""
    other = args[0] if args else kwargs.get("other")
    if isinstance(other, Tensor | Gaussian):
        return two(method, function, x, other)
    values = one(method, function, x, *args, **kwargs)
    return Extremes(values) if args or kwargs else values


def maxima(
    of_two: Callable[[Gaussian, Gaussian], Gaussian], along: Callable[[Gaussian, int], Gaussian]
) -> dict[Any, Rule]:
    """Rows for all maxima and minima among functions, from a method's moments of two entries and of those along a dimension."""
    rows: dict[Any, Rule] = {}
    for sign, names in ((1.0, "maximum amax max"), (-1.0, "minimum amin min")):
        pair, whole, both = (getattr(torch, name) for name in names.split())
        rows[pair], rows[whole] = partial(larger, of_two, sign), partial(largest, along, sign)
        rows[both] = partial(either, rows[pair], rows[whole])
    return rows


MAXIMA = (torch.maximum, torch.amax, torch.max, torch.minimum, torch.amin, torch.min)

"""Smooth functions of one normal variable, by Gauss-Hermite quadrature."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import BuiltinFunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import vjp
from torch.nn import functional as F

from ..gaussian import Gaussian

NODES = 32
BLOCK = 2**18
"""How many values at nodes to compute at once."""
_RULES = {n: [tuple(a.tolist()) for a in np.polynomial.hermite_e.hermegauss(n)] for n in (8, NODES)}
"""Nodes and weights by their number, as constants that `torch.compile` can read."""


def expectation(g: Callable[[Tensor], Tensor], x: Gaussian, points: int = NODES) -> Tensor:
    """E[g(x)] for an elementwise g by Gauss-Hermite quadrature (Eq. 16).

    >>> expectation(torch.exp, Gaussian(torch.tensor(0.0), torch.tensor(1.0)))       # exp(1/2)
    tensor(1.6487)
    """
    nodes, weights = hermite(x, points)
    return (weights * g(x.mean + x.std * nodes)).sum(0)


def log_expectation_exp(g: Callable[[Tensor], Tensor], x: Gaussian) -> Tensor:
    """log E[exp g(x)] for an elementwise g by Gauss-Hermite quadrature (Eq. 16)."""
    values, weights = _at_nodes(g, x)
    return (values + weights.log()).logsumexp(0)


def quadrature(g: Callable[[Tensor], Tensor], x: Gaussian) -> Gaussian:
    """Mean and variance of g(x) for any elementwise g by Gauss-Hermite quadrature (Eq. 16)."""
    if torch.is_grad_enabled() and _is_fixed(g):
        return Gaussian.of(*_Quadrature.apply(g, x.mean, x.var))  # type: ignore[no-untyped-call]
    return Gaussian.of(*_moments(g, x))


def _moments(g: Callable[[Tensor], Tensor], x: Gaussian) -> tuple[Tensor, Tensor]:
    """From the deviations of the values from one of them, which are exactly zero if x has no variance."""
    m, s = x.mean, x.std
    nodes, weights = hermite(x)
    centre = g(torch.addcmul(m, s, nodes[NODES // 2]))

    def deviations(z: Tensor) -> tuple[Tensor, Tensor]:
        apart = g(torch.addcmul(m, s, z)) - centre
        return apart, apart.square()

    (mean,), (second_moment,) = _sums(deviations, nodes, weights.view(1, -1), x)
    return centre + mean, F.relu(second_moment - mean.square())


def _sums(
    terms: Callable[[Tensor], Sequence[Tensor]], nodes: Tensor, weights: Tensor, x: Gaussian
) -> Sequence[Sequence[Tensor]]:
    """Σ_k w_k t(z_k) over the nodes, for each of the terms t(z) and for each row w of weights.

    The terms are computed at all nodes at once in a graph, or if a cache holds them, else node by node.
    """
    if torch.compiler.is_compiling() or NODES * x.mean.numel() <= BLOCK:
        return [torch.tensordot(weights, term, 1).unbind() for term in terms(nodes)]
    totals: list[list[Tensor]] = []
    for node, of_node in zip(nodes, weights.T, strict=True):
        found = terms(node)
        totals = totals or [[torch.zeros_like(term) for _ in weights] for term in found]
        for rows, term in zip(totals, found, strict=True):
            for total, weight in zip(rows, of_node, strict=True):
                total.addcmul_(term, weight)
    return totals


def _is_fixed(g: object) -> bool:
    """Whether nothing but its argument can have an influence on the value of g."""
    if isinstance(g, nn.Module):
        return next(g.parameters(), None) is None
    return isinstance(g, BuiltinFunctionType)


class _Quadrature(torch.autograd.Function):
    """Mean and variance of g(x) with derivatives from those of g at the nodes.

    Autograd would keep the values at all nodes, and walk through all of them for every output whose
    derivatives are wanted. With d = g'(m + s z) and w the weights of the nodes z:

        dE = Σ w d (dm + z ds),    dVar = 2 Σ w (g - E) d (dm + z ds)
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(g: Callable[[Tensor], Tensor], m: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return _moments(g, Gaussian.of(m, v))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, Tensor, Tensor], output: tuple[Tensor, Tensor]) -> None:
        ctx.g, *saved = inputs
        ctx.slopes = None
        ctx.save_for_backward(*saved, output[0])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(
        ctx: Any, to_mean: Tensor | None, to_var: Tensor | None
    ) -> tuple[None, Tensor | None, Tensor | None]:
        if to_mean is None and to_var is None:
            return None, None, None
        if torch.is_grad_enabled():  # the slopes are to be differentiated themselves
            slopes = _slopes(ctx.g, *ctx.saved_tensors)
        else:
            if ctx.slopes is None:  # several outputs go back through one pass in `vp.correlated`
                ctx.slopes = _slopes(ctx.g, *ctx.saved_tensors)
            slopes = ctx.slopes
        given = to_mean, to_var
        to_m, to_v = (
            sum(to * slope for to, slope in zip(given, by, strict=True) if to is not None)
            for by in zip(*slopes, strict=True)
        )
        return None, to_m, to_v  # type: ignore[return-value]


Slopes = tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]


def _slopes(g: Callable[[Tensor], Tensor], m: Tensor, v: Tensor, mean: Tensor) -> Slopes:
    """Of the mean, and of the variance, each by m and by v."""
    x = Gaussian.of(m, v)
    s, writes = x.std, getattr(g, "inplace", False)
    nodes, weights = hermite(x)

    def terms(z: Tensor) -> tuple[Tensor, Tensor]:
        values, pull = vjp(lambda t: g(t.clone() if writes else t), torch.addcmul(m, s, z))[:2]
        (slope,) = pull(torch.ones_like(values))
        return slope, (values - mean) * slope

    moves = torch.stack([weights.flatten(), (weights * nodes).flatten()])  # of x, by the mean and by the std
    (mean_by_m, mean_by_s), (half_by_m, half_by_s) = _sums(terms, nodes, moves, x)
    by_v = torch.where(v > 0, 0.5 / torch.where(v > 0, s, 1.0), 0.0)  # ds/dv
    return (mean_by_m, by_v * mean_by_s), (2 * half_by_m, 2 * by_v * half_by_s)


def smooth_slope(g: Callable[[Tensor], Tensor], x: Gaussian) -> Tensor:
    """Mean slope of an elementwise g, Cov(g(x), x)/Var[x] = E[g'(x)] (Eq. 25), by Gauss-Hermite quadrature.

    Standard deviations below 0.01 are raised to 0.01, because rounding errors would dominate the quotient.
    """
    s = x.std.clamp(min=0.01)
    nodes, weights = hermite(x)
    moves = (weights * nodes).view(1, -1)
    ((by_s,),) = _sums(lambda z: (g(torch.addcmul(x.mean, s, z)),), nodes, moves, x)
    return by_s / s


def _at_nodes(g: Callable[[Tensor], Tensor], x: Gaussian) -> tuple[Tensor, Tensor]:
    nodes, weights = hermite(x)
    return g(x.mean + x.std * nodes), weights


def hermite(x: Gaussian, points: int = NODES) -> tuple[Tensor, Tensor]:
    """Nodes and weights for a standard normal variable, shaped to stack in front of x."""
    shape, dtype = (-1, *(1,) * x.mean.dim()), torch.promote_types(x.mean.dtype, x.var.dtype)
    nodes, weights = (torch.tensor(a, dtype=dtype, device=x.mean.device).view(shape) for a in _RULES[points])
    return nodes, weights / weights.sum(0)

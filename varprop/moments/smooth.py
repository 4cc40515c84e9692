"""Smooth functions of one normal variable, by Gauss-Hermite quadrature."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import BuiltinFunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import vjp

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
    if _at_once(x):
        values, weights = _at_nodes(g, x)
        centre = values[NODES // 2]
        apart = values - centre
        mean = torch.tensordot(weights.flatten(), apart, 1)
        return centre + mean, torch.tensordot(weights.flatten(), (apart - mean).square(), 1)
    std, middle = x.std, _RULES[NODES][0][NODES // 2]
    centre = g(x.mean + std * middle)
    mean, second_moment = torch.zeros_like(centre), torch.zeros_like(centre)
    for node, weight in _pairs():
        apart = g(torch.add(x.mean, std, alpha=node)) - centre
        mean.add_(apart, alpha=weight)
        second_moment.add_(apart.square(), alpha=weight)
    return centre + mean, second_moment.sub_(mean.square()).relu_()


def _at_once(x: Gaussian) -> bool:
    """Whether to compute the values at all nodes at once: in a graph, or if a cache holds them."""
    return torch.compiler.is_compiling() or NODES * x.mean.numel() <= BLOCK


def _pairs() -> Iterator[tuple[float, float]]:
    """Nodes and weights one by one."""
    nodes, weights = _RULES[NODES]
    total = sum(weights)
    return ((node, weight / total) for node, weight in zip(nodes, weights, strict=True))


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
        pairs = zip((to_mean, to_var), slopes, strict=True)
        to_m, to_v = sum(to * of for to, of in pairs if to is not None)  # type: ignore[misc]
        return None, to_m, to_v


def _slopes(g: Callable[[Tensor], Tensor], m: Tensor, v: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
    """Of the mean, and of the variance, by m and by v, which are stacked in front."""
    x = Gaussian.of(m, v)
    std, writes = x.std, getattr(g, "inplace", False)

    def at(t: Tensor) -> tuple[Tensor, Tensor]:
        values, pull = vjp(lambda t: g(t.clone() if writes else t), t)[:2]
        return values, pull(torch.ones_like(values))[0]

    if torch.is_grad_enabled() or _at_once(x):
        nodes, weights = hermite(x)
        values, slopes = at(m + std * nodes)
        moves = torch.stack([weights.flatten(), (weights * nodes).flatten()])  # by the mean, and by the std
        of_mean = torch.tensordot(moves, slopes, 1)
        of_var = torch.tensordot(2 * moves, (values - mean) * slopes, 1)
    else:
        of_mean, of_var = torch.zeros_like(torch.stack([m, m])), torch.zeros_like(torch.stack([m, m]))
        for node, weight in _pairs():
            values, slopes = at(torch.add(m, std, alpha=node))
            of_mean[0].add_(slopes, alpha=weight)
            of_mean[1].add_(slopes, alpha=weight * node)
            apart = (values - mean).mul_(slopes)
            of_var[0].add_(apart, alpha=2 * weight)
            of_var[1].add_(apart, alpha=2 * weight * node)
    by_v = torch.where(v > 0, 0.5 / torch.where(v > 0, std, 1.0), 0.0)  # ds/dv
    units = torch.stack([torch.ones_like(by_v), by_v])
    return units * of_mean, units * of_var


def smooth_slope(g: Callable[[Tensor], Tensor], x: Gaussian) -> Tensor:
    """Mean slope of an elementwise g, Cov(g(x), x)/Var[x] = E[g'(x)] (Eq. 25), by Gauss-Hermite quadrature.

    Standard deviations below 0.01 are raised to 0.01, because rounding errors would dominate the quotient.
    """
    s = x.std.clamp(min=0.01)
    if torch.is_grad_enabled() or _at_once(x):
        nodes, weights = hermite(x)
        return (weights * nodes * g(x.mean + s * nodes)).sum(0) / s
    total = torch.zeros_like(s)
    for node, weight in _pairs():
        total.add_(g(torch.add(x.mean, s, alpha=node)), alpha=weight * node)
    return total.div_(s)


def _at_nodes(g: Callable[[Tensor], Tensor], x: Gaussian) -> tuple[Tensor, Tensor]:
    nodes, weights = hermite(x)
    return g(x.mean + x.std * nodes), weights


def hermite(x: Gaussian, points: int = NODES) -> tuple[Tensor, Tensor]:
    """Nodes and weights for a standard normal variable, shaped to stack in front of x."""
    shape, dtype = (-1, *(1,) * x.mean.dim()), torch.promote_types(x.mean.dtype, x.var.dtype)
    nodes, weights = (torch.tensor(a, dtype=dtype, device=x.mean.device).view(shape) for a in _RULES[points])
    return nodes, weights / weights.sum(0)

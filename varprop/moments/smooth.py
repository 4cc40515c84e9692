"""Smooth functions of one normal variable, by Gauss-Hermite quadrature."""

from __future__ import annotations

from collections.abc import Callable
from types import BuiltinFunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import vjp

from ..gaussian import Gaussian

NODES = 32
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
    values, weights = _at_nodes(g, x)
    centre = values[len(values) // 2]  # without variance all values equal it, and nothing is left to round
    apart = values - centre
    mean = torch.tensordot(weights.flatten(), apart, 1)
    return centre + mean, torch.tensordot(weights.flatten(), (apart - mean).square(), 1)


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
        ctx.save_for_backward(*saved, output[0])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(
        ctx: Any, to_mean: Tensor | None, to_var: Tensor | None
    ) -> tuple[None, Tensor | None, Tensor | None]:
        m, v, mean = ctx.saved_tensors
        x = Gaussian.of(m, v)
        nodes, weights = hermite(x)
        at = m + x.std * nodes
        writes = getattr(ctx.g, "inplace", False)
        values, pull = vjp(lambda t: ctx.g(t.clone() if writes else t), at)[:2]
        (slopes,) = pull(torch.ones_like(values))
        moves = torch.stack([weights.flatten(), (weights * nodes).flatten()])  # by the mean, and by the std
        by_v = torch.where(v > 0, 0.5 / torch.where(v > 0, x.std, 1.0), 0.0)  # ds/dv
        units = torch.stack([torch.ones_like(by_v), by_v])
        parts = []
        if to_mean is not None:
            parts.append(to_mean * (units * torch.tensordot(moves, slopes, 1)))
        if to_var is not None:
            parts.append(to_var * (units * torch.tensordot(2 * moves, (values - mean) * slopes, 1)))
        to_m, to_v = sum(parts) if parts else (None, None)
        return None, to_m, to_v


def smooth_slope(g: Callable[[Tensor], Tensor], x: Gaussian) -> Tensor:
    """Mean slope of an elementwise g, Cov(g(x), x)/Var[x] = E[g'(x)] (Eq. 25), by Gauss-Hermite quadrature.

    Standard deviations below 0.01 are raised to 0.01, because rounding errors would dominate the quotient.
    """
    s = x.std.clamp(min=0.01)
    nodes, weights = hermite(x)
    return (weights * nodes * g(x.mean + s * nodes)).sum(0) / s


def _at_nodes(g: Callable[[Tensor], Tensor], x: Gaussian) -> tuple[Tensor, Tensor]:
    nodes, weights = hermite(x)
    return g(x.mean + x.std * nodes), weights


def hermite(x: Gaussian, points: int = NODES) -> tuple[Tensor, Tensor]:
    """Nodes and weights for a standard normal variable, shaped to stack in front of x."""
    shape, dtype = (-1, *(1,) * x.mean.dim()), torch.promote_types(x.mean.dtype, x.var.dtype)
    nodes, weights = (torch.tensor(a, dtype=dtype, device=x.mean.device).view(shape) for a in _RULES[points])
    return nodes, weights / weights.sum(0)

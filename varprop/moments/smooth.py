"""Smooth functions of one normal variable, by Gauss-Hermite quadrature."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

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
    values, weights = _at_nodes(g, x)
    mean = (weights * values).sum(0)
    return Gaussian.of(mean, (weights * (values - mean).square()).sum(0))


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

"""Means and variances of elementary operations on independent normal variables, in closed form.

Pure functions; the equation numbers are those of `docs/maths.md`. Throughout, m and v are the mean and the variance of the
input, s = √v, and Φ, φ the normal distribution function and density.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from .gaussian import Activation, Gaussian, mean_of, second_moment_of
from .piecewise import RELU, Piecewise, Tail, anchor, anchored, gate, rectify, slope, tail

__all__ = [
    "RELU",
    "FactoredWeight",
    "Outer",
    "Piecewise",
    "Tail",
    "affine",
    "anchor",
    "anchored",
    "average",
    "expectation",
    "gate",
    "gate_kl",
    "largest",
    "log_expectation_exp",
    "mask",
    "maximum",
    "per_channel",
    "product",
    "quadrature",
    "rectify",
    "slope",
    "smooth_slope",
    "square",
    "strongest",
    "tail",
    "winner",
]

Op = Callable[..., Tensor]


# --------------------------------------------------------------------------------------------- linear maps and products


@dataclass(frozen=True)
class Outer:
    """Variances that factor over outputs and inputs, Var[w_oi] = a_o b_i (Eq. 2)."""

    outputs: Tensor
    inputs: Tensor


@dataclass(frozen=True)
class FactoredWeight:
    """A random weight whose variance is an outer product."""

    mean: Tensor
    var: Outer


Weight = Tensor | Gaussian | FactoredWeight


def affine(op: Op, x: Activation, weight: Weight, bias: Activation | None = None) -> Activation:
    """Moments of op(x, w) + b for an operation linear in x and in w, with x, w and b independent (Eq. 1).

        E = op(E[x], E[w]) + E[b],    Var = op(Var[x], E[w]²) + op(E[x²], Var[w]) + Var[b]

    Three linear operations, two where input or weight is certain, one (a plain tensor) where both are.

    >>> x = Gaussian(torch.tensor([[1.0, 2.0]]), torch.tensor([[0.1, 0.1]]))
    >>> w = Gaussian(torch.tensor([[1.0, -1.0]]), torch.tensor([[0.5, 0.5]]))
    >>> affine(F.linear, x, w).var            # 0.1 + 0.1 + 0.5 (1.1) + 0.5 (4.1)
    tensor([[2.8000]])
    """
    w = weight if isinstance(weight, Tensor) else weight.mean
    mean = op(mean_of(x), w, None if bias is None else mean_of(bias))
    parts = []
    if isinstance(x, Gaussian):
        parts.append(op(x.var, w.square()))
    if isinstance(weight, Gaussian):
        parts.append(op(second_moment_of(x), weight.var))
    if isinstance(weight, FactoredWeight):
        parts.append(op(second_moment_of(x), weight.var.inputs) * weight.var.outputs)
    if isinstance(bias, Gaussian):
        parts.append(per_channel(bias.var, w).expand_as(mean))
    # Under autocast the products are of reduced precision; what is done to their sum, tails above all, is not.
    parts = [part.to(w.dtype) for part in parts]
    return Gaussian.of(mean, sum(parts[1:], parts[0])) if parts else mean


def per_channel(t: Tensor, weight: Tensor) -> Tensor:
    """One entry for each output of a layer, shaped to broadcast over the layer's output."""
    return t.view(-1, *(1,) * (weight.dim() - 2))


def product(a: Activation, b: Activation) -> Activation:
    """Moments of a·b for independent a and b: Var = E[a²] Var[b] + Var[a] E[b]² (Eq. 3).

    >>> a = Gaussian(torch.tensor(2.0), torch.tensor(0.5))
    >>> product(a, a).var                     # two independent copies
    tensor(4.2500)
    """
    mean = mean_of(a) * mean_of(b)
    parts = []
    if isinstance(b, Gaussian):
        parts.append(second_moment_of(a) * b.var)
    if isinstance(a, Gaussian):
        parts.append(a.var * mean_of(b).square())
    return Gaussian.of(mean, sum(parts[1:], parts[0])) if parts else mean


def square(x: Gaussian) -> Gaussian:
    """Moments of x² for normal x, which is not the product of two independent copies: E = m² + v, Var = 2 v² + 4 m² v (Eq. 40).

    >>> square(Gaussian(torch.tensor(2.0), torch.tensor(0.5))).var
    tensor(8.5000)
    """
    return Gaussian.of(x.second_moment, 2 * x.var.square() + 4 * x.mean.square() * x.var)


# ------------------------------------------------------------------------------------------------ maxima and averages


def winner(a: Gaussian, b: Gaussian) -> Gaussian:
    """The larger of two by the Heaviside gate of a - b: the mean and the variance of the one with the larger mean (Eq. 7)."""
    wins = a.mean > b.mean
    return Gaussian.of(torch.where(wins, a.mean, b.mean), torch.where(wins, a.var, b.var))


def maximum(a: Gaussian, b: Gaussian) -> Gaussian:
    """Exact moments of max(a, b) for independent normal a and b (Clark 1961; Eq. 8).

    With w the one of larger mean, l the other and d = l - w:  max = w + max(0, d),  Cov(w, max(0, d)) = -Var[w] P(d > 0).
    """
    w = winner(a, b)
    loser_mean, loser_var = a.mean + b.mean - w.mean, a.var + b.var - w.var
    r = tail(Gaussian.of(loser_mean - w.mean, loser_var + w.var))
    var = w.var * (1 - 2 * r.probability) + r.second_moment - r.mean.square()
    return Gaussian.of(w.mean + r.mean, F.relu(var))


def strongest(x: Gaussian, dim: int = -1) -> Gaussian:
    """The entry of largest mean along a dimension, with its own variance (Eq. 7)."""
    mean, winner = x.mean.max(dim, keepdim=True)
    return Gaussian.of(mean.squeeze(dim), x.var.gather(dim, winner).squeeze(dim))


def largest(x: Gaussian, dim: int = -1) -> Gaussian:
    """Moments of the largest of independent entries along a dimension: of two halves, and again, each result taken as normal (Eq. 8).

    >>> largest(Gaussian(torch.zeros(4), torch.ones(4))).mean           # 1.0294 in truth
    tensor(1.0300)
    """
    while (n := x.shape[dim]) > 1:
        a, b = (x.map(lambda t, i=i: t.narrow(dim, i * (n // 2), n // 2)) for i in (0, 1))  # type: ignore[misc]
        y = maximum(a, b)
        if n % 2:
            last = x.map(lambda t: t.narrow(dim, n - 1, 1))
            y = Gaussian.of(torch.cat((y.mean, last.mean), dim), torch.cat((y.var, last.var), dim))
        x = y
    return x.map(lambda t: t.squeeze(dim))


def average(x: Gaussian, pool: Callable[[Tensor], Tensor], size: Tensor | float) -> Gaussian:
    """Mean over windows of `size` independent entries: Var = mean of the variances / size (Eq. 9)."""
    return Gaussian.of(pool(x.mean), pool(x.var) / size)


# ---------------------------------------------------------------------------------------------------- noise and quadrature


def mask(x: Activation, keep: float, fill: float = 0.0) -> Gaussian:
    """Moments of z·x + (1-z)·fill with z ~ Bernoulli(keep) independent of x: dropout before its rescaling (Eq. 10)."""
    m = mean_of(x)
    spread = keep * (1 - keep) * (m - fill).square()
    var = keep * x.var + spread if isinstance(x, Gaussian) else spread
    return Gaussian.of(keep * m + (1 - keep) * fill, var)


NODES = 32
_HERMITE = [tuple(a.tolist()) for a in np.polynomial.hermite_e.hermegauss(NODES)]
_LAGUERRE = [tuple(a.tolist()) for a in np.polynomial.laguerre.laggauss(40)]


def expectation(g: Callable[[Tensor], Tensor], x: Gaussian) -> Tensor:
    """E[g(x)] for an elementwise g by 32-point Gauss-Hermite quadrature (Eq. 11).

    >>> expectation(torch.exp, Gaussian(torch.tensor(0.0), torch.tensor(1.0)))       # exp(1/2)
    tensor(1.6487)
    """
    values, weights = _at_nodes(g, x)
    return (weights * values).sum(0)


def log_expectation_exp(g: Callable[[Tensor], Tensor], x: Gaussian) -> Tensor:
    """log E[exp g(x)] for an elementwise g by Gauss-Hermite quadrature (Eq. 11)."""
    values, weights = _at_nodes(g, x)
    return (values + weights.log()).logsumexp(0)


def quadrature(g: Callable[[Tensor], Tensor], x: Gaussian) -> Gaussian:
    """Mean and variance of g(x) for any elementwise g by Gauss-Hermite quadrature (Eq. 11)."""
    values, weights = _at_nodes(g, x)
    mean = (weights * values).sum(0)
    return Gaussian.of(mean, (weights * (values - mean).square()).sum(0))


def smooth_slope(g: Callable[[Tensor], Tensor], x: Gaussian) -> Tensor:
    """Mean slope of an elementwise g, Cov(g(x), x)/Var[x] = E[g'(x)] (Eq. 42), by Gauss-Hermite quadrature.

    A standard deviation below a hundredth is taken as a hundredth: the quotient stays one of numbers, not of roundings.
    """
    s = x.std.clamp(min=0.01)
    nodes, weights = _hermite(x)
    return (weights * nodes * g(x.mean + s * nodes)).sum(0) / s


def _at_nodes(g: Callable[[Tensor], Tensor], x: Gaussian) -> tuple[Tensor, Tensor]:
    nodes, weights = _hermite(x)
    return g(x.mean + x.std * nodes), weights


def _hermite(x: Gaussian) -> tuple[Tensor, Tensor]:
    """Nodes and weights for a standard normal variable, to stack in front of x."""
    shape, dtype = (-1, *(1,) * x.mean.dim()), torch.promote_types(x.mean.dtype, x.var.dtype)
    nodes, weights = (torch.tensor(a, dtype=dtype, device=x.mean.device).view(shape) for a in _HERMITE)
    return nodes, weights / weights.sum(0)


# --------------------------------------------------------------------------------------------------------- gate divergence


def gate_kl(x: Gaussian, slope: float, exact: bool = True) -> Tensor:
    """E KL[q(z) || p(z|x)] of a Bernoulli gate with log-odds slope·x (Proposition 2 of the paper; Eq. 12).

        E[softplus(C x)] - softplus(C m)  ~  C E[r]        (r the tail at zero)

    `exact=False` is the paper's closed form on the right, at most log 2 away; `exact=True` adds what it leaves out, by Gauss-Laguerre
    quadrature of log(1 + exp(-C|x|)) where C s > 1 and by Gauss-Hermite quadrature of the softplus below.
    """
    if not exact:
        return slope * tail(x).mean
    shape = (-1, *(1,) * x.mean.dim())
    u, w = (torch.tensor(a, dtype=torch.float64, device=x.mean.device).view(shape) for a in _LAGUERRE)
    w = (w * u.exp() * torch.log1p(torch.exp(-u))).to(x.mean.dtype)
    u = u.to(x.mean.dtype)
    wide = slope * x.std > 1
    s = torch.where(wide, x.std, 1 / slope)
    density = sum(torch.exp(-0.5 * ((u / slope * sign - x.mean) / s).square()) for sign in (-1, 1)) / (s * math.sqrt(2 * math.pi))
    rest = (w * density).sum(0) / slope - torch.log1p(torch.exp(-slope * x.mean.abs()))
    narrow = Gaussian.of(x.mean, torch.where(wide, 0.0, x.var))
    direct = expectation(lambda a: F.softplus(slope * a), narrow) - F.softplus(slope * x.mean)
    return F.relu(torch.where(wide, slope * tail(x).mean + rest, direct))

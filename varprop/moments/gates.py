"""The gates of VBP: which piece of an activation a unit is on, drawn independently of its input."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ..gaussian import Gaussian
from .piecewise import RELU, Piecewise, step
from .rectified import tail
from .smooth import expectation


def gate(x: Gaussian, slope: float = math.inf, pieces: Piecewise = RELU) -> Gaussian:
    """Moments of a piecewise-linear unit whose piece z is sampled independently of x (Eq. 6).

    For ReLU this is z·x with z ~ Bernoulli(p), p = sigmoid(slope·m):  E = p m,  Var = p v + p(1-p) m².
    An infinite slope always picks the piece in which E[x] lies.

    >>> gate(Gaussian(torch.tensor(1.0), torch.tensor(0.2)))
    Gaussian(mean=tensor(1.), var=tensor(0.2000))
    """
    m, v = x.mean, x.var
    if math.isinf(slope):
        if pieces is RELU:
            return Gaussian.of(F.relu(m), step(v, m))
        return Gaussian.of(pieces(m), pieces.slope(m).square() * v)
    lines = pieces.lines(m)
    p = _piece_probabilities(m, pieces, slope)
    mean = (p * lines).sum(0)
    gain = sum(p[k] * s**2 for k, s in enumerate(pieces.slopes))
    return Gaussian.of(mean, v * gain + (p * (lines - mean).square()).sum(0))


def _piece_probabilities(m: Tensor, pieces: Piecewise, slope: float) -> Tensor:
    """The probability of each piece, stacked in front; the log-odds of neighbours are slope·(m - knot)."""
    log_odds = [torch.zeros_like(m), *(slope * (m - knot) for knot in pieces.knots)]
    return torch.stack(log_odds).cumsum(0).softmax(0)


def gate_slope(x: Gaussian, slope: float = math.inf, pieces: Piecewise = RELU) -> Tensor:
    """Mean slope of a unit whose piece is sampled independently of x, Cov(out, in)/Var[in] (Eq. 25).

    >>> gate_slope(Gaussian(torch.tensor(1.0), torch.tensor(1.0)))
    tensor(1.)
    """
    if math.isinf(slope):
        return pieces.slope(x.mean)
    p = _piece_probabilities(x.mean, pieces, slope)
    return sum(p[k] * s for k, s in enumerate(pieces.slopes))  # type: ignore[return-value]


_LAGUERRE = [tuple(a.tolist()) for a in np.polynomial.laguerre.laggauss(40)]


def gate_kl(x: Gaussian, slope: float, exact: bool = True) -> Tensor:
    """E KL[q(z) || p(z|x)] of a Bernoulli gate with log-odds C x, where C is the slope (Eq. 45).

        E[softplus(C x)] - softplus(C m)  ≈  C E[r]        (r the tail at zero)

    The right-hand side is the closed form of the paper's Proposition 2, at most log 2 away.

    :param exact: add the difference, by Gauss-Laguerre quadrature of log(1 + exp(-C|x|)) if C s > 1 and by
        Gauss-Hermite quadrature of the softplus otherwise.
    """
    if not exact:
        return slope * tail(x).mean
    shape = (-1, *(1,) * x.mean.dim())
    u, w = (torch.tensor(a, dtype=torch.float64, device=x.mean.device).view(shape) for a in _LAGUERRE)
    w = (w * u.exp() * torch.log1p(torch.exp(-u))).to(x.mean.dtype)
    u = u.to(x.mean.dtype)
    wide = slope * x.std > 1
    s = torch.where(wide, x.std, 1 / slope)
    both_sides = sum(torch.exp(-0.5 * ((u / slope * sign - x.mean) / s).square()) for sign in (-1, 1))
    density = both_sides / (s * math.sqrt(2 * math.pi))
    rest = (w * density).sum(0) / slope - torch.log1p(torch.exp(-slope * x.mean.abs()))
    narrow = Gaussian.of(x.mean, torch.where(wide, 0.0, x.var))
    direct = expectation(lambda a: F.softplus(slope * a), narrow) - F.softplus(slope * x.mean)
    return F.relu(torch.where(wide, slope * tail(x).mean + rest, direct))

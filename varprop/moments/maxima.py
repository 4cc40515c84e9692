"""Maxima of independent normal variables: by the gate of the paper, and with Clark's exact moments of two.

The equation numbers are those of `docs/maths.md`.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from ..gaussian import Gaussian
from .piecewise import tail


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

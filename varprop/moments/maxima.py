"""Maxima of independent normal variables: by the paper's gate, or with Clark's exact moments of two."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from ..gaussian import Gaussian
from .rectified import tail


def winner(a: Gaussian, b: Gaussian) -> Gaussian:
    """The maximum by the Heaviside gate of a - b: the moments of the one with the larger mean (Eq. 10)."""
    wins = a.mean > b.mean
    return Gaussian.of(torch.where(wins, a.mean, b.mean), torch.where(wins, a.var, b.var))


def maximum(a: Gaussian, b: Gaussian) -> Gaussian:
    """Exact moments of max(a, b) for independent normal a and b (Clark 1961; Eq. 11).

    Let w be the one with the larger mean, l the other and d = l - w. Then

        max(a, b) = w + max(0, d),    Cov(w, max(0, d)) = -Var[w] P(d > 0)
    """
    w = winner(a, b)
    loser_mean, loser_var = a.mean + b.mean - w.mean, a.var + b.var - w.var
    r = tail(Gaussian.of(loser_mean - w.mean, loser_var + w.var))
    var = w.var * (1 - 2 * r.probability) + r.second_moment - r.mean.square()
    return Gaussian.of(w.mean + r.mean, F.relu(var))


def strongest(x: Gaussian, dim: int = -1) -> Gaussian:
    """The entry with the largest mean along a dimension, with its variance (Eq. 10)."""
    mean, winner = x.mean.max(dim, keepdim=True)
    return Gaussian.of(mean.squeeze(dim), x.var.gather(dim, winner).squeeze(dim))


def largest(x: Gaussian, dim: int = -1) -> Gaussian:
    """Moments of the maximum of independent entries along a dimension (Eq. 11).

    The maximum of two halves is taken again and again, each intermediate result being treated as normal.

    >>> largest(Gaussian(torch.zeros(4), torch.ones(4))).mean           # exactly: 1.0294
    tensor(1.0300)
    """
    while (n := x.shape[dim]) > 1:
        parts = zip(x.mean.split(n // 2, dim), x.var.split(n // 2, dim), strict=True)
        a, b, *rest = (Gaussian.of(mean, var) for mean, var in parts)
        x = maximum(a, b)
        for last in rest:  # of an odd number of entries
            x = Gaussian.of(torch.cat((x.mean, last.mean), dim), torch.cat((x.var, last.var), dim))
    return x.map(lambda t: t.squeeze(dim))

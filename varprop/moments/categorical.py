"""Softmax of independent normal logits, and attention, which averages values by it.

The equation numbers are those of `docs/maths.md`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from ..gaussian import Activation, Gaussian, mean_of, second_moment_of, sqrt
from .smooth import quadrature


def margin(x: Gaussian, dim: int = -1) -> Gaussian:
    """Each entry less the log-sum-exp of the others along `dim`, taken as normal: softmax is its sigmoid (Eq. 33).

    With q the softmax of the others, their log-sum-exp has mean lse(m) + Σ v q(1-q)/2 and variance Σ v q², to second and to first order;
    what is added to lse(m) stays below √(2 log n Σ v q), which the mean of the largest of n normal variables does not pass.
    Exact for two entries, where the only other one is its own log-sum-exp.

    >>> margin(Gaussian(torch.tensor([1.0, -2.0]), torch.tensor([0.5, 0.2])))
    Gaussian(mean=tensor([ 3., -3.]), var=tensor([0.7000, 0.7000]))
    """
    m, v = x.mean.movedim(dim, -1), x.var.movedim(dim, -1)
    # Without its largest entry the sum over all may be below rounding, so that the others of the largest have a softmax of their own.
    top = torch.arange(m.shape[-1], device=m.device) == m.argmax(-1, keepdim=True)
    rest = m.masked_fill(top, torch.finfo(m.dtype).min / 4)
    p, q = m.softmax(-1), rest.softmax(-1).masked_fill(top, 0.0)
    left = torch.where(top, 1.0, 1 - p)

    def others(of_the_largest: Tensor, of_all: Tensor) -> Tensor:
        return torch.where(top, of_the_largest.sum(-1, keepdim=True), of_all.sum(-1, keepdim=True) - of_all)

    q_v, q2_v = others(q * v, p * v) / left, others(q.square() * v, p.square() * v) / left.square()
    lse = torch.where(top, rest.logsumexp(-1, keepdim=True), m.logsumexp(-1, keepdim=True) + left.log())
    expansion = F.relu(q_v - q2_v) / 2
    highest = sqrt(2 * math.log(max(m.shape[-1] - 1, 1)) * F.relu(q_v))
    mean = lse + torch.minimum(expansion, highest)
    return Gaussian.of(m - mean, v + F.relu(q2_v)).map(lambda t: t.movedim(-1, dim))


def softmax(x: Gaussian, dim: int = -1) -> Gaussian:
    """Moments of the softmax as the sigmoid of each entry's margin (Eq. 34). Means sum to one, variances are at most p(1-p).

    >>> softmax(Gaussian(torch.tensor([1.0, 0.0, 0.0]), torch.ones(3)))
    Gaussian(mean=tensor([0.5181, 0.2409, 0.2409]), var=tensor([0.0588, 0.0383, 0.0383]))
    """
    p = quadrature(torch.sigmoid, margin(x, dim))
    total = p.mean.sum(dim, keepdim=True)
    mean = p.mean / total
    return Gaussian.of(mean, torch.minimum(p.var / total.square(), mean * (1 - mean)))


def log_softmax(x: Gaussian, dim: int = -1) -> Gaussian:
    """Moments of the log-softmax as the log-sigmoid of each entry's margin (Eq. 34)."""
    return quadrature(F.logsigmoid, margin(x, dim))


def attend(scores: Gaussian, values: Activation, dropped: float = 0.0) -> tuple[Gaussian, Gaussian]:
    """Moments of a @ values with a = softmax(scores) along the last dimension, and those of a (Eq. 37).

        E = y = E[a] @ m,    Var = ρ Σ_j E[a_j]² v_j (m_j - y)² + Σ_j E[a_j²] Var[value_j],    v the variances of the scores

    The first term is the delta method, which knows that weights sum to one: values that are all alike have no variance from the scores.
    ρ is the sum of the weights' variances by Eq. 34 over that by the delta method, and 1 for small variances of the scores.

    :param dropped: probability with which dropout takes a weight away.
    """
    a = softmax(scores)
    m = mean_of(values)
    centre = m.mean(-2, keepdim=True)  # of a sum of squares that would be lost in the size of the values
    m = m - centre
    y = a.mean @ m
    moved = a.mean.square() * scores.var
    total = moved.sum(-1, keepdim=True)
    by_delta = (moved * (1 - 2 * a.mean) + a.mean.square() * total).sum(-1, keepdim=True)
    random = by_delta > torch.finfo(by_delta.dtype).tiny
    moved = moved * torch.where(random, a.var.sum(-1, keepdim=True) / torch.where(random, by_delta, 1.0), 1.0)
    var = F.relu(moved @ m.square() - 2 * y * (moved @ m) + y.square() * moved.sum(-1, keepdim=True))
    if isinstance(values, Gaussian):
        var = var + a.second_moment @ values.var
    if dropped:
        var = var + dropped / (1 - dropped) * (a.second_moment @ second_moment_of(values))
    return Gaussian.of(y + centre, var), a

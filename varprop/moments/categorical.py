"""Softmax of independent normal logits: class probabilities, and attention, which averages values by them."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.quasirandom import SobolEngine

from ..gaussian import Activation, Gaussian, mean_of, second_moment_of, sqrt
from .smooth import quadrature

EULER = 0.5772156649015329


def margin(x: Gaussian, dim: int = -1) -> Gaussian:
    """Each entry minus the log-sum-exp of the others along `dim`, whose sigmoid is the softmax (Eq. 18).

    With q the softmax of the n others, their log-sum-exp has mean lse(m) + Σ v q(1-q)/2 to second order and
    variance Σ v q² to first order. The correction to lse(m) is kept below √(2 log n Σ v q), a bound on the
    expected maximum of n normal variables. The result is treated as normal; it is exact for two entries.

    >>> margin(Gaussian(torch.tensor([1.0, -2.0]), torch.tensor([0.5, 0.2])))
    Gaussian(mean=tensor([ 3., -3.]), var=tensor([0.7000, 0.7000]))
    """
    m, v = x.mean.movedim(dim, -1), x.var.movedim(dim, -1)
    # The sum over all minus the largest entry may be nothing but rounding errors, so the others of the
    # largest get their own softmax.
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
    """Moments of the softmax as the sigmoid of each entry's margin (Eq. 19).

    The means sum to one, and the variances are at most p(1-p).

    >>> softmax(Gaussian(torch.tensor([1.0, 0.0, 0.0]), torch.ones(3)))
    Gaussian(mean=tensor([0.5181, 0.2409, 0.2409]), var=tensor([0.0588, 0.0383, 0.0383]))
    """
    p = quadrature(torch.sigmoid, margin(x, dim))
    total = p.mean.sum(dim, keepdim=True)
    mean = p.mean / total
    return Gaussian.of(mean, torch.minimum(p.var / total.square(), mean * (1 - mean)))


def log_softmax(x: Gaussian, dim: int = -1) -> Gaussian:
    """Moments of the log-softmax as the log-sigmoid of each entry's margin (Eq. 19)."""
    return quadrature(F.logsigmoid, margin(x, dim))


def attend(scores: Gaussian, values: Activation, dropped: float = 0.0) -> tuple[Gaussian, Gaussian]:
    """Moments of a @ values with a = softmax(scores) along the last dimension, and those of a (Eq. 21).

        E = y = E[a] @ m,    Var = ρ Σ_j E[a_j]² v_j (m_j - y)² + Σ_j E[a_j²] Var[value_j]

    Here m are the means of the values and v the variances of the scores. The first term is the delta method,
    which respects that the weights sum to one: if all values are equal, random scores add no variance. ρ
    rescales it by the sum of the weights' variances according to Eq. 19 over that of the delta method; it
    tends to 1 for small variances of the scores.

    :param dropped: the dropout probability of the weights.
    """
    a = softmax(scores)
    m = mean_of(values)
    centre = m.mean(-2, keepdim=True)  # keeps precision in the sum of squares when the values are large
    m = m - centre
    y = a.mean @ m
    var = _by_random_weights(a, scores.var, m, y)
    if isinstance(values, Gaussian):
        var = var + a.second_moment @ values.var
    if dropped:
        var = var + dropped / (1 - dropped) * (a.second_moment @ second_moment_of(values))
    return Gaussian.of(y + centre, var), a


def _by_random_weights(a: Gaussian, v: Tensor, m: Tensor, y: Tensor) -> Tensor:
    """The first term of Eq. 21, ρ Σ_j E[a_j]² v_j (m_j - y)².

    For the position with the largest weight, m_j - y = (1 - E[a_j]) (m_j - q @ m), where q are the other
    positions' shares of the weight that is left. All other terms, and the denominator of ρ, contain the
    square of this 1 - E[a_j] as well, and it cancels. Otherwise they would underflow, or be lost among the
    rounding errors of large numbers, where one position has nearly all the weight.
    """
    tiny = torch.finfo(v.dtype).tiny
    top = torch.arange(v.shape[-1], device=v.device) == a.mean.argmax(-1, keepdim=True)
    others = a.mean.masked_fill(top, 0.0)
    left = others.sum(-1, keepdim=True)
    q = others / torch.where(left > tiny, left, 1.0)
    moved = torch.where(top, a.mean, q).square() * v
    size = moved.detach().amax(-1, keepdim=True)
    random = (size > tiny) & (left > tiny)
    size = torch.where(size > tiny, size, 1.0)
    moved = moved / size
    of_top, moved = moved.masked_fill(~top, 0.0).sum(-1, keepdim=True), moved.masked_fill(top, 0.0)
    squares = a.mean.square()
    by_delta = of_top * (1 + q.square().sum(-1, keepdim=True)) + (
        moved * ((1 - a.mean).square() + squares.sum(-1, keepdim=True) - squares)
    ).sum(-1, keepdim=True)
    around = moved @ m.square() - 2 * y * (moved @ m) + y.square() * moved.sum(-1, keepdim=True)
    spread = of_top * ((top.to(q.dtype) - q) @ m).square() + around.clamp(min=0.0)
    total = a.var.sum(-1, keepdim=True)
    return spread * torch.where(random, total / torch.where(random, by_delta, 1.0), size * left.square())


# -------------------- class probabilities and their expected entropy


def softmax_quadrature(f: Gaussian, points: int = 36, nodes: int = 12) -> tuple[Tensor, Tensor]:
    """E softmax(f) along dimension 1 and the expected entropy of softmax(f), by one integral (Eq. 42).

    Add an independent Gumbel variable g_c to each logit. Then softmax(f)_c is the probability that f_c + g_c
    is the largest, and the entropy of softmax(f) is the expected g of the largest minus Euler's constant. For
    independent logits both are integrals over the value t of the largest, whose integrands have a factor
    P(f_j + g_j < t) for each other class j. The trapezoidal rule evaluates them at `points` values of t and
    `nodes` values of each f.
    """
    m, s = f.mean, f.std
    low, high = (m - 4 * s).amax(1, keepdim=True) - 3, (m + 4 * s).amax(1, keepdim=True) + 12
    steps = torch.linspace(0, 1, points, dtype=m.dtype, device=m.device).view(-1, *(1,) * m.dim())
    below, density, noise = _logit_plus_gumbel(f, low + (high - low) * steps, nodes)
    others_below = torch.exp(below.log().sum(2, keepdim=True) - below.log())
    wins, noise_of_winner = (density * others_below).sum(0), (noise * others_below).sum(0)
    total = wins.sum(1, keepdim=True)
    probs = wins / total
    expected_entropy = F.relu(noise_of_winner.sum(1) / total.squeeze(1) - EULER)
    return probs, _within_jensen(expected_entropy, probs)


def _logit_plus_gumbel(f: Gaussian, t: Tensor, nodes: int) -> tuple[Tensor, Tensor, Tensor]:
    """P(f + g < t), the density of f + g at t, and that density times E[g | f + g = t]."""
    v, distance, width = f.var, t - f.mean, f.std.clamp(max=4)
    # Beyond a variance of 16 the nodes lie too far apart, but f + g is close to normal, as f is much wider
    # than g. The sum over nodes is then not used, and must not overflow in its gradient either.
    wide, gumbel_var = v > 16, math.pi**2 / 6
    near = torch.where(wide, 0.0, distance)
    below, density, noise = (torch.zeros_like(distance) for _ in range(3))
    z = torch.linspace(-4.5, 4.5, nodes, dtype=torch.float64)
    for node, weight in zip(z.tolist(), torch.softmax(-z.square() / 2, 0).tolist(), strict=True):
        g = near - width * node
        x = torch.exp(-g)
        below_here = weight * torch.exp(-x)
        density_here = x * below_here
        below += below_here
        density += density_here
        noise += g * density_here
    total_var = v + gumbel_var
    u = (distance - EULER) / total_var.sqrt()
    normal_density = torch.exp(-0.5 * u.square()) / torch.sqrt(2 * math.pi * total_var)
    below = torch.where(wide, torch.special.ndtr(u), below).clamp(min=torch.finfo(t.dtype).tiny)
    density = torch.where(wide, normal_density, density)
    noise = torch.where(wide, (EULER + gumbel_var / total_var.sqrt() * u) * normal_density, noise)
    return below, density, noise


def softmax_delta(f: Gaussian) -> tuple[Tensor, Tensor]:
    """E softmax(f) along dimension 1 and the expected entropy of softmax(f), to second order (Eq. 43).

    The paper's reference code has Σ v p in place of the linear term -v p, and its probabilities do not sum to
    one. For large variances the expansion can become negative: it is clipped and rescaled, and the entropy is
    kept between zero and its bound by Jensen's inequality.
    """
    p, v = f.mean.softmax(1), f.var
    vp = v * p
    probs = p * (1 + v / 2 - vp + (vp * p).sum(1, keepdim=True) - 0.5 * vp.sum(1, keepdim=True))
    probs = probs.clamp(min=1e-8)
    probs = probs / probs.sum(1, keepdim=True)
    log_p = f.mean.log_softmax(1)
    entropy = -(p * log_p).sum(1, keepdim=True)
    curvature = -p * (1 - p) - p * (1 - 2 * p) * (log_p + entropy)
    expected_entropy = F.relu(entropy.squeeze(1) + 0.5 * (v * curvature).sum(1))
    return probs, _within_jensen(expected_entropy, probs)


def softmax_samples(f: Gaussian, n: int) -> tuple[Tensor, Tensor]:
    """E softmax(f) along dimension 1 and the expected entropy of softmax(f), over n quasi-random samples.

    The samples are the same in every call, so that predictions are reproducible.
    """
    classes = f.shape[1]
    points = SobolEngine(classes, scramble=True, seed=0).draw(n, dtype=torch.float64)
    normal = torch.special.ndtri(points.clamp(1e-9, 1 - 1e-9)).to(f.mean)
    noise = normal.view(n, 1, classes, *(1,) * (f.mean.dim() - 2))
    p = (f.mean + f.std * noise).softmax(2)
    return p.mean(0), torch.special.entr(p).sum(2).mean(0)


def _within_jensen(expected_entropy: Tensor, probs: Tensor) -> Tensor:
    """The expected entropy is at most the entropy of the expected probabilities."""
    return torch.minimum(expected_entropy, torch.special.entr(probs).sum(1))

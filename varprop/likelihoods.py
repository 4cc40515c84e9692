"""Likelihoods: what the network's output f says about a target y. A new one is one method, log_prob(f, y)."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.quasirandom import SobolEngine

from . import moments as fn
from .gaussian import Activation, Gaussian, as_gaussian, mean_of
from .predictive import (
    ClassPredictive,
    LabelPredictive,
    LatentPredictive,
    NormalPredictive,
    Predictive,
    binary_entropy,
    check_classes,
    check_shape,
)

Approximation = Literal["quadrature", "delta", "mackay", "plugin", "samples"]
EULER = 0.5772156649015329


class Likelihood(nn.Module, ABC):
    """p(y | f). Give `log_prob`; where it couples several outputs, give `expected_log_prob` too.

    >>> class Poisson(Likelihood):
    ...     def log_prob(self, f, y):
    ...         return y * f - f.exp() - torch.lgamma(y + 1)
    >>> f = Gaussian(torch.tensor([[0.5]]), torch.tensor([[0.1]]))
    >>> Poisson().expected_log_prob(f, torch.tensor([[2.0]]))       # 2 (0.5) - exp(0.55) - log 2
    tensor([[-1.4264]])
    """

    @abstractmethod
    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        """log p(y | f), entry by entry."""

    def expected_log_prob(self, f: Gaussian, y: Tensor) -> Tensor:
        """E log p(y | f) over a random f; by quadrature (Eq. 11) unless a closed form is given."""
        return fn.expectation(lambda value: self.log_prob(value, y), f)

    def predictive(self, f: Activation) -> Predictive:
        """Distribution of y when f is random; by quadrature unless a closed form is given."""
        return LatentPredictive(as_gaussian(f), self)

    def target_shape(self, f: Activation) -> torch.Size:
        """Shape of the targets that belong to an output f."""
        return f.shape

    def statistic(self, f: Activation, y: Tensor, weight: Tensor | None = None) -> Tensor | None:
        """What `update` needs to know of a batch, averaged over it; None for a likelihood without anything to update.

        :param weight: how often each data point counts.
        """
        return None

    def update(self, statistic: Tensor) -> None:
        """Set the likelihood's own parameters to their best value, given the statistic's average over the data."""


class Normal(Likelihood):
    """y ~ N(f, 1/precision), one precision for each of `outputs` last-dimension entries, or one for all (Eq. 20).

    >>> likelihood = Normal()
    >>> f = Gaussian(torch.zeros(4, 1), torch.full((4, 1), 0.5))
    >>> likelihood.update(likelihood.statistic(f, torch.ones(4, 1)))        # 1/precision = E(y - f)² = 1.5
    >>> likelihood.precision
    tensor([0.6667])
    """

    precision: Tensor

    def __init__(self, precision: float = 1.0, outputs: int = 1) -> None:
        super().__init__()
        if not 0 < precision < math.inf:
            raise ValueError(f"likelihoods.Normal: precision must be positive and finite, got {precision}.")
        self.register_buffer("precision", torch.full((outputs,), float(precision)))

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        return self._expected(f - y, 0.0)

    def expected_log_prob(self, f: Gaussian, y: Tensor) -> Tensor:
        return self._expected(f.mean - y, f.var)

    def _expected(self, error: Tensor, var: Tensor | float) -> Tensor:
        return -0.5 * (
            self.precision * (error.square() + var) - torch.log(self.precision) + math.log(2 * math.pi)
        )

    def predictive(self, f: Activation) -> NormalPredictive:
        f = as_gaussian(f)
        return NormalPredictive(f.mean, f.var, (1 / self.precision).expand_as(f.mean))

    def statistic(self, f: Activation, y: Tensor, weight: Tensor | None = None) -> Tensor:
        """E(y - f)², for each output (Eq. 21)."""
        f = as_gaussian(f)
        square = (f.mean - y).square() + f.var
        if weight is not None:
            relative = weight / weight.mean().clamp(
                min=torch.finfo(weight.dtype).tiny
            )  # a batch may have no weight at all
            square = square * relative.view(-1, *(1,) * (square.dim() - 1))
        return square.reshape(-1, self.precision.numel()).mean(0)

    def update(self, statistic: Tensor) -> None:
        """Type-II maximum likelihood: 1/precision = E(y - f)² over the data (Eq. 21)."""
        self.precision.copy_(1 / statistic.clamp(min=torch.finfo(statistic.dtype).tiny))


class HeteroscedasticNormal(Likelihood):
    """y ~ N(f₁, exp f₂): the first half of the outputs is the mean, the second the log-variance of the noise (Eq. 22).

    Log-variances are held within ±10, so that a far-off input cannot overflow.
    """

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        mean, logvar = f.chunk(2, -1)
        logvar = logvar.clamp(-10, 10)
        return -0.5 * (math.log(2 * math.pi) + logvar + torch.exp(-logvar) * (mean - y).square())

    def expected_log_prob(self, f: Gaussian, y: Tensor) -> Tensor:
        mean, logvar = _halves(f)
        precision = torch.exp((-logvar.mean + logvar.var / 2).clamp(-10, 10))
        return -0.5 * (
            math.log(2 * math.pi) + logvar.mean + precision * (mean.var + (mean.mean - y).square())
        )

    def predictive(self, f: Activation) -> NormalPredictive:
        mean, logvar = _halves(as_gaussian(f))
        return NormalPredictive(mean.mean, mean.var, torch.exp((logvar.mean + logvar.var / 2).clamp(-10, 10)))

    def target_shape(self, f: Activation) -> torch.Size:
        *batch, outputs = f.shape
        if outputs % 2:
            raise ValueError(
                f"HeteroscedasticNormal: the network must end in two outputs for each target, a mean and a log-variance; it has {outputs}."
            )
        return torch.Size((*batch, outputs // 2))


def _halves(f: Gaussian) -> tuple[Gaussian, Gaussian]:
    (m, log), (m_var, log_var) = f.mean.chunk(2, -1), f.var.chunk(2, -1)
    return Gaussian.of(m, m_var), Gaussian.of(log.clamp(-10, 10), log_var)


class Categorical(Likelihood):
    """y ~ Categorical(softmax f), classes in dimension 1, targets integer.

    The expectation of the log-sum-exp is the paper's second-order expansion (Eq. 23).

    :param approximation: class probabilities by "quadrature" of one integral (Eq. 31), right for any variance; by "delta", the second-order
        expansion of the softmax (Eq. 24), right for small ones; "mackay", softmax of the means shrunk by √(1 + π v/8); "plugin", softmax
        of the means; "samples", an average over a fixed set of quasi-random draws of f. `experiments/softmax.py` compares them.
    :param samples: size of that set.
    """

    def __init__(self, approximation: Approximation = "quadrature", samples: int = 128) -> None:
        super().__init__()
        if approximation not in get_args(Approximation):
            raise ValueError(
                f"Categorical: approximation must be one of {', '.join(get_args(Approximation))}; got {approximation!r}."
            )
        if not samples > 0:
            raise ValueError(f"Categorical: samples must be one or more, got {samples}.")
        self.approximation = approximation
        self.samples = samples

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        check_classes(y)
        return f.gather(1, y.unsqueeze(1)).squeeze(1) - f.logsumexp(1)

    def expected_log_prob(self, f: Gaussian, y: Tensor) -> Tensor:
        p = f.mean.softmax(1)
        return self.log_prob(f.mean, y) - 0.5 * (f.var * p * (1 - p)).sum(1)

    def predictive(self, f: Activation) -> ClassPredictive:
        m = mean_of(f)
        if not isinstance(f, Gaussian) or self.approximation == "plugin":
            return _certain(m.softmax(1))
        if self.approximation == "mackay":
            return _certain((m / torch.sqrt(1 + math.pi / 8 * f.var)).softmax(1))
        if self.approximation == "samples":
            p = (m + f.std * _normal_points(self.samples, m)).softmax(2)
            return ClassPredictive(p.mean(0), torch.special.entr(p).sum(2).mean(0))
        return ClassPredictive(
            *(softmax_delta(f) if self.approximation == "delta" else softmax_quadrature(f))
        )

    def target_shape(self, f: Activation) -> torch.Size:
        return torch.Size((f.shape[0], *f.shape[2:]))


def softmax_quadrature(f: Gaussian, points: int = 36, nodes: int = 12) -> tuple[Tensor, Tensor]:
    """E softmax(f) and its expected entropy by one integral, with no expansion (Eq. 31).

    Add an independent Gumbel variable g to each logit: softmax_c is the probability that f_c + g_c is the largest, and the entropy of the
    softmax is the mean of the largest one's g, less Euler's constant. With logits independent, both are integrals over the value t of the
    largest of Π_j P(f_j + g_j < t), by the trapezoidal rule: `points` values of t and `nodes` of each f. Where f is much wider than g,
    beyond a variance of 16, their sum is taken as normal.
    """
    m, v = f.mean, f.var
    s = f.std
    low, high = (m - 4 * s).amax(1, keepdim=True) - 3, (m + 4 * s).amax(1, keepdim=True) + 12
    t = low + (high - low) * torch.linspace(0, 1, points, dtype=m.dtype, device=m.device).view(
        -1, *(1,) * m.dim()
    )
    distance, width = t - m, s.clamp(max=4)
    below, density, noise = (torch.zeros_like(distance) for _ in range(3))
    z = torch.linspace(-4.5, 4.5, nodes, dtype=torch.float64)
    for node, weight in zip(z.tolist(), torch.softmax(-z.square() / 2, 0).tolist(), strict=True):
        g = distance - width * node
        x = torch.exp(-g)
        below_here = weight * torch.exp(-x)
        density_here = x * below_here
        below += below_here
        density += density_here
        noise += g * density_here
    wide, gumbel_var = v > 16, math.pi**2 / 6
    total_var = v + gumbel_var
    u = (distance - EULER) / total_var.sqrt()
    normal_density = torch.exp(-0.5 * u.square()) / torch.sqrt(2 * math.pi * total_var)
    below = torch.where(wide, torch.special.ndtr(u), below).clamp(min=torch.finfo(m.dtype).tiny)
    density = torch.where(wide, normal_density, density)
    noise = torch.where(wide, (EULER + gumbel_var / total_var.sqrt() * u) * normal_density, noise)
    others_below = torch.exp(below.log().sum(2, keepdim=True) - below.log())
    wins, noise_of_winner = (density * others_below).sum(0), (noise * others_below).sum(0)
    total = wins.sum(1, keepdim=True)
    probs = wins / total
    expected_entropy = F.relu(noise_of_winner.sum(1) / total.squeeze(1) - EULER)
    return probs, torch.minimum(expected_entropy, torch.special.entr(probs).sum(1))


def softmax_delta(f: Gaussian) -> tuple[Tensor, Tensor]:
    """Second-order expansions of E softmax(f) and of its expected entropy (Eq. 24).

    The paper's reference code has Σ v p in the place of the linear -v p: its probabilities do not sum to one. For large variances the
    expansion itself can turn negative; it then is clipped and rescaled, and the entropy held between zero and its bound by Jensen.
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
    return probs, torch.minimum(expected_entropy, torch.special.entr(probs).sum(1))


def _certain(probs: Tensor) -> ClassPredictive:
    return ClassPredictive(probs, torch.special.entr(probs).sum(1))


def _normal_points(n: int, like: Tensor) -> Tensor:
    """n quasi-random standard normal points over the classes: the same at every call, so that predictions repeat."""
    classes = like.shape[1]
    points = SobolEngine(classes, scramble=True, seed=0).draw(n, dtype=torch.float64)
    normal = torch.special.ndtri(points.clamp(1e-9, 1 - 1e-9)).to(like)
    return normal.view(n, 1, classes, *(1,) * (like.dim() - 2))


class _Probit(Likelihood):
    """P(y = 1) = Φ(f), entry by entry.

    :param expectation: of log Φ(±f), "quadrature"; or the lower bound log Φ(±m) - v/2, "bound", which needs no nodes; or "paper",
        the bound L_clsf that follows from treating y as a latent margin with unit noise (Eq. 25).
    """

    def __init__(self, expectation: Literal["quadrature", "bound", "paper"] = "quadrature") -> None:
        super().__init__()
        if expectation not in ("quadrature", "bound", "paper"):
            raise ValueError(
                f'{type(self).__name__}: expectation must be "quadrature", "bound" or "paper", got {expectation!r}.'
            )
        self.expectation = expectation

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        return torch.special.log_ndtr(torch.where(y > 0, f, -f))

    def expected_log_prob(self, f: Gaussian, y: Tensor) -> Tensor:
        if self.expectation == "bound":
            return self.log_prob(f.mean, y) - f.var / 2
        if self.expectation == "paper":
            return self.log_prob(f.mean / math.sqrt(2), y) - f.var / 2
        return super().expected_log_prob(f, y)

    def predictive(self, f: Activation) -> LabelPredictive:
        f = as_gaussian(f)
        score = f.mean / torch.sqrt(1 + f.var)
        entropy = fn.expectation(lambda value: binary_entropy(torch.special.ndtr(value)), f)
        # Through its logarithm, because torch's ndtr has no tail in single precision: it is zero at -6.
        probs, complement = (torch.special.log_ndtr(a).exp() for a in (score, -score))
        return LabelPredictive(probs, entropy, complement)


class Bernoulli(_Probit):
    """A binary target, 0 or 1, with the probit link: P(y = 1) = Φ(m/√(1 + v)) in closed form (Eq. 25). One output."""

    def target_shape(self, f: Activation) -> torch.Size:
        if f.shape[-1] != 1:
            raise ValueError(
                f"Bernoulli: the network must end in one output, it has {f.shape[-1]}; for several labels use MultiLabel."
            )
        return f.shape


class MultiLabel(_Probit):
    """Several binary targets, each with an output of its own (Eq. 25)."""


def check_target(likelihood: Likelihood, f: Activation, y: Tensor) -> None:
    """Refuse a target that would broadcast against the prediction."""
    check_shape(y, likelihood.target_shape(f))

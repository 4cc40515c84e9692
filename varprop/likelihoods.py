"""Likelihoods p(y | f) of a target y given the network's output f. A new one needs only log_prob(f, y)."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from .gaussian import Activation, Gaussian, as_gaussian, mean_of
from .moments import expectation, hermite
from .moments.categorical import softmax_delta, softmax_quadrature, softmax_samples
from .moments.probit import expected_bump, expected_log_ndtr, log_ndtr
from .predictive import (
    ClassPredictive,
    LabelPredictive,
    LatentPredictive,
    NormalPredictive,
    Predictive,
    StudentPredictive,
    binary_entropy,
    check_classes,
    check_shape,
)

POINTS = 8
"""Of the quadrature over the noise's level at an input."""
Approximation = Literal["quadrature", "delta", "mackay", "plugin", "samples"]


class Likelihood(nn.Module, ABC):
    """p(y | f). Implement `log_prob`, and `expected_log_prob` too if it couples several outputs.

    >>> class Poisson(Likelihood):
    ...     def log_prob(self, f, y):
    ...         return y * f - f.exp() - torch.lgamma(y + 1)
    >>> f = Gaussian(torch.tensor([[0.5]]), torch.tensor([[0.1]]))
    >>> Poisson().expected_log_prob(f, torch.tensor([[2.0]]))       # 2 (0.5) - exp(0.55) - log 2
    tensor([[-1.4264]])
    """

    @abstractmethod
    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        """log p(y | f), elementwise."""

    def expected_log_prob(self, f: Gaussian, y: Tensor) -> Tensor:
        """E log p(y | f) over a random f, by quadrature (Eq. 16) unless a subclass has a closed form."""
        return expectation(lambda value: self.log_prob(value, y), f)

    def predictive(self, f: Activation) -> Predictive:
        """The distribution of y when f is random, by quadrature unless a subclass has a closed form."""
        return LatentPredictive(as_gaussian(f), self)

    def target_shape(self, f: Activation) -> torch.Size:
        """The shape of the targets that belong to an output f."""
        return f.shape

    def statistic(self, f: Activation, y: Tensor, weight: Tensor | None = None) -> Tensor | None:
        """What `update` needs from a batch, averaged over it; None if the likelihood has nothing to update.

        :param weight: of each data point, 1 by default.
        """
        return None

    def update(self, statistic: Tensor, share: float = 1.0) -> None:
        """Set the likelihood's parameters to their optimum, given the statistic averaged over the data.

        :param share: of these data among all; the others are those that the parameters were set from before.
        """


class Normal(Likelihood):
    """y ~ N(f, 1/precision) (Eq. 38).

    :param outputs: the number of precisions, one for each entry of the last dimension; 1 is shared by all.

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
        """E(y - f)² for each precision (Eq. 39)."""
        f = as_gaussian(f)
        return self._average((f.mean - y).square() + f.var, weight)

    def _average(self, square: Tensor, weight: Tensor | None) -> Tensor:
        if weight is not None:
            average = weight.mean().clamp(min=torch.finfo(weight.dtype).tiny)  # all weights may be zero
            square = square * (weight / average).view(-1, *(1,) * (square.dim() - 1))
        return square.reshape(-1, self.precision.numel()).mean(0)

    def update(self, statistic: Tensor, share: float = 1.0) -> None:
        """Type-II maximum likelihood: 1/precision = E(y - f)² over the data (Eq. 39)."""
        if share < 1:
            statistic = share * statistic + (1 - share) / self.precision
        self.precision.copy_(1 / statistic.clamp(min=torch.finfo(statistic.dtype).tiny))


class HeteroscedasticNormal(Likelihood):
    """y ~ N(f₁, exp f₂): half of the outputs are means, the other half log-variances of the noise (Eq. 40).

    Log-variances are clamped to ±10, so that inputs far from the data cannot overflow.
    """

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        mean, logvar = f.chunk(2, -1)
        logvar = logvar.clamp(-10, 10)
        return -0.5 * (math.log(2 * math.pi) + logvar + torch.exp(-logvar) * (mean - y).square())

    def expected_log_prob(self, f: Gaussian, y: Tensor) -> Tensor:
        mean, logvar = self._halves(f)
        precision = torch.exp((-logvar.mean + logvar.var / 2).clamp(-10, 10))
        return -0.5 * (
            math.log(2 * math.pi) + logvar.mean + precision * (mean.var + (mean.mean - y).square())
        )

    def predictive(self, f: Activation) -> NormalPredictive:
        mean, logvar = self._halves(as_gaussian(f))
        return NormalPredictive(mean.mean, mean.var, torch.exp((logvar.mean + logvar.var / 2).clamp(-10, 10)))

    def target_shape(self, f: Activation) -> torch.Size:
        return _half_shape("HeteroscedasticNormal", f)

    @staticmethod
    def _halves(f: Gaussian) -> tuple[Gaussian, Gaussian]:
        mean, logvar = _halves(f)
        return mean, Gaussian.of(logvar.mean.clamp(-10, 10), logvar.var)


def _halves(f: Gaussian) -> tuple[Gaussian, Gaussian]:
    (mean, noise), (mean_var, noise_var) = f.mean.chunk(2, -1), f.var.chunk(2, -1)
    return Gaussian.of(mean, mean_var), Gaussian.of(noise, noise_var)


def _half_shape(likelihood: str, f: Activation) -> torch.Size:
    *batch, outputs = f.shape
    if outputs % 2:
        raise ValueError(
            f"{likelihood}: the network needs two outputs for each target, a mean and a log-variance; it has "
            f"{outputs}."
        )
    return torch.Size((*batch, outputs // 2))


class BoundedNoise(Normal):
    """y ~ N(f₁, exp(b tanh(f₂/b))/precision): noise that differs between inputs, within bounds (Eq. 54).

    Half of the outputs are means, the other half say how much more or less noise than usual there is. However
    far f₂ goes, the noise's standard deviation stays within a factor of exp(b/2) of 1/√precision, which is
    updated as that of `Normal`.

    :param outputs: the number of targets, each with its precision.
    """

    def __init__(self, outputs: int = 1, bound: float = 4.0) -> None:
        if not 0 < bound < math.inf:
            raise ValueError(f"BoundedNoise: bound must be positive and finite, got {bound}.")
        super().__init__(outputs=outputs)
        self.bound = bound

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        mean, level = f.chunk(2, -1)
        log_var = self._log_var(level)
        return self._at((mean - y).square() * torch.exp(-log_var), log_var)

    def expected_log_prob(self, f: Gaussian, y: Tensor) -> Tensor:
        return self._at(*self._relative(f, y))

    def predictive(self, f: Activation) -> NormalPredictive:
        mean, level = _halves(as_gaussian(f))
        relative = expectation(lambda h: torch.exp(self._log_var(h)), level, POINTS)
        return NormalPredictive(mean.mean, mean.var, relative / self.precision)

    def statistic(self, f: Activation, y: Tensor, weight: Tensor | None = None) -> Tensor:
        """The expected squared error relative to the noise at each input, for each precision."""
        return self._average(self._relative(as_gaussian(f), y)[0], weight)

    def _at(self, square: Tensor, log_var: Tensor) -> Tensor:
        return -0.5 * (self.precision * square + torch.log(2 * math.pi / self.precision) + log_var)

    def _relative(self, f: Gaussian, y: Tensor) -> tuple[Tensor, Tensor]:
        """The expected squared error relative to the noise at each input, and the expected log noise."""
        mean, level = _halves(f)
        nodes, weights = hermite(level, POINTS)
        log_var = self._log_var(level.mean + level.std * nodes)
        precision = (weights * torch.exp(-log_var)).sum(0)
        return precision * ((mean.mean - y).square() + mean.var), (weights * log_var).sum(0)

    def _log_var(self, level: Tensor) -> Tensor:
        return self.bound * torch.tanh(level / self.bound)

    def target_shape(self, f: Activation) -> torch.Size:
        return _half_shape("BoundedNoise", f)


class StudentT(Likelihood):
    """y = f + scale · t: noise with the heavy tails of Student's t, whose scale and dof are learned.

    The expectation is bounded from below, in closed form, by the log density at the root of the expected
    squared error (Eq. 55): log t is convex in the squared error.

    :param dof: degrees of freedom at the start; they stay above 2, so that the noise has a variance.
    :param outputs: the number of targets, each with a scale and degrees of freedom.
    """

    def __init__(self, scale: float = 1.0, dof: float = 10.0, outputs: int = 1) -> None:
        super().__init__()
        if not (0 < scale < math.inf and 2 < dof < math.inf):
            raise ValueError(f"StudentT: scale must be positive and dof above 2, got {scale} and {dof}.")
        self.log_scale = nn.Parameter(torch.full((outputs,), math.log(scale)))
        self.log_dof = nn.Parameter(torch.full((outputs,), math.log(dof - 2)))

    @property
    def scale(self) -> Tensor:
        return self.log_scale.exp()

    @property
    def dof(self) -> Tensor:
        return 2 + self.log_dof.exp()

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        return self._at((f - y).square())

    def expected_log_prob(self, f: Gaussian, y: Tensor) -> Tensor:
        return self._at((f.mean - y).square() + f.var)

    def _at(self, square: Tensor) -> Tensor:
        half = (self.dof + 1) / 2
        constant = torch.lgamma(half) - torch.lgamma(self.dof / 2) - 0.5 * torch.log(math.pi * self.dof)
        return constant - self.log_scale - half * torch.log1p(square / (self.dof * self.scale.square()))

    def predictive(self, f: Activation) -> StudentPredictive:
        f = as_gaussian(f)
        scale, dof = self.scale.expand_as(f.mean), self.dof.expand_as(f.mean)
        return StudentPredictive(f.mean, f.var, scale.square() * dof / (dof - 2), dof)


class Categorical(Likelihood):
    """y ~ Categorical(softmax f), with the classes in dimension 1 and integer targets.

    The expected log-sum-exp is the paper's second-order expansion (Eq. 41).

    :param approximation: how class probabilities are predicted. "quadrature" of one integral (Eq. 42) is
        accurate for any variance; "delta", the second-order expansion of the softmax (Eq. 43), for small
        ones. "mackay" is the softmax of the means divided by √(1 + π v/8), "plugin" the softmax of the means,
        and "samples" an average over a fixed set of quasi-random samples of f. `experiments/softmax.py`
        compares them.
    :param samples: the number of samples for "samples".
    """

    def __init__(self, approximation: Approximation = "quadrature", samples: int = 128) -> None:
        super().__init__()
        if approximation not in get_args(Approximation):
            raise ValueError(
                f"Categorical: approximation must be one of {', '.join(get_args(Approximation))}; "
                f"got {approximation!r}."
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
        if not isinstance(f, Gaussian) or self.approximation == "plugin":
            return _plugin(mean_of(f).softmax(1))
        if self.approximation == "mackay":
            return _plugin((f.mean / torch.sqrt(1 + math.pi / 8 * f.var)).softmax(1))
        if self.approximation == "samples":
            return ClassPredictive(*softmax_samples(f, self.samples))
        if self.approximation == "delta":
            return ClassPredictive(*softmax_delta(f))
        return ClassPredictive(*softmax_quadrature(f))

    def target_shape(self, f: Activation) -> torch.Size:
        return torch.Size((f.shape[0], *f.shape[2:]))


def _plugin(probs: Tensor) -> ClassPredictive:
    """A prediction without epistemic uncertainty."""
    return ClassPredictive(probs, torch.special.entr(probs).sum(1))


class _Probit(Likelihood):
    """P(y = 1) = Φ(f), elementwise.

    :param expectation: how E log Φ(±f) is computed: by "quadrature", to nine digits, by the lower "bound"
        log Φ(±m) - v/2, or by the "paper"'s bound L_clsf, which treats y as a latent margin with unit noise
        (Eq. 44).
    """

    def __init__(self, expectation: Literal["quadrature", "bound", "paper"] = "quadrature") -> None:
        super().__init__()
        if expectation not in ("quadrature", "bound", "paper"):
            raise ValueError(
                f'{type(self).__name__}: expectation must be "quadrature", "bound" or "paper", '
                f"got {expectation!r}."
            )
        self.expectation = expectation

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        return log_ndtr(torch.where(y > 0, f, -f))

    def expected_log_prob(self, f: Gaussian, y: Tensor) -> Tensor:
        if self.expectation == "bound":
            return self.log_prob(f.mean, y) - f.var / 2
        if self.expectation == "paper":
            return self.log_prob(f.mean / math.sqrt(2), y) - f.var / 2
        return expected_log_ndtr(Gaussian.of(torch.where(y > 0, f.mean, -f.mean), f.var))

    def predictive(self, f: Activation) -> LabelPredictive:
        f = as_gaussian(f)
        # Beyond 40, a tail is zero in any type, and the derivative of its logarithm may overflow.
        score = (f.mean / torch.sqrt(1 + f.var)).clamp(-40.0, 40.0)
        entropy = expected_bump(lambda value: binary_entropy(torch.special.ndtr(value)), f)
        # By the logarithm, because torch's ndtr loses its tail in single precision: it is zero at -6.
        wide = torch.promote_types(score.dtype, torch.float32)
        probs, complement = (torch.special.log_ndtr(a.to(wide)).exp().to(a.dtype) for a in (score, -score))
        return LabelPredictive(probs, entropy, complement)


class Bernoulli(_Probit):
    """A binary target, 0 or 1, with one output and the probit link: P(y = 1) = Φ(m/√(1 + v)) (Eq. 44)."""

    def target_shape(self, f: Activation) -> torch.Size:
        if f.shape[-1] != 1:
            raise ValueError(
                f"Bernoulli: the network must have one output, but has {f.shape[-1]}; "
                "use MultiLabel for several labels."
            )
        return f.shape


class MultiLabel(_Probit):
    """Several binary targets, one for each output, with the probit link (Eq. 44)."""


def check_target(likelihood: Likelihood, f: Activation, y: Tensor) -> None:
    """Refuse a target that would only broadcast against the prediction."""
    check_shape(y, likelihood.target_shape(f))

"""Likelihoods of numbers: normal noise, constant or not, and noise with heavy tails."""

from __future__ import annotations

import math
from numbers import Real

import torch
from torch import Tensor, nn

from ..gaussian import Activation, Gaussian, as_gaussian
from ..moments import expectation, hermite
from ..predictive import NormalPredictive, StudentPredictive
from .base import Likelihood

POINTS = 8
"""Of the quadrature over the noise's level at an input."""


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
        if not (isinstance(precision, Real | Tensor) and 0 < precision < math.inf):
            raise ValueError(f"likelihoods.Normal: precision must be positive and finite, got {precision!r}.")
        self.register_buffer("precision", torch.full((outputs,), float(precision)))

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        return self._expected((f - y).square())

    def expected_log_prob(self, f: Gaussian, y: Tensor) -> Tensor:
        error = f.mean - y
        return self._expected(torch.addcmul(f.var, error, error))

    def _expected(self, square: Tensor) -> Tensor:
        constant = 0.5 * torch.log(self.precision / (2 * math.pi))
        return torch.addcmul(constant, self.precision, square, value=-0.5)

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

"""Predictions of numbers: a mean, and a variance with an epistemic and an aleatoric part."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from statistics import NormalDist

import torch
from torch import Tensor

from .base import Predictive, check_shape, per_datum


class Regression(Predictive):
    """A prediction of numbers: a mean, and a variance with an epistemic and an aleatoric part."""

    mean: Tensor
    epistemic: Tensor
    """The variance due to uncertain weights, which shrinks with more data."""
    aleatoric: Tensor
    """The variance of the noise, which does not."""

    @abstractmethod
    def cdf(self, y: Tensor) -> Tensor:
        """The probability of a target below y."""

    @abstractmethod
    def interval(self, level: float = 0.9) -> tuple[Tensor, Tensor]:
        """The central interval that contains the target with probability `level`."""

    @property
    def var(self) -> Tensor:
        return self.epistemic + self.aleatoric

    @property
    def std(self) -> Tensor:
        return self.var.sqrt()


@dataclass(frozen=True, eq=False)
class NormalPredictive(Regression):
    """y ~ N(mean, epistemic + aleatoric).

    >>> p = NormalPredictive(torch.tensor([[0.0]]), torch.tensor([[0.75]]), torch.tensor([[0.25]]))
    >>> p.interval(0.9)
    (tensor([[-1.6449]]), tensor([[1.6449]]))
    """

    mean: Tensor
    epistemic: Tensor
    aleatoric: Tensor

    def log_prob(self, y: Tensor) -> Tensor:
        check_shape(y, self.mean.shape)
        return per_datum(-0.5 * ((y - self.mean).square() / self.var + torch.log(2 * math.pi * self.var)))

    def cdf(self, y: Tensor) -> Tensor:
        # Half, not 0/0, where a point mass lies.
        return torch.special.ndtr(torch.where(y == self.mean, 0.0, (y - self.mean) / self.std))

    def interval(self, level: float = 0.9) -> tuple[Tensor, Tensor]:
        check_level(level)
        half = self.std * NormalDist().inv_cdf((1 + level) / 2)
        return self.mean - half, self.mean + half


@dataclass(frozen=True, eq=False)
class StudentPredictive(Regression):
    """y = f + noise, with a normal f and noise of Student's t (Eq. 56).

    The noise is a mixture of normals over its precision, by the trapezoidal rule in the logarithm of it.

    >>> zero, two, four = (torch.full((1, 1), v) for v in (0.0, 2.0, 4.0))
    >>> StudentPredictive(zero, zero, two, four).interval(0.9)          # of t with four degrees of freedom
    (tensor([[-2.1318]]), tensor([[2.1318]]))
    """

    mean: Tensor
    epistemic: Tensor
    aleatoric: Tensor
    dof: Tensor
    """Degrees of freedom, above 2; the scale is √(aleatoric · (1 - 2/dof))."""

    def log_prob(self, y: Tensor) -> Tensor:
        check_shape(y, self.mean.shape)
        log_weight, var = self._normals
        log = -0.5 * ((y - self.mean).square() / var + torch.log(2 * math.pi * var))
        return per_datum((log_weight + log).logsumexp(0))

    def cdf(self, y: Tensor) -> Tensor:
        log_weight, var = self._normals
        # The smaller tail, because the weights sum to one only up to rounding.
        tail = (log_weight.exp() * torch.special.ndtr(-(y - self.mean).abs() / var.sqrt())).sum(0)
        return torch.where(y < self.mean, tail, 1 - tail)

    def interval(self, level: float = 0.9) -> tuple[Tensor, Tensor]:
        check_level(level)
        # Cantelli's inequality: how far a quantile can be from the mean.
        reach = self.std * math.sqrt((1 + level) / (1 - level))
        lower = quantile(self.cdf, (1 - level) / 2, self.mean - reach, self.mean)
        return lower, 2 * self.mean - lower

    @property
    def _normals(self) -> tuple[Tensor, Tensor]:
        """The logarithms of the weights of the normal components, and their variances."""
        # The density of u = log(precision) is proportional to exp(dof/2 · (u - exp u)).
        reach = 1 + 40 / self.dof
        steps = torch.linspace(0, 1, 64, dtype=self.mean.dtype, device=self.mean.device)
        low, high = 1 - 2 * reach, torch.log(reach) + 0.5
        u = low + (high - low) * steps.view(-1, *(1,) * self.mean.dim())
        log_weight = (self.dof / 2 * (u - u.exp())).log_softmax(0)
        return log_weight, self.epistemic + self.aleatoric * (1 - 2 / self.dof) * torch.exp(-u)


@dataclass(frozen=True, eq=False)
class LogNormalPredictive(Regression):
    """y = exp(f + noise), with a normal f and normal noise (Eq. 57).

    >>> log = NormalPredictive(torch.zeros(1, 1), torch.zeros(1, 1), torch.ones(1, 1))
    >>> LogNormalPredictive(log).mean                                   # exp(1/2)
    tensor([[1.6487]])
    """

    log: NormalPredictive

    @property
    def mean(self) -> Tensor:  # type: ignore[override]
        return torch.exp(self.log.mean + self.log.var / 2)

    @property
    def epistemic(self) -> Tensor:  # type: ignore[override]
        """Var E[y | f]."""
        return torch.exp(2 * self.log.mean + self.log.var + _log_expm1(self.log.epistemic))

    @property
    def aleatoric(self) -> Tensor:  # type: ignore[override]
        """E Var[y | f]."""
        epistemic, aleatoric = self.log.epistemic, _log_expm1(self.log.aleatoric)
        return torch.exp(2 * self.log.mean + self.log.var + epistemic + aleatoric)

    def log_prob(self, y: Tensor) -> Tensor:
        positive = y > 0
        log = torch.where(positive, y, 1.0).log()
        density = self.log.log_prob(log) - per_datum(log)
        return torch.where(per_datum((~positive).to(log)) > 0, -math.inf, density)

    def cdf(self, y: Tensor) -> Tensor:
        return self.log.cdf(y.clamp(min=0).log())

    def interval(self, level: float = 0.9) -> tuple[Tensor, Tensor]:
        lower, upper = self.log.interval(level)
        return lower.exp(), upper.exp()


def _log_expm1(var: Tensor) -> Tensor:
    """log(exp(v) - 1). A product of exponentials would be NaN where one overflows and another is zero."""
    positive = var > 0
    safe = torch.where(positive, var, 1.0)
    return torch.where(positive, safe + torch.log(-torch.expm1(-safe)), -math.inf)


def quantile(cdf: Callable[[Tensor], Tensor], probability: float, low: Tensor, high: Tensor) -> Tensor:
    """Where a distribution function takes a value, between two bounds."""
    for _ in range(60):
        middle = (low + high) / 2
        below = cdf(middle) < probability
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return (low + high) / 2


def check_level(level: float) -> None:
    if not (isinstance(level, Real) and 0 < level < 1):
        raise ValueError(f"level must be a number between 0 and 1, such as 0.9, got {level!r}.")

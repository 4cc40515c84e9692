"""Predictive distributions over targets, which tell epistemic from aleatoric uncertainty."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from statistics import NormalDist
from typing import Any, Protocol

import torch
from torch import Tensor

from .gaussian import Gaussian
from .moments import log_expectation_exp


class Predictive(ABC):
    """A predictive distribution for each data point of a batch."""

    @abstractmethod
    def log_prob(self, y: Tensor) -> Tensor:
        """The log density or log probability of each data point's target."""


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


class Discrete(Predictive):
    """A prediction of classes or labels."""

    probs: Tensor
    expected_entropy: Tensor
    """The entropy that would remain on average if the weights were known: the aleatoric part."""

    @property
    @abstractmethod
    def entropy(self) -> Tensor:
        """The entropy of the prediction, in nats."""

    @property
    def mutual_information(self) -> Tensor:
        """The entropy due to uncertain weights, in nats: the epistemic part."""
        return (self.entropy - self.expected_entropy).clamp(min=0)


@dataclass(frozen=True, eq=False)
class ClassPredictive(Discrete):
    """Class probabilities, with the classes in dimension 1."""

    probs: Tensor
    expected_entropy: Tensor

    def log_prob(self, y: Tensor) -> Tensor:
        check_shape(y, self.entropy.shape)
        check_classes(y)
        return per_datum(log_probability(self.probs.gather(1, y.unsqueeze(1)).squeeze(1)))

    @property
    def entropy(self) -> Tensor:
        return torch.special.entr(self.probs).sum(1)


@dataclass(frozen=True, eq=False)
class LabelPredictive(Discrete):
    """Probabilities P(y = 1) of independent binary labels."""

    probs: Tensor
    expected_entropy: Tensor
    complement: Tensor
    """P(y = 0), stored because 1 - probs loses its digits near zero."""

    def log_prob(self, y: Tensor) -> Tensor:
        check_shape(y, self.probs.shape)
        return per_datum(log_probability(torch.where(y > 0, self.probs, self.complement)))

    @property
    def entropy(self) -> Tensor:
        return binary_entropy(self.probs)


class Elementwise(Protocol):
    """What `LatentPredictive` needs from a likelihood."""

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor: ...


@dataclass(frozen=True, eq=False)
class LatentPredictive(Predictive):
    """The prediction of any elementwise likelihood, averaged over the network's output f by quadrature."""

    f: Gaussian
    likelihood: Elementwise

    def log_prob(self, y: Tensor) -> Tensor:
        check_shape(y, self.f.shape)
        return per_datum(log_expectation_exp(lambda f: self.likelihood.log_prob(f, y), self.f))


def mixture(components: Sequence[Predictive]) -> Predictive:
    """The mixture, with equal weights, of Monte Carlo samples or of the members of an ensemble.

    >>> one = NormalPredictive(torch.zeros(1, 1), torch.zeros(1, 1), torch.ones(1, 1))
    >>> two = NormalPredictive(torch.ones(1, 1), torch.zeros(1, 1), torch.ones(1, 1))
    >>> mixture([one, two]).epistemic
    tensor([[0.2500]])
    """
    if not components:
        raise ValueError(
            "mixture: there is nothing to mix; give at least one prediction (samples=1 or more)."
        )
    regressions = [p for p in components if isinstance(p, Regression)]
    if len(regressions) == len(components):
        return mixture_of_numbers(regressions)
    first = components[0]
    if isinstance(first, ClassPredictive | LabelPredictive):
        averages = (
            torch.stack([getattr(p, field.name) for p in components]).mean(0) for field in fields(first)
        )
        return type(first)(*averages)
    return Mixture(components)


def mixture_of_numbers(components: Sequence[Regression]) -> RegressionMixture:
    means = torch.stack([p.mean for p in components])
    epistemic = torch.stack([p.epistemic for p in components]).mean(0) + means.var(0, correction=0)
    aleatoric = torch.stack([p.aleatoric for p in components]).mean(0)
    return RegressionMixture(components, means.mean(0), epistemic, aleatoric)


@dataclass(frozen=True, eq=False)
class Mixture(Predictive):
    """A mixture of several predictions with equal weights."""

    components: Sequence[Predictive]

    def log_prob(self, y: Tensor) -> Tensor:
        log_probs = torch.stack([p.log_prob(y) for p in self.components])
        return log_probs.logsumexp(0) - math.log(len(self.components))


@dataclass(frozen=True, eq=False)
class RegressionMixture(Mixture, Regression):
    """A mixture of several regressions; the variance between their means counts as epistemic."""

    components: Sequence[Regression]
    mean: Tensor
    epistemic: Tensor
    aleatoric: Tensor

    def cdf(self, y: Tensor) -> Tensor:
        return torch.stack([p.cdf(y) for p in self.components]).mean(0)

    def interval(self, level: float = 0.9) -> tuple[Tensor, Tensor]:
        lower, upper = zip(*(p.interval(level) for p in self.components), strict=True)
        # A quantile of the mixture lies between the smallest and the largest quantile of its components.
        between = [torch.stack(ends).aminmax(dim=0) for ends in (lower, upper)]
        return (
            quantile(self.cdf, (1 - level) / 2, *between[0]),
            quantile(self.cdf, (1 + level) / 2, *between[1]),
        )


def concatenate(parts: Sequence[Predictive]) -> Predictive:
    """One prediction for a whole data set from predictions for its parts.

    >>> part = NormalPredictive(torch.zeros(2, 1), torch.zeros(2, 1), torch.ones(2, 1))
    >>> concatenate([part, part]).mean.shape
    torch.Size([4, 1])
    """
    return _joined(lambda tensors: torch.cat(list(tensors)), parts)


def reordered(p: Predictive, rows: Tensor) -> Predictive:
    """The prediction of some of its data points, in the order of their numbers."""
    return _joined(lambda tensors: tensors[0][rows], [p])


def _joined(join: Callable[[Sequence[Tensor]], Tensor], parts: Sequence[Predictive]) -> Predictive:
    first: Any = parts[0]  # some dataclass: every kind of prediction is one
    return type(first)(*(_field(join, [getattr(p, field.name) for p in parts]) for field in fields(first)))


def _field(join: Callable[[Sequence[Tensor]], Tensor], values: Sequence[Any]) -> object:
    """One field of several predictions: tensors, Gaussians, components of mixtures, or a shared object."""
    first = values[0]
    if isinstance(first, Tensor):
        return join(values)
    if isinstance(first, Gaussian):
        return Gaussian.of(join([v.mean for v in values]), join([v.var for v in values]))
    if isinstance(first, Predictive):
        return _joined(join, values)
    if isinstance(first, Sequence):
        return [_joined(join, components) for components in zip(*values, strict=True)]
    return first


def rescaled(p: Predictive, mean: Tensor | float, scale: Tensor | float) -> Regression:
    """The prediction of scale · y + mean, given a prediction of y.

    >>> p = NormalPredictive(torch.zeros(1, 1), torch.zeros(1, 1), torch.ones(1, 1))
    >>> rescaled(p, 5.0, 2.0).interval(0.9)
    (tensor([[1.7103]]), tensor([[8.2897]]))
    """
    if isinstance(p, RegressionMixture):
        # Rescaled and not computed anew: the variance between large means would lose its digits.
        components = [rescaled(component, mean, scale) for component in p.components]
        return RegressionMixture(
            components, p.mean * scale + mean, p.epistemic * scale**2, p.aleatoric * scale**2
        )
    if isinstance(p, NormalPredictive | StudentPredictive):
        return replace(
            p,
            mean=p.mean * scale + mean,
            epistemic=p.epistemic * scale**2,
            aleatoric=p.aleatoric * scale**2,
        )
    raise _not_numbers("rescaled", p)


def widened(p: Predictive, factor: Tensor | float) -> Regression:
    """The prediction with all variances multiplied by a factor; between the means of a mixture they stay."""
    if isinstance(p, RegressionMixture):
        return mixture_of_numbers([widened(component, factor) for component in p.components])
    if isinstance(p, NormalPredictive | StudentPredictive):
        return replace(p, epistemic=p.epistemic * factor, aleatoric=p.aleatoric * factor)
    raise _not_numbers("widened", p)


def limited(p: Predictive, low: Tensor, high: Tensor) -> Regression:
    """The normal prediction, or mixture of normals, with every mean between two bounds."""
    if isinstance(p, RegressionMixture):
        return mixture_of_numbers([limited(component, low, high) for component in p.components])
    if isinstance(p, NormalPredictive):
        return NormalPredictive(p.mean.clamp(low.to(p.mean), high.to(p.mean)), p.epistemic, p.aleatoric)
    raise _not_numbers("limited", p)


def exponential(p: Predictive) -> Regression:
    """The prediction of exp(y), given a normal prediction of y or a mixture of normals."""
    if isinstance(p, RegressionMixture):
        return mixture_of_numbers([exponential(component) for component in p.components])
    if isinstance(p, NormalPredictive):
        return LogNormalPredictive(p)
    raise _not_numbers("exponential", p)


def _not_numbers(function: str, p: Predictive) -> TypeError:
    return TypeError(
        f"{function}: needs a prediction of numbers or a mixture of them, got {type(p).__name__}."
    )


def tempered(p: ClassPredictive, temperature: float) -> ClassPredictive:
    """The prediction with the logarithms of its probabilities divided by a temperature.

    The epistemic share of the entropy stays.

    >>> tempered(ClassPredictive(torch.tensor([[0.8, 0.2]]), torch.tensor([0.0])), 0.5).probs
    tensor([[0.9412, 0.0588]])
    """
    floor = torch.finfo(p.probs.dtype).tiny
    sharper = ClassPredictive((p.probs.clamp(min=floor).log() / temperature).softmax(1), p.expected_entropy)
    share = p.expected_entropy / p.entropy.clamp(min=floor)
    return replace(sharper, expected_entropy=sharper.entropy * share.clamp(0, 1))


def two_classes(p: LabelPredictive) -> ClassPredictive:
    """Each label as one data point with the classes 0 and 1."""
    probs = torch.stack([p.complement.flatten(), p.probs.flatten()], 1)
    return ClassPredictive(probs, p.expected_entropy.flatten())


def binary_entropy(p: Tensor) -> Tensor:
    return torch.special.entr(p) + torch.special.entr(1 - p)


def log_probability(p: Tensor) -> Tensor:
    """log p. A probability below the smallest normal number, which may be zero, counts as that number."""
    return torch.log(p.clamp(min=torch.finfo(p.dtype).tiny))


def per_datum(log_prob: Tensor) -> Tensor:
    """Sum over all dimensions but the first."""
    return log_prob.flatten(1).sum(1) if log_prob.dim() > 1 else log_prob


def check_shape(y: Tensor, shape: torch.Size) -> None:
    if y.shape != shape:
        raise ValueError(
            f"target has shape {tuple(y.shape)}, the prediction needs {tuple(shape)}; "
            "reshape the target (y.unsqueeze(-1) adds an axis)."
        )


def check_classes(y: Tensor) -> None:
    if y.is_floating_point() or y.is_complex() or y.dtype == torch.bool:
        raise ValueError(f"target has type {y.dtype}, but class indices are integers; use y.long().")


def check_level(level: float) -> None:
    if not 0 < level < 1:
        raise ValueError(f"interval: level must lie between 0 and 1, got {level}.")

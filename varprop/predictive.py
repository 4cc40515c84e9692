"""What a prediction is: a distribution over targets that knows which part of its spread more data would remove."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor

from .gaussian import Gaussian
from .moments import log_expectation_exp


class Predictive(ABC):
    """A predictive distribution for each data point of a batch."""

    @abstractmethod
    def log_prob(self, y: Tensor) -> Tensor:
        """Log density or probability of each data point's target."""


class Regression(Predictive):
    """A prediction of numbers: mean and variance, the variance split into epistemic and aleatoric."""

    mean: Tensor
    epistemic: Tensor
    """Variance from not knowing the weights: it shrinks with more data."""
    aleatoric: Tensor
    """Variance of the noise: it does not."""

    @abstractmethod
    def cdf(self, y: Tensor) -> Tensor:
        """Probability of a target below y."""

    @abstractmethod
    def interval(self, level: float = 0.9) -> tuple[Tensor, Tensor]:
        """Central interval that holds a target with probability `level`."""

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
        return torch.special.ndtr((y - self.mean) / self.std)

    def interval(self, level: float = 0.9) -> tuple[Tensor, Tensor]:
        check_level(level)
        half = self.std * NormalDist().inv_cdf((1 + level) / 2)
        return self.mean - half, self.mean + half


class Discrete(Predictive):
    """A prediction of classes or labels: probabilities, and the entropy that would be left if the weights were known."""

    probs: Tensor
    expected_entropy: Tensor

    @property
    @abstractmethod
    def entropy(self) -> Tensor:
        """Of the prediction, in nats."""

    @property
    def mutual_information(self) -> Tensor:
        """Entropy from not knowing the weights, in nats."""
        return (self.entropy - self.expected_entropy).clamp(min=0)


@dataclass(frozen=True, eq=False)
class ClassPredictive(Discrete):
    """Class probabilities in dimension 1."""

    probs: Tensor
    expected_entropy: Tensor

    def log_prob(self, y: Tensor) -> Tensor:
        check_shape(y, self.entropy.shape)
        check_classes(y)
        return per_datum(torch.log(self.probs.gather(1, y.unsqueeze(1)).squeeze(1)))

    @property
    def entropy(self) -> Tensor:
        return torch.special.entr(self.probs).sum(1)


@dataclass(frozen=True, eq=False)
class LabelPredictive(Discrete):
    """Probabilities of labels that are on or off, each by itself; probs is P(y = 1)."""

    probs: Tensor
    expected_entropy: Tensor
    complement: Tensor
    """P(y = 0), kept by itself: near zero, 1 - probs has no digits left."""

    def log_prob(self, y: Tensor) -> Tensor:
        check_shape(y, self.probs.shape)
        return per_datum(torch.log(torch.where(y > 0, self.probs, self.complement)))

    @property
    def entropy(self) -> Tensor:
        return binary_entropy(self.probs)


@dataclass(frozen=True, eq=False)
class LatentPredictive(Predictive):
    """log_prob of any elementwise likelihood, averaged over the network's output f by quadrature."""

    f: Gaussian
    likelihood: Any

    def log_prob(self, y: Tensor) -> Tensor:
        check_shape(y, self.f.shape)
        return per_datum(log_expectation_exp(lambda f: self.likelihood.log_prob(f, y), self.f))


def mixture(components: Sequence[Predictive]) -> Predictive:
    """The equal mixture of predictions: sampled passes, or the members of an ensemble.

    >>> one = NormalPredictive(torch.zeros(1, 1), torch.zeros(1, 1), torch.ones(1, 1))
    >>> two = NormalPredictive(torch.ones(1, 1), torch.zeros(1, 1), torch.ones(1, 1))
    >>> mixture([one, two]).epistemic
    tensor([[0.2500]])
    """
    if not components:
        raise ValueError(
            "mixture: there is nothing to mix; give at least one prediction (predict needs samples=1 or more)."
        )
    first = components[0]
    if isinstance(first, Regression):
        between = torch.stack([p.mean for p in components]).var(0, correction=0)  # type: ignore[attr-defined]
        epistemic = _average(components, "epistemic") + between
        return RegressionMixture(
            components, _average(components, "mean"), epistemic, _average(components, "aleatoric")
        )
    if isinstance(first, ClassPredictive | LabelPredictive):
        return type(first)(*(_average(components, field.name) for field in fields(first)))
    return Mixture(components)


@dataclass(frozen=True, eq=False)
class Mixture(Predictive):
    """Equal parts of several predictions."""

    components: Sequence[Predictive]

    def log_prob(self, y: Tensor) -> Tensor:
        return torch.stack([p.log_prob(y) for p in self.components]).logsumexp(0) - math.log(
            len(self.components)
        )


@dataclass(frozen=True, eq=False)
class RegressionMixture(Mixture, Regression):
    """Equal parts of several regressions; what they disagree about is epistemic."""

    components: Sequence[Any]
    mean: Tensor
    epistemic: Tensor
    aleatoric: Tensor

    def cdf(self, y: Tensor) -> Tensor:
        return torch.stack([p.cdf(y) for p in self.components]).mean(0)

    def interval(self, level: float = 0.9) -> tuple[Tensor, Tensor]:
        lower, upper = zip(*(p.interval(level) for p in self.components), strict=True)
        # A quantile of the mixture lies between the smallest and the largest of its components' quantiles.
        return self._quantile((1 - level) / 2, lower), self._quantile((1 + level) / 2, upper)

    def _quantile(self, probability: float, quantiles: Sequence[Tensor]) -> Tensor:
        low, high = torch.stack(tuple(quantiles)).aminmax(dim=0)
        for _ in range(60):
            middle = (low + high) / 2
            below = self.cdf(middle) < probability
            low, high = torch.where(below, middle, low), torch.where(below, high, middle)
        return (low + high) / 2


def concatenate(parts: Sequence[Predictive]) -> Predictive:
    """Predictions for the parts of a data set, as one for all of it.

    >>> part = NormalPredictive(torch.zeros(2, 1), torch.zeros(2, 1), torch.ones(2, 1))
    >>> concatenate([part, part]).mean.shape
    torch.Size([4, 1])
    """
    first: Any = parts[0]
    return type(first)(*(_join([getattr(p, field.name) for p in parts]) for field in fields(first)))


def _join(values: Sequence[Any]) -> Any:
    first = values[0]
    if isinstance(first, Tensor):
        return torch.cat(list(values))
    if isinstance(first, Gaussian):
        return Gaussian.of(_join([v.mean for v in values]), _join([v.var for v in values]))
    if isinstance(first, Sequence):
        return [concatenate(components) for components in zip(*values, strict=True)]
    return first


def rescaled(p: Predictive, mean: Tensor | float, scale: Tensor | float) -> Predictive:
    """The prediction of scale · y + mean, from one of numbers y.

    >>> p = NormalPredictive(torch.zeros(1, 1), torch.zeros(1, 1), torch.ones(1, 1))
    >>> rescaled(p, 5.0, 2.0).interval(0.9)
    (tensor([[1.7103]]), tensor([[8.2897]]))
    """
    if isinstance(p, RegressionMixture):
        # Its moments by themselves, because the spread of large means would have few digits.
        components = [rescaled(component, mean, scale) for component in p.components]
        return RegressionMixture(
            components, p.mean * scale + mean, p.epistemic * scale**2, p.aleatoric * scale**2
        )
    if not isinstance(p, NormalPredictive):
        raise TypeError(
            f"rescaled: needs a normal prediction or a mixture of normal ones, got {type(p).__name__}."
        )
    return NormalPredictive(p.mean * scale + mean, p.epistemic * scale**2, p.aleatoric * scale**2)


def two_classes(p: LabelPredictive) -> ClassPredictive:
    """Every label as a case of its own, with the classes off and on."""
    return ClassPredictive(
        torch.stack([p.complement.flatten(), p.probs.flatten()], 1), p.expected_entropy.flatten()
    )


def _average(components: Sequence[Predictive], name: str) -> Tensor:
    return torch.stack([getattr(p, name) for p in components]).mean(0)


def binary_entropy(p: Tensor) -> Tensor:
    return torch.special.entr(p) + torch.special.entr(1 - p)


def per_datum(log_prob: Tensor) -> Tensor:
    """Sum over everything but the first dimension."""
    return log_prob.flatten(1).sum(1) if log_prob.dim() > 1 else log_prob


def check_shape(y: Tensor, shape: torch.Size) -> None:
    if y.shape != shape:
        raise ValueError(
            f"target has shape {tuple(y.shape)}, the prediction needs {tuple(shape)}; reshape the target (y.unsqueeze(-1) adds an axis)."
        )


def check_classes(y: Tensor) -> None:
    if y.is_floating_point() or y.is_complex() or y.dtype == torch.bool:
        raise ValueError(f"target has type {y.dtype}, class indices are integers; use y.long().")


def check_level(level: float) -> None:
    if not 0 < level < 1:
        raise ValueError(f"interval: level must lie between 0 and 1, got {level}.")

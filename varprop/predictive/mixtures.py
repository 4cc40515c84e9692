"""Several predictions as one: mixtures, and the parts of a data set."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from ..gaussian import Gaussian
from .base import Predictive
from .classes import ClassPredictive, LabelPredictive
from .regression import Regression, quantile


def mixture(components: Sequence[Predictive]) -> Predictive:
    """The mixture, with equal weights, of Monte Carlo samples or of the members of an ensemble.

    >>> one = vp.predictive.NormalPredictive(torch.zeros(1, 1), torch.zeros(1, 1), torch.ones(1, 1))
    >>> two = vp.predictive.NormalPredictive(torch.ones(1, 1), torch.zeros(1, 1), torch.ones(1, 1))
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

    >>> part = vp.predictive.NormalPredictive(torch.zeros(2, 1), torch.zeros(2, 1), torch.ones(2, 1))
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

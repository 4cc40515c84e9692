"""The outputs of V-ReLU-Net: numbers that are observed, codes of classes, and margins of labels."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import likelihoods
from ..gaussian import Gaussian
from ..predictive import Predictive
from .factors import Inputs, Weights


@dataclass
class Numbers:
    """Targets that are observed; their precision is fitted (Eq. 39)."""

    likelihood: likelihoods.Normal

    @property
    def precision(self) -> float:
        return self.likelihood.precision.item()

    def targets(self, location: Tensor, y: Tensor) -> Tensor:
        return y.to(location)

    def squared_errors(self, inputs: Inputs, targets: Tensor, prior: Weights, q: Weights) -> Tensor:
        """E(y - w'h)² under the posterior, summed."""
        total = (targets - inputs.mean @ q.mean).square().sum()
        total = total + q.mean.shape[1] * (q.cov * inputs.square).sum()
        if inputs.cov is not None:
            total = total + len(targets) * (q.mean * (inputs.cov @ q.mean)).sum()
        return total

    def fit(self, variance: Tensor) -> None:
        self.likelihood.update(variance.expand(1))

    def predictive(self, f: Gaussian, variance: Tensor) -> Predictive:
        return self.likelihood.predictive(f)


@dataclass
class Codes:
    """Classes as numbers, 1 for the class and -1 for the others.

    Given that y is one of these codes, its probabilities are softmax(2 f/variance), with the variance of the
    errors (Eq. 62).
    """

    likelihood: likelihoods.Categorical
    precision: float

    def targets(self, location: Tensor, y: Tensor) -> Tensor:
        return 2.0 * F.one_hot(y, location.shape[1]).to(location) - 1

    def squared_errors(self, inputs: Inputs, targets: Tensor, prior: Weights, q: Weights) -> Tensor:
        """(y - E[w]'h)² before the batch was learned, summed: the error of a prediction."""
        return (targets - inputs.mean @ prior.mean).square().sum()

    def fit(self, variance: Tensor) -> None:
        """The precision of the codes is given."""

    def predictive(self, f: Gaussian, variance: Tensor) -> Predictive:
        return self.likelihood.predictive(f * (2 / variance))


@dataclass
class Margins:
    """Latent margins, whose signs are the labels: y ~ N(f, 1), truncated (Eq. 62)."""

    likelihood: likelihoods.Bernoulli | likelihoods.MultiLabel
    precision: float = 1.0

    def targets(self, location: Tensor, y: Tensor) -> Tensor:
        sign = torch.where(y > 0, 1.0, -1.0).to(location)
        log_density = -0.5 * (location.square() + math.log(2 * math.pi))
        return location + sign * torch.exp(log_density - torch.special.log_ndtr(sign * location))

    def squared_errors(self, inputs: Inputs, targets: Tensor, prior: Weights, q: Weights) -> Tensor:
        return targets.new_zeros(())

    def fit(self, variance: Tensor) -> None:
        """A margin has unit variance."""

    def predictive(self, f: Gaussian, variance: Tensor) -> Predictive:
        return self.likelihood.predictive(f)


def output_of(likelihood: likelihoods.Likelihood, labels: float) -> Numbers | Codes | Margins:
    if type(likelihood) is likelihoods.Normal and likelihood.precision.numel() == 1:
        return Numbers(likelihood)
    if isinstance(likelihood, likelihoods.Categorical):
        return Codes(likelihood, labels)
    if isinstance(likelihood, likelihoods.Bernoulli | likelihoods.MultiLabel):
        return Margins(likelihood)
    raise ValueError(
        "CoordinateAscent: the likelihood must be Normal with one precision, Bernoulli, MultiLabel or"
        f" Categorical, got {type(likelihood).__name__}."
    )

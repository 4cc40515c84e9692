"""Predictions of classes and labels: probabilities, and an entropy with its epistemic and aleatoric parts."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .base import Predictive, check_labels, check_shape, log_probability, of_class, per_datum


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
        return per_datum(log_probability(of_class(self.probs, y)))

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
        check_labels(y)
        return per_datum(log_probability(torch.where(y > 0, self.probs, self.complement)))

    @property
    def entropy(self) -> Tensor:
        return binary_entropy(self.probs)


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

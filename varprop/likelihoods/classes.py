"""Likelihoods of classes and labels: softmax, and probit."""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from ..gaussian import Activation, Gaussian, as_gaussian, mean_of
from ..moments.categorical import softmax_delta, softmax_quadrature, softmax_samples
from ..moments.probit import expected_bump, expected_log_ndtr, log_ndtr
from ..predictive import (
    ClassPredictive,
    LabelPredictive,
    binary_entropy,
    check_labels,
    of_class,
)
from .base import Likelihood

Approximation = Literal["quadrature", "delta", "mackay", "plugin", "samples"]


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
        return of_class(f, y) - f.logsumexp(1)

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

    def check(self, y: Tensor) -> None:
        check_labels(y)

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

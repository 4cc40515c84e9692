"""Scores of predictions: log-likelihood, error, CRPS and coverage; calibration error for classes."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from ..predictive import (
    ClassPredictive,
    LabelPredictive,
    NormalPredictive,
    Predictive,
    Regression,
    RegressionMixture,
    check_shape,
    two_classes,
)

NEEDED: dict[type, str] = {
    Predictive: "prediction",
    Regression: "prediction of numbers",
    ClassPredictive: "prediction of classes",
}


def summary(p: Predictive, y: Tensor) -> dict[str, float]:
    """All scores that apply to a prediction, by name.

    >>> p = vp.predictive.ClassPredictive(torch.tensor([[0.8, 0.2], [0.2, 0.8]]), torch.zeros(2))
    >>> for name, value in summary(p, torch.tensor([0, 0])).items():
    ...     print(f"{name:24} {value:.3f}")
    cases                    2.000
    accuracy                 0.500
    log-likelihood           -0.916
    Brier score              0.680
    calibration error (ECE)  0.300
    entropy                  0.500
    mutual information       0.500
    """
    _check("summary", p, Predictive)
    if isinstance(p, LabelPredictive):
        p, y = two_classes(p), y.flatten().long()
    measures: dict[str, Tensor]
    if isinstance(p, Regression):
        low, high = p.interval(0.9)
        measures = {
            "root mean squared error": rmse(p, y),
            "mean absolute error": (p.mean - y).abs().mean(),
            "log-likelihood": log_likelihood(p, y),
            "CRPS": crps(p, y),
            "coverage of 90 % intervals": coverage(p, y),
            "width of 90 % intervals": (high - low).mean(),
            "epistemic share of the variance": p.epistemic.sum() / p.var.sum(),
        }
    elif isinstance(p, ClassPredictive):
        truth = torch.nn.functional.one_hot(y, p.probs.shape[1]).movedim(-1, 1)
        measures = {
            "accuracy": (p.probs.argmax(1) == y).double().mean(),
            "log-likelihood": log_likelihood(p, y),
            "Brier score": (p.probs - truth).square().sum(1).mean(),
            "calibration error (ECE)": ece(p, y),
            "entropy": p.entropy.mean(),
            "mutual information": p.mutual_information.mean(),
        }
    else:
        measures = {"log-likelihood": log_likelihood(p, y)}
    return {"cases": len(y), **{name: float(value) for name, value in measures.items()}}


def log_likelihood(p: Predictive, y: Tensor) -> Tensor:
    """Mean log density or log probability of the targets; larger is better.

    >>> p = vp.predictive.NormalPredictive(torch.zeros(1, 1), torch.zeros(1, 1), torch.ones(1, 1))
    >>> log_likelihood(p, torch.zeros(1, 1))
    tensor(-0.9189)
    """
    _check("log_likelihood", p, Predictive)
    return p.log_prob(y).mean()


def rmse(p: Regression, y: Tensor) -> Tensor:
    """Root mean squared error of the predictive mean."""
    _check("rmse", p, Regression)
    check_shape(y, p.mean.shape)
    return (p.mean - y).square().mean().sqrt()


def crps(p: Regression, y: Tensor) -> Tensor:
    """Mean continuous ranked probability score, E|Y - y| - E|Y - Y'|/2 with Y, Y' ~ p; smaller is better.

    It has a closed form for a normal prediction and, summed over pairs of components, for a mixture of
    normals. For other predictions it is the integral of the squared distance between the distribution
    function and the step at y.

    >>> p = vp.predictive.NormalPredictive(torch.zeros(1, 1), torch.zeros(1, 1), torch.ones(1, 1))
    >>> crps(p, torch.zeros(1, 1))
    tensor(0.2337)
    """
    _check("crps", p, Regression)
    check_shape(y, p.mean.shape)
    components = p.components if isinstance(p, RegressionMixture) else [p]
    if not all(isinstance(c, NormalPredictive) for c in components):
        return _distance_from_step(p, y)
    mean, var = torch.stack([c.mean for c in components]), torch.stack([c.var for c in components])
    apart = sum(_mean_absolute(mean - c.mean, var + c.var).mean() for c in components) / len(components)
    return _mean_absolute(mean - y, var).mean() - apart / 2


def _distance_from_step(p: Regression, y: Tensor) -> Tensor:
    """∫ (F(t) - [t ≥ y])² dt, by Gauss-Legendre quadrature between quantiles, on either side of y."""
    ends = [p.interval(level) for level in (1 - 1e-6, 0.999, 0.9, 0.3)]
    points = [*(lower for lower, _ in ends), *(upper for _, upper in reversed(ends))]
    points = [torch.minimum(points[0], y), *points[1:-1], torch.maximum(points[-1], y)]
    nodes, weights = (torch.as_tensor(a).tolist() for a in np.polynomial.legendre.leggauss(12))
    total = torch.zeros_like(p.mean)
    for a, b in pairwise(points):
        for left, right, step in (
            (torch.minimum(a, y), torch.minimum(b, y), 0.0),
            (torch.maximum(a, y), torch.maximum(b, y), 1.0),
        ):
            half = (right - left) / 2
            for node, weight in zip(nodes, weights, strict=True):
                total += weight * half * (p.cdf(left + half * (1 + node)) - step).square()
    return total.mean()


def _mean_absolute(m: Tensor, v: Tensor) -> Tensor:
    """E|x| for x ~ N(m, v)."""
    s = v.sqrt()
    t = m / s
    return s * math.sqrt(2 / math.pi) * torch.exp(-0.5 * t.square()) + m * torch.erf(t / math.sqrt(2))


def coverage(p: Regression, y: Tensor, level: float = 0.9) -> Tensor:
    """Share of the targets inside the central interval that should contain `level` of them.

    >>> p = vp.predictive.NormalPredictive(torch.zeros(4, 1), torch.zeros(4, 1), torch.ones(4, 1))
    >>> coverage(p, torch.tensor([[0.0], [1.0], [-1.5], [2.0]]))
    tensor(0.7500)
    """
    _check("coverage", p, Regression)
    check_shape(y, p.mean.shape)
    low, high = p.interval(level)
    return ((low <= y) & (y <= high)).to(y.dtype).mean()


def ece(p: ClassPredictive, y: Tensor, bins: int = 15) -> Tensor:
    """Expected calibration error: |accuracy - confidence| in equally wide bins, averaged over the data.

    >>> p = vp.predictive.ClassPredictive(torch.tensor([[0.8, 0.2], [0.2, 0.8]]), torch.zeros(2))
    >>> ece(p, torch.tensor([0, 0]))                     # 80 % confident, right half of the time
    tensor(0.3000)
    """
    _check("ece", p, ClassPredictive)
    confidence, chosen = p.probs.max(1)
    check_shape(y, chosen.shape)
    gap = (chosen == y).to(confidence.dtype) - confidence
    bin_of = (confidence * bins).ceil().long().clamp(1, bins) - 1
    totals = gap.new_zeros(bins).index_add(0, bin_of.flatten(), gap.flatten())
    return totals.abs().sum() / gap.numel()


def _check(score: str, p: object, kind: type) -> None:
    if not isinstance(p, kind):
        raise TypeError(f"{score}: a {NEEDED[kind]} comes first, then the targets; got a {type(p).__name__}.")

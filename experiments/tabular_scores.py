"""What the rows of the tabular benchmark predict, and how it is scored."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.special import ndtr
from sklearn.metrics import roc_auc_score

from varprop.inspect import metrics
from varprop.predictive import ClassPredictive, NormalPredictive, Predictive, Regression, mixture

LEVEL = 0.9
Z = 1.6448536269514722
"""The 95 % quantile of the standard normal distribution."""
LEAST = 1e-6
"""Smaller class probabilities count as this one: a forest's zeros would cost infinitely much."""

Score = Callable[[np.ndarray], float]


@dataclass(frozen=True)
class Prediction:
    """The mean, the 90 % interval and, if the row predicts a whole distribution, its scores."""

    mean: np.ndarray
    lower: np.ndarray
    upper: np.ndarray
    log_likelihood: Score | None = None
    crps: Score | None = None


def normals(mean: np.ndarray, std: np.ndarray) -> Prediction:
    """A normal prediction, or with a first dimension of members their mixture."""
    components = [
        NormalPredictive(_column(m), torch.zeros(len(m), 1, dtype=torch.float64), _column(s).square())
        for m, s in zip(np.atleast_2d(mean), np.atleast_2d(std), strict=True)
    ]
    return of(components[0] if len(components) == 1 else mixture(components))


def of(p: Predictive) -> Prediction:
    """A predictive distribution of varprop, for one target."""
    assert isinstance(p, Regression)
    lower, upper = (end.numpy().ravel() for end in p.interval(LEVEL))
    return Prediction(
        p.mean.numpy().ravel(),
        lower,
        upper,
        lambda y: metrics.log_likelihood(p, _column(y)).item(),
        lambda y: metrics.crps(p, _column(y)).item(),
    )


def _column(values: np.ndarray) -> torch.Tensor:
    return torch.tensor(np.asarray(values, dtype=np.float64)).view(-1, 1)


def two_pieces(quantiles: np.ndarray, least: float) -> Prediction:
    """The density made of the 5 %, 50 % and 95 % quantiles: two half normals that meet at the median.

    Each half has probability one half and the given quantile; its scale is at least `least`.

    >>> p = two_pieces(np.array([[-Z], [0.0], [Z]]), 0.01)     # both halves are those of N(0, 1)
    >>> print(f"{p.log_likelihood(np.zeros(1)):.4f} {p.crps(np.ones(1)):.4f}")
    -0.9189 0.6024
    """
    low, median, high = np.sort(quantiles, axis=0)
    left, right = (np.maximum(width / Z, least) for width in (median - low, high - median))

    def log_likelihood(y: np.ndarray) -> float:
        scale = np.where(y < median, left, right)
        return float(np.mean(-0.5 * ((y - median) / scale) ** 2 - np.log(scale * math.sqrt(2 * math.pi))))

    def crps(y: np.ndarray) -> float:
        scale, other = np.where(y < median, [left, right], [right, left])
        # The half without y counts as in a prediction that meets its target, half of CRPS(0) for N(0, 1).
        return float(
            np.mean(scale * _standard_crps((y - median) / scale) + (other - scale) * _standard_crps(0.0) / 2)
        )

    mean = median + (right - left) / math.sqrt(2 * math.pi)
    return Prediction(mean, low, high, log_likelihood, crps)


def _standard_crps(z: Any) -> Any:
    return (
        z * (2 * ndtr(z) - 1) + math.sqrt(2 / math.pi) * np.exp(-0.5 * np.square(z)) - 1 / math.sqrt(math.pi)
    )


def regression(p: Prediction, y: np.ndarray) -> dict[str, float | None]:
    """Scores in the unit of the target."""
    outside = np.maximum(p.lower - y, 0) + np.maximum(y - p.upper, 0)
    return {
        "rmse": float(np.sqrt(np.mean((p.mean - y) ** 2))),
        "log_likelihood": p.log_likelihood(y) if p.log_likelihood else None,
        "crps": p.crps(y) if p.crps else None,
        "interval_score": float(np.mean(p.upper - p.lower + 2 / (1 - LEVEL) * outside)),
        "coverage": float(np.mean(outside == 0)),
    }


def classes(probs: np.ndarray, y: np.ndarray) -> dict[str, float | None]:
    """Scores of class probabilities; y are the places of the classes."""
    p = ClassPredictive(torch.tensor(probs), torch.zeros(len(y)))
    truth = np.eye(probs.shape[1])[y]
    return {
        "error": float(np.mean(probs.argmax(1) != y)),
        "log_likelihood": float(np.mean(np.log(np.maximum(probs[np.arange(len(y)), y], LEAST)))),
        "brier": float(np.mean(np.sum((probs - truth) ** 2, 1))),
        "ece": metrics.ece(p, torch.tensor(y)).item(),
        "auc": float(roc_auc_score(y, probs[:, 1])) if probs.shape[1] == 2 else None,
    }

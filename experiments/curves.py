"""Of a prediction of classes: scores, reliability, accuracy against rejection, the entropies of strangers."""

from __future__ import annotations

import torch
from sklearn.metrics import roc_auc_score
from torch import Tensor

import varprop as vp

ClassPredictive = vp.predictive.ClassPredictive
BINS = 15
REJECTED = [k / 20 for k in range(20)]
"""Shares of the data left undecided."""


def scores(p: ClassPredictive, y: Tensor) -> dict[str, float]:
    """Share of wrong classes, mean log-likelihood, expected calibration error and Brier score."""
    found = vp.metrics.summary(p, y)
    return {
        "error": 1 - found["accuracy"],
        "log_likelihood": found["log-likelihood"],
        "ece": found["calibration error (ECE)"],
        "brier": found["Brier score"],
    }


def reliability(p: ClassPredictive, y: Tensor) -> list[list[float]]:
    """For each bin of confidence: its share of the data, mean confidence and accuracy."""
    confidence, chosen = p.probs.max(1)
    place = (confidence * BINS).ceil().long().clamp(1, BINS) - 1
    bins = []
    for k in range(BINS):
        inside = place == k
        count = max(1, int(inside.sum()))
        right = (chosen[inside] == y[inside]).double().sum()
        mean_confidence = confidence[inside].sum() / count
        bins.append([float(inside.double().mean()), float(mean_confidence), float(right / count)])
    return bins


def rejection(p: ClassPredictive, y: Tensor) -> list[float]:
    """Accuracy on what is left when shares of the data, the most uncertain by entropy, are rejected."""
    right = (p.probs.argmax(1) == y)[p.entropy.argsort()].double()
    return [right[: round(len(y) * (1 - share))].mean().item() for share in REJECTED]


def entropies(p: ClassPredictive) -> list[float]:
    """Histogram of the predictive entropy from zero to that of complete ignorance, as shares of the data."""
    most = torch.tensor(p.probs.shape[1]).log().item()
    counts = torch.histc(p.entropy.float(), BINS, 0.0, most)
    return (counts / len(p.probs)).tolist()


def aurocs(known: ClassPredictive, strange: ClassPredictive) -> dict[str, float]:
    """How well a threshold on the uncertainty tells strange images from known ones."""
    truth = torch.cat([torch.zeros(len(known.probs)), torch.ones(len(strange.probs))])
    return {
        name: float(roc_auc_score(truth, torch.cat([getattr(known, name), getattr(strange, name)])))
        for name in ("entropy", "mutual_information")
    }

"""Intervals with a guarantee: CV+ of Barber et al. (2021), with the distribution function as the score."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .predictive import Regression, check_level, quantile


def scores(p: Regression, y: Tensor) -> Tensor:
    """How far from the middle of its prediction a target is: 0 at the median, 1/2 at the ends."""
    return (p.cdf(y) - 0.5).abs()


def interval(folds: Sequence[Regression], found: Sequence[Tensor], level: float) -> tuple[Tensor, Tensor]:
    """The interval between the ends that all rows with known targets would have given (CV+).

    A row that was held out of fold k with score s stands for the central interval of k's prediction that
    holds the probability 2s. The lower end here is a quantile of the lower ends of all of these, and the
    upper end of the upper ones. If rows are exchangeable, a new target is inside with a probability of
    2 level - 1 at least, and of about `level` in practice.

    :param folds: the predictions of each fold's members for the new rows.
    :param found: the scores of the rows that were held out of each fold, one column for each target.
    """
    check_level(level)
    total = sum(len(s) for s in found)
    rank = math.floor((1 - level) * (total + 1))
    if rank < 1:
        raise ValueError(
            f"predict_interval: a conformal interval with level {level} needs at least "
            f"{math.ceil(1 / (1 - level)) - 1} rows to be fitted to, and there were {total}."
        )
    ordered = [s.sort(0).values.T.contiguous() for s in found]
    ends = [p.interval(1 - 1e-9) for p in folds]
    low = torch.stack([lower for lower, _ in ends]).amin(0)
    high = torch.stack([upper for _, upper in ends]).amax(0)
    # Lower ends at t or below become more as t grows, upper ends at t or above become fewer.
    lower = quantile(lambda t: _count(folds, ordered, t, lower=True), rank, low, high)
    upper = quantile(lambda t: -_count(folds, ordered, t, lower=False), 0.5 - rank, low, high)
    return lower, upper


def _count(folds: Sequence[Regression], ordered: Sequence[Tensor], t: Tensor, lower: bool) -> Tensor:
    """How many lower ends are at t or below it, or how many upper ends at t or above it."""
    counts = torch.zeros_like(t)
    for p, s in zip(folds, ordered, strict=True):
        distance = (0.5 - p.cdf(t) if lower else p.cdf(t) - 0.5).T.contiguous()
        counts += (s.shape[1] - torch.searchsorted(s, distance)).T
    return counts

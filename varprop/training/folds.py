"""Members as folds: each is trained without some rows, is stopped by them, and predicts them honestly."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from scipy.optimize import minimize_scalar
from torch import Tensor, nn

from ..laplace import RANK, Laplace
from ..objectives import ELBO
from ..predictive import Predictive, Regression, concatenate, mixture, reordered
from ..settings import LONG
from . import groups
from .batches import Chosen
from .epochs import predict

PART = 65_536
"""Rows of a long table that are looked at together."""
LEAST = 0.25
"""The least factor on the variances of members that a row can ask for where they predict together."""


@dataclass(frozen=True)
class Folds:
    """Rows in parts of about equal size. Member m is trained without part m modulo the number of parts.

    >>> folds = Folds.draw(torch.randn(10, 2), torch.arange(10.0), 5, seed=0)
    >>> folds.part.bincount().tolist()
    [2, 2, 2, 2, 2]
    """

    part: Tensor
    """Of each row."""
    count: int
    judges: Tensor
    """The rows that judge the members: all, or of a long table some that are drawn at random."""

    @classmethod
    def draw(cls, x: Tensor, y: Tensor, count: int, seed: int) -> Folds:
        """Parts that share the range of the targets evenly, or at random if there are very many rows; equal
        rows are in the same part.
        """
        if len(x) > LONG:
            generator = torch.Generator().manual_seed(seed)
            judges = torch.randperm(len(x), generator=generator)[:LONG].sort().values
            return cls(_random_numbers(x, y, generator) % count, count, judges)
        rows = torch.cat([x.double(), y.double().view(len(y), -1)], 1)
        different, group = torch.unique(rows, dim=0, return_inverse=True)
        generator = torch.Generator().manual_seed(seed)
        shuffled = torch.randperm(len(different), generator=generator)
        order = shuffled[different[shuffled, x.shape[1]].argsort(stable=True)]
        blocks = torch.arange(len(order)) // count
        turns = torch.randint(count, (len(order),), generator=generator)[blocks]
        part = torch.empty_like(order)
        part[order] = (torch.arange(len(order)) + turns) % count
        return cls(part[group], count, torch.arange(len(x)))

    def held_out(self, members: int) -> Tensor:
        """Whether a member is trained without a row: a matrix with a line for each member."""
        return torch.arange(members).unsqueeze(1) % self.count == self.part

    def fit(
        self, members: Sequence[ELBO], x: Tensor, y: Tensor, weight: Tensor, **options: Any
    ) -> pd.DataFrame:
        """`groups.fit` of the members, each stopped by the rows that it does not see.

        :param weight: of each row.
        """
        held_out = self.held_out(len(members))
        train = _chosen(~held_out, x, y, weight)
        train[2].div_(train[2].mean(1, keepdim=True))
        judges = self.judges
        validation = _chosen(held_out[:, judges], x, y, weight, judges)
        return groups.fit(members, *train, validation=validation, **options)

    def correlate(self, members: Sequence[ELBO], gain: float, x: Tensor, weight: Tensor) -> None:
        """Give each member the correlations between its weights, from the rows that it has seen.

        :param gain: the prior variance of weights times the inputs of their unit.
        """
        seen = ~self.held_out(len(members))
        rank = min(RANK, int(seen.sum(1).min()))
        for member, rows in zip(members, seen, strict=True):
            p = predict(member, x[rows])
            assert isinstance(p, Regression)
            assert isinstance(member.net, nn.Sequential)
            member.covariance = Laplace.fit(member.net, gain, x[rows], p.aleatoric, weight[rows].to(x), rank)

    def predict(self, members: Sequence[ELBO], x: Tensor) -> Predictive:
        """Of each row that judges, by the members that have not seen it."""
        parts, part = [], self.part[self.judges]
        for k in range(self.count):
            rows = x[self.judges[part == k]]
            if len(rows):
                predictions = [predict(member, rows) for member in members[k :: self.count]]
                parts.append(predictions[0] if len(predictions) == 1 else mixture(predictions))
        # The rows of part 0 come first; the inverse of their order takes all of them back.
        return reordered(concatenate(parts), part.argsort(stable=True).argsort())

    def predict_apart(self, members: Sequence[ELBO], x: Tensor) -> list[Predictive]:
        """Of each row that judges, once by the members of every part, whether they have seen it or not."""
        predictions = [predict(member, x[self.judges]) for member in members]
        return [mixture(predictions[k :: self.count]) for k in range(self.count)]


def _chosen(
    chosen: Tensor, x: Tensor, y: Tensor, weight: Tensor, among: Tensor | None = None
) -> tuple[Chosen, Chosen, Tensor]:
    """The chosen rows of each member; where others have more, rows without weight fill it up.

    :param among: the rows that there were to choose from; all by default.
    """
    most = int(chosen.sum(1).max())
    places = torch.stack([torch.cat([own.nonzero(), (~own).nonzero()])[:most, 0].int() for own in chosen])
    rows = places if among is None else among.int()[places]
    weights = [
        torch.where(own[at], weight[row], 0.0) for own, at, row in zip(chosen, places, rows, strict=True)
    ]
    return Chosen(x, rows), Chosen(y, rows), torch.stack(weights).to(x.dtype)


def _random_numbers(x: Tensor, y: Tensor, generator: torch.Generator) -> Tensor:
    """A number for each row, drawn at random, but the same for equal rows (multiply-shift hashing)."""
    width = x.shape[1] + y[:1].numel()
    *factors, last = (torch.randint(2**62, (width + 1,), generator=generator) * 2 + 1).unbind()
    numbers = []
    for part, targets in zip(x.split(PART), y.split(PART), strict=True):
        bits = torch.cat([part.double(), targets.double().view(len(part), -1)], 1).view(torch.int64)
        numbers.append((((bits * torch.stack(factors)).sum(1) * last) >> 33).abs())
    return torch.cat(numbers)


def best_factor(score: Callable[[float], float]) -> float:
    """The factor with the best log-likelihood, where log-factors have a standard normal prior.

    The prior keeps the factor near 1 where only few rows are known.
    """

    def loss(log: float) -> float:
        return log**2 / 2 - score(math.exp(log))

    return math.exp(minimize_scalar(loss, bounds=(-3.0, 3.0), method="bounded").x)


def agreement(parts: Sequence[Regression], weight: Tensor) -> float:
    """The factor on the variances of several predictions with which their mixture has the right one (Eq. 67).

    If each is right alone, with the variance V on average, the mean of their means errs less than they do, by
    just the variance D between the means: it is V - D (Krogh and Vedelsby 1995), where the mixture has V + D.
    For rows that most predictions were fitted to, D is too small rather than too large.

    >>> left, right = (
    ...     vp.predictive.NormalPredictive(torch.full((1, 1), m), torch.zeros(1, 1), torch.ones(1, 1))
    ...     for m in (-0.4, 0.4)
    ... )
    >>> round(agreement([left, right], torch.ones(1)), 2)                      # 1 - 2 D/V
    0.68
    """
    alone = torch.stack([p.var for p in parts]).mean(0)
    between = torch.stack([p.mean for p in parts]).var(0, correction=0)
    factor = (1 - 2 * between / alone).clamp(min=LEAST).mean(1)
    return float((weight * factor).sum() / weight.sum())

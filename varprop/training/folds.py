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
from . import groups
from .epochs import predict


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

    @classmethod
    def draw(cls, x: Tensor, y: Tensor, count: int, seed: int) -> Folds:
        """Parts that share the range of the targets evenly; equal rows are in the same part."""
        rows = torch.cat([x.double(), y.double().view(len(y), -1)], 1)
        different, group = torch.unique(rows, dim=0, return_inverse=True)
        generator = torch.Generator().manual_seed(seed)
        shuffled = torch.randperm(len(different), generator=generator)
        order = shuffled[different[shuffled, x.shape[1]].argsort(stable=True)]
        blocks = torch.arange(len(order)) // count
        turns = torch.randint(count, (len(order),), generator=generator)[blocks]
        part = torch.empty_like(order)
        part[order] = (torch.arange(len(order)) + turns) % count
        return cls(part[group], count)

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
        train, validation = (_rows(chosen, x, y, weight) for chosen in (~held_out, held_out))
        train[2].div_(train[2].mean(1, keepdim=True))
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
        """Of each row by the members that have not seen it."""
        parts = []
        for k in range(self.count):
            rows = x[self.part == k]
            if len(rows):
                predictions = [predict(member, rows) for member in members[k :: self.count]]
                parts.append(predictions[0] if len(predictions) == 1 else mixture(predictions))
        # The rows of part 0 come first; the inverse of their order takes all of them back.
        return reordered(concatenate(parts), self.part.argsort(stable=True).argsort())


def _rows(chosen: Tensor, x: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The chosen rows of each member; where others have more, rows without weight fill it up."""
    order = (~chosen).to(torch.uint8).argsort(dim=1, stable=True)[:, : int(chosen.sum(1).max())]
    return x[order], y[order], torch.where(chosen.gather(1, order), weight[order], 0.0).to(x.dtype)


def best_factor(score: Callable[[float], float]) -> float:
    """The factor with the best log-likelihood, where log-factors have a standard normal prior.

    The prior keeps the factor near 1 where only few rows are known.
    """

    def loss(log: float) -> float:
        return log**2 / 2 - score(math.exp(log))

    return math.exp(minimize_scalar(loss, bounds=(-3.0, 3.0), method="bounded").x)

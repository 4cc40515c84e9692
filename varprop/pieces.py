"""Numbers as pieces: where between its quantiles a value lies, as inputs of a network.

A perceptron bends slowly: a target that goes up and down along a column takes many of its units. Cut at the
quantiles of the column, each piece is an input of its own, and every stretch can have its own slope
(piecewise-linear encoding; Gorishniy, Rubachev and Babenko 2022).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

NARROW = 1e-4
"""A piece is wider than this, so that single precision tells its ends apart."""


class Pieces(nn.Module):
    """The inputs, followed by the share of each piece [low, high] of a column that lies below the value.

        (clip((x - low) / (high - low), 0, 1) - mean) / scale

    :param columns: the column of each piece.

    >>> pieces = Pieces.of(torch.tensor([[0.0], [1.0], [2.0], [4.0]]), 2)
    >>> pieces.columns, pieces.low.tolist(), pieces.high.tolist()
    ((0, 0), [0.0, 1.5], [1.5, 4.0])
    """

    low: Tensor
    high: Tensor
    mean: Tensor
    scale: Tensor

    def __init__(self, columns: Sequence[int]) -> None:
        super().__init__()
        self.columns = tuple(columns)
        for name in ("low", "high", "mean", "scale"):
            self.register_buffer(name, torch.zeros(len(self.columns)))

    @classmethod
    def of(cls, x: Tensor, pieces: int) -> Pieces | None:
        """At most so many pieces of each column, with equal shares of the rows; None if none can be cut."""
        columns, ends = [], []
        for column, values in enumerate(x.double().numpy(force=True).T):
            knots = _knots(values, pieces)
            columns += [column] * (len(knots) - 1)
            ends += list(pairwise(knots))
        if not columns:
            return None
        made = cls(columns).to(x)
        made.low, made.high = (torch.tensor(end).to(x) for end in np.array(ends).T)
        shares = made.shares(x)
        made.mean, made.scale = shares.mean(0), shares.std(0, correction=0)
        return made

    def shares(self, x: Tensor) -> Tensor:
        return F.hardtanh((x[..., list(self.columns)] - self.low) / (self.high - self.low), 0.0, 1.0)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, (self.shares(x) - self.mean) / self.scale], -1)


def _knots(values: np.ndarray, pieces: int) -> np.ndarray:
    """Quantiles, and the ends and the middle of wide gaps between them; none for a column of two values.

    The rows on either side of a gap say nothing about what happens in its middle, and with a knot there the
    variance of a posterior with correlations says so.
    """
    distinct = np.unique(values)
    if len(distinct) <= 2:
        return np.empty(0)
    quantiles = np.quantile(values, np.linspace(0, 1, pieces + 1))
    steps = np.diff(distinct)
    wide = steps > (distinct[-1] - distinct[0]) / pieces
    start, end = distinct[:-1][wide], distinct[1:][wide]
    knots = np.sort(np.concatenate([quantiles, start, (start + end) / 2, end]))
    return knots[np.diff(knots, prepend=-np.inf) > NARROW]

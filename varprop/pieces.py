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

NARROW = 1e-4
"""A piece is wider than this, so that single precision tells its ends apart."""
BEYOND = 4.0
"""How many times its neighbour's width a piece beyond the data is long; further out nothing changes."""


class Pieces(nn.Module):
    """The inputs, followed by how far into each piece [low, high] of a column the value lies.

        (clip((x - low) / (high - low), least, most) - mean) / scale

    A piece among the data goes from 0 to 1. The first and the last piece of a column lie beyond the data: no
    row says anything about their weights.

    :param columns: the column of each piece.

    >>> pieces = Pieces.of(torch.tensor([[0.0], [1.0], [2.0], [4.0]]), 2)
    >>> pieces.low.tolist(), pieces.high.tolist()
    ([-1.5, 0.0, 1.5, 4.0], [0.0, 1.5, 4.0, 6.5])
    """

    low: Tensor
    high: Tensor
    least: Tensor
    most: Tensor
    mean: Tensor
    scale: Tensor

    def __init__(self, columns: Sequence[int]) -> None:
        super().__init__()
        self.columns = tuple(columns)
        for name in ("low", "high", "least", "most", "mean", "scale"):
            self.register_buffer(name, torch.zeros(len(self.columns)))

    @classmethod
    def of(cls, x: Tensor, pieces: int) -> Pieces | None:
        """So many pieces of each column, with equal shares of the rows, or fewer; None if none can be cut."""
        columns, cuts = [], []
        for column, values in enumerate(x.double().numpy(force=True).T):
            knots = _knots(values, pieces)
            if len(knots) > 1:
                widths = np.diff(knots)
                ends = list(pairwise([knots[0] - widths[0], *knots, knots[-1] + widths[-1]]))
                columns += [column] * len(ends)
                cuts += [(*ends[0], -BEYOND, 1.0), *((*piece, 0.0, 1.0) for piece in ends[1:-1])]
                cuts += [(*ends[-1], 0.0, BEYOND)]
        if not columns:
            return None
        made = cls(columns).to(x)
        made.low, made.high, made.least, made.most = (torch.tensor(t).to(x) for t in np.array(cuts).T)
        shares = made.shares(x)
        made.mean, made.scale = shares.mean(0), shares.std(0, correction=0)
        # A piece beyond the data has the scale of its neighbour.
        first, last = (made.least < 0).nonzero()[:, 0], (made.most > 1).nonzero()[:, 0]
        made.scale[first], made.scale[last] = made.scale[first + 1], made.scale[last - 1]
        return made

    def shares(self, x: Tensor) -> Tensor:
        share = (x[..., list(self.columns)] - self.low) / (self.high - self.low)
        return torch.minimum(torch.maximum(share, self.least), self.most)

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

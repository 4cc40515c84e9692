"""The encoding of a table as tensor operations, whatever the number of columns."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .columns import MISSING
from .kinds import Category, Date, Number


class Columns(nn.Module):
    """From rows with a number for each column to the features of a network.

    A missing number is NaN; a date is its days since 1970; a category is its place in the column's list, NaN
    where missing, and any other value is another category.
    """

    median: Tensor
    low: Tensor
    high: Tensor
    scale: Tensor
    squashed: Tensor
    missing: Tensor
    date: Tensor
    period: Tensor
    empty: Tensor
    count: Tensor
    column: Tensor
    place: Tensor

    def __init__(self, numbers: Sequence[Number], categories: Sequence[Category]) -> None:
        super().__init__()
        cycles = [(i, p) for i, n in enumerate(numbers) if isinstance(n, Date) for p in n.periods]
        counts = [len(c.categories) + c.other for c in categories]
        doubles: dict[str, Sequence[float]] = {
            "median": [n.median for n in numbers],
            "low": [-math.inf if n.low is None else n.low for n in numbers],
            "high": [math.inf if n.high is None else n.high for n in numbers],
            "scale": [n.scale or 1.0 for n in numbers],
            "period": [period for _, period in cycles],
            # The places of missing values and of others, which may be no indicator's.
            "empty": [
                list(c.categories).index(MISSING) if MISSING in c.categories else len(c.categories)
                for c in categories
            ],
            "count": [len(c.categories) for c in categories],
            "place": [place for count in counts for place in range(count)],
        }
        places: dict[str, Sequence[int]] = {
            "missing": [i for i, n in enumerate(numbers) if n.missing],
            "date": [i for i, _ in cycles],
            "column": [i for i, count in enumerate(counts) for _ in range(count)],
        }
        for name, value in doubles.items():
            self.register_buffer(name, torch.tensor(value, dtype=torch.float64))
        for name, index in places.items():
            self.register_buffer(name, torch.tensor(index, dtype=torch.long))
        self.register_buffer("squashed", torch.tensor([n.scale is not None for n in numbers]))
        self.any_squashed = any(n.scale is not None for n in numbers)

    def forward(self, x: Tensor) -> Tensor:
        x = x.double()
        return torch.cat(
            [
                *(self._numbers(x[:, : len(self.median)]) if len(self.median) else ()),
                *(self._categories(x[:, len(self.median) :]) if len(self.count) else ()),
            ],
            1,
        )

    def _numbers(self, x: Tensor) -> list[Tensor]:
        missing = x.isnan()
        x = torch.where(missing, self.median, x)
        values = torch.minimum(torch.maximum(x, self.low), self.high)
        parts = [values]
        if self.any_squashed:
            parts = [torch.where(self.squashed, _asinh((values - self.median) / self.scale), values)]
        if len(self.date):
            turns = values[:, self.date] / self.period
            angle = 2 * math.pi * (turns - turns.floor())
            parts += [angle.sin(), angle.cos()]
        if len(self.missing):
            parts.append(missing[:, self.missing].double())
        return parts

    def _categories(self, x: Tensor) -> list[Tensor]:
        known = (x == x.floor()) & (x >= 0) & (x < self.count)
        places = torch.where(x.isnan(), self.empty, torch.where(known, x, self.count))
        return [(places[:, self.column] == self.place).double()]


def _asinh(x: Tensor) -> Tensor:
    """The inverse of sinh, which ONNX has in single precision only."""
    return x.sign() * torch.log(x.abs() + torch.sqrt(x.square() + 1))

"""The rows of a fit: as they are given, and as the networks take them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..io.storage import scratch
from ..model import Model
from ..settings import LONG
from .folds import PART, Folds


@dataclass(frozen=True)
class Rows:
    """Features and targets in their own units, and how often each row counts."""

    X: np.ndarray
    y: np.ndarray
    weight: np.ndarray

    def __len__(self) -> int:
        return len(self.X)

    @property
    def total(self) -> float:
        """How many rows they count as."""
        return float(self.weight.sum())

    def sample(self, count: int, seed: int) -> Rows:
        """Some of the rows, drawn at random."""
        chosen = np.random.RandomState(seed).permutation(len(self))[:count]
        return Rows(self.X[chosen], self.y[chosen], self.weight[chosen])


@dataclass(frozen=True)
class Scaled:
    """Rows in the units of a model's networks, with the folds that they are in."""

    x: Tensor
    t: Tensor
    """Targets as the likelihood takes them."""
    values: Tensor
    """Targets in their own unit."""
    weight: Tensor
    folds: Folds | None
    """None if every member sees all rows."""

    @classmethod
    def by(cls, model: Model, rows: Rows, folds: int, seed: int) -> Scaled:
        x, t = _inputs(model, rows.X), model.targets(rows.y)
        parts = None if folds == 1 else Folds.draw(x, t, folds, seed)
        return cls(
            x,
            t,
            model.target.values(rows.y),
            torch.from_numpy(np.require(rows.weight, requirements="W")),
            parts,
        )

    @property
    def total(self) -> float:
        return float(self.weight.sum())


def _inputs(model: Model, X: np.ndarray) -> Tensor:
    """Features in the units of the networks; those of a long table are in a file, not in memory."""
    if len(X) <= LONG:
        return model.inputs(X)
    first = model.inputs(X[:1])
    x = torch.from_numpy(scratch((len(X), *first.shape[1:]), first.numpy().dtype))
    for i in range(0, len(X), PART):
        x[i : i + PART] = model.inputs(X[i : i + PART])
    return x

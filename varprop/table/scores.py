"""Scores of a table's model, each beside that of a baseline which predicts every row alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..inspect import metrics
from ..predictive import ClassPredictive, NormalPredictive, Predictive, Regression
from .target import TargetColumn

COMPARED = (
    "root mean squared error",
    "mean absolute error",
    "log-likelihood",
    "CRPS",
    "accuracy",
    "Brier score",
)
"""Scores that tell whether a model has learned more than its baseline."""


@dataclass(frozen=True)
class Baseline:
    """Mean and standard deviation of each target in training, or the shares of the classes."""

    mean: Sequence[float] = ()
    std: Sequence[float] = ()
    shares: Sequence[float] = ()

    @classmethod
    def fit(cls, target: TargetColumn, y: np.ndarray) -> Baseline:
        if target.classes is not None:
            return cls(shares=[float((y == name).mean()) for name in target.classes])
        columns = y.reshape(len(y), -1)
        # A constant target still has a density.
        return cls(columns.mean(0).tolist(), np.maximum(columns.std(0), 1e-12).tolist())

    @property
    def name(self) -> str:
        return "class shares" if self.shares else "mean of the target"

    def predict(self, rows: int) -> Predictive:
        if self.shares:
            probs = torch.tensor(self.shares, dtype=torch.float64).expand(rows, -1)
            return ClassPredictive(probs, torch.special.entr(probs).sum(1))
        mean, std = (torch.tensor(v, dtype=torch.float64).expand(rows, -1) for v in (self.mean, self.std))
        return NormalPredictive(mean, torch.zeros_like(mean), std.square())

    def to_json(self) -> dict[str, object]:
        return {name: list(value) for name, value in asdict(self).items()}


Scores = Mapping[str, tuple[float, float | None]]
"""Of each measure, the model's and the baseline's."""


def scores(p: Predictive, y: Tensor, target: TargetColumn, baseline: Baseline | None = None) -> Scores:
    """All measures of a prediction; of several targets, those of each and the joint log-likelihood."""
    plain = None if baseline is None else baseline.predict(len(y))
    if len(target.names) == 1:
        return _beside(p, y, plain)
    found = dict(_beside(p, y, plain, ("cases", "log-likelihood")))
    for i, name in enumerate(target.names):
        part = None if plain is None else one_target(plain, i)
        each = _beside(one_target(p, i), y[:, i : i + 1], part)
        found |= {f"{name}: {measure}": value for measure, value in each.items() if measure != "cases"}
    return found


def _beside(p: Predictive, y: Tensor, plain: Predictive | None, only: Sequence[str] = ()) -> Scores:
    model = metrics.summary(p, y)
    other = {} if plain is None else metrics.summary(plain, y)
    return {
        name: (value, other.get(name) if name in COMPARED else None)
        for name, value in model.items()
        if not only or name in only
    }


def one_target(p: Predictive, i: int) -> Regression:
    """The prediction of one of several targets."""
    assert isinstance(p, Regression)
    return replace(p, **{f.name: _one(getattr(p, f.name), i) for f in fields(p)})  # type: ignore[arg-type,type-var]


def _one(value: Any, i: int) -> Any:
    if isinstance(value, Tensor):
        return value[..., i : i + 1] if value.dim() else value
    if isinstance(value, Predictive):
        return one_target(value, i)
    if isinstance(value, list | tuple):
        return type(value)(_one(v, i) for v in value)
    return value

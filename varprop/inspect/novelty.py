"""Rows unlike the training data, by the scales that the model has kept of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import pandas as pd
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from ..model import Model, Standardise

FAR = 5.0
"""So many standard deviations from the training mean lie at most 4 % of the training rows, and of normal ones
less than one in a million."""


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows as a table with names, and as the networks of a model take them."""

    model: Model
    table: pd.DataFrame

    @classmethod
    def of(cls, model: Model, x: ArrayLike | Tensor | pd.DataFrame) -> Rows:
        if not isinstance(x, pd.DataFrame):
            if model.encoder is not None:
                model.inputs(x)  # says that it takes a DataFrame
            values = x.numpy(force=True) if isinstance(x, Tensor) else np.asarray(x)
            if values.ndim != 2:
                raise ValueError(f"explain: needs rows and columns, got the shape {values.shape}.")
            names = [c for c in model.columns if isinstance(c, str)]
            if len(names) != values.shape[1]:
                names = [f"x{i + 1}" for i in range(values.shape[1])]
            x = pd.DataFrame(values, columns=names)
        if not len(x):
            raise ValueError("explain: there are no rows; give at least one.")
        return cls(model, x)

    def replaced(self, table: pd.DataFrame) -> Rows:
        return replace(self, table=table)

    @property
    def names(self) -> list[str]:
        """Of the columns that the model uses."""
        if self.model.encoder is None:
            return list(self.table.columns)
        return [str(c["name"]) if isinstance(c, Mapping) else c for c in self.model.columns]

    @property
    def categorical(self) -> set[str]:
        return {str(c["name"]) for c in self.model.columns if isinstance(c, Mapping) and "categories" in c}

    @cached_property
    def inputs(self) -> Tensor:
        x = self.table if self.model.encoder is not None else self.table.to_numpy(copy=True)
        inputs = self.model.inputs(x)
        return inputs.to(next(self.model.elbo.parameters()).dtype)


def unlike_training(rows: Rows) -> pd.DataFrame | None:
    """How far each row is from the training data, and in which column; None if the model has no scales.

    `distance` is the largest distance of a number from its training mean, in standard deviations, and
    infinite for an indicator that was never set in training, as of an unknown category; `far` is a distance
    beyond 5, and `column` is given for those. It sees one column at a time: a row can be unlike the training
    data in a combination of columns that are each ordinary.
    """
    if rows.model.standardise is None:
        return None
    distances = _distances(rows.inputs.double(), rows.model.standardise)
    distance, feature = distances.max(1)
    far = distance > FAR
    columns = np.full(len(far), "", dtype=object)
    for i in feature[far].unique().tolist():
        of_feature = far & (feature == i)
        columns[of_feature.numpy(force=True)] = _owner(rows, i, int(of_feature.nonzero()[0]))
    shown = {"distance": distance.numpy(force=True), "column": columns, "far": far.numpy(force=True)}
    return pd.DataFrame(shown, index=rows.table.index)


def _distances(z: Tensor, scales: Standardise) -> Tensor:
    """|z|; nothing for an indicator that was both set and not set in training, however rarely."""
    mean, var = scales.mean.to(z.device), scales.scale.to(z.device).square()
    # The variance of values between 0 and 1 is largest, mean (1 - mean), if all of them are 0 or 1.
    indicator = torch.isclose(var, mean * (1 - mean), rtol=1e-6, atol=0.0) & (mean > 0) & (mean < 1)
    value = z * scales.scale.to(z.device) + mean
    known = indicator & (torch.minimum(value.abs(), (value - 1).abs()) < 1e-4)
    # A feature that never changed has the scale 1.
    never_set = (mean == 0) & (var == 1) & (value == 1)
    return torch.where(known, 0.0, torch.where(never_set, torch.inf, z.abs()))


def _owner(rows: Rows, feature: int, row: int) -> str:
    """The column that a feature comes from: without its value in this row, the feature is another."""
    if rows.model.encoder is None:
        return str(rows.table.columns[feature])
    z = rows.inputs[:, feature]
    other = int((z - z[row]).abs().argmax())
    if z[other] == z[row]:
        return ""
    repeated = rows.table.iloc[np.full(len(rows.names), row)].reset_index(drop=True)
    columns = {name: repeated[name] for name in repeated}
    for i, name in enumerate(rows.names):
        pieces = [repeated[name].iloc[:i], rows.table[name].iloc[[other]], repeated[name].iloc[i + 1 :]]
        columns[name] = pd.concat(pieces, ignore_index=True)
    changed = rows.replaced(pd.DataFrame(columns)).inputs[:, feature] != z[row]
    return rows.names[int(changed.int().argmax())]

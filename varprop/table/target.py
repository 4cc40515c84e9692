"""The columns to predict: numbers, or classes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from .columns import ABSENT, MISSING, PLACEHOLDERS, Text, is_numeric, is_truth, labels, numbers, parsed
from .messages import TableError, listed
from .task import Task

FEW, SMALL = 10, 100
"""Whole numbers are classes if they have `FEW` values at most, mostly neighbours and none beyond `SMALL`."""
MOST_CLASSES = 1000


@dataclass(frozen=True)
class TargetColumn:
    """What is predicted: one column or several of numbers, or one of classes."""

    names: Sequence[str]
    classes: Sequence[str] | None = None

    @property
    def name(self) -> str:
        return ", ".join(self.names)

    @classmethod
    def fit(cls, table: pd.DataFrame, names: Sequence[str], task: Task = Task.auto) -> TargetColumn:
        """The target of a table whose rows all have one, see `with_target`."""
        if not len(table):
            raise TableError(f"no row has a value of {listed(names)}; give another --target.")
        if len(names) == 1 and task is Task.auto:
            task = guess_task(table[names[0]])
        if len(names) > 1 or task is Task.regression:
            if task is Task.classification:
                raise TableError("classes can be predicted for one target only; give one --target.")
            target = cls(tuple(names))
            target.values(table)
            return target
        column = table[names[0]]
        classes = sorted(labels(column).unique(), key=_numerically)
        if not 2 <= len(classes) <= MOST_CLASSES:
            raise TableError(
                f"column {column.name!r} has {len(classes)} different value{'s' * (len(classes) != 1)}; "
                f"classification needs 2 to {MOST_CLASSES:,}."
            )
        return cls(tuple(names), classes)

    def values(self, table: pd.DataFrame) -> np.ndarray:
        """Numbers, with a column for each of several targets, or class names; the error names the row."""
        if self.classes is None:
            columns = [_complete(table[name], numbers(table[name])) for name in self.names]
            return columns[0] if len(columns) == 1 else np.column_stack(columns)
        column = table[self.names[0]]
        places = pd.Index(self.classes).get_indexer(pd.Index(labels(column)))
        if (places < 0).any():
            i = int((places < 0).argmax())
            raise TableError(
                f"column {self.name!r} has {str(column.iloc[i])!r} in row {column.index[i]}, "
                f"a class that the model was not trained with; it knows {listed(self.classes)}."
            )
        return np.array(self.classes, dtype=object)[places]

    def complete(self, table: pd.DataFrame) -> pd.DataFrame:
        """The rows of a table, or of a part of one, that have the target."""
        return with_target(
            table, self.names, Task.regression if self.classes is None else Task.classification
        )

    def to_json(self) -> dict[str, object]:
        return {"names": list(self.names), "classes": self.classes}

    @classmethod
    def from_json(cls, kept: Mapping[str, Any]) -> TargetColumn:
        """What `to_json` gave, of this version or of one that knew one target only."""
        return cls(kept["names"] if "names" in kept else [kept["name"]], kept["classes"])


def with_target(table: pd.DataFrame, names: Sequence[str], task: Task = Task.auto) -> pd.DataFrame:
    """The rows that have every target.

    An empty field is a missing target. Words such as NA are missing too where the others are numbers, but
    are classes beside other words.
    """
    missing = np.zeros(len(table), dtype=bool)
    for name in names:
        missing |= _absent(table[name], task)
    return table[~missing] if missing.any() else table


def _absent(column: Text, task: Task) -> np.ndarray:
    text = labels(column).str.strip()
    empty = (text == MISSING).to_numpy()
    words = text.isin(ABSENT | PLACEHOLDERS).to_numpy()
    if words.any() and task is not Task.classification and is_numeric(column[~words]):
        return words
    return empty


def guess_task(column: Text) -> Task:
    """Text, and a few small whole numbers next to each other such as 0, 1, 2, are classes.

    >>> guess_task(pd.Series([0, 1, 2, 1])).value, guess_task(pd.Series([1000, 2000, 5000])).value
    ('classification', 'regression')
    """
    if not is_numeric(column):
        _check_no_numbers_with_text(column)
        return Task.classification
    values = np.unique(numbers(column))
    if len(values) > FEW or bool((values != np.floor(values)).any()):
        return Task.regression
    neighbours = np.ptp(values) < 2 * len(values) and bool((np.abs(values) <= SMALL).all())
    return Task.classification if len(values) <= 2 or neighbours else Task.regression


def _check_no_numbers_with_text(column: Text) -> None:
    """Refuse to guess where a few words stand in a column of numbers, each of which would become a class."""
    if isinstance(column.dtype, pd.CategoricalDtype) or is_truth(column):
        return
    if pd.api.types.is_datetime64_any_dtype(column):
        return
    is_number = ~np.isnan(parsed(column))
    if is_number.any() and guess_task(column[is_number]) is Task.regression:
        text = column[~is_number]
        raise TableError(
            f"column {column.name!r}, the target, has numbers, but {str(text.iloc[0])!r} in row "
            f"{text.index[0]}; correct it, or choose --task classification."
        )


def _complete(column: Text, values: np.ndarray) -> np.ndarray:
    missing = np.isnan(values)
    if missing.any():
        row = column.index[int(missing.argmax())]
        raise TableError(
            f"column {column.name!r}, the target, has no value in row {row}; remove the row, or fill it in."
        )
    return values


def _numerically(label: str) -> tuple[float, str]:
    number = pd.to_numeric(label, errors="coerce")
    return (float("inf") if pd.isna(number) else float(number), label)

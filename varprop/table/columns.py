"""Single columns: as numbers, as text, and as the target of a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

import numpy as np
import pandas as pd

from .reading import TableError

MISSING = ""
"""How a missing category is written: what an empty field of a CSV file holds."""
FEW = 10
"""Whole numbers with at most this many different values are taken for classes."""

Text: TypeAlias = "pd.Series[str]"
"""A column as it was read; most are text, until something is known about them."""


class Task(str, Enum):
    """What is predicted: classes or numbers."""

    auto = "auto"
    regression = "regression"
    classification = "classification"


def numbers(column: Text) -> np.ndarray:
    """A column as float64, NaN where missing; the error for any other non-number names its row."""
    values = pd.to_numeric(column, errors="coerce").to_numpy(np.float64, na_value=np.nan)
    wrong = (np.isnan(values) & column.notna().to_numpy()) | np.isinf(values)
    if wrong.any():
        i = int(wrong.argmax())
        raise TableError(
            f"column {column.name!r} has {str(column.iloc[i])!r} in row {column.index[i]}, "
            f"where a finite number is needed."
        )
    return values


def labels(column: Text) -> Text:
    """A column as text, empty where missing."""
    return column.astype(object).where(column.notna(), MISSING).astype(str).astype(object)


def is_numeric(column: Text) -> bool:
    """Whether every value is a number, as text or not, or missing; truth values and dates are not numbers."""
    truth_values = pd.api.types.infer_dtype(column, skipna=True) == "boolean"
    if truth_values or pd.api.types.is_datetime64_any_dtype(column):
        return False
    return bool((pd.to_numeric(column, errors="coerce").notna() | column.isna()).all())


@dataclass(frozen=True)
class TargetColumn:
    """The column to predict: its name, and its classes if it has any."""

    name: str
    classes: Sequence[str] | None = None

    @classmethod
    def fit(cls, column: Text, task: Task = Task.auto) -> TargetColumn:
        _check_complete(column)
        if task is Task.auto:
            task = guess_task(column)
        if task is Task.regression:
            numbers(column)
            return cls(str(column.name))
        classes = sorted(labels(column).unique(), key=_numerically)
        if not 2 <= len(classes) <= 1000:
            raise TableError(
                f"column {column.name!r} has {len(classes)} different values; classification needs 2 to "
                "1,000."
            )
        return cls(str(column.name), classes)

    def values(self, column: Text) -> np.ndarray:
        """The column as numbers or class names; the error for any other value names its row."""
        _check_complete(column)
        if self.classes is None:
            return numbers(column)
        names = labels(column)
        unknown = ~names.isin(self.classes).to_numpy()
        if unknown.any():
            i = int(unknown.argmax())
            raise TableError(
                f"column {self.name!r} has {str(column.iloc[i])!r} in row {column.index[i]}, "
                f"a class that the model was not trained with."
            )
        return names.to_numpy()


def guess_task(column: Text) -> Task:
    """Text, and whole numbers with few different values, are classes."""
    if not is_numeric(column):
        _check_no_numbers_with_text(column)
        return Task.classification
    values = np.unique(numbers(column))
    few = len(values) <= FEW and bool((values == np.floor(values)).all())
    return Task.classification if few else Task.regression


def _check_no_numbers_with_text(column: Text) -> None:
    """Refuse to guess where a few words stand in a column of numbers, each of which would become a class."""
    truth_values = pd.api.types.infer_dtype(column, skipna=True) == "boolean"
    if truth_values or pd.api.types.is_datetime64_any_dtype(column):
        return
    is_number = pd.to_numeric(column, errors="coerce").notna()
    if is_number.any() and guess_task(column[is_number]) is Task.regression:
        text = column[~is_number]
        raise TableError(
            f"column {column.name!r}, the target, has numbers, but {str(text.iloc[0])!r} in row "
            f"{text.index[0]}; correct it, or choose --task classification."
        )


def _check_complete(column: Text) -> None:
    missing = column.isna().to_numpy()
    if missing.any():
        row = column.index[int(missing.argmax())]
        raise TableError(
            f"column {column.name!r}, the target, has no value in row {row}; remove the row, or fill it in."
        )


def _numerically(label: str) -> tuple[float, str]:
    number = pd.to_numeric(label, errors="coerce")
    return (float("inf") if pd.isna(number) else float(number), label)

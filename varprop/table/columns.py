"""Single columns: as numbers, as text."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import pandas as pd

from .messages import TableError

MISSING = ""
"""How a missing category is written: what an empty field of a CSV file holds."""
ABSENT = frozenset(
    ["", "#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND", "1.#QNAN", "<NA>"]
) | {"N/A", "NA", "NULL", "NaN", "None", "n/a", "nan", "null"}
"""Words for a missing value in any column of features; those that pandas takes for one."""
PLACEHOLDERS = frozenset(
    ["?", "-", "--", ".", "n.a.", "na", "none", "missing", "unknown", "#VALUE!", "#DIV/0!"]
)
"""Words for a missing number, in a column of numbers."""
LARGEST = 1e150
"""The largest size of a number: its square is still one."""
FORMATTED = r"[+-]?[$€£]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?\s?[%$€£]?"
"""Numbers with thousands separators, percent signs or currencies: 36,953 and 49.8%."""

Text: TypeAlias = "pd.Series[str]"
"""A column as it was read; most are text, until something is known about them."""


def parsed(column: Text) -> np.ndarray:
    """A column as float64, NaN for everything that is not a number.

    >>> parsed(pd.Series(["1", "36,953", "49.8%", "$5", "many", None])).tolist()
    [1.0, 36953.0, 49.8, 5.0, nan, nan]
    """
    values = pd.to_numeric(column, errors="coerce").to_numpy(np.float64, na_value=np.nan, copy=True)
    others = np.isnan(values) & column.notna().to_numpy()
    if others.any():
        text = column[others].astype(str).str.strip()
        plain = text.where(text.str.fullmatch(FORMATTED)).str.replace(r"[,%$€£\s]", "", regex=True)
        values[others] = pd.to_numeric(plain, errors="coerce").to_numpy(np.float64, na_value=np.nan)
    return values


def numbers(column: Text, words: frozenset[str] = PLACEHOLDERS, largest: float = LARGEST) -> np.ndarray:
    """A column as float64, NaN where missing; the error for any other non-number names its row.

    :param words: what stands for a missing number, besides the words that do so in any column.
    """
    values = parsed(column)
    wrong = np.isnan(values) & column.notna().to_numpy()
    if wrong.any():
        wrong[wrong] = ~column[wrong].astype(str).str.strip().isin(ABSENT | words).to_numpy()
    wrong |= np.abs(values) > largest
    if wrong.any():
        i = int(wrong.argmax())
        wanted = f"number of at most {LARGEST:g}" if np.isfinite(values[i]) else "finite number"
        raise TableError(
            f"column {column.name!r} has {str(column.iloc[i])!r:.80} in row {column.index[i]}, "
            f"where a {wanted} is needed."
        )
    return values


def labels(column: Text) -> Text:
    """A column as text, empty where missing."""
    return column.astype(object).where(column.notna(), MISSING).astype(str).astype(object)


def absent(column: Text) -> np.ndarray:
    """Where a column of features has no value, or a word for none."""
    missing = column.isna().to_numpy()
    if column.dtype.kind in "biufcmM":
        return missing
    return missing | column.astype(str).str.strip().isin(ABSENT).to_numpy()


def number_share(column: Text) -> float:
    """The share of a column's values that are numbers, beside words for a missing one.

    Truth values, dates and the categories of pandas are not numbers; a column without values has none.
    """
    if column.dtype.kind in "iuf":
        return float(column.notna().any())
    if isinstance(column.dtype, pd.CategoricalDtype) or is_truth(column):
        return 0.0
    if pd.api.types.is_datetime64_any_dtype(column):
        return 0.0
    values = column[~absent(column)]
    is_number = ~np.isnan(parsed(values))
    if not is_number.any():
        return 0.0
    others = values[~is_number].astype(str).str.strip()
    return float(is_number.sum() / (is_number.sum() + (~others.isin(PLACEHOLDERS)).sum()))


def is_numeric(column: Text) -> bool:
    """Whether every value is a number, as text or not, or missing; truth values and dates are not numbers."""
    return number_share(column) == 1.0


def is_truth(column: Text) -> bool:
    return pd.api.types.infer_dtype(column, skipna=True) == "boolean"

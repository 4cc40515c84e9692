"""Columns to numbers: scikit-learn's transformers, whose learned state is plain JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pandas as pd
import torch
from sklearn.compose import ColumnTransformer
from sklearn.impute import SimpleImputer
from sklearn.preprocessing import OneHotEncoder
from torch import Tensor, nn

from .columns import MISSING, Text, is_numeric, labels, numbers
from .reading import TableError

MOST_CATEGORIES = 100


@dataclass(frozen=True)
class Encoder:
    """How the rows of a table become numbers: missing numbers by the median, categories as indicators.

    A missing category is a category too, whether or not training had one. The transformers of scikit-learn do
    the work; `medians` and `categories` are all that they learn.

    >>> import pandas as pd
    >>> table = pd.DataFrame({"area": [1.0, 3.0, None], "town": ["Ulm", None, "Bonn"]})
    >>> Encoder.fit(table).transform(table)
    array([[1., 0., 0., 1.],
           [3., 1., 0., 0.],
           [2., 0., 1., 0.]])
    """

    medians: Mapping[str, float]
    """Of each numeric column."""
    categories: Mapping[str, Sequence[str]]
    """Of each other column, sorted."""

    @classmethod
    def fit(cls, table: pd.DataFrame) -> Encoder:
        if not len(table.columns):
            raise TableError(
                "the table has no column besides the target; there is nothing to predict it from."
            )
        numeric = [str(name) for name in table.columns if _checked(table[name])]
        others = [str(name) for name in table.columns if name not in set(numeric)]
        places = {name: sorted({MISSING, *labels(table[name])}) for name in others}
        transformer = _transformer(numeric, places).fit(_typed(table, numeric, others))
        medians = transformer.named_transformers_["numeric"].statistics_.tolist() if numeric else []
        return cls(dict(zip(numeric, medians, strict=True)), places)

    @cached_property
    def _transformer(self) -> ColumnTransformer:
        # One row with the medians, and with a category for each other column, teaches the same state again.
        first = {name: [places[0]] for name, places in self.categories.items()}
        row = pd.DataFrame({name: [median] for name, median in self.medians.items()} | first)
        return _transformer(list(self.medians), self.categories).fit(row)

    def transform(self, table: pd.DataFrame) -> np.ndarray:
        """Numbers in double precision, numeric columns first; an unknown category is refused by its row."""
        typed = _typed(table, list(self.medians), list(self.categories))
        for name, known in self.categories.items():
            unknown = ~typed[name].isin(known).to_numpy()
            if unknown.any():
                i = int(unknown.argmax())
                listed = ", ".join(repr(c) for c in known[:8] if c) + ", …" * (len(known) > 9)
                raise TableError(
                    f"column {name!r} has {str(table[name].iloc[i])!r} in row {table.index[i]}, a category "
                    "that the "
                    f"model was not trained with; it knows {listed}."
                )
        return np.asarray(self._transformer.transform(typed), dtype=np.float64)

    def module(self) -> nn.Module:
        """The same for a graph: its input has the table's columns, with categories as places."""
        return Columns(list(self.medians.values()), list(self.categories.values()))

    @property
    def types(self) -> dict[str, str]:
        """The columns of a table that are used, and how to read them."""
        return dict.fromkeys(self.medians, "float64") | dict.fromkeys(self.categories, "str")

    @property
    def columns(self) -> list[dict[str, object]]:
        """What a graph's reader has to know about each column."""
        columns: list[dict[str, object]] = [{"name": name} for name in self.medians]
        columns += [{"name": name, "categories": list(known)} for name, known in self.categories.items()]
        return columns

    def to_json(self) -> dict[str, object]:
        return {"medians": dict(self.medians), "categories": {n: list(c) for n, c in self.categories.items()}}


def _transformer(numeric: Sequence[str], categories: Mapping[str, Sequence[str]]) -> ColumnTransformer:
    indicators = OneHotEncoder(categories=[list(c) for c in categories.values()], sparse_output=False)
    steps = [
        ("numeric", SimpleImputer(strategy="median"), list(numeric)),
        ("categorical", indicators, list(categories)),
    ]
    return ColumnTransformer([step for step in steps if step[2]])


def _typed(table: pd.DataFrame, numeric: Sequence[str], others: Sequence[str]) -> pd.DataFrame:
    """Numbers as float64 and everything else as text."""
    columns = {name: numbers(table[name]) for name in numeric}
    return pd.DataFrame(columns | {name: labels(table[name]) for name in others}, index=table.index)


def _checked(column: Text) -> bool:
    """Whether a column is numeric; one that cannot be learned from is refused."""
    if column.isna().all():
        raise TableError(f"column {column.name!r} has no values; leave it out with --ignore.")
    if pd.api.types.is_datetime64_any_dtype(column):
        raise TableError(
            f"column {column.name!r} holds dates; turn them into numbers, or leave it out with --ignore."
        )
    numeric = is_numeric(column)
    if not numeric and (count := column.nunique()) > MOST_CATEGORIES:
        text = column[pd.to_numeric(column, errors="coerce").isna() & column.notna()]
        raise TableError(
            f"column {column.name!r} is text ({str(text.iloc[0])!r} in row {text.index[0]}) with {count} "
            "different "
            f"values, more than {MOST_CATEGORIES}; correct it, or leave it out with --ignore."
        )
    return numeric


class Columns(nn.Module):
    """`Encoder.transform` as a few tensor operations, whatever the number of columns.

    A missing number is NaN; a category is its place in the column's list, NaN where missing. Any other value
    makes the column's indicators NaN.
    """

    medians: Tensor
    counts: Tensor
    missing: Tensor
    column: Tensor
    places: Tensor

    def __init__(self, medians: Sequence[float], categories: Sequence[Sequence[str]]) -> None:
        super().__init__()
        counts = [len(known) for known in categories]
        buffers = {
            "medians": torch.tensor(medians, dtype=torch.float64),
            "counts": torch.tensor(counts, dtype=torch.float64),
            "missing": torch.tensor([list(c).index(MISSING) for c in categories], dtype=torch.float64),
            # For each indicator, the column that it belongs to and its place in it.
            "column": torch.tensor([i for i, n in enumerate(counts) for _ in range(n)], dtype=torch.long),
            "places": torch.tensor([p for n in counts for p in range(n)], dtype=torch.float64),
        }
        for name, value in buffers.items():
            self.register_buffer(name, value)

    def forward(self, x: Tensor) -> Tensor:
        x = x.double()
        parts = []
        if len(self.medians):
            values = x[:, : len(self.medians)]
            parts.append(torch.where(values.isnan(), self.medians, values))
        if len(self.counts):
            codes = x[:, len(self.medians) :]
            codes = torch.where(codes.isnan(), self.missing, codes)
            known = (codes == codes.floor()) & (codes >= 0) & (codes < self.counts)
            codes = torch.where(known, codes, math.nan)[:, self.column]
            parts.append(torch.where(codes.isnan(), math.nan, (codes == self.places).double()))
        return torch.cat(parts, 1)

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

    A missing category is a category too, whether or not training had one. The transformers of scikit-learn
    do the work; `medians` and `categories` are all that they learn.

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
            raise TableError("the table has no column besides the target; nothing can predict it.")
        numeric = {str(name): math.nan for name in table.columns if _checked(table[name])}
        others = [str(name) for name in table.columns if name not in numeric]
        encoder = cls(numeric, {name: sorted({MISSING, *labels(table[name])}) for name in others})
        if not numeric:
            return encoder
        imputer = encoder._unfitted().fit(encoder.coded(table)).named_transformers_["numeric"]
        return cls(dict(zip(numeric, imputer.statistics_.tolist(), strict=True)), encoder.categories)

    def transform(self, table: pd.DataFrame) -> np.ndarray:
        """Numbers in double precision, numeric columns first."""
        return np.asarray(self._transformer.transform(self.coded(table)), dtype=np.float64)

    def coded(self, table: pd.DataFrame) -> np.ndarray:
        """Numbers, NaN where missing, and places of categories; the error for another value names its row."""
        values = [numbers(table[name]) for name in self.medians]
        places = [_places(table[name], known) for name, known in self.categories.items()]
        return np.column_stack(values + places)

    def _unfitted(self) -> ColumnTransformer:
        n, count = len(self.medians), len(self.medians) + len(self.categories)
        indicators = OneHotEncoder(
            categories=[np.arange(float(len(known))) for known in self.categories.values()],
            sparse_output=False,
        )
        imputer = SimpleImputer(strategy="median")
        steps = [("numeric", imputer, list(range(n))), ("categorical", indicators, list(range(n, count)))]
        return ColumnTransformer([step for step in steps if step[2]])

    @cached_property
    def _transformer(self) -> ColumnTransformer:
        # One row with the medians, and any category, teaches the transformers the same again.
        return self._unfitted().fit(np.array([[*self.medians.values(), *(0.0 for _ in self.categories)]]))

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


def _places(column: Text, known: Sequence[str]) -> np.ndarray:
    """The place of each value in a list of categories."""
    values = column.astype("category")
    places = pd.Index(known).get_indexer(pd.Index([str(value) for value in values.cat.categories]))
    # The last entry is for missing values, whose code is -1.
    found = np.append(places, list(known).index(MISSING))[values.cat.codes]
    if (found < 0).any():
        i = int((found < 0).argmax())
        listed = ", ".join(repr(c) for c in known[:8] if c) + ", …" * (len(known) > 9)
        raise TableError(
            f"column {column.name!r} has {str(column.iloc[i])!r} in row {column.index[i]}, a category "
            f"that the model was not trained with; it knows {listed}."
        )
    return found.astype(np.float64)


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

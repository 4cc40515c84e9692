"""Tables to numbers; all that is learned is plain JSON."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import nn

from .choice import choose
from .columns import parsed
from .graph import Columns
from .kinds import Category, Date, Number, to_json
from .messages import TableError, listed


@dataclass(frozen=True)
class Encoder:
    """How the rows of a table become numbers, learned from the rows of training.

    Numbers come first, then the parts of dates, indicators of missing numbers, and those of categories, each
    column's last for all other categories (`varprop.table.kinds`).

    >>> import pandas as pd
    >>> table = pd.DataFrame({"area": [1.0, 3.0, None], "town": ["Ulm", None, "Bonn"]})
    >>> Encoder.fit(table).transform(table)
    array([[1., 0., 0., 0., 1., 0.],
           [3., 0., 1., 0., 0., 0.],
           [2., 1., 0., 1., 0., 0.]])
    """

    numbers: Sequence[Number]
    """Dates are among them."""
    categories: Sequence[Category]
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Columns that nothing is learned from, and why."""
    notes: Sequence[str] = field(default=(), compare=False)
    """What was recognised in the rows of training."""

    @classmethod
    def fit(cls, table: pd.DataFrame, keep: Collection[str] = ()) -> Encoder:
        """Learn from a table without the target.

        :param keep: columns to use even if they seem to number the rows, or to be free text.
        """
        if not len(table.columns):
            raise TableError("the table has no column besides the target; nothing can predict it.")
        table = _plain(_named_columns(table))
        kinds = {name: choose(table[name], name in keep) for name in table.columns}
        if all(isinstance(kind, str) for kind in kinds.values()):
            # A row number is better than nothing: it may be the time.
            kinds = {name: choose(table[name], kinds[name] == "numbers the rows") for name in table.columns}
        numbers = [kind for kind in kinds.values() if isinstance(kind, Number)]
        numbers.sort(key=lambda number: isinstance(number, Date))
        categories = [kind for kind in kinds.values() if isinstance(kind, Category)]
        left_out = {name: kind for name, kind in kinds.items() if isinstance(kind, str)}
        if len(left_out) == len(kinds):
            reasons = ", ".join(f"{name!r} {reason}" for name, reason in list(left_out.items())[:8])
            raise TableError(f"no column can be learned from: {reasons}.")
        return cls(numbers, categories, left_out, [*_recognised(table, numbers), *_reasons(left_out)])

    def transform(self, table: pd.DataFrame) -> np.ndarray:
        """Numbers in double precision; values that training never had are told by a `TableWarning`."""
        return self._module(torch.from_numpy(self.coded(table))).numpy()

    def coded(self, table: pd.DataFrame) -> np.ndarray:
        """The columns as `module` takes them; the error for a wrong value names its row."""
        table = _named_columns(table)
        kinds = self.kinds
        if missing := [kind.name for kind in kinds if kind.name not in table.columns]:
            raise TableError(f"the table has no column {missing[0]!r}; it has {listed(list(table.columns))}.")
        return np.column_stack([kind.values(table[kind.name]) for kind in kinds])

    def module(self) -> nn.Module:
        """From coded columns to the same numbers, as a few tensor operations."""
        return Columns(self.numbers, self.categories)

    @property
    def kinds(self) -> list[Number | Category]:
        """Of the columns that are used, in the order of `coded`."""
        return [*self.numbers, *self.categories]

    @cached_property
    def _module(self) -> nn.Module:
        return self.module()

    @property
    def types(self) -> dict[str, str]:
        """The columns of a table that are used, and how to read them."""
        numbers = {n.name: "str" if isinstance(n, Date) else "float64" for n in self.numbers}
        return numbers | dict.fromkeys((c.name for c in self.categories), "str")

    @property
    def width(self) -> int:
        """How many numbers a row becomes."""
        return self._module(torch.zeros(1, len(self.kinds)).double()).shape[1]

    @property
    def columns(self) -> list[dict[str, object]]:
        """What a graph's reader has to know about each column."""
        return [kind.about() for kind in self.kinds]

    def to_json(self) -> dict[str, object]:
        return {
            "numbers": [to_json(n) for n in self.numbers if not isinstance(n, Date)],
            "dates": [to_json(n) for n in self.numbers if isinstance(n, Date)],
            "categories": [to_json(category) for category in self.categories],
            "left_out": dict(self.left_out),
        }

    @classmethod
    def from_json(cls, kept: Mapping[str, Any]) -> Encoder:
        """What `to_json` gave, of this version or of one that knew medians and categories only."""
        if "medians" in kept:
            numbers = [Number(name, median) for name, median in kept["medians"].items()]
            known = kept["categories"].items()
            return cls(numbers, [Category(name, categories, other=False) for name, categories in known])
        numbers = [Number(**number) for number in kept["numbers"]] + [Date(**date) for date in kept["dates"]]
        return cls(numbers, [Category(**category) for category in kept["categories"]], kept["left_out"])


def is_mixed(X: object) -> bool:
    """Whether rows are a table with anything but numbers, or with missing ones."""
    if not isinstance(X, pd.DataFrame):
        return False
    numbers = all(isinstance(dtype, np.dtype) and dtype.kind in "iuf" for dtype in X.dtypes)
    return not numbers or bool(X.isna().to_numpy().any())


def _named_columns(table: pd.DataFrame) -> pd.DataFrame:
    """The table with text for the names of its columns, all different."""
    check_names(table)
    return table.set_axis([str(name) for name in table.columns], axis=1)


def check_names(table: pd.DataFrame) -> None:
    """Refuse a table in which two columns have the same name."""
    names = [str(name) for name in table.columns]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise TableError(f"the table has more than one column {twice!r}; give each its own name.")


def _plain(table: pd.DataFrame) -> pd.DataFrame:
    """The table with text that needs no care, plain numbers, as numbers: much faster to look at."""
    columns = {}
    for name, column in table.items():
        text = column.dtype.kind == "O" and not isinstance(column.dtype, pd.CategoricalDtype)
        values = pd.to_numeric(column, errors="coerce") if text else column
        plain = values.dtype.kind in "iuf" and values.isna().sum() == column.isna().sum()
        columns[name] = values if plain else column
    return pd.DataFrame(columns)


def _recognised(table: pd.DataFrame, numbers: Sequence[Number]) -> list[str]:
    """What text was taken for numbers or dates."""
    notes = []
    if dates := [n for n in numbers if isinstance(n, Date)]:
        named = (repr(d.name) + f" ({d.order} first)" * (d.order != "year") for d in dates[:8])
        notes.append("dates become parts: " + ", ".join(named) + ", …" * (len(dates) > 8))
    if worded := {n.name: n.words for n in numbers if n.words}:
        shown = ", ".join(f"{name!r} ({listed(words, 3)})" for name, words in list(worded.items())[:8])
        notes.append(f"columns of numbers in which words count as missing: {shown}")
    formatted = {}
    for number in numbers:
        if not isinstance(number, Date) and table[number.name].dtype.kind not in "biuf":
            column = table[number.name]
            unusual = column[
                pd.to_numeric(column, errors="coerce").isna().to_numpy() & ~np.isnan(parsed(column))
            ]
            if len(unusual):
                formatted[number.name] = str(unusual.iloc[0])
    if formatted:
        shown = ", ".join(f"{name!r} ({text!r})" for name, text in list(formatted.items())[:8])
        notes.append(f"read as plain numbers: {shown}")
    return notes


def _reasons(left_out: Mapping[str, str]) -> list[str]:
    if not left_out:
        return []
    shown = ", ".join(f"{name!r} {reason}" for name, reason in list(left_out.items())[:12])
    return [f"left out: {shown}" + f", and {len(left_out) - 12} more" * (len(left_out) > 12)]

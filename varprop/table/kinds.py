"""The kinds of columns, and what is learned about each from the rows of training."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pandas as pd

from .columns import ABSENT, LARGEST, MISSING, PLACEHOLDERS, Text, absent, labels, numbers, parsed
from .dates import Order, days
from .messages import TableWarning

TAIL = 20.0
"""A column is squashed if a value lies this many times farther from the median than its typical value."""
BODY = 5.0
"""The scale of a squashed column in typical distances: within it, the column stays nearly linear."""
REACH = 1000.0
"""Numbers are clamped so many spans of the training data beyond its ends."""
RARE, RARE_SHARE = 10, 0.01
"""Categories are pooled that stand in fewer rows than `RARE` and than this share of all rows."""
MOST_CATEGORIES = 100
YEAR, WEEK, DAY = 365.2425, 7.0, 1.0


@dataclass(frozen=True)
class Number:
    """A column of numbers. A missing one is the median, with an indicator where training had missing ones.

    A column with heavy tails becomes asinh((x - median) / scale); the scale is five times the typical
    distance from the median, which is the median distance of the values that differ from it.
    """

    name: str
    median: float
    low: float | None = None
    high: float | None = None
    """Values beyond are clamped."""
    missing: bool = False
    """Whether training had missing values."""
    scale: float | None = None
    """Of a column that is squashed."""
    words: Sequence[str] = ()
    """What stood for a missing number in training."""

    @classmethod
    def fit(cls, column: Text) -> Number:
        is_word = np.isnan(parsed(column)) & ~absent(column)
        words = sorted(set(column[is_word].astype(str).str.strip()))
        return cls(**_learned(str(column.name), numbers(column, frozenset(words))) | {"words": words})

    def values(self, column: Text) -> np.ndarray:
        """The column as a graph takes it: NaN where missing."""
        largest = LARGEST if self.high is None else math.inf  # what is larger is clamped
        return self._checked(column, numbers(column, PLACEHOLDERS.union(self.words), largest))

    def about(self) -> dict[str, object]:
        """What a graph's reader has to know."""
        return {"name": self.name}

    def _checked(self, column: Text, values: np.ndarray) -> np.ndarray:
        if self.low is not None and self.high is not None:
            if not self.missing:
                _warn(column, np.isnan(values), "where training always had one", "the median is taken")
            beyond = (values < self.low) | (values > self.high)
            _warn(column, beyond, "far beyond all that training had", "the prediction is a guess")
        return values


@dataclass(frozen=True)
class Date(Number):
    """A column of dates: days since 1970, and where they lie in the year, the week and perhaps the day."""

    clock: bool = False
    """Whether training had times of day."""
    order: Order = "year"
    """Of text."""

    @classmethod
    def fit(cls, column: Text, order: Order = "year") -> Date:
        values = days(column, order)
        known = values[~np.isnan(values)]
        clock = bool((known != np.floor(known)).any())
        return cls(**_learned(str(column.name), values) | {"scale": None}, clock=clock, order=order)

    @property
    def periods(self) -> list[float]:
        """In days; each gives a sine and a cosine."""
        return [YEAR, WEEK, DAY] if self.clock else [YEAR, WEEK]

    def values(self, column: Text) -> np.ndarray:
        return self._checked(column, days(column, self.order))

    def about(self) -> dict[str, object]:
        return {"name": self.name, "unit": "days since 1970-01-01"}


@dataclass(frozen=True)
class Category:
    """A column of categories: an indicator for each, and one for all other values, rare or never seen."""

    name: str
    categories: Sequence[str]
    """Sorted. The empty one is a missing value, if training had any."""
    rare: Sequence[str] = ()
    """Categories of training that are not among them."""
    other: bool = True
    """Whether other values have an indicator; if not, they have none at all."""

    @classmethod
    def fit(cls, column: Text) -> Category:
        counts = labels(column).where(~absent(column), MISSING).value_counts()
        fewest = min(RARE, RARE_SHARE * len(column))
        kept = counts[counts >= fewest].nlargest(MOST_CATEGORIES).index
        return cls(str(column.name), sorted(kept), sorted(counts.index.difference(kept)))

    def values(self, column: Text) -> np.ndarray:
        """The place of each value in the list, -1 for any other."""
        coded = column.astype("category").cat
        names = [str(name).strip() if str(name).strip() in ABSENT else str(name) for name in coded.categories]
        names = [MISSING if name in ABSENT else name for name in (*names, MISSING)]
        places = pd.Index(list(self.categories)).get_indexer(pd.Index(names))
        unseen = (places < 0) & ~np.isin(names, list(self.rare))
        # The last name is for missing values, whose code is -1.
        _warn(column, unseen[coded.codes], "which training never had", "it is treated as unknown")
        return places[coded.codes].astype(np.float64)

    def about(self) -> dict[str, object]:
        return {"name": self.name, "categories": list(self.categories)}


def to_json(kind: Number | Category) -> dict[str, object]:
    """Plain JSON, from which `type(kind)(**json)` makes the same again."""
    return {name: list(v) if isinstance(v, list | tuple) else v for name, v in asdict(kind).items()}


def _learned(name: str, values: np.ndarray) -> dict[str, Any]:
    """What is learned about a column of numbers, NaN where missing."""
    known = values[~np.isnan(values)]
    low, median, high = (float(f(known)) for f in (np.min, np.median, np.max))
    reach = REACH * (high - low)
    distance = np.abs(known - median)
    typical = float(np.median(distance[distance > 0])) if high > low else math.inf
    return {
        "name": name,
        "median": median,
        "low": max(low - reach, -1e300),
        "high": min(high + reach, 1e300),
        "missing": len(known) < len(values),
        "scale": BODY * typical if distance.max() > TAIL * typical else None,
        "words": [],
    }


def _warn(column: Text, where: np.ndarray, why: str, done: str) -> None:
    if where.any():
        i = int(where.argmax())
        value = column.iloc[i]
        shown = "no value" if pd.isna(value) or str(value) in ABSENT else repr(str(value))
        warning = TableWarning(str(column.name), shown, column.index[i], int(where.sum()), why, done)
        warnings.warn(warning, stacklevel=2)

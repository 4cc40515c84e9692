"""Rows drawn at random from a table of any length."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd

from ..settings import LONG
from .columns import Text, labels
from .target import MOST_CLASSES


class Sample(NamedTuple):
    """All rows of a table, or of a long one as many as `LONG` says."""

    table: pd.DataFrame
    rows: int
    """How many the whole table has."""

    @property
    def is_whole(self) -> bool:
        return len(self.table) == self.rows


def sampled(parts: Iterable[pd.DataFrame], classes: str | None = None, seed: int = 0) -> Sample:
    """A sample of a table that is read in parts, in the order of its rows.

    :param classes: a column of classes, if it is one; each has a row in the sample.
    """
    random, known = np.random.default_rng(seed), set[str]()
    kept, ranks, rows = list[pd.DataFrame](), list[np.ndarray](), 0
    for part in parts:
        rank = random.random(len(part))
        if classes is not None and len(known) < MOST_CLASSES:
            rank[_first_rows(labels(part[classes]), known)] = -1.0
        kept.append(part)
        ranks.append(rank)
        rows += len(part)
        if sum(map(len, kept)) > 1.25 * LONG:
            kept, ranks = _lowest(kept, ranks)
    if rows > LONG:
        kept, ranks = _lowest(kept, ranks)
    return Sample(pd.concat(kept), rows)


def _first_rows(column: Text, known: set[str]) -> np.ndarray:
    """Where classes have their first row; they are known from now on."""
    new = ~column.duplicated() & ~column.isin(known)
    places = np.flatnonzero(new)[: MOST_CLASSES - len(known)]
    known.update(column.iloc[places])
    return places


def _lowest(
    parts: Sequence[pd.DataFrame], ranks: Sequence[np.ndarray]
) -> tuple[list[pd.DataFrame], list[np.ndarray]]:
    rank = np.concatenate(ranks)
    lowest = np.sort(np.argpartition(rank, LONG - 1)[:LONG])
    return [pd.concat(parts).iloc[lowest]], [rank[lowest]]

"""The rows of a table that judge a model, and its scores beside those of a baseline."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import pandas as pd

from .shell import Rows, say, shown
from .table.messages import TableError
from .table.model import TableModel
from .table.reading import chunks
from .table.sampling import Sample, sampled
from .table.scores import Scores


def judges(model: TableModel, data: Path) -> pd.DataFrame:
    """The rows that have the target, or of a long table some of them."""
    table = sample_of(chunks(data, model.types_with_target), data).table
    complete = model.target.complete(table)
    if not len(complete):
        raise TableError(f"{data} has no row with a value of {model.target.name!r}; nothing can be measured.")
    say_left_out(table, complete)
    return complete


def sample_of(parts: Iterable[pd.DataFrame], data: Path, target: Sequence[str] = (), seed: int = 0) -> Sample:
    """The rows of a table, or of a long one some that are drawn at random, which is said."""
    sample = sampled(parts, target[0] if len(target) == 1 else None, seed)
    if not sample.is_whole:
        say(f"{data} has {sample.rows:,} rows; scores come from {len(sample.table):,}, drawn at random.")
    return sample


def say_left_out(table: pd.DataFrame, complete: pd.DataFrame) -> None:
    if missing := len(table) - len(complete):
        say(f"left out: {missing:,} of {len(table):,} rows, which have no target.")


def compared(model: TableModel, found: Scores, before: str = "") -> tuple[tuple[str, ...], Rows]:
    """Scores beside those of the baseline, where it is known, and the heads of both columns."""
    if model.baseline is None:
        return (), {f"{before}{name}": shown(value) for name, (value, _) in found.items()}
    pairs: Rows = {
        f"{before}{name}": (shown(value), "" if plain is None else shown(plain))
        for name, (value, plain) in found.items()
    }
    return ("model", model.baseline.name), pairs

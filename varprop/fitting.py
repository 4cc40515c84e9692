"""The work of `varprop fit`: a table becomes a model, which is judged by rows that it has not seen."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from .judging import compared, sample_of, say_left_out
from .shell import Rows, said, say
from .table.cache import LongTable
from .table.layout import check_present
from .table.messages import TableError, TableWarning
from .table.model import TableModel, split, train
from .table.reading import chunks
from .table.target import TargetColumn, with_target
from .table.task import Task


class Judged(NamedTuple):
    """A model, and what is known about it."""

    model: TableModel
    rows: int
    """Of the table, with a target."""
    heads: tuple[str, ...]
    """Of the columns of its scores."""
    scores: Rows


def fitted(
    data: Path,
    target: Sequence[str],
    task: Task,
    options: Mapping[str, Any],
    *,
    of_numbers: Mapping[str, Any],
    of_classes: Mapping[str, Any],
    ignore: Sequence[str],
    keep: Sequence[str],
    holdout: float,
    refit: bool,
    seed: int,
) -> Judged:
    """Train on a file, and judge by held-out rows or by those that each member has not seen.

    :param options: of training.
    :param of_numbers: further options if the target is a number.
    :param of_classes: and if it is a class.
    """
    sample = sample_of(chunks(data), data, target, seed)
    check_present(data, list(sample.table.columns), (*target, *ignore, *keep))
    complete = with_target(sample.table.drop(columns=list(ignore)), target, task)
    say_left_out(sample.table, complete)
    column = TargetColumn.fit(complete, target, task)
    own, others = (of_numbers, of_classes) if column.classes is None else (of_classes, of_numbers)
    for name, value in others.items():
        if value and value != "auto":
            kind, other = ("numbers", "classes") if others is of_numbers else ("classes", "numbers")
            option = f"--{name.replace('_', '-')} {value}"
            raise TableError(f"{option} is for {kind}, and {column.name!r} has {other}; leave it out.")
    options = {**options, **own, "keep": keep}
    training, held_out = split(complete, column, holdout, seed)
    whole = None if sample.is_whole else LongTable(data, sample.rows, held_out.index)
    with said():
        model = train(training, column, whole=whole, say=say, **options)
    heads: tuple[str, ...] = ()
    scores: Rows = {}
    if len(held_out):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", TableWarning)
            found = model.scores(held_out)
        heads, scores = compared(model, found, "held out: ")
        if refit:
            whole = None if whole is None else replace(whole, without=held_out.index[:0])
            model = train(complete, column, whole=whole, **options)
    elif model.out_of_fold is not None:
        heads, scores = compared(model, model.out_of_fold, "out of fold: ")
    return Judged(model, len(complete) if sample.is_whole else sample.rows, heads, scores)

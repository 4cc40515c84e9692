"""Which kind a column is, or why it is left out."""

from __future__ import annotations

import re

import numpy as np

from .columns import Text, absent, is_truth, number_share, parsed
from .dates import order_of
from .kinds import MOST_CATEGORIES, Category, Date, Number
from .messages import TableError

MOSTLY = 0.9
"""A column with at least this share of numbers is one of numbers; its words are missing values."""
FREE_TEXT = 20
"""Text with more different values than this, and than half as many as there are rows, has no categories."""
ID = re.compile(r"(?i:(.*[_\W])?(id|ids|uid|uuid|guid|index|idx|rownum|rowid)|unnamed: 0)|.*[a-z]I[Dd]")


def choose(column: Text, keep: bool = False) -> Number | Category | str:
    """What is learned about a column, or, in a few words, why nothing can be learned from it.

    :param keep: learn from it if that is possible at all.
    """
    known = column[~absent(column)]
    try:
        different = known.nunique()
    except TypeError as error:  # it cannot be hashed
        kind = type(known.iloc[0]).__name__
        raise TableError(
            f"column {column.name!r} has values of type {kind}, which are no numbers, text or dates; "
            "make columns of their parts, or leave it out."
        ) from error
    if not len(known):
        return "has no values"
    if different == 1 and len(known) == len(column):
        return "has one value only"
    order = order_of(column)
    if not keep and (reason := _identifies(column, known, order is not None)):
        return reason
    if order is not None:
        return Date.fit(column, order)
    if number_share(column) >= MOSTLY:
        return Number.fit(column)
    category = Category.fit(column)
    pooled = known.astype(str).isin(category.rare).mean()
    free = different > max(FREE_TEXT, len(column) / 2) or (different > MOST_CATEGORIES and pooled > 0.5)
    return f"text with {different:,} different values" if free and not keep else category


def _identifies(column: Text, known: Text, is_date: bool) -> str:
    """Why a column only tells one row from another; empty if it does not."""
    if len(known) < len(column) or not known.is_unique or is_truth(known):
        return ""
    values = parsed(column)
    whole = bool((values == np.floor(values)).all())
    if whole and _counts(values, column.index.to_numpy()):
        return "numbers the rows"
    text = bool(np.isnan(values).all()) and not is_date
    return "is an identifier" if (whole or text) and ID.fullmatch(str(column.name)) else ""


def _counts(values: np.ndarray, index: np.ndarray) -> bool:
    """Whether values are 0, 1, 2, … or 1, 2, 3, … in the order of the rows or of their index."""
    places = [np.arange(len(values))] + ([index] if index.dtype.kind in "iu" else [])
    return any(bool((values - i == values[0] - i[0]).all()) and abs(values[0] - i[0]) <= 1 for i in places)

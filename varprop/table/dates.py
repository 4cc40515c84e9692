"""Columns of dates, by their type or as text in one of three orders, as days since 1970."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pandas as pd

from .columns import MISSING, Text, absent, labels
from .messages import TableError

Order = Literal["year", "month", "day"]
"""What stands first. A date with the year first is understood in any column of dates."""
EXAMPLES: dict[Order, str] = {"year": "2024-02-29", "month": "02/29/2024", "day": "29/02/2024"}
DATE = (
    r"(?P<first>\d{1,4})(?P<sign>[-/.])(?P<second>\d{1,2})(?P=sign)(?P<third>\d{1,4})"
    r"(?:[T ](?P<hour>\d{1,2})(?P<minute>:\d{2}(?::\d{2}(?:\.\d+)?)?(?:Z|[+-]\d{2}:?\d{2})?))?"
)


def order_of(column: Text) -> Order | None:
    """The order in which every value is a date; None if they are no dates.

    If month and day could be either, the day is first where points stand between them, and the month where
    anything else does.

    >>> order_of(pd.Series(["13/02/2024", "01/02/2024"])), order_of(pd.Series(["01/02/2024", "03/04/2024"]))
    ('day', 'month')
    """
    if pd.api.types.is_datetime64_any_dtype(column):
        return "year"
    if column.dtype.kind in "biufc" or isinstance(column.dtype, pd.CategoricalDtype):
        return None
    values = pd.Series(column[~absent(column)].astype(str).str.strip().unique())
    if not len(values) or not values.str.fullmatch(DATE).all():
        return None
    points = values.str.contains(r"^\d{1,2}\.").any()
    orders: tuple[Order, ...] = ("year", "day", "month") if points else ("year", "month", "day")
    return next((order for order in orders if _stamps(values, order).notna().all()), None)


def days(column: Text, order: Order = "year") -> np.ndarray:
    """Dates as days since 1970-01-01, NaN where missing; the error for any other value names its row.

    >>> days(pd.Series(["1970-01-02", "3.1.1970 12:00", None]), "day").tolist()
    [1.0, 2.5, nan]
    """
    is_date = pd.api.types.is_datetime64_any_dtype(column)
    stamps = pd.to_datetime(column, utc=True) if is_date else _stamps(labels(column).str.strip(), order)
    wrong = stamps.isna().to_numpy() & ~absent(column)
    if wrong.any():
        i = int(wrong.argmax())
        raise TableError(
            f"column {column.name!r} has {str(column.iloc[i])!r} in row {column.index[i]}, "
            f"where a date such as {EXAMPLES[order]} is needed."
        )
    epoch = pd.Timestamp(0, tz="UTC").as_unit("s")  # in nanoseconds, no year before 1677 could be subtracted
    return ((stamps - epoch) / pd.Timedelta(days=1)).to_numpy(np.float64, na_value=np.nan)


def _stamps(text: Text, order: Order) -> pd.Series[pd.Timestamp]:
    """Points in time; NaT for what is no date in this order."""
    stamps = _iso(text)
    others = stamps.isna() & (text != MISSING)
    if others.any():
        stamps = stamps.where(~others, _iso(_year_first(text[others], order)))
    return stamps


def _iso(text: Text) -> pd.Series[pd.Timestamp]:
    return pd.to_datetime(text, format="ISO8601", errors="coerce", utc=True)


def _year_first(text: Text, order: Order) -> Text:
    """Dates as in ISO 8601."""
    parts = text.str.extract(DATE)
    first, second, third = parts["first"], parts["second"], parts["third"]
    usual = {"year": (first, second, third), "month": (third, first, second), "day": (third, second, first)}
    has_year_first = first.str.len() == 4
    year, month, day = (
        own.where(~has_year_first, iso) for own, iso in zip(usual[order], usual["year"], strict=True)
    )
    time = ("T" + parts["hour"].str.zfill(2) + parts["minute"]).fillna("")
    return year + "-" + month.str.zfill(2) + "-" + day.str.zfill(2) + time

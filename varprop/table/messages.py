"""What is said about a table: what cannot be used, and what was not as in training."""

from __future__ import annotations

from collections.abc import Sequence


class TableError(ValueError):
    """A table that cannot be used."""


class TableWarning(UserWarning):
    """Values of a column that training never had, and what is done with them.

    :param value: the first of them, in `row`; all of them stand in `count` rows.
    """

    def __init__(self, column: str, value: str, row: object, count: int, done: str) -> None:
        super().__init__(column, value, row, count, done)
        self.column, self.value, self.row, self.count, self.done = column, value, row, count, done

    def __str__(self) -> str:
        more = f" and {self.count - 1:,} more like it" * (self.count > 1)
        return f"column {self.column!r} has {self.value} in row {self.row}{more}, {self.done}."

    def merged(self, later: TableWarning) -> TableWarning:
        """The same about a further part of the table."""
        return TableWarning(self.column, self.value, self.row, self.count + later.count, self.done)


def listed(names: Sequence[object], most: int = 8) -> str:
    """Names in quotation marks, the first few of many.

    >>> listed(["a", "b"])
    "'a', 'b'"
    """
    return ", ".join(repr(str(name)) for name in names[:most]) + ", …" * (len(names) > most)

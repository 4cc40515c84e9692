"""What is said about a table: what cannot be used, and what was not as in training."""

from __future__ import annotations

from collections.abc import Sequence


class TableError(ValueError):
    """A table that cannot be used."""


class TableWarning(UserWarning):
    """Values of a column that training never had, and what is done with them.

    :param value: the first of them, in `row`; all of them stand in `count` rows.
    :param why: what is unusual about them.
    :param done: what is done with them.
    """

    def __init__(self, column: str, value: str, row: object, count: int, why: str, done: str) -> None:
        super().__init__(column, value, row, count, why, done)
        self.column, self.value, self.row, self.count, self.why, self.done = (
            column,
            value,
            row,
            count,
            why,
            done,
        )

    def __str__(self) -> str:
        return f"{self._found}; {self.done}."

    @property
    def refusal(self) -> str:
        """The same as an error."""
        return f"{self._found}; correct it, or leave --strict out."

    @property
    def _found(self) -> str:
        more = f" and {self.count - 1:,} more like it" * (self.count > 1)
        return f"column {self.column!r} has {self.value} in row {self.row}{more}, {self.why}"

    def merged(self, later: TableWarning) -> TableWarning:
        """The same about a further part of the table."""
        count = self.count + later.count
        return TableWarning(self.column, self.value, self.row, count, self.why, self.done)


def listed(names: Sequence[object], most: int = 8) -> str:
    """Names in quotation marks, the first few of many.

    >>> listed(["a", "b"])
    "'a', 'b'"
    """
    return ", ".join(repr(str(name)) for name in names[:most]) + ", …" * (len(names) > most)

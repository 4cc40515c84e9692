"""Tables from files, in chunks: CSV, TSV and Parquet."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import pandas as pd

from .columns import ABSENT
from .layout import (
    DECIMAL_COMMA,
    UNPACKING,
    Layout,
    check_file,
    check_present,
    is_parquet,
    unpacked_not,
)
from .messages import TableError

CHUNK = 32_768
COMPRESSIONS: dict[str, Literal["gzip", "bz2", "xz"]] = {".gz": "gzip", ".bz2": "bz2", ".xz": "xz"}
"""By the suffix, as pandas names them: those that the layout can be recognised through."""


def chunks(
    path: str | Path, types: Mapping[str, str] | None = None, rows: int = CHUNK
) -> Iterator[pd.DataFrame]:
    """A table with at least one row, in chunks. The index counts from 1.

    :param types: the columns to read, and the type of each. Without it all columns are read, and the fields
        of CSV and TSV files stay text, so that the type of a column does not depend on the chunk. Text is
        taken literally: only an empty field is missing, NA is a word.
    """
    path = Path(path)
    check_file(path)
    source = _parquet if is_parquet(path) else _text
    seen = 0
    try:
        for part in source(path, types, rows):
            if len(part):
                part.index = pd.RangeIndex(seen + 1, seen + len(part) + 1)
                seen += len(part)
                yield part
    except UnicodeDecodeError as error:
        raise TableError(f"{path} is damaged: it is no {error.encoding} text after row {seen}.") from error
    except (pd.errors.ParserError, pd.errors.EmptyDataError) as error:
        reason = str(error).strip().splitlines()[-1].split("C error: ")[-1].rstrip(".")
        raise TableError(f"{path} cannot be read as a table: {reason}.") from error
    except UNPACKING as error:
        raise unpacked_not(path, error) from error
    if not seen:
        raise TableError(f"{path} has no rows.")


def _text(path: Path, types: Mapping[str, str] | None, rows: int) -> Iterator[pd.DataFrame]:
    layout = Layout.of(path)
    packed = COMPRESSIONS.get(path.suffix.lower())
    options: dict[str, Any] = {"sep": layout.separator, "encoding": layout.encoding, "compression": packed}
    # If every row is longer than the header, pandas takes the first column for row names; without a header it
    # reports the wrong length instead.
    pd.read_csv(path, nrows=2, header=None, dtype=str, **options)
    names = list(pd.read_csv(path, nrows=0, **options).columns)
    # The first column of a name keeps it, the others are renamed by pandas.
    first: dict[str, str] = {}
    for name, raw in zip(names, layout.header, strict=False):
        if not raw or name.strip() == raw:
            first.setdefault(raw or name, name)
    if not first:
        raise TableError(f"{path} cannot be read as a table: its header has no names.")
    check_present(path, list(first), list(types or ()))
    columns = {name: first[name] for name in (first if types is None else types)}
    options |= {"keep_default_na": False, "chunksize": rows}
    numeric = {columns[name] for name, kind in (types or {}).items() if kind != "str"}
    # Unused columns are parsed too: rows of a wrong length cannot be found otherwise.
    typed = dict.fromkeys(names, "str") | {columns[name]: kind for name, kind in (types or {}).items()}
    missing = {name: sorted(ABSENT) if name in numeric else [""] for name in names}
    seen = 0
    try:
        with pd.read_csv(path, dtype=typed, na_values=missing, decimal=layout.decimal, **options) as parts:
            for part in parts:
                yield _points(_named(part, columns), layout)
                seen += len(part)
    except (UnicodeDecodeError, pd.errors.ParserError, TableError):
        raise
    except ValueError:
        # A field does not have its column's type. Read as text, it is parsed with more care, or refused by a
        # check that names its row.
        options |= {"skiprows": range(1, seen + 1), "na_values": [""]}
        with pd.read_csv(path, dtype=str, **options) as parts:
            for part in parts:
                yield _points(_named(part, columns), layout)


def _named(table: pd.DataFrame, columns: Mapping[str, str]) -> pd.DataFrame:
    """The columns that are wanted, under their names without spaces."""
    return table.loc[:, list(columns.values())].set_axis(list(columns), axis=1)


def _points(table: pd.DataFrame, layout: Layout) -> pd.DataFrame:
    """The table with decimal points, where its text has decimal commas."""
    if layout.decimal == ".":
        return table
    swap, pattern = str.maketrans(",.", ".,"), rf"(?:{DECIMAL_COMMA.pattern})|[+-]?\d{{1,3}}(?:\.\d{{3}})+%?"
    text = [name for name in table if table[name].dtype.kind not in "biuf"]
    swapped: dict[str, Any] = {}
    for name in text:
        is_number = table[name].str.strip().str.fullmatch(pattern, na=False).astype(bool)
        swapped[str(name)] = table[name].where(~is_number, table[name].str.translate(swap))
    return table.assign(**swapped)


def _parquet(path: Path, types: Mapping[str, str] | None, rows: int) -> Iterator[pd.DataFrame]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise TableError(
            f"{path}: reading Parquet needs pyarrow; install it with `pip install pyarrow`."
        ) from error
    try:
        with parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if twice := [name for i, name in enumerate(names) if name in names[:i]]:
                raise TableError(f"{path} has more than one column {twice[0]!r}; give each its own name.")
            check_present(path, names, list(types or ()))
            for batch in file.iter_batches(rows, columns=None if types is None else list(types)):
                batch.validate(full=True)
                yield _plain(batch)
    except TableError:
        raise
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        reason = str(error).strip().splitlines()[0].rstrip(".")
        raise TableError(f"{path} cannot be read as Parquet: {reason}.") from error


def _plain(batch: Any) -> pd.DataFrame:
    """Rows of Parquet with text for what is neither a number nor a truth value, a date or text."""
    from pyarrow import types as arrow

    table = batch.to_pandas()
    for name, kind in zip(batch.schema.names, batch.schema.types, strict=True):
        is_bytes = arrow.is_binary(kind) or arrow.is_large_binary(kind) or arrow.is_fixed_size_binary(kind)
        if is_bytes:
            table[name] = table[name].map(_decoded, na_action="ignore")
        elif arrow.is_nested(kind) or arrow.is_duration(kind) or arrow.is_time(kind):
            table[name] = table[name].map(str, na_action="ignore")
    return table


def _decoded(value: bytes) -> str:
    return value.decode("utf-8", "backslashreplace")

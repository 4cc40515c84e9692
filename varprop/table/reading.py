"""Tables from files, whole or in chunks: CSV, TSV and Parquet."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TypedDict

import pandas as pd

CHUNK = 32_768


class TableError(ValueError):
    """A table that cannot be used."""


def read(path: str | Path, types: Mapping[str, str] | None = None) -> pd.DataFrame:
    """A whole table."""
    return pd.concat(chunks(path, types))


def chunks(
    path: str | Path, types: Mapping[str, str] | None = None, rows: int = CHUNK
) -> Iterator[pd.DataFrame]:
    """A table with at least one row, in chunks; the file suffix tells the format. The index counts from 1.

    :param types: the columns to read, and the type of each. Without it all columns are read, and the fields
        of CSV and TSV files stay text, so that the type of a column does not depend on the chunk.
    """
    path = Path(path)
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        raise TableError(f"{path} {what}; give a CSV, TSV or Parquet file.")
    source = _parquet if path.suffix.lower() in (".parquet", ".pq") else _text
    seen = 0
    try:
        for part in source(path, types, rows):
            if len(part):
                part.index = pd.RangeIndex(seen + 1, seen + len(part) + 1)
                seen += len(part)
                yield part
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise TableError(
            f"{path} is not UTF-8 text (byte 0x{byte:02x} after row {seen}); save it as UTF-8."
        ) from error
    except (pd.errors.ParserError, pd.errors.EmptyDataError) as error:
        reason = str(error).strip().splitlines()[-1].split("C error: ")[-1].rstrip(".")
        raise TableError(f"{path} cannot be read as a table: {reason}.") from error
    if not seen:
        raise TableError(f"{path} has no rows.")


class _Layout(TypedDict):
    sep: str
    encoding: str


def _text(path: Path, types: Mapping[str, str] | None, rows: int) -> Iterator[pd.DataFrame]:
    tabs = path.suffix.lower() in (".tsv", ".tab")
    layout: _Layout = {"sep": "\t" if tabs else ",", "encoding": "utf-8-sig"}
    # If every row is longer than the header, pandas takes the first column for row names; without a header it
    # reports the wrong length instead.
    pd.read_csv(path, nrows=2, header=None, dtype=str, **layout)
    check_present(path, pd.read_csv(path, nrows=0, **layout).columns, types)
    columns = slice(None) if types is None else list(types)
    # Unused columns are parsed too: rows of a wrong length cannot be found otherwise.
    typed = defaultdict(lambda: "str", types or {})
    seen = 0
    try:
        with pd.read_csv(path, dtype=typed, chunksize=rows, **layout) as parts:
            for part in parts:
                yield part.loc[:, columns]
                seen += len(part)
    except (UnicodeDecodeError, pd.errors.ParserError, TableError):
        raise
    except ValueError:
        # A field does not have its column's type. Read as text, it reaches the check that names its row.
        with pd.read_csv(path, dtype=str, chunksize=rows, skiprows=range(1, seen + 1), **layout) as parts:
            for part in parts:
                yield part.loc[:, columns]


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
            check_present(path, file.schema_arrow.names, types)
            for batch in file.iter_batches(rows, columns=None if types is None else list(types)):
                yield batch.to_pandas()
    except pyarrow.ArrowInvalid as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise TableError(f"{path} cannot be read as Parquet: {reason}.") from error


def check_present(path: Path, present: Iterable[str], wanted: Iterable[str] | None) -> None:
    """Refuse a table that lacks one of the wanted columns."""
    present = list(present)
    for name in wanted or ():
        if name not in present:
            known = ", ".join(map(repr, present[:10])) + ", …" * (len(present) > 10)
            hint = " (separated by semicolons? Save it with commas)" * (
                len(present) == 1 and ";" in present[0]
            )
            raise TableError(f"{path} has no column {name!r}; it has {known}{hint}.")

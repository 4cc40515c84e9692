"""Tables: read from files in chunks, and turned into numbers by rules learned once and kept as JSON."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from sklearn.compose import ColumnTransformer
from sklearn.impute import SimpleImputer
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

CHUNK = 32_768
MOST_CATEGORIES = 100
MISSING = ""
"""How a missing category is written: what an empty field of a CSV file holds."""


class TableError(ValueError):
    """A table that cannot be used as it is."""


def read(path: str | Path, types: Mapping[str, str] | None = None) -> pd.DataFrame:
    """A whole table."""
    return pd.concat(chunks(path, types))


def chunks(
    path: str | Path, types: Mapping[str, str] | None = None, rows: int = CHUNK
) -> Iterator[pd.DataFrame]:
    """A table of one row or more, part by part: CSV, TSV (.tsv, .tab) or Parquet, by the ending of its name. The index counts from 1.

    :param types: the columns to read, and the type of each. Otherwise all are read, and fields of CSV and TSV files stay text, so that
        what a column is does not depend on the part of it that is looked at.
    """
    path = Path(path)
    if not path.is_file():
        raise TableError(
            f"{path} {'is a folder' if path.is_dir() else 'does not exist'}; give a CSV, TSV or Parquet file."
        )
    parts = (
        _parquet(path, types, rows)
        if path.suffix.lower() in (".parquet", ".pq")
        else _text(path, types, rows)
    )
    seen = 0
    try:
        for part in parts:
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


def _text(path: Path, types: Mapping[str, str] | None, rows: int) -> Iterator[pd.DataFrame]:
    layout: Any = {"sep": "\t" if path.suffix.lower() in (".tsv", ".tab") else ",", "encoding": "utf-8-sig"}
    # Where every row is longer than the header, pandas would take the first column for names of rows; without a header it complains.
    pd.read_csv(path, nrows=2, header=None, dtype=str, **layout)
    check_present(path, pd.read_csv(path, nrows=0, **layout).columns, types)
    columns = slice(None) if types is None else list(types)
    # Columns that are not used are parsed too, because rows of a wrong length are found in no other way.
    typed: Any = defaultdict(lambda: str, types or {})
    seen = 0
    try:
        with pd.read_csv(path, dtype=typed, chunksize=rows, **layout) as parts:
            for part in parts:
                yield part.loc[:, columns]
                seen += len(part)
    except (UnicodeDecodeError, pd.errors.ParserError, TableError):
        raise
    except ValueError:
        # Some field is not of its column's type: as text it reaches the check that names its row.
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
        raise TableError(
            f"{path} cannot be read as Parquet: {str(error).splitlines()[0].rstrip('.')}."
        ) from error


def check_present(path: Path, present: Iterable[str], wanted: Iterable[str] | None) -> None:
    """Refuse a table without one of the columns wanted."""
    present = list(present)
    for name in wanted or ():
        if name not in present:
            raise TableError(
                f"{path} has no column {name!r}; it has {', '.join(map(repr, present[:10]))}{', …' * (len(present) > 10)}."
            )


def numbers(column: pd.Series[Any]) -> np.ndarray:
    """A column as float64, a missing value as NaN; anything else that is no finite number is refused by name and row."""
    values = pd.to_numeric(column, errors="coerce").to_numpy(np.float64, na_value=np.nan)
    wrong = (np.isnan(values) & column.notna().to_numpy()) | np.isinf(values)
    if wrong.any():
        place = int(wrong.argmax())
        raise TableError(
            f"column {column.name!r} has {str(column.iloc[place])!r} in row {column.index[place]}, where a finite number is needed."
        )
    return values


def labels(column: pd.Series[Any]) -> pd.Series[Any]:
    """A column as text, a missing value as empty text."""
    return column.astype(object).where(column.notna(), MISSING).astype(str).astype(object)


def is_numeric(column: pd.Series[Any]) -> bool:
    """Whether every value that is there is a number (as text or not); truth values and dates are not."""
    if pd.api.types.is_bool_dtype(column) or pd.api.types.is_datetime64_any_dtype(column):
        return False
    return bool((pd.to_numeric(column, errors="coerce").notna() | column.isna()).all())


@dataclass(frozen=True)
class Numeric:
    """A column of numbers: missing ones become the median, then mean 0 and standard deviation 1."""

    name: str
    median: float
    mean: float
    scale: float

    def encode(self, column: pd.Series[Any]) -> np.ndarray:
        values = numbers(column)
        return ((np.where(np.isnan(values), self.median, values) - self.mean) / self.scale)[:, None]


@dataclass(frozen=True)
class Categorical:
    """A column of categories: a one for the value's own place, zeros elsewhere. Missing is a category too."""

    name: str
    categories: tuple[str, ...]

    def encode(self, column: pd.Series[Any]) -> np.ndarray:
        values: Any = column.astype("category").cat
        code = {category: i for i, category in enumerate(self.categories)}
        # The last entry is what pandas' code of a missing value, -1, finds.
        codes = np.array([*(code.get(str(value), -1) for value in values.categories), code[MISSING]])[
            values.codes
        ]
        if (codes < 0).any():
            place = int((codes < 0).argmax())
            known = ", ".join(repr(c) for c in self.categories[:8] if c)
            raise TableError(
                f"column {self.name!r} has {str(column.iloc[place])!r} in row {column.index[place]}, "
                f"a category that the model was not trained with; it knows {known}{', …' * (len(self.categories) > 9)}."
            )
        return np.eye(len(self.categories))[codes]


@dataclass(frozen=True)
class Encoder:
    """How the rows of a table become vectors: scikit-learn's ColumnTransformer, its learned state in plain values.

    >>> import pandas as pd
    >>> table = pd.DataFrame({"area": [1.0, 3.0, None], "town": ["Ulm", None, "Bonn"]})
    >>> encoder = Encoder.fit(table)
    >>> encoder.transform(table).round(3)
    array([[-1.225,  0.   ,  0.   ,  1.   ],
           [ 1.225,  1.   ,  0.   ,  0.   ],
           [ 0.   ,  0.   ,  1.   ,  0.   ]], dtype=float32)
    """

    columns: tuple[Numeric | Categorical, ...]

    @classmethod
    def fit(cls, table: pd.DataFrame) -> Encoder:
        for name in table.columns:
            _check_column(table[name])
        numeric = [name for name in table.columns if is_numeric(table[name])]
        categorical = [name for name in table.columns if name not in numeric]
        values = pd.DataFrame(
            {name: numbers(table[name]) if name in numeric else labels(table[name]) for name in table.columns}
        )
        transformer = column_transformer(values, numeric, categorical).fit(values)
        columns: dict[str, Numeric | Categorical] = {}
        if numeric:
            imputer, scaler = transformer.named_transformers_["numeric"]
            learned = (imputer.statistics_.tolist(), scaler.mean_.tolist(), scaler.scale_.tolist())
            columns |= {name: Numeric(name, *state) for name, *state in zip(numeric, *learned, strict=True)}
        if categorical:
            categories = transformer.named_transformers_["categorical"].categories_
            columns |= {
                name: Categorical(name, tuple(kinds))
                for name, kinds in zip(categorical, categories, strict=True)
            }
        return cls(tuple(columns[name] for name in numeric + categorical))

    def transform(self, table: pd.DataFrame) -> np.ndarray:
        return np.hstack([column.encode(table[column.name]) for column in self.columns]).astype(np.float32)

    @property
    def types(self) -> dict[str, str]:
        """The columns of a table that are used, and how to read them."""
        return {column.name: "float64" if isinstance(column, Numeric) else "str" for column in self.columns}

    def to_json(self) -> list[dict[str, Any]]:
        return [asdict(column) for column in self.columns]

    @classmethod
    def from_json(cls, columns: Iterable[Mapping[str, Any]]) -> Encoder:
        return cls(
            tuple(
                Categorical(c["name"], tuple(c["categories"])) if "categories" in c else Numeric(**c)
                for c in columns
            ),
        )


def column_transformer(
    values: pd.DataFrame, numeric: Sequence[str], categorical: Sequence[str]
) -> ColumnTransformer:
    """Median and standard scale for numbers; for categories one-hot, with a place for missing whether or not one was missing."""
    kinds = [sorted({MISSING, *values[name]}) for name in categorical]
    steps = [
        ("numeric", make_pipeline(SimpleImputer(strategy="median"), StandardScaler()), list(numeric)),
        ("categorical", OneHotEncoder(categories=kinds, sparse_output=False), list(categorical)),
    ]
    return ColumnTransformer([step for step in steps if step[2]])


def _check_column(column: pd.Series[Any]) -> None:
    if column.isna().all():
        raise TableError(f"column {column.name!r} has no values; leave it out with --ignore.")
    if pd.api.types.is_datetime64_any_dtype(column):
        raise TableError(
            f"column {column.name!r} holds dates; turn them into numbers, or leave it out with --ignore."
        )
    if not is_numeric(column) and (count := column.nunique()) > MOST_CATEGORIES:
        text = column[pd.to_numeric(column, errors="coerce").isna() & column.notna()]
        raise TableError(
            f"column {column.name!r} is text ({str(text.iloc[0])!r} in row {text.index[0]}) with {count} different values, "
            f"more than {MOST_CATEGORIES}; correct it, or leave it out with --ignore."
        )

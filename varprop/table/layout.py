"""How a text file holds a table: its encoding, its separator, its decimal sign and its header.

Nothing here needs more than Python itself, so that a wrong name of a file or column is told at once.
"""

from __future__ import annotations

import bz2
import codecs
import csv
import gzip
import io
import lzma
import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from .messages import TableError, listed

SAMPLE = 1 << 18
"""Bytes at the beginning of a file that its separator and its decimal sign are recognised by."""
SEPARATORS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "bars"}
DECIMAL_COMMA = re.compile(r"[+-]?(\d{1,3}(\.\d{3})+|\d+),\d+%?")
DECIMAL_POINT = re.compile(r"[+-]?\d*\.\d+([eE][+-]?\d+)?%?")
THOUSANDS = re.compile(r"[+-]?\d{1,3}([.,])\d{3}(\1\d{3})*%?")
"""Groups of three digits: a number in its own right, whichever the decimal sign."""
OPENERS: dict[str, Callable[..., object]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
UNPACKING = (EOFError, OSError, lzma.LZMAError, zlib.error)
"""What the openers raise where a file is damaged."""
PARQUET = (".parquet", ".pq")


@dataclass(frozen=True)
class Layout:
    """The layout of a text file.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "data.csv"
    >>> _ = path.write_text("area;price\\n1,5;20\\n")
    >>> Layout.of(path).notes
    ('separated by semicolons', 'with decimal commas')
    """

    path: Path
    encoding: str
    separator: str
    decimal: str
    header: tuple[str, ...]
    """The names of the columns, without spaces around them; one may stand there twice."""

    @classmethod
    def of(cls, path: Path) -> Layout:
        """Recognise the layout of a file."""
        try:
            with _open(path) as file:
                start = file.read(SAMPLE)
                encoding = _encoding(path, start, file)
        except UNPACKING as error:
            raise unpacked_not(path, error) from error
        text = codecs.getincrementaldecoder(encoding)("replace").decode(start)
        whole = len(start) < SAMPLE
        usual = "\t" if Path(path.name.removesuffix(path.suffix) or path).suffix in _TABBED else ","
        usual = "\t" if path.suffix.lower() in _TABBED else usual
        separator = _separator(text, usual, whole)
        records = _records(text, separator, whole)
        fields = [field.strip() for record in records[1:] for field in record]
        return cls(
            path,
            encoding,
            separator,
            _decimal(fields, separator),
            tuple(name.strip() for name in records[0]) if records else (),
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """What is unusual about the file, in a few words each."""
        tabbed = self.separator == "\t" and self.path.suffix.lower() in _TABBED
        twice = [name for i, name in enumerate(self.header) if name and name in self.header[:i]]
        notes = {
            f"in {_ENCODINGS.get(self.encoding, '')}": self.encoding in _ENCODINGS,
            f"separated by {SEPARATORS[self.separator]}": self.separator != "," and not tabbed,
            "with decimal commas": self.decimal == ",",
            f"with the name {listed(twice)} twice in its header; the first column of it counts": bool(twice),
        }
        return tuple(note for note, told in notes.items() if told)


_TABBED = (".tsv", ".tab")
_ENCODINGS = {
    "utf-16": "UTF-16",
    "utf-16-le": "UTF-16",
    "utf-16-be": "UTF-16",
    "cp1252": "Latin-1",
    "latin-1": "Latin-1",
}


def check_file(path: Path) -> None:
    """Refuse a path at which there is no file."""
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        raise TableError(f"{path} {what}; give a CSV, TSV or Parquet file.")


def is_parquet(path: Path) -> bool:
    """Whether a file is Parquet, by its first bytes, or is meant to be, by its name."""
    with path.open("rb") as file:
        return file.read(4) == b"PAR1" or path.suffix.lower() in PARQUET


def check_present(path: Path, present: Sequence[str], wanted: Sequence[str]) -> None:
    """Refuse a table that lacks one of the wanted columns."""
    for name in wanted:
        if name not in present:
            raise TableError(f"{path} has no column {name!r}; it has {listed(present, 10)}.")


def unpacked_not(path: Path, error: Exception) -> Exception:
    """The error for a file that cannot be unpacked; one of the system, such as a missing right, stays."""
    if isinstance(error, OSError) and error.errno is not None:
        return error
    return TableError(f"{path} is damaged: it cannot be unpacked.")


def _open(path: Path) -> BinaryIO:
    return cast(BinaryIO, OPENERS.get(path.suffix.lower(), open)(path, "rb"))


def _encoding(path: Path, start: bytes, rest: BinaryIO) -> str:
    if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    if b"\0" in start:
        even, odd = start[:1000:2].count(0), start[1:1000:2].count(0)
        if max(even, odd) < 5 * min(even, odd) + len(start[:1000]) / 5:
            kind = "an Excel workbook or an archive" if start.startswith(b"PK") else "not text"
            raise TableError(f"{path} is {kind}; save the table as CSV.")
        return "utf-16-be" if even > odd else "utf-16-le"
    return next(
        (encoding for encoding in ("utf-8-sig", "cp1252") if _decodes(start, rest, encoding)), "latin-1"
    )


def _decodes(start: bytes, rest: BinaryIO, encoding: str) -> bool:
    decoder = codecs.getincrementaldecoder(encoding)()
    rest.seek(len(start))
    try:
        decoder.decode(start)
        while block := rest.read(1 << 20):
            decoder.decode(block)
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        return False
    return True


def _records(text: str, separator: str, whole: bool) -> list[list[str]]:
    """The rows of a text; the last one, which may be cut off, only if the text is whole."""
    try:
        records = [row for row in csv.reader(io.StringIO(text, newline=""), delimiter=separator) if row]
    except csv.Error:
        return [line.split(separator) for line in text.splitlines() if line]
    return records if whole else records[:-1]


def _separator(text: str, usual: str, whole: bool) -> str:
    """What splits all rows into as many fields as the header; if nothing does, what splits the header."""
    best, most = usual, 1
    for agreeing in (True, False):
        for separator in sorted(SEPARATORS, key=lambda s: s != usual):
            lengths = [len(record) for record in _records(text, separator, whole)[:200]]
            if lengths and lengths[0] > most and (not agreeing or len(set(lengths)) == 1):
                best, most = separator, lengths[0]
        if most > 1:
            break
    return best


def _decimal(fields: Sequence[str], separator: str) -> str:
    commas = [field for field in fields if "," in field and DECIMAL_COMMA.fullmatch(field)]
    clear = [field for field in commas if not THOUSANDS.fullmatch(field)]
    points = any("." in f and DECIMAL_POINT.fullmatch(f) and not THOUSANDS.fullmatch(f) for f in fields)
    return "," if not points and (clear or (commas and separator == ";")) else "."

"""What the commands of the shell share: checks before any work, messages, tables, progress."""

from __future__ import annotations

import functools
import json
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import ParamSpec, TypeAlias

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from .table.layout import Layout, check_file, check_present, is_parquet
from .table.messages import TableError, TableWarning

P = ParamSpec("P")
Rows: TypeAlias = dict[str, str | tuple[str, str]]
"""Of a printed table: a value or two for each name."""
SHOWN = 12
"""As many names are listed."""


def one_sentence(function: Callable[P, None]) -> Callable[P, None]:
    """A command whose failures are one sentence on stderr and exit code 2."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            function(*args, **kwargs)
        except (ValueError, OSError, ImportError, FloatingPointError, MemoryError, TableWarning) as error:
            if isinstance(error, BrokenPipeError):
                raise
            message = error.refusal if isinstance(error, TableWarning) else str(error)
            if isinstance(error, OSError) and error.strerror:
                message = ": ".join(filter(None, (error.filename, error.strerror))) + "."
            say(message.strip().splitlines()[0])
            raise typer.Exit(2) from None

    return run


def say(message: str) -> None:
    typer.echo(f"varprop: {message}", err=True)


@contextmanager
def told(strict: bool = False) -> Iterator[None]:
    """Say at the end what was not as in training, once for each column and kind; an error if strict."""
    collected: dict[tuple[str, str], TableWarning] = {}

    def collect(message: Warning | str, *args: object, **kwargs: object) -> None:
        if isinstance(message, TableWarning):
            key = message.column, message.done
            collected[key] = collected[key].merged(message) if key in collected else message
        else:
            before(message, *args, **kwargs)  # type: ignore[arg-type]

    with warnings.catch_warnings():
        before = warnings.showwarning
        warnings.simplefilter("error" if strict else "always", TableWarning)
        warnings.showwarning = collect
        yield
    for warning in collected.values():
        say(str(warning))


@contextmanager
def said() -> Iterator[None]:
    """Say warnings as sentences, each once."""
    once = functools.cache(say)
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *args, **kwargs: once(str(message))
        yield


# ------------------------------------------------------------------------------------ checks before any work


def table_file(context: typer.Context, given: Path) -> Path:
    """The file that a command reads, more than once; of standard input a copy that goes when it ends."""
    if str(given) != "-":
        return given
    copy = Path(context.with_resource(tempfile.TemporaryDirectory())) / "stdin"
    with copy.open("wb") as file:
        shutil.copyfileobj(sys.stdin.buffer, file)
    return copy


def check_table(data: Path, wanted: Sequence[str] = (), unusual: bool = True) -> tuple[str, ...]:
    """Refuse a file that is none, or a text file without a wanted column; the names that a text file has.

    :param unusual: say what is unusual about the file.
    """
    check_file(data)
    if is_parquet(data):
        return ()
    layout = Layout.of(data)
    if layout.header:
        check_present(data, layout.header, wanted)
    if unusual and layout.notes:
        say(f"{data} is read as a table {', '.join(layout.notes)}.")
    return layout.header


def check_model(folder: Path, with_target: bool = False) -> list[str]:
    """Refuse a folder without a model; the columns that its tables must have, if its file tells them."""
    if not (folder / "model.json").is_file():
        what = (
            "has no model.json" if folder.is_dir() else "is a file" if folder.exists() else "does not exist"
        )
        raise TableError(f"{folder} {what}; give a folder that `varprop fit` wrote.")
    try:
        kept = json.loads((folder / "model.json").read_text(encoding="utf-8"))["preprocessing"]
        kinds = [kind for part in ("numbers", "dates", "categories") for kind in kept["encoder"][part]]
        return [kind["name"] for kind in kinds] + (kept["target"]["names"] if with_target else [])
    except (OSError, ValueError, KeyError, TypeError):
        return []  # damaged, or of an earlier version: loading it tells


def check_free(out: Path, overwrite: bool, is_folder: bool = False) -> None:
    """Refuse a place that exists or cannot be written to."""
    if out.exists() and (not overwrite or out.is_dir() != is_folder):
        remedy = ", or --overwrite to replace it" if out.is_dir() == is_folder else ""
        raise FileExistsError(
            f"{out} exists{' and is a folder' * (out.is_dir() and not is_folder)}; "
            f"give another --out{remedy}."
        )
    folder = next(parent for parent in out.absolute().parents if parent.exists())
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise OSError(
            f"{out} cannot be written: {folder} is {'not writable' if folder.is_dir() else 'not a folder'}."
        ) from error


# ----------------------------------------------------------------------------------------------------- output


@contextmanager
def progress(quiet: bool) -> Iterator[Callable[[str], None]]:
    console = Console(stderr=True)
    # rich 13 ends a bar with an empty line even if it is disabled.
    if quiet or not console.is_terminal:
        yield lambda text: None
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console) as shown:
        task = shown.add_task("")
        yield lambda text: shown.update(task, description=text)


def print_table(title: str, rows: Rows, heads: Sequence[str] = ()) -> None:
    """A table with a name and a value in each row, or with two values under `heads`."""
    table = Table(title=title, title_justify="left", show_header=bool(heads))
    table.add_column(style="dim")
    for head in heads or ("",):
        table.add_column(head)
    for name, value in rows.items():
        table.add_row(name, *((value,) if isinstance(value, str) else value))
    # A pipe has no width; a narrow guess would cut numbers in two.
    wide = None if Console().is_terminal else 120
    Console(width=wide).print(table)


def places(names: Sequence[str]) -> str:
    shown = ", ".join(f"{i} {name or '(missing)'}" for i, name in enumerate(names[:SHOWN]))
    return shown + ", …" * (len(names) > SHOWN)


def shown(value: float) -> str:
    """A plain number with four digits: 31,200 rather than 3.12e+04."""
    if isinstance(value, int) or 1e4 <= abs(value) < 1e15:
        return f"{value:,.0f}"
    return f"{value:.4g}"

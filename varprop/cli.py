"""The command line: varprop fit | predict | evaluate | report | export | demo."""

from __future__ import annotations

import functools
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, ParamSpec

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

P = ParamSpec("P")
app = typer.Typer(
    name="varprop",
    help="Predictions from a table that know how sure they are.",
    epilog="Start with: varprop fit data.csv --target price --out model",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class Task(str, Enum):
    """What is predicted: classes or numbers."""

    auto = "auto"
    regression = "regression"
    classification = "classification"


class MethodName(str, Enum):
    """How activations travel through the network."""

    cvbp = "cvbp"
    vbp = "vbp"
    dvi = "dvi"
    local_reparam = "local_reparam"
    deterministic = "deterministic"


Data = Annotated[Path, typer.Argument(help="Table: .csv, .tsv or .parquet.", show_default=False)]
Model = Annotated[Path, typer.Argument(help="Folder that `varprop fit` wrote.", show_default=False)]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what is at --out.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar.")]


def command(function: Callable[P, None]) -> Callable[P, None]:
    """A command whose failures are one sentence on stderr and exit code 2."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            function(*args, **kwargs)
        except (ValueError, OSError, ImportError, FloatingPointError, MemoryError) as error:
            if isinstance(error, BrokenPipeError):
                raise
            message = (
                f"{error.filename}: {error.strerror}."
                if isinstance(error, OSError) and error.filename
                else str(error)
            )
            typer.echo(f"varprop: {message.strip().splitlines()[0]}", err=True)
            raise typer.Exit(2) from None

    return app.command()(run)


@app.callback(invoke_without_command=True)
def version(
    show: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False,
) -> None:
    if show:
        from . import __version__

        typer.echo(f"varprop {__version__}")
        raise typer.Exit


@command
def fit(
    data: Data,
    target: Annotated[str, typer.Option(help="Column to predict.", show_default=False)],
    out: Annotated[Path, typer.Option(help="Folder for the model.")] = Path("model"),
    task: Annotated[
        Task, typer.Option(help="auto: text, and whole numbers with at most 10 values, are classes.")
    ] = Task.auto,
    method: Annotated[
        MethodName, typer.Option(help="How mean and variance pass through the network.")
    ] = MethodName.dvi,
    epochs: Annotated[
        int | None,
        typer.Option(min=1, help="Passes over the data; by default enough for its size.", show_default=False),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same model.")] = 0,
    holdout: Annotated[
        float, typer.Option(min=0.0, max=0.5, help="Share of the rows kept out of training to judge it.")
    ] = 0.1,
    ignore: Annotated[
        list[str] | None,
        typer.Option(help="Column to leave out; may be given several times.", show_default=False),
    ] = None,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
) -> None:
    """Train a network to predict one column of a table from the others.

    Numbers are scaled, categories become indicators, missing values are filled in; all of it is kept with the model.
    """
    _check_free(out, overwrite, is_folder=True)
    from .inspect import metrics
    from .table import model as tabular
    from .table.encoding import Encoder, check_present, read

    began = time.perf_counter()
    table = read(data)
    check_present(data, table.columns, (target, *(ignore or ())))
    table = table.drop(columns=list(ignore or ()))
    column = tabular.Target.fit(table[target], task.value)
    # Of the whole table, so that a category of the rows held out is known; no target is looked at.
    encoder = Encoder.fit(table.drop(columns=target))
    training, held_out = tabular.split(table, column, holdout, seed)
    read_by = time.perf_counter()
    options = {"method": method.value, "epochs": epochs or "auto", "random_state": seed}
    model = tabular.train(
        training, column, encoder, verbose=not quiet and Console(stderr=True).is_terminal, **options
    )
    trained_by = time.perf_counter()
    model.save(out)
    rows = {
        "table": f"{len(table):,} rows, {len(model.types)} columns used",
        "task": "regression" if column.classes is None else f"classification, {len(column.classes)} classes",
        "method": f"{method.value}, {len(model.history_)} epochs",
        "time": f"{read_by - began:.1f} s reading, {trained_by - read_by:.1f} s training",
    }
    if len(held_out):
        y = column.encode(held_out[target])
        rows |= {
            f"held out: {name}": _shown(value)
            for name, value in metrics.summary(model.predictive(held_out), y).items()
        }
    _print(f"{target} → {out}", rows)


@command
def predict(
    model: Model,
    data: Data,
    out: Annotated[
        Path | None,
        typer.Option(help="CSV file for the predictions; standard output by default.", show_default=False),
    ] = None,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
) -> None:
    """Predict every row of a table, however long, with its uncertainty.

    Numbers: mean, std, lower and upper (90 % interval), epistemic and aleatoric (the two parts of the variance).
    Classes: class, p_<name> of each, entropy, mutual_information (the epistemic part of the entropy).
    """
    if out is not None:
        _check_free(out, overwrite)
    from .io.storage import replacing
    from .table.model import TableModel

    loaded = TableModel.load(model)
    target: Any = nullcontext(sys.stdout.buffer) if out is None else replacing(out)
    done = 0
    with _progress(quiet) as told, target as file:
        for part in loaded.stream(data):
            part.to_csv(file, index=False, header=done == 0)
            done += len(part)
            told(f"{done:,} rows")


@command
def evaluate(model: Model, data: Data) -> None:
    """Measure a model on a table that has the target column, and audit its posterior on the first rows."""
    from .inspect import metrics
    from .posterior import posteriors
    from .table.encoding import chunks

    loaded, p, y = _judged(model, data)
    rows = {name: _shown(value) for name, value in metrics.summary(p, y).items()}
    if next(posteriors(loaded.elbo.net), None) is not None:
        first = next(chunks(data, {**loaded.types, loaded.target.name: "str"}, rows=1000))
        rows["audit"] = loaded.audit(first).verdict
    _print(f"{model} on {data}", rows)


@command
def report(
    model: Model,
    data: Data,
    out: Annotated[Path, typer.Option(help="HTML file for the report.")] = Path("report.html"),
    overwrite: Overwrite = False,
) -> None:
    """Write one HTML page with pictures of how a model does on a table that has the target column."""
    _check_free(out, overwrite)
    from .reporting import report as write
    from .table.encoding import read
    from .table.model import TableModel

    loaded = TableModel.load(model)
    table = read(data, {**loaded.types, loaded.target.name: "str"})
    write(loaded, table[list(loaded.types)], table[loaded.target.name], out)
    typer.echo(out)


@command
def export(
    model: Model,
    out: Annotated[Path, typer.Option(help="ONNX file for the graph.")] = Path("model.onnx"),
    overwrite: Overwrite = False,
) -> None:
    """Write a model as an ONNX graph that takes rows as they are and predicts in the target's own units.

    Its input x has one column for each column of the table that is used. Numbers are given as they are, NaN where missing; categories as
    their place, from 0, in the list that the file's metadata hold. A place that is not in the list gives NaN.
    """
    _check_free(out, overwrite)
    from .io.program import export_onnx
    from .table.model import TableModel

    loaded = TableModel.load(model)
    export_onnx(loaded, out)
    rows = {}
    for i, column in enumerate(loaded.encoder.columns):
        categories = getattr(column, "categories", None)
        places = "a number, NaN if missing" if categories is None else _places(categories)
        rows[f"x[:, {i}]  {column.name}"] = places
    if loaded.target.classes is None:
        rows[f"outputs for {loaded.target.name}"] = "mean, variance, epistemic, aleatoric"
    else:
        rows[f"outputs for {loaded.target.name}"] = (
            f"probabilities ({_places(loaded.target.classes)}), entropy, mutual_information"
        )
    _print(f"{model} → {out}", rows)


@command
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the report and the figure.")] = Path("demo"),
) -> None:
    """Fit two data sets that scikit-learn carries, show what uncertainty adds, write a report and draw a figure."""
    from .demo import demo as run

    run(out)


def main() -> None:
    app()


def _judged(folder: Path, data: Path) -> tuple[Any, Any, Any]:
    """A model, its predictions for a table and the truth."""
    import torch

    from .predictive import concatenate
    from .table.encoding import chunks
    from .table.model import TableModel

    model = TableModel.load(folder)
    parts = [
        (model.predictive(part), model.target.encode(part[model.target.name]))
        for part in chunks(data, {**model.types, model.target.name: "str"})
    ]
    return model, concatenate([p for p, _ in parts]), torch.cat([y for _, y in parts])


def _check_free(out: Path, overwrite: bool, is_folder: bool = False) -> None:
    """Refuse, before any work is done, a place that is taken or cannot be written to."""
    if out.exists() and (not overwrite or out.is_dir() != is_folder):
        remedy = ", or --overwrite to replace it" if out.is_dir() == is_folder else ""
        raise FileExistsError(
            f"{out} exists{' and is a folder' * (out.is_dir() and not is_folder)}; give another --out{remedy}."
        )
    folder = next(parent for parent in out.absolute().parents if parent.exists())
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise OSError(
            f"{out} cannot be written: {folder} is {'not writable' if folder.is_dir() else 'not a folder'}."
        ) from error


@contextmanager
def _progress(quiet: bool) -> Iterator[Callable[[str], None]]:
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=quiet or not console.is_terminal) as progress:
        task = progress.add_task("")
        yield lambda text: progress.update(task, description=text)


def _places(names: Sequence[str], most: int = 12) -> str:
    shown = ", ".join(f"{i} {name or '(missing)'}" for i, name in enumerate(names[:most]))
    return shown + ", …" * (len(names) > most)


def _print(title: str, rows: dict[str, str]) -> None:
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column(style="dim")
    table.add_column()
    for name, value in rows.items():
        table.add_row(name, value)
    Console().print(table)


def _shown(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"

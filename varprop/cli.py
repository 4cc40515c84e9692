"""The command line: varprop fit | predict | evaluate | report | export | demo."""

from __future__ import annotations

import functools
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import Enum
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, ParamSpec

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from .table.columns import Task

if TYPE_CHECKING:
    from torch import Tensor

    from .predictive import Predictive
    from .table.model import TableModel

P = ParamSpec("P")
SHOWN = 12
"""As many names are listed."""
app = typer.Typer(
    name="varprop",
    help="Fit a table, and predict with calibrated uncertainty.",
    epilog="Start with: varprop fit data.csv --target price --out model",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class MethodName(str, Enum):
    """How mean and variance pass through the network."""

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

    Numbers are scaled, categories become indicators and missing values are filled in; the model keeps all of
    this.
    """
    _check_free(out, overwrite, is_folder=True)
    from .table import model as tabular
    from .table.columns import TargetColumn
    from .table.encoding import Encoder
    from .table.reading import check_present, read

    began = time.perf_counter()
    table = read(data)
    check_present(data, table.columns, (target, *(ignore or ())))
    if target in (ignore or ()):
        raise ValueError(f"column {target!r} is the target and cannot be ignored; take it out of --ignore.")
    table = table.drop(columns=list(ignore or ()))
    column = TargetColumn.fit(table[target], task)
    # Fitted to the whole table, so that the categories of held-out rows are known; the target is not used.
    encoder = Encoder.fit(table.drop(columns=target))
    training, held_out = tabular.split(table, column, holdout, seed)
    read_by = time.perf_counter()
    model = tabular.train(
        training,
        column,
        encoder,
        method=method.value,
        epochs=epochs or "auto",
        random_state=seed,
        verbose=not quiet and Console(stderr=True).is_terminal,
    )
    trained_by = time.perf_counter()
    model.save(out)
    rows = {
        "table": f"{len(table):,} rows, {len(model.types)} columns used",
        "task": "regression" if column.classes is None else f"classification, {len(column.classes)} classes",
        "method": f"{method.value}, {len(model.history)} epochs",
        "time": f"{read_by - began:.1f} s reading, {trained_by - read_by:.1f} s training",
    }
    if len(held_out):
        judged = model.predict(held_out), model.values(held_out)
        rows |= {f"held out: {name}": value for name, value in _measures(*judged).items()}
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
    """Predict every row of a table of any length, with its uncertainty.

    Numbers: mean, std, lower and upper (90 % interval), epistemic and aleatoric (the two parts of the
    variance). Classes: class, p_<name> of each, entropy, mutual_information (the epistemic part of the
    entropy).
    """
    if out is not None:
        _check_free(out, overwrite)
    from .io.storage import replacing
    from .table.model import TableModel

    loaded = TableModel.load(model)
    target: AbstractContextManager[IO[bytes]] = (
        nullcontext(sys.stdout.buffer) if out is None else replacing(out)
    )
    done = 0
    with _progress(quiet) as show, target as file:
        for part in loaded.stream(data):
            part.to_csv(file, index=False, header=done == 0)
            done += len(part)
            show(f"{done:,} rows")


@command
def evaluate(model: Model, data: Data) -> None:
    """Measure a model on a table that has the target column, and audit it on the first 1,000 rows."""
    from .posterior import posteriors
    from .table.model import TableModel
    from .table.reading import chunks

    loaded = TableModel.load(model)
    rows = _measures(*_judged(loaded, data))
    if next(posteriors(loaded.model.elbo.net), None) is not None:
        first = next(chunks(data, loaded.types_with_target, rows=1000))
        rows["audit"] = loaded.audit(first).verdict
    _print(f"{model} on {data}", rows)


@command
def report(
    model: Model,
    data: Data,
    out: Annotated[Path, typer.Option(help="HTML file for the report.")] = Path("report.html"),
    overwrite: Overwrite = False,
) -> None:
    """Write one HTML page with figures of how a model does on a table that has the target column."""
    _check_free(out, overwrite)
    from .reporting import report as write
    from .table.model import TableModel
    from .table.reading import read

    loaded = TableModel.load(model)
    table = read(data, loaded.types_with_target)
    write(loaded, table[list(loaded.types)], loaded.truth(table), out)
    typer.echo(out)


@command
def export(
    model: Model,
    out: Annotated[Path, typer.Option(help="ONNX file for the graph.")] = Path("model.onnx"),
    overwrite: Overwrite = False,
) -> None:
    """Write a model as an ONNX graph that takes raw rows and predicts in the target's own unit.

    Its input x has one column for each column of the table that is used. A number is given unscaled, NaN
    where missing; a category by its place, from 0, in the list in the file's metadata. Any other place gives
    NaN.
    """
    _check_free(out, overwrite)
    from .io.program import export_onnx
    from .table.model import TableModel

    loaded = TableModel.load(model)
    export_onnx(loaded, out)
    rows = {}
    numeric = list(loaded.encoder.medians)
    if len(numeric) > SHOWN:
        rows[f"x[:, :{len(numeric)}]"] = f"{_places(numeric)}: numbers, NaN if missing"
    else:
        rows |= {f"x[:, {i}]  {name}": "a number, NaN if missing" for i, name in enumerate(numeric)}
    for i, (name, categories) in enumerate(loaded.encoder.categories.items(), len(numeric)):
        rows[f"x[:, {i}]  {name}"] = _places(categories)
    outputs = "mean, variance, epistemic, aleatoric"
    if loaded.target.classes is not None:
        outputs = f"probabilities ({_places(loaded.target.classes)}), entropy, mutual_information"
    rows[f"outputs for {loaded.target.name}"] = outputs
    _print(f"{model} → {out}", rows)


@command
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the report and the figure.")] = Path("demo"),
) -> None:
    """Fit two of scikit-learn's data sets, show what uncertainty adds, write a report and draw a figure."""
    from .demo import demo as run

    run(out)


def main() -> None:
    app()


def _judged(model: TableModel, data: Path) -> tuple[Predictive, Tensor]:
    """Predictions for a table, and the truth."""
    import torch

    from .predictive import concatenate
    from .table.reading import chunks

    parts = [(model.predict(part), model.values(part)) for part in chunks(data, model.types_with_target)]
    return concatenate([p for p, _ in parts]), torch.cat([y for _, y in parts])


def _measures(p: Predictive, y: Tensor) -> dict[str, str]:
    from .inspect import metrics

    return {name: _shown(value) for name, value in metrics.summary(p, y).items()}


def _check_free(out: Path, overwrite: bool, is_folder: bool = False) -> None:
    """Refuse, before any work is done, a place that exists or cannot be written to."""
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


@contextmanager
def _progress(quiet: bool) -> Iterator[Callable[[str], None]]:
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=quiet or not console.is_terminal) as progress:
        task = progress.add_task("")
        yield lambda text: progress.update(task, description=text)


def _places(names: Sequence[str]) -> str:
    shown = ", ".join(f"{i} {name or '(missing)'}" for i, name in enumerate(names[:SHOWN]))
    return shown + ", …" * (len(names) > SHOWN)


def _print(title: str, rows: dict[str, str]) -> None:
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column(style="dim")
    table.add_column()
    for name, value in rows.items():
        table.add_row(name, value)
    Console().print(table)


def _shown(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"

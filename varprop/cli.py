"""The command line: varprop fit | predict | evaluate | update | report | export | demo."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, ParamSpec

import typer

from .shell import (
    SHOWN,
    check_free,
    check_model,
    check_table,
    one_sentence,
    places,
    print_table,
    progress,
    say,
    shown,
    told,
)
from .table.messages import TableError, TableWarning
from .table.task import Task

if TYPE_CHECKING:
    import pandas as pd

    from .table.model import TableModel
    from .table.sampling import Sample
    from .table.scores import Scores

P = ParamSpec("P")
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


class NoiseName(str, Enum):
    """How targets scatter around their mean."""

    auto = "auto"
    constant = "constant"
    heteroscedastic = "heteroscedastic"
    student = "student"


class ClassWeight(str, Enum):
    """How much each class counts in training."""

    none = "none"
    balanced = "balanced"


Data = Annotated[
    Path, typer.Argument(help="Table: CSV, TSV or Parquet, recognised by its content.", show_default=False)
]
Model = Annotated[Path, typer.Argument(help="Folder that `varprop fit` wrote.", show_default=False)]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what is at --out.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar.")]
Strict = Annotated[
    bool, typer.Option("--strict", help="Refuse values that training never had, such as a new category.")
]
Columns = list[str] | None


def command(function: Callable[P, None]) -> Callable[P, None]:
    return app.command()(one_sentence(function))


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
    target: Annotated[
        list[str],
        typer.Option(help="Column to predict; several numbers: --target a --target b.", show_default=False),
    ],
    out: Annotated[Path, typer.Option(help="Folder for the model.")] = Path("model"),
    task: Annotated[
        Task, typer.Option(help="auto: text, and a few small whole numbers such as 0, 1, 2, are classes.")
    ] = Task.auto,
    method: Annotated[
        MethodName, typer.Option(help="How mean and variance pass through the network.")
    ] = MethodName.dvi,
    hidden: Annotated[
        str,
        typer.Option(
            help="Units of the hidden layers, such as 50 or 100,50; auto: by the size of the table."
        ),
    ] = "auto",
    prior: Annotated[
        float | None,
        typer.Option(
            min=1e-6,
            help="Prior variance of the weights into a unit, times their number; by default 8, or 4 for "
            "classes.",
            show_default=False,
        ),
    ] = None,
    noise: Annotated[
        NoiseName, typer.Option(help="Of numbers; auto: the kind that suits rows outside training best.")
    ] = NoiseName.auto,
    pieces: Annotated[
        str,
        typer.Option(
            help="Pieces of each column of numbers, as further inputs, or 0; auto: what suits rows outside "
            "training best."
        ),
    ] = "auto",
    folds: Annotated[
        int,
        typer.Option(
            min=1,
            help="Parts of the rows; each network is trained without one, which judges it. 1: all rows.",
        ),
    ] = 5,
    replicas: Annotated[int, typer.Option(min=1, help="Networks for each fold, from other starts.")] = 1,
    class_weight: Annotated[
        ClassWeight, typer.Option(help="balanced: every class counts the same, however rare.")
    ] = ClassWeight.none,
    epochs: Annotated[
        int | None,
        typer.Option(min=1, help="Passes over the data; by default enough for its size.", show_default=False),
    ] = None,
    devices: Annotated[
        int,
        typer.Option(min=1, help="Processes that share the training of a table with 5,000 rows or more."),
    ] = 1,
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same model.")] = 0,
    holdout: Annotated[
        float,
        typer.Option(min=0.0, max=0.5, help="Share of the rows to judge it by; with folds none is needed."),
    ] = 0.0,
    refit: Annotated[
        bool, typer.Option(help="After judging it by the rows held out, train again on all rows.")
    ] = True,
    ignore: Annotated[
        Columns,
        typer.Option(help="Column to leave out; may be given several times.", show_default=False),
    ] = None,
    keep: Annotated[
        Columns,
        typer.Option(
            help="Column to use even if it seems to be an identifier or free text.", show_default=False
        ),
    ] = None,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
) -> None:
    """Train a network to predict one column of a table, or several, from the others.

    Numbers are scaled, categories become indicators, dates become parts and missing values are filled in; the
    model keeps all of this. What is left out or recognised is said.
    """
    check_free(out, overwrite, is_folder=True)
    target, ignored, kept = list(dict.fromkeys(target)), ignore or [], keep or []
    if both := [name for name in target if name in ignored]:
        raise TableError(f"column {both[0]!r} is the target and cannot be ignored; take it out of --ignore.")
    hidden_layer_sizes, pieces_of_columns = _sizes(hidden), _pieces(pieces)
    header = check_table(data, (*target, *ignored, *kept))
    if header and not set(header) - {*target, *ignored}:
        raise TableError("every column besides the target is ignored; nothing is left to predict it from.")
    from .table import model as tabular
    from .table.cache import LongTable
    from .table.layout import check_present
    from .table.reading import chunks
    from .table.target import TargetColumn, with_target

    began = time.perf_counter()
    sample = _sample(chunks(data), data, target, seed)
    table = sample.table
    check_present(data, list(table.columns), (*target, *ignored, *kept))
    complete = with_target(table.drop(columns=ignored), target, task)
    _say_left_out(table, complete)
    column = TargetColumn.fit(complete, target, task)
    options: dict[str, Any] = {
        "method": method.value,
        "hidden_layer_sizes": hidden_layer_sizes,
        "n_replicas": replicas,
        "folds": folds,
        "epochs": epochs or "auto",
        "devices": devices,
        "random_state": seed,
        "verbose": not quiet and sys.stderr.isatty(),
    }
    if prior is not None:
        options["prior"] = prior
    if column.classes is None:
        options |= {"noise": noise.value, "pieces": pieces_of_columns}
    options |= {"balanced": class_weight is ClassWeight.balanced, "keep": kept}
    training, held_out = tabular.split(complete, column, holdout, seed)
    whole = None if sample.is_whole else LongTable(data, sample.rows, held_out.index)
    model = tabular.train(training, column, whole=whole, say=say, **options)
    rows: dict[str, str | tuple[str, str]] = {
        "table": f"{(len(complete) if sample.is_whole else sample.rows):,} rows, "
        f"{len(model.types)} columns used",
        "task": "regression" if column.classes is None else f"classification, {len(column.classes)} classes",
    }
    judged: dict[str, str | tuple[str, str]] = {}
    heads: tuple[str, ...] = ()
    if len(held_out):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", TableWarning)
            found = model.scores(held_out)
        heads, judged = _compared(model, found, "held out: ")
        if refit:
            whole = None if whole is None else replace(whole, without=held_out.index[:0])
            model = tabular.train(complete, column, whole=whole, **options)
    elif model.out_of_fold is not None:
        heads, judged = _compared(model, model.out_of_fold, "out of fold: ")
    model.save(out)
    rows |= {
        "method": f"{method.value}, {len(model.model.members)} networks, {len(model.history)} epochs",
        **model.choices,
        "time": f"{time.perf_counter() - began:.1f} s",
    }
    print_table(f"{column.name} → {out}", rows | judged, heads)


@command
def predict(
    model: Model,
    data: Data,
    out: Annotated[
        Path | None,
        typer.Option(help="CSV file for the predictions; standard output by default.", show_default=False),
    ] = None,
    level: Annotated[
        float,
        typer.Option(min=0.001, max=0.999, help="Share of the targets that the intervals should contain."),
    ] = 0.9,
    id: Annotated[
        Columns,
        typer.Option(help="Column to repeat before the predictions; may be given several times."),
    ] = None,
    strict: Strict = False,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
) -> None:
    """Predict every row of a table of any length, with its uncertainty.

    Numbers: mean, std, lower and upper (the interval), epistemic and aleatoric (the two parts of the
    variance). Classes: class, p_<name> of each, entropy, mutual_information (the epistemic part of the
    entropy).
    """
    if out is not None:
        check_free(out, overwrite)
    ids = id or []
    check_table(data, [*ids, *check_model(model)])
    from .io.storage import replacing

    loaded = _load(model)
    target: AbstractContextManager[IO[bytes]] = (
        nullcontext(sys.stdout.buffer) if out is None else replacing(out)
    )
    done = 0
    with told(strict), progress(quiet) as show, target as file:
        for part in loaded.stream(data, ids, level):
            part.to_csv(file, index=False, header=done == 0)
            done += len(part)
            show(f"{done:,} rows")


@command
def evaluate(model: Model, data: Data, strict: Strict = False) -> None:
    """Measure a model on a table that has the target column, and audit it on the first 1,000 rows."""
    check_table(data, check_model(model, with_target=True))
    from .posterior import posteriors

    loaded = _load(model)
    with told(strict):
        complete = _judges(loaded, data)
        heads, rows = _compared(loaded, loaded.scores(complete))
        if next(posteriors(loaded.model.elbo.net), None) is not None:
            rows["audit"] = loaded.audit(complete[:1000]).verdict
    print_table(f"{model} on {data}", rows, heads)


@command
def update(
    model: Model,
    data: Data,
    epochs: Annotated[
        int | None,
        typer.Option(min=1, help="Passes over the new rows; by default enough.", show_default=False),
    ] = None,
    strict: Strict = False,
    quiet: Quiet = False,
) -> None:
    """Let a model learn the rows of another table with the target column, in place.

    What it knew becomes its prior, so that no earlier row is needed. The folder holds the old model until the
    new one is complete. The scores are those of the new rows; only the ones before are of rows that the model
    had not seen.
    """
    check_table(data, check_model(model, with_target=True))
    check_free(model / "model.json", overwrite=True)
    from .table.reading import chunks

    loaded = _load(model)
    with told(strict):
        complete = _judges(loaded, data)
        before = loaded.scores(complete)
        verbose = not quiet and sys.stderr.isatty()
        parts = chunks(data, loaded.types_with_target)
        updated = loaded.updated(parts, epochs=epochs or "auto", verbose=verbose)
        after = updated.scores(complete)
    updated.save(model)
    rows: dict[str, str | tuple[str, str]] = {"rows used": f"{updated.rows - loaded.rows:,.0f}"}
    rows |= {name: (shown(value), shown(after[name][0])) for name, (value, _) in before.items()}
    print_table(f"{model} with {data}", rows, ("before", "after"))


@command
def report(
    model: Model,
    data: Data,
    out: Annotated[Path, typer.Option(help="HTML file for the report.")] = Path("report.html"),
    strict: Strict = False,
    overwrite: Overwrite = False,
) -> None:
    """Write one HTML page with figures of how a model does on a table that has the target column."""
    check_free(out, overwrite)
    check_table(data, check_model(model, with_target=True))
    from .reporting import report as write

    loaded = _load(model)
    with told(strict):
        table = _judges(loaded, data)
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
    where missing; a date by its days since 1970-01-01; a category by its place, from 0, in the list in the
    file's metadata, and one that is not in the list by -1.
    """
    check_free(out, overwrite)
    check_model(model)
    from .io.program import export_onnx
    from .table.kinds import Date

    loaded = _load(model)
    export_onnx(loaded, out)
    rows: dict[str, str | tuple[str, str]] = {}
    numbers, categories = loaded.encoder.numbers, loaded.encoder.categories
    if len(numbers) > SHOWN:
        rows[f"x[:, :{len(numbers)}]"] = f"{places([n.name for n in numbers])}: numbers, NaN if missing"
    else:
        for i, number in enumerate(numbers):
            what = "days since 1970-01-01" if isinstance(number, Date) else "a number"
            rows[f"x[:, {i}]  {number.name}"] = f"{what}, NaN if missing"
    for i, category in enumerate(categories, len(numbers)):
        rows[f"x[:, {i}]  {category.name}"] = f"{places(category.categories)}, -1 any other"
    outputs = "mean, variance, epistemic, aleatoric"
    if loaded.target.classes is not None:
        outputs = f"probabilities ({places(loaded.target.classes)}), entropy, mutual_information"
    rows[f"outputs for {loaded.target.name}"] = outputs
    print_table(f"{model} → {out}", rows)


@command
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the report and the figure.")] = Path("demo"),
) -> None:
    """Fit two of scikit-learn's data sets, show what uncertainty adds, write a report and draw a figure."""
    from .demo import demo as run

    run(out)


def main() -> None:
    app()


def _load(folder: Path) -> TableModel:
    from .table.model import TableModel

    return TableModel.load(folder)


def _pieces(given: str) -> int | str:
    if given != "auto" and not given.isdecimal():
        raise TableError(f"--pieces must be auto or a whole number such as 8, got {given!r}.")
    return given if given == "auto" else int(given)


def _sizes(hidden: str) -> str | list[int]:
    if hidden == "auto":
        return hidden
    sizes = hidden.split(",")
    if not all(size.strip().isdecimal() and int(size) > 0 for size in sizes):
        raise TableError(f"--hidden {hidden!r} is no list of sizes; give numbers such as 50 or 100,50.")
    return [int(size) for size in sizes]


def _judges(model: TableModel, data: Path) -> pd.DataFrame:
    """The rows that have the target, or of a long table some of them."""
    from .table.reading import chunks

    table = _sample(chunks(data, model.types_with_target), data).table
    complete = model.target.complete(table)
    if not len(complete):
        raise TableError(f"{data} has no row with a value of {model.target.name!r}; nothing can be measured.")
    _say_left_out(table, complete)
    return complete


def _sample(parts: Iterable[pd.DataFrame], data: Path, target: Sequence[str] = (), seed: int = 0) -> Sample:
    """The rows of a table, or of a long one some that are drawn at random, which is said."""
    from .table.sampling import sampled

    sample = sampled(parts, target[0] if len(target) == 1 else None, seed)
    if not sample.is_whole:
        say(f"{data} has {sample.rows:,} rows; scores come from {len(sample.table):,}, drawn at random.")
    return sample


def _say_left_out(table: pd.DataFrame, complete: pd.DataFrame) -> None:
    if missing := len(table) - len(complete):
        say(f"left out: {missing:,} of {len(table):,} rows, which have no target.")


def _compared(
    model: TableModel, found: Scores, before: str = ""
) -> tuple[tuple[str, ...], dict[str, str | tuple[str, str]]]:
    """Scores beside those of the baseline, where it is known, and the heads of both columns."""
    if model.baseline is None:
        return (), {f"{before}{name}": shown(value) for name, (value, _) in found.items()}
    pairs: dict[str, str | tuple[str, str]] = {
        f"{before}{name}": (shown(value), "" if plain is None else shown(plain))
        for name, (value, plain) in found.items()
    }
    return ("model", model.baseline.name), pairs

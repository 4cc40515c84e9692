"""The command line: varprop fit | predict | evaluate | update | report | export | demo."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from enum import Enum
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, ParamSpec

import typer

from .shell import (
    SHOWN,
    Rows,
    check_free,
    check_model,
    check_table,
    one_sentence,
    places,
    print_table,
    progress,
    shown,
    table_file,
    told,
)
from .table.layout import PARQUET
from .table.messages import TableError
from .table.task import Task

if TYPE_CHECKING:
    from .table.model import TableModel

P = ParamSpec("P")
app = typer.Typer(
    name="varprop",
    help="Fit a table, and predict with calibrated uncertainty.",
    epilog="Start with: varprop fit data.csv --target price --out model",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
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
    Path,
    typer.Argument(
        callback=table_file,
        help="Table: CSV, TSV or Parquet, recognised by its content; - is standard input.",
        show_default=False,
    ),
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
            help="Prior variance of the weights into a unit, times their number; by default 2, or 1 for "
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
    from .fitting import fitted

    began = time.perf_counter()
    options: dict[str, Any] = {
        "method": method.value,
        "hidden_layer_sizes": hidden_layer_sizes,
        "pieces": pieces_of_columns,
        "n_replicas": replicas,
        "folds": folds,
        "epochs": epochs or "auto",
        "devices": devices,
        "random_state": seed,
        "verbose": not quiet and sys.stderr.isatty(),
    }
    if prior is not None:
        options["prior"] = prior
    judged = fitted(
        data,
        target,
        task,
        options,
        of_numbers={"noise": noise.value},
        of_classes={"class_weight": None if class_weight is ClassWeight.none else class_weight.value},
        ignore=ignored,
        keep=kept,
        holdout=holdout,
        refit=refit,
        seed=seed,
    )
    trained, classes = judged.model, judged.model.target.classes
    columns = len(trained.types)
    trained.save(out)
    rows: Rows = {
        "table": f"{judged.rows:,} rows, {columns:,} column{'s' * (columns != 1)} used",
        "task": "regression" if classes is None else f"classification, {len(classes)} classes",
        "method": f"{method.value}, {len(trained.model.members)} networks, {len(trained.history)} epochs",
        **trained.choices,
        "time": f"{time.perf_counter() - began:.1f} s",
    }
    print_table(f"{trained.target.name} → {out}", rows | judged.scores, judged.heads)


@command
def predict(
    model: Model,
    data: Data,
    out: Annotated[
        Path | None,
        typer.Option(
            help="CSV file for the predictions, packed if it ends in .gz; standard output by default.",
            show_default=False,
        ),
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
    variance). Classes: class, `p_<name>` of each, entropy, mutual_information (the epistemic part of the
    entropy).
    """
    if out is not None:
        check_free(out, overwrite)
        if out.suffix.lower() in PARQUET:
            raise TableError(
                f"predictions are written as CSV, not as {out.suffix}; end --out in .csv or .csv.gz."
            )
    ids = id or []
    check_table(data, [*ids, *check_model(model)])
    from .io.storage import replacing
    from .table.reading import COMPRESSIONS

    packed = None if out is None else COMPRESSIONS.get(out.suffix.lower())
    loaded = _load(model)
    target: AbstractContextManager[IO[bytes]] = (
        nullcontext(sys.stdout.buffer) if out is None else replacing(out)
    )
    done = 0
    with told(strict), progress(quiet) as show, target as file:
        for part in loaded.stream(data, ids, level):
            part.to_csv(file, index=False, header=done == 0, compression=packed)
            done += len(part)
            show(f"{done:,} rows")


@command
def evaluate(model: Model, data: Data, strict: Strict = False) -> None:
    """Measure a model on a table that has the target column, and audit it on the first 1,000 rows."""
    check_table(data, check_model(model, with_target=True))
    from .judging import compared, judges
    from .posterior import posteriors

    loaded = _load(model)
    with told(strict):
        complete = judges(loaded, data)
        heads, rows = compared(loaded, loaded.scores(complete))
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
    from .judging import judges
    from .table.reading import chunks

    loaded = _load(model)
    with told(strict):
        complete = judges(loaded, data)
        before = loaded.scores(complete)
        verbose = not quiet and sys.stderr.isatty()
        parts = chunks(data, loaded.types_with_target)
        updated = loaded.updated(parts, epochs=epochs or "auto", verbose=verbose)
        after = updated.scores(complete)
    updated.save(model)
    rows: Rows = {"rows used": f"{updated.rows - loaded.rows:,.0f}"}
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
    from .judging import judges
    from .reporting import report as write

    loaded = _load(model)
    with told(strict):
        table = judges(loaded, data)
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

    loaded = _load(model)
    export_onnx(loaded, out)
    print_table(f"{model} → {out}", _inputs_and_outputs(loaded))


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


def _inputs_and_outputs(model: TableModel) -> Rows:
    """What each column of an exported graph's input holds, and what the graph returns."""
    from .table.kinds import Date

    rows: Rows = {}
    numbers, categories = model.encoder.numbers, model.encoder.categories
    if len(numbers) > SHOWN:
        rows[f"x[:, :{len(numbers)}]"] = f"{places([n.name for n in numbers])}: numbers, NaN if missing"
    else:
        for i, number in enumerate(numbers):
            what = "days since 1970-01-01" if isinstance(number, Date) else "a number"
            rows[f"x[:, {i}]  {number.name}"] = f"{what}, NaN if missing"
    for i, category in enumerate(categories, len(numbers)):
        rows[f"x[:, {i}]  {category.name}"] = f"{places(category.categories)}, -1 any other"
    outputs = "mean, variance, epistemic, aleatoric"
    if model.target.classes is not None:
        outputs = f"probabilities ({places(model.target.classes)}), entropy, mutual_information"
    rows[f"outputs for {model.target.name}"] = outputs
    return rows


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

"""Tables against what users would pick, all with their defaults: `python -m experiments.tabular`.

    python -m experiments.tabular --half report --rows varprop boosting
    python -m experiments.tabular --tables diabetes penguins --splits 1

One cell for each row and table; cells that exist are not computed again.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.exceptions import ConvergenceWarning

from . import cells, tabular_data, tabular_ranks, tabular_rows, tabular_scores
from .tabular_data import Table

PACKAGES = {
    "boosting-conformal": ("scikit-learn", "mapie"),
    "ngboost": ("ngboost",),
    "catboost": ("catboost",),
    tabular_rows.OURS: ("varprop",),
}
"""What made a row; scikit-learn the others."""


def possible(table: Table, train: np.ndarray) -> list[str]:
    """Those for this kind of table and this many rows; the cost of a Gaussian process is cubic in them."""
    names = tabular_rows.NUMBERS if table.kind == "regression" else tabular_rows.CLASSES
    return [name for name in names if name != "gp" or len(train) <= tabular_rows.MOST_ROWS_OF_GP]


def evaluate(row: str, table: Table, train: np.ndarray, test: np.ndarray, seed: int) -> dict[str, Any]:
    """The scores of one split, and the processor time of the fit in seconds."""
    x, x_test = table.x.iloc[train], table.x.iloc[test]
    start = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # 200 iterations are the networks' default
        warnings.filterwarnings("ignore", "Found unknown categories", UserWarning)
        if table.kind == "regression":
            predict = tabular_rows.NUMBERS[row](x, table.y[train], seed)
            seconds = time.process_time() - start
            scores = tabular_scores.regression(predict(x_test), table.y[test])
        else:
            classes, y = np.unique(table.y, return_inverse=True)
            probabilities = tabular_rows.CLASSES[row](x, table.y[train], seed)
            seconds = time.process_time() - start
            assert len(np.unique(y[train])) == len(classes)
            scores = tabular_scores.classes(probabilities(x_test), y[test])
    return {**scores, "seconds": seconds}


def run(row: str, table: Table, splits: int | None, out: Path) -> None:
    """Compute a cell, unless it exists already."""
    n = min(splits or tabular_data.count(table), tabular_data.count(table))
    parts = list(tabular_data.splits(table, n))
    if row not in possible(table, parts[0][0]):
        return
    configuration = {
        "row": row,
        "table": table.name,
        "half": tabular_data.HALVES[table.name],
        "splits": n,
        "training_rows": len(parts[0][0]),
        "packages": {name: version(name) for name in PACKAGES.get(row, ("scikit-learn",))},
    }
    path = out / row / f"{table.name}.json"
    if cells.finished(path, configuration):
        return
    results = [evaluate(row, table, *part, seed) for seed, part in enumerate(parts)]
    cells.write(path, configuration, splits=results)
    first = "rmse" if table.kind == "regression" else "error"
    shown = "   ".join(
        f"{name.replace('_', '-')} {np.mean([r[name] for r in results]):.4g}"
        for name in (first, "log_likelihood", "seconds")
        if results[0][name] is not None
    )
    print(f"{row:18} {table.name:13} {n} splits   {shown}", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.tabular", description=__doc__.split("\n")[0])
    names, rows = tabular_data.NAMES, tabular_rows.ROWS
    parser.add_argument("--tables", nargs="+", choices=names, default=names, metavar="NAME")
    parser.add_argument("--rows", nargs="+", choices=rows, default=rows, metavar="ROW")
    parser.add_argument("--splits", type=int, help="use only the first splits")
    parser.add_argument("--half", choices=("choose", "report"), help="default: both")
    parser.add_argument("--out", type=Path, default=cells.RESULTS / "tabular", help="folder for the results")
    options = parser.parse_args(arguments)
    chosen = [name for name in options.tables if options.half in (None, tabular_data.HALVES[name])]
    for name in chosen:
        table = tabular_data.load(name)
        for row in options.rows:
            run(row, table, options.splits, options.out)
    print(tabular_ranks.ranking(options.out))
    if options.out == cells.RESULTS / "tabular":
        tabular_ranks.draw(options.out)


if __name__ == "__main__":
    main()

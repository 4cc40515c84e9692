"""Regression in gaps of the data: the estimators' default against a Gaussian process.

    python -m experiments.gaps

The middle third of one feature after another is left out of the training rows and predicted (Foong et al.
2019), on the five small UCI sets. What knows where it has no data has wider intervals there.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from varprop import BayesianMLPRegressor

from . import cells, data
from .tables import markdown
from .tabular_rows import Regressor, gaussian_process, ours, standardised
from .tabular_scores import Prediction, of, regression

SETS = ("boston", "concrete", "energy", "wine-red", "yacht")


def mean_field(x: pd.DataFrame, y: np.ndarray, seed: int) -> Callable[[pd.DataFrame], Prediction]:
    """The default without the correlations between weights."""
    model = BayesianMLPRegressor(random_state=seed, laplace=False).fit(x, y)
    return lambda x: of(model.predictive(x))


ROWS: dict[str, Regressor] = {"varprop": ours, "mean-field": mean_field, "gp": standardised(gaussian_process)}


def run(name: str, row: str, features: int | None, out: Path) -> None:
    """The scores in the gap of each feature, as one cell; features that are there are not computed again."""
    x, y, *_ = data.uci(name)
    configuration = {"set": name, "row": row}
    path = out / row / f"{name}.json"
    found: list[dict[str, Any]] = []
    if cells.finished(path, configuration):
        found = json.loads(path.read_text())["gaps"]
    table = pd.DataFrame(x.astype(float))
    for train, test in data.gap_rows(x)[len(found) : features]:
        predict = ROWS[row](table.iloc[train], y[train], 0)
        found.append(regression(predict(table.iloc[test]), y[test]))
        cells.write(path, configuration, gaps=found)


def tables(folder: Path = cells.RESULTS / "gaps") -> str:
    """The average over the gaps of a set."""
    shown = []
    for score, title, digits in (
        ("log_likelihood", "log-likelihood", 2),
        ("coverage", "coverage of 90 % intervals", 3),
        ("rmse", "RMSE", 2),
    ):
        lines = [[title, *SETS]]
        for row in ROWS:
            line = [row]
            for name in SETS:
                path = folder / row / f"{name}.json"
                gaps = json.loads(path.read_text())["gaps"] if path.exists() else []
                line.append(f"{np.mean([gap[score] for gap in gaps]):.{digits}f}" if gaps else "")
            lines.append(line)
        shown.append(markdown(lines))
    return "\n\n".join(shown)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.gaps", description=__doc__.split("\n")[0])
    parser.add_argument("--datasets", nargs="+", choices=SETS, default=list(SETS), metavar="NAME")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), metavar="ROW")
    parser.add_argument("--features", type=int, help="only the gaps of the first features")
    parser.add_argument("--out", type=Path, default=cells.RESULTS / "gaps", help="folder for the results")
    options = parser.parse_args(arguments)
    for name in options.datasets:
        for row in options.rows:
            run(name, row, options.features, options.out)
    print(tables(options.out))


if __name__ == "__main__":
    main()

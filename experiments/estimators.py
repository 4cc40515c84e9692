"""The estimators as they come, against scikit-learn's: error on every set, and how often the 90 % intervals hold the truth.

    python -m experiments.estimators

`BayesianMLPRegressor()` and `make_pipeline(StandardScaler(), MLPRegressor())`, nothing else set but the random state. Published splits
of the UCI sets; diabetes in twenty random ones. With `--inner` the training parts are split again and no test split is read. Splits that
are in the results are not computed again.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from sklearn.datasets import load_diabetes
from sklearn.exceptions import ConvergenceWarning
from sklearn.neural_network import MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from varprop import BayesianMLPRegressor

from . import cells, data

SETS = dict.fromkeys(("boston", "concrete", "energy", "wine-red", "yacht", "diabetes"), 20)
SETS |= dict.fromkeys(("kin8nm", "power", "naval", "protein"), 3)
Split = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def splits(name: str, n: int, inner: bool) -> Iterator[Split]:
    if name == "diabetes":
        x, y = load_diabetes(return_X_y=True)
        orders = [np.random.RandomState(k).permutation(len(y)) for k in range(n)]
        parts: list[Sequence[np.ndarray]] = [np.split(order, [round(0.9 * len(y))]) for order in orders]
    else:
        x, y, train, test = data.uci(name)
        parts = list(zip(train[:n], test[:n], strict=True))
    for train_rows, test_rows in parts:
        a, b = np.split(train_rows, [round(0.8 * len(train_rows))]) if inner else (train_rows, test_rows)
        yield x[a], y[a], x[b], y[b]


def error(prediction: np.ndarray, y: np.ndarray) -> float:
    return float(np.sqrt(np.mean((prediction - y) ** 2)))


def score(split: Split, seed: int) -> dict[str, float]:
    x, y, x_test, y_test = split
    start = time.process_time()
    ours = BayesianMLPRegressor(random_state=seed).fit(x, y)
    seconds = time.process_time() - start
    theirs = make_pipeline(StandardScaler(), MLPRegressor(random_state=seed))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # two hundred epochs are what it does by default
        theirs.fit(x, y)
    lower, upper = ours.predict_interval(x_test, 0.9)
    return {
        "rmse": error(ours.predict(x_test), y_test),
        "rmse_sklearn": error(theirs.predict(x_test), y_test),
        "coverage": float(np.mean((lower <= y_test) & (y_test <= upper))),
        "log_likelihood": float(np.mean(ours.log_prob(x_test, y_test))),
        "cpu_seconds": seconds,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--datasets", nargs="+", default=list(SETS), choices=list(SETS))
    parser.add_argument("--splits", type=int)
    parser.add_argument("--inner", action="store_true")
    parser.add_argument("--out", type=Path, default=cells.RESULTS, help="folder of the results")
    options = parser.parse_args(arguments)
    path = options.out / ("estimators-inner.json" if options.inner else "estimators.json")

    def finished() -> dict[str, list[dict[str, float]]]:
        return json.loads(path.read_text())["sets"] if path.exists() else {}

    for name in options.datasets:
        for k, split in enumerate(splits(name, options.splits or SETS[name], options.inner)):
            if k >= len(finished().get(name, [])):
                scores = score(split, k)
                sets = finished()  # read again, because another process may have added to it
                sets.setdefault(name, []).append(scores)
                cells.write(path, {"level": 0.9, "inner": options.inner}, sets=sets)
    print(f"{'set':10} {'splits':>6} {'RMSE':>9} {'+-':>8} {'sklearn':>9} {'+-':>8} {'cover':>6} {'log-lik':>8} {'+-':>6} {'CPU s':>6}")
    for name, rows in finished().items():
        mean = {key: np.mean([row[key] for row in rows]) for key in rows[0]}
        se = {key: np.std([row[key] for row in rows]) / np.sqrt(len(rows)) for key in rows[0]}
        print(
            f"{name:10} {len(rows):6} {mean['rmse']:9.4f} {se['rmse']:8.4f} {mean['rmse_sklearn']:9.4f} {se['rmse_sklearn']:8.4f} "
            f"{mean['coverage']:6.3f} {mean['log_likelihood']:8.3f} {se['log_likelihood']:6.3f} {mean['cpu_seconds']:6.1f}"
        )


if __name__ == "__main__":
    main()

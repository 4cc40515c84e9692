"""The estimators with their default settings against scikit-learn's: `python -m experiments.estimators`.

`BayesianMLPRegressor()` is compared with `make_pipeline(StandardScaler(), MLPRegressor())` on test data, and
the classifiers likewise; only the random state is set. The UCI sets have their published splits, the sets
that come with scikit-learn random ones. Splits with existing results are not computed again.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.exceptions import ConvergenceWarning
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from varprop import BayesianMLPClassifier, BayesianMLPRegressor

from . import cells, data
from .tables import markdown, standard_error

NUMBERS = dict.fromkeys(("boston", "concrete", "energy", "wine-red", "yacht", "diabetes"), 20)
NUMBERS |= dict.fromkeys(("kin8nm", "power", "naval", "protein"), 3)
CLASSES = dict.fromkeys(("breast cancer", "digits", "iris", "wine"), 10)
"""The data sets and their numbers of splits."""

AIMS = {
    "boston": -2.40,
    "concrete": -3.00,
    "energy": -0.75,
    "kin8nm": 1.20,
    "naval": 6.33,
    "power": -2.79,
    "protein": -2.83,
    "wine-red": -0.90,
    "yacht": -0.40,
}
"""The log-likelihoods that the defaults should reach."""

Split = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def splits(name: str, n: int) -> Iterator[Split]:
    """Training and test parts; a set without published splits is cut at nine tenths of a random order."""
    if name in data.BUNDLED:
        x, y = data.BUNDLED[name](return_X_y=True)
        orders = [np.random.RandomState(k).permutation(len(y)) for k in range(n)]
        parts = [np.split(order, [round(0.9 * len(y))]) for order in orders]
    else:
        x, y, train, test = data.uci(name)
        parts = [list(rows) for rows in zip(train[:n], test[:n], strict=True)]
    for a, b in parts:
        yield x[a], y[a], x[b], y[b]


def fitted(ours: Any, theirs: Any, split: Split) -> tuple[Any, Any, float]:
    """Both estimators after training, and the processor time of ours in seconds."""
    x, y, *_ = split
    start = time.process_time()
    ours.fit(x, y)
    seconds = time.process_time() - start
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # 200 iterations are its default
        return ours, make_pipeline(StandardScaler(), theirs).fit(x, y), seconds


def numbers(split: Split, seed: int) -> dict[str, float]:
    _, _, x, y = split
    ours, theirs, seconds = fitted(
        BayesianMLPRegressor(random_state=seed), MLPRegressor(random_state=seed), split
    )
    lower, upper = ours.predict_interval(x, 0.9)
    return {
        "rmse": float(np.sqrt(np.mean((ours.predict(x) - y) ** 2))),
        "rmse_sklearn": float(np.sqrt(np.mean((theirs.predict(x) - y) ** 2))),
        "coverage": float(np.mean((lower <= y) & (y <= upper))),
        "log_likelihood": float(np.mean(ours.log_prob(x, y))),
        "cpu_seconds": seconds,
    }


def classes(split: Split, seed: int) -> dict[str, float]:
    _, _, x, y = split
    ours, theirs, seconds = fitted(
        BayesianMLPClassifier(random_state=seed), MLPClassifier(random_state=seed), split
    )
    columns = np.arange(len(y)), np.searchsorted(ours.classes_, y)
    return {
        "error": float(np.mean(ours.predict(x) != y)),
        "error_sklearn": float(np.mean(theirs.predict(x) != y)),
        "log_likelihood": float(np.mean(ours.predict_log_proba(x)[columns])),
        "log_likelihood_sklearn": float(np.mean(theirs.predict_log_proba(x)[columns])),
        "cpu_seconds": seconds,
    }


def tables(path: Path = cells.RESULTS / "estimators.json") -> str:
    found = json.loads(path.read_text())["sets"]
    shown = []
    for sets in (NUMBERS, CLASSES):
        measured = {name: found[name] for name in sets if name in found}
        if measured:
            scores = list(next(iter(measured.values()))[0])
            lines = [["set", "splits", *(score.replace("_", " ") for score in scores)]]
            lines += [
                [name, str(len(rows)), *(_average([row[score] for row in rows]) for score in scores)]
                for name, rows in measured.items()
            ]
            if sets is NUMBERS:
                aims = (f"{AIMS[name]:.2f}" if name in AIMS else "" for name in measured)
                lines = [[*line, aim] for line, aim in zip(lines, ["aim", *aims], strict=True)]
            shown.append(markdown(lines))
    return "\n\n".join(shown)


def _average(values: Sequence[float]) -> str:
    digits = 3 if abs(np.mean(values)) > 0.01 else 5
    if len(values) == 1:
        return f"{values[0]:.{digits}f}"
    return f"{np.mean(values):.{digits}f} ± {standard_error(np.array(values)):.{digits}f}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.estimators", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--datasets", nargs="+", default=[*NUMBERS, *CLASSES], choices=[*NUMBERS, *CLASSES])
    parser.add_argument("--splits", type=int)
    parser.add_argument("--out", type=Path, default=cells.RESULTS, help="folder for the results")
    options = parser.parse_args(arguments)
    path = options.out / "estimators.json"

    def finished() -> dict[str, list[dict[str, float]]]:
        return json.loads(path.read_text())["sets"] if path.exists() else {}

    for name in options.datasets:
        score, n = (numbers, NUMBERS[name]) if name in NUMBERS else (classes, CLASSES[name])
        for k, split in enumerate(splits(name, options.splits or n)):
            if k >= len(finished().get(name, [])):
                scores = score(split, k)
                sets = finished()  # another process may have added to it
                sets.setdefault(name, []).append(scores)
                cells.write(path, {"level": 0.9}, sets=sets)
    print(tables(path))


if __name__ == "__main__":
    main()

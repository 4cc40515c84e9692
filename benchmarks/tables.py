"""How long does a default fit of a table take? `python -m benchmarks.tables`.

Processor time of `BayesianMLPRegressor().fit` on one thread, all members and all choices included, and how
much of it goes where: evaluating the objective and its gradients, tracing the programs for it, and the rest.
Gradient boosting with its defaults is beside it. boston and diamonds are real; the third table is made up.
Results are in benchmarks/results/tables.json.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from sklearn.ensemble import HistGradientBoostingRegressor

import varprop as vp
from experiments import cells, tabular_data
from varprop.training.stack import Stack

RESULT = Path(__file__).parent / "results" / "tables.json"


def boston() -> tuple[Any, np.ndarray]:
    from mlxtend.data import boston_housing_data

    x, y = boston_housing_data()
    return x, y


def made_up(rows: int = 10_000) -> tuple[Any, np.ndarray]:
    random = np.random.RandomState(0)
    x = random.normal(size=(rows, 10))
    return x, np.sin(2 * x[:, 0]) + x[:, 1] * x[:, 2] + 0.3 * random.normal(size=rows)


def diamonds() -> tuple[Any, np.ndarray]:
    table = tabular_data.load("diamonds")
    return table.x, table.y


TABLES: dict[str, Callable[[], tuple[Any, np.ndarray]]] = {
    "boston": boston,
    "10,000 x 10": made_up,
    "diamonds": diamonds,
}


def measure(x: Any, y: np.ndarray, **options: Any) -> dict[str, Any]:
    """Seconds of processor time of a fit, and their parts."""
    spent = {"gradients": 0.0, "tracing": 0.0}

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            began = time.process_time()
            result = function(*args, **kwargs)
            spent[name] += time.process_time() - began
            return result

        return call

    began = time.process_time()
    with (
        patch.object(Stack, "gradients", timed("gradients", Stack.gradients)),
        patch.object(Stack, "_traced", timed("tracing", Stack._traced)),
    ):
        model = vp.BayesianMLPRegressor(random_state=0, **options).fit(x, y)
    total = time.process_time() - began
    spent["gradients"] -= spent["tracing"]  # the first call of a shape traces its program
    began = time.process_time()
    HistGradientBoostingRegressor(categorical_features="from_dtype", random_state=0).fit(x, y)
    boosting = time.process_time() - began
    parts = {**spent, "rest": total - sum(spent.values())}
    return {"rows": len(y), "seconds": total, "parts": parts, "boosting": boosting, "choices": model.choices_}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tables", description=__doc__.split("\n")[0])
    parser.add_argument("--tables", nargs="+", choices=TABLES, default=list(TABLES), metavar="NAME")
    parser.add_argument("--epochs", type=int, help="fewer than the default's, to try things out")
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    chosen = {} if options.epochs is None else {"epochs": options.epochs}
    found: dict[str, Any] = json.loads(options.out.read_text())["tables"] if options.out.exists() else {}
    for name in options.tables:
        found[name] = measure(*TABLES[name](), **chosen)
        print(name, json.dumps(found[name]), flush=True)
        cells.write(options.out, chosen, tables=found)


if __name__ == "__main__":
    main()

"""How far does L-BFGS get in the time of Adam? `python -m benchmarks.lbfgs`.

Networks with 50 hidden units are trained on the published training splits of small UCI sets, all splits of
a set at once, by Adam with a cosine schedule and by L-BFGS, each from log-variances of -9 and of -5. After
each epoch the script notes the processor time, the bound, and the predictive log-likelihood of the last fifth
of the training rows, which is held out. No test part is used. Results are in benchmarks/results/lbfgs.json.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import varprop as vp
from experiments import cells
from experiments.data import Splits, regression

RESULT = Path(__file__).parent / "results" / "lbfgs.json"
SETS = ("boston", "concrete", "energy", "yacht")
STARTS = -9.0, -5.0
"""Log-variances of the weights at the start."""


def members(splits: Splits, logvar: float) -> list[vp.ELBO]:
    """A network for each split; the same start for both optimisers."""
    made = []
    for k in splits.numbers:
        torch.manual_seed(k)
        net = nn.Sequential(nn.Linear(splits.x.shape[2], 50), nn.ReLU(), nn.Linear(50, 1))
        prior, likelihood = vp.priors.FanIn(4.0), vp.likelihoods.Normal()
        net = vp.variational(net, logvar, init="he")
        made.append(vp.ELBO(net, vp.DVI, likelihood, prior, n_data=splits.x.shape[1]).double())
    return made


def run(splits: Splits, optimizer: str, logvar: float, epochs: int) -> list[dict[str, float]]:
    """Averages over the splits after each epoch; an epoch of L-BFGS is a round of 20 iterations."""
    options: dict[str, Any] = (
        {"optimizer": "lbfgs"} if optimizer == "lbfgs" else {"schedule": "cosine", "batch_size": 32}
    )
    x, y, x_held, y_held = (t.double() for t in (splits.x, splits.y, splits.x_test, splits.y_test))
    began = time.process_time()
    validation = x_held, y_held
    history = vp.replicas.fit(members(splits, logvar), x, y, epochs=epochs, validation=validation, **options)
    seconds = time.process_time() - began
    means = history.groupby("epoch")[["loss", "validation"]].mean()
    epochs_took = history[history.replica == 0].seconds
    share = epochs_took.cumsum() / epochs_took.sum()
    return [
        {"seconds": seconds * part, "loss": loss, "validation": validation}
        for part, (loss, validation) in zip(share, means.to_numpy().tolist(), strict=True)
    ]


def table(results: dict[str, dict[str, list[dict[str, float]]]]) -> str:
    """The best held-out log-likelihood of each run, when it was reached, and the losses."""
    lines = [
        "| set | optimiser | best held-out log-likelihood | after seconds | loss then | loss at the end |"
    ]
    lines.append("|---|---|---|---|---|---|")
    for name, runs in results.items():
        for optimizer, points in runs.items():
            best = max(points, key=lambda point: point["validation"])
            numbers = f"{best['validation']:.3f} | {best['seconds']:.1f} | {best['loss']:.2f}"
            lines.append(f"| {name} | {optimizer} | {numbers} | {points[-1]['loss']:.2f} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lbfgs", description=__doc__.split("\n")[0])
    parser.add_argument("--datasets", nargs="+", default=list(SETS))
    parser.add_argument("--splits", type=int, default=5)
    parser.add_argument("--adam", type=int, default=120, help="epochs of Adam")
    parser.add_argument("--lbfgs", type=int, default=60, help="rounds of L-BFGS")
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    results = {}
    for name in options.datasets:
        inner = regression(name, tuple(range(options.splits))).inner()
        results[name] = {
            f"{kind} from {start:g}": run(inner, kind, start, getattr(options, kind))
            for kind in ("adam", "lbfgs")
            for start in STARTS
        }
    configuration = {name: value for name, value in vars(options).items() if name != "out"}
    cells.write(options.out, configuration, results=json.loads(json.dumps(results)))
    print(table(results))


if __name__ == "__main__":
    main()

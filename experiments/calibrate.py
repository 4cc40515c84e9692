"""A plain network before and after calibration with frozen means: accuracy, log-likelihood and ECE.

    python -m experiments.calibrate

A network is trained with Adam (rate 0.001, batches of 128) without weight decay until it is overconfident.
Held-out rows then set the temperature of its softmax, for comparison, or the variances of its weights
(`vp.calibrate` with its defaults). Beside them are a Laplace approximation of its last layer, whose prior
the held-out rows set (laplace-torch, to be installed as `benchmarks/peers/environments.py` lists it), and a
network trained with dropout, of which 30 samples are averaged. The seed decides which rows are held out and
how the network is initialised. Rows that exist are not computed again.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import product
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import varprop as vp
from varprop.predictive import ClassPredictive, concatenate

from . import cells, data
from .lenets import narrow
from .operators import declare_torchvision
from .tables import markdown, standard_error

Rows = tuple[Tensor, Tensor]
SAMPLES = 30


@dataclass(frozen=True)
class Task:
    """A data set in three parts, and a network for it."""

    rows: Callable[[int], tuple[Rows, Rows, Rows]]
    """Training, held-out and test rows for a seed."""
    net: Callable[[], nn.Sequential]
    epochs: int


def digits(seed: int) -> tuple[Rows, Rows, Rows]:
    x, y = (torch.tensor(part) for part in load_digits(return_X_y=True))
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    train, held_out, test = order.split([1000, 297, 500])
    x = x.float() / 8 - 1
    return (x[train], y[train]), (x[held_out], y[held_out]), (x[test], y[test])


def fashion(seed: int) -> tuple[Rows, Rows, Rows]:
    x, y, x_test, y_test = data.fashion_mnist()
    held_out, train = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed)).split(
        [5000, 55000]
    )
    x, x_test = ((images.float() / 255 - 0.286) / 0.353 for images in (x, x_test))
    return (x[train], y[train]), (x[held_out], y[held_out]), (x_test, y_test)


def perceptron() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10))


TASKS = {
    "digits": Task(digits, perceptron, 500),
    "FashionMNIST": Task(fashion, partial(narrow, 16, 32, 128), 20),
}


def train(net: nn.Module, rows: Rows, epochs: int) -> None:
    x, y = rows
    optimiser = torch.optim.Adam(net.parameters(), lr=1e-3)
    for _ in range(epochs):
        for batch in torch.randperm(len(x)).split(128):
            optimiser.zero_grad()
            F.cross_entropy(net(x[batch]), y[batch]).backward()
            optimiser.step()
    net.eval()


class Run:
    """The data of a seed, and the network that is trained on them."""

    def __init__(self, task: Task, seed: int, epochs: int) -> None:
        self.task, self.seed, self.epochs = task, seed, epochs
        self.known, self.held_out, self.test = task.rows(seed)

    @cached_property
    def trained(self) -> nn.Sequential:
        return self.train(self.task.net)

    def train(self, build: Callable[[], nn.Sequential]) -> nn.Sequential:
        torch.manual_seed(self.seed)
        net = build()
        train(net, self.known, self.epochs)
        return net


Predict = Callable[[Tensor], ClassPredictive]


def of(probs: Tensor) -> ClassPredictive:
    return ClassPredictive(probs, torch.zeros(len(probs)))


def plain(run: Run) -> Predict:
    net = run.trained
    return lambda x: of(net(x).softmax(1))


@torch.no_grad()
def temperature(run: Run) -> Predict:
    """The temperature of the softmax with the largest log-likelihood (Guo et al. 2017)."""
    net, (x, y) = run.trained, run.held_out
    f = net(x)
    t = min(torch.arange(0.5, 5, 0.02).tolist(), key=lambda t: F.cross_entropy(f / t, y).item())
    return lambda x: of((net(x) / t).softmax(1))


def calibrated(method: vp.Method, run: Run) -> Predict:
    likelihood = vp.likelihoods.Categorical()
    elbo = vp.calibrate(deepcopy(run.trained), run.held_out, likelihood, method=method, progress=False)
    return elbo.predict  # type: ignore[return-value]


def laplace(run: Run) -> Predict:
    """Kronecker-factored, of the last layer, with the prior that suits the held-out rows best."""
    declare_torchvision()
    from laplace import Laplace

    found = Laplace(deepcopy(run.trained), "classification")
    found.fit(DataLoader(TensorDataset(*run.known), batch_size=512))
    found.optimize_prior_precision(
        method="gridsearch", val_loader=DataLoader(TensorDataset(*run.held_out), batch_size=512)
    )
    return lambda x: of(found(x).detach())


def dropout(run: Run) -> Predict:
    """The average of networks with a quarter of the units left out (Gal and Ghahramani 2016)."""

    def build() -> nn.Sequential:
        layers = list(run.task.net())
        first = next(i for i, layer in enumerate(layers) if isinstance(layer, nn.ReLU))
        linear = [i for i, layer in enumerate(layers) if isinstance(layer, nn.Linear) and i > first]
        for i in reversed(linear):
            layers.insert(i, nn.Dropout(0.25))
        return nn.Sequential(*layers)

    net = run.train(build).train()
    return lambda x: of(torch.stack([net(x).softmax(1) for _ in range(SAMPLES)]).mean(0))


ROWS: dict[str, Callable[[Run], Predict]] = {
    "plain": plain,
    "temperature": temperature,
    "calibrated, vbp": partial(calibrated, vp.VBP),
    "calibrated, dvi": partial(calibrated, vp.DVI),
    "laplace-torch": laplace,
    f"dropout, {SAMPLES} samples": dropout,
}


def scores(p: vp.predictive.Predictive, y: Tensor) -> dict[str, float]:
    kept = {
        "accuracy": "accuracy",
        "log-likelihood": "log_likelihood",
        "calibration error (ECE)": "ece",
        "Brier score": "brier",
    }
    return {kept[name]: value for name, value in vp.metrics.summary(p, y).items() if name in kept}


def measure(run: Run, row: str) -> dict[str, float]:
    """Scores on the test part, and the seconds of getting ready and of a prediction of all of it."""
    if row != "plain":
        _ = run.trained  # not counted
    began = time.process_time()
    predict = ROWS[row](run)
    ready = time.process_time()
    x, y = run.test
    with torch.no_grad():
        p = concatenate([predict(part) for part in x.split(500)])
    seconds = {"seconds": ready - began, "prediction_seconds": time.process_time() - ready}
    return scores(p, y) | seconds


COSTS = {"seconds": "s to get ready", "prediction_seconds": "s to predict"}


def table(folder: Path = cells.RESULTS / "calibrate") -> str:
    """Test scores of plain networks and of the same networks after calibration."""
    lines = []
    for place in sorted(folder.iterdir()):
        runs = [json.loads(path.read_text())["rows"] for path in sorted(place.glob("*.json"))]
        for row in dict.fromkeys(row for run in runs for row in run):
            having = [run[row] for run in runs if row in run]
            values = {score: np.array([run[score] for run in having]) for score in having[0]}
            shown = [
                f"{values[score].mean():.4f} ± {standard_error(values[score]):.4f}"
                for score in ("accuracy", "log_likelihood", "ece", "brier")
            ]
            costs = [values[part].mean() if part in values else None for part in COSTS]
            seconds = ["" if cost is None else f"{cost:.3g}" for cost in costs]
            lines.append([place.name, row, str(len(having)), *shown, *seconds])
    head = ["set", "", "runs", "accuracy", "log-likelihood", "ECE", "Brier score", *COSTS.values()]
    return markdown([head, *lines])


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--datasets", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=list(ROWS), metavar="ROW")
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--out", type=Path, default=cells.RESULTS / "calibrate")
    options = parser.parse_args(words)
    torch.set_num_threads(1)
    for name, seed in product(options.datasets, range(options.runs)):
        epochs = options.epochs or TASKS[name].epochs
        path, configuration = options.out / name / f"{seed}.json", {"seed": seed, "epochs": epochs}
        done = json.loads(path.read_text())["rows"] if cells.finished(path, configuration) else {}
        if missing := [row for row in options.rows if row not in done]:
            run = Run(TASKS[name], seed, epochs)
            for row in missing:
                done[row] = measure(run, row)
                cells.write(path, configuration, rows=done)
    print(table(options.out))


if __name__ == "__main__":
    main()

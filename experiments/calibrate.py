"""A plain network before and after calibration with frozen means: accuracy, log-likelihood and ECE.

    python -m experiments.calibrate

A network is trained with Adam (rate 0.001, batches of 128) without weight decay until it is overconfident.
Held-out rows then set the temperature of its softmax, for comparison, or the variances of its weights
(`vp.calibrate` with its defaults). The seed decides which rows are held out and how the network is
initialised. Existing results are not computed again.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import varprop as vp
from varprop.predictive import ClassPredictive, concatenate

from . import cells, data, tables

Rows = tuple[Tensor, Tensor]


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


def lenet() -> nn.Sequential:
    convolutions = nn.Conv2d(1, 16, 5, 2), nn.ReLU(), nn.Conv2d(16, 32, 5, 2), nn.ReLU(), nn.Flatten()
    return nn.Sequential(*convolutions, nn.Linear(512, 128), nn.ReLU(), nn.Linear(128, 10))


TASKS = {"digits": Task(digits, perceptron, 500), "FashionMNIST": Task(fashion, lenet, 20)}


def train(net: nn.Module, rows: Rows, epochs: int) -> None:
    x, y = rows
    optimiser = torch.optim.Adam(net.parameters(), lr=1e-3)
    for _ in range(epochs):
        for batch in torch.randperm(len(x)).split(128):
            optimiser.zero_grad()
            F.cross_entropy(net(x[batch]), y[batch]).backward()
            optimiser.step()


@torch.no_grad()
def temperature(net: nn.Module, rows: Rows) -> float:
    """The temperature of the softmax with the largest log-likelihood (Guo et al. 2017)."""
    f = net(rows[0])
    return min(torch.arange(0.5, 5, 0.02).tolist(), key=lambda t: F.cross_entropy(f / t, rows[1]).item())


@torch.no_grad()
def plain(net: nn.Module, x: Tensor, t: float = 1.0) -> ClassPredictive:
    probs = (net(x) / t).softmax(1)
    return ClassPredictive(probs, torch.zeros(len(x)))


def scores(p: vp.predictive.Predictive, y: Tensor) -> dict[str, float]:
    kept = {
        "accuracy": "accuracy",
        "log-likelihood": "log_likelihood",
        "calibration error (ECE)": "ece",
        "Brier score": "brier",
    }
    return {kept[name]: value for name, value in vp.metrics.summary(p, y).items() if name in kept}


def run(task: Task, seed: int, epochs: int) -> dict[str, dict[str, float]]:
    """Scores on the test part, and how many seconds each step took."""
    known, held_out, (x, y) = task.rows(seed)
    torch.manual_seed(seed)
    net = task.net()
    start = time.perf_counter()
    train(net, known, epochs)
    rows = {"plain": scores(plain(net, x), y) | {"seconds": time.perf_counter() - start}}
    start = time.perf_counter()
    t = temperature(net, held_out)
    rows["temperature"] = scores(plain(net, x, t), y) | {"seconds": time.perf_counter() - start}
    for name in ("vbp", "dvi"):
        again = task.net()
        again.load_state_dict(net.state_dict())
        start = time.perf_counter()
        elbo = vp.calibrate(
            again, held_out, vp.likelihoods.Categorical(), method=vp.METHODS[name], progress=False
        )
        seconds = time.perf_counter() - start
        p = concatenate([elbo.predict(part) for part in x.split(500)])
        rows[f"calibrated, {name}"] = scores(p, y) | {"seconds": seconds}
    return rows


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--datasets", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--out", type=Path, default=cells.RESULTS / "calibrate")
    options = parser.parse_args(words)
    torch.set_num_threads(1)
    for name in options.datasets:
        epochs = options.epochs or TASKS[name].epochs
        for seed in range(options.runs):
            path, configuration = options.out / name / f"{seed}.json", {"seed": seed, "epochs": epochs}
            if not cells.finished(path, configuration):
                cells.write(path, configuration, rows=run(TASKS[name], seed, epochs))
    print(tables.calibration(options.out))


if __name__ == "__main__":
    main()

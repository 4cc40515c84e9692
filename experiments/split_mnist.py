"""Split MNIST: five pairs of digits, learned one after another. `python -m experiments.split_mnist`.

A network of one hidden layer learns 0 and 1, then 2 and 3, and so on, and never sees an earlier pair again.
With several heads each pair has its own two outputs, and it is told which pair an image belongs to. With a
single head all ten digits compete. The posterior of each task is the prior of the next (`vp.update`); a plain
network is trained on. Of each task 40 images, in all 200, are left out as a coreset (Nguyen et al. 2018): before
each test a copy of the network learns those of the tasks so far. The accuracy on each task after each task is in
experiments/results/split_mnist.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import varprop as vp

from . import cells, data
from .tables import markdown, standard_error

METHODS = {"plain": vp.DETERMINISTIC, "vbp": vp.VBP, "dvi": vp.DVI}
HEADS = ("multi", "single")
TASKS = 5
CORESET = 40
"""Images of each task."""
UNITS, BATCH, RATE, LOGVAR = 256, 128, 0.001, -6.0
EPOCHS, CORESET_EPOCHS = 2, 40
Rows = tuple[Tensor, Tensor]


class Head(vp.likelihoods.Categorical):
    """The classes of one task; all classes if there is no task."""

    task: int | None = None

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        return super().log_prob(self._own(f), y)

    def expected_log_prob(self, f: vp.Gaussian, y: Tensor) -> Tensor:
        own = vp.Gaussian(self._own(f.mean), self._own(f.var))
        p = own.mean.softmax(1)
        return super().log_prob(own.mean, y) - 0.5 * (own.var * p * (1 - p)).sum(1)

    def predictive(self, f: Any) -> vp.predictive.ClassPredictive:
        own = vp.Gaussian(self._own(f.mean), self._own(f.var)) if isinstance(f, vp.Gaussian) else self._own(f)
        return super().predictive(own)

    def _own(self, f: Tensor) -> Tensor:
        return f if self.task is None else f[:, 2 * self.task : 2 * self.task + 2]


@dataclass(frozen=True)
class Learner:
    """A network that learns one task after another."""

    elbo: vp.ELBO
    multi: bool

    @classmethod
    def new(cls, method: str, multi: bool, pixels: int) -> Learner:
        net: nn.Module = nn.Sequential(nn.Linear(pixels, UNITS), nn.ReLU(), nn.Linear(UNITS, 2 * TASKS))
        if method != "plain":
            vp.variational(net, logvar=LOGVAR, init="he", biases=True)
        return cls(vp.ELBO(net, METHODS[method], Head(), vp.priors.FanIn(4.0), n_data=1), multi)

    def learn(self, rows: Rows, task: int | None, epochs: int, batch_size: int = BATCH) -> None:
        x, y = rows
        options: dict[str, Any] = {"epochs": epochs, "lr": RATE, "batch_size": batch_size, "progress": False}
        vp.update(self._at(task), x, self._labels(y, task), **options)

    def after(self, coreset: Sequence[Rows], task: int) -> Learner:
        """A copy that has learned the coreset too: of the task, if it has its own head, or of all tasks."""
        copy = Learner(deepcopy(self.elbo), self.multi)
        rows = [coreset[task]] if self.multi else coreset
        x, y = (torch.cat(part) for part in zip(*rows, strict=True))
        copy.learn((x, y), task, CORESET_EPOCHS, batch_size=CORESET)
        return copy

    def accuracy(self, rows: Rows, task: int) -> float:
        x, y = rows
        p = self._at(task).predict(x, batch_size=1000)
        assert isinstance(p, vp.predictive.ClassPredictive)
        return float((p.probs.argmax(1) == self._labels(y, task)).float().mean())

    def _at(self, task: int | None) -> vp.ELBO:
        assert isinstance(self.elbo.likelihood, Head)
        self.elbo.likelihood.task = task if self.multi else None
        return self.elbo

    def _labels(self, y: Tensor, task: int | None) -> Tensor:
        return y - 2 * task if self.multi and task is not None else y


def tasks(x: Tensor, y: Tensor) -> list[Rows]:
    """Pixels between 0 and 1, and labels, of each pair of digits."""
    chosen = [(y // 2) == task for task in range(TASKS)]
    return [(x[rows].flatten(1).float() / 255, y[rows]) for rows in chosen]


def run(method: str, multi: bool, images: data.Images, seed: int, epochs: int) -> dict[str, Any]:
    """Of each task so far, after each task: the accuracy without and with the coreset, and of it alone."""
    torch.manual_seed(seed)
    train, test = tasks(*images[:2]), tasks(*images[2:])
    orders = [torch.randperm(len(y)) for _, y in train]
    coreset = [(x[order[:CORESET]], y[order[:CORESET]]) for (x, y), order in zip(train, orders, strict=True)]
    learner = Learner.new(method, multi, train[0][0].shape[1])
    fresh = deepcopy(learner)
    found: dict[str, Any] = {"alone": [], "with_coreset": [], "coreset_alone": []}
    began = time.process_time()
    for task, ((x, y), order) in enumerate(zip(train, orders, strict=True)):
        learner.learn((x[order[CORESET:]], y[order[CORESET:]]), task, epochs)
        found["alone"].append([learner.accuracy(test[k], k) for k in range(task + 1)])
        for name, start in (("with_coreset", learner), ("coreset_alone", fresh)):
            learners = [start.after(coreset[: task + 1], k) for k in (range(task + 1) if multi else (0,))]
            found[name].append([learners[k if multi else 0].accuracy(test[k], k) for k in range(task + 1)])
    return {**found, "seconds": time.process_time() - began}


ROWS = {
    "plain, trained on": ("plain", "alone"),
    "VBP": ("vbp", "alone"),
    "DVI": ("dvi", "alone"),
    "plain, then the coreset": ("plain", "with_coreset"),
    "VBP, then the coreset": ("vbp", "with_coreset"),
    "DVI, then the coreset": ("dvi", "with_coreset"),
    "plain, the coreset alone": ("plain", "coreset_alone"),
}


def courses(folder: Path, head: str, row: str) -> np.ndarray:
    """The mean accuracy over the tasks so far after each task, with a line for each run."""
    method, kind = ROWS[row]
    paths = sorted((folder / head).glob(f"{method}-*.json"))
    return np.array(
        [[np.mean(accuracies) for accuracies in json.loads(path.read_text())[kind]] for path in paths]
    )


def table(folder: Path = cells.RESULTS / "split_mnist") -> str:
    """The mean accuracy on the tasks so far, in percent, after two tasks and more."""
    lines = [
        ["", *(f"{head} head{'s' * (head == 'multi')}, {n} tasks" for head in HEADS for n in (2, 3, 4, 5))]
    ]
    for row in ROWS:
        line = []
        for head in HEADS:
            found = 100 * courses(folder, head, row)
            line += (
                [f"{v.mean():.1f} ± {standard_error(v):.1f}" for v in found.T[1:]] if len(found) else [""] * 4
            )
        lines.append([row, *line])
    return markdown(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.split_mnist", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), metavar="NAME")
    parser.add_argument("--heads", nargs="+", choices=HEADS, default=list(HEADS), metavar="HEADS")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=EPOCHS, help="of each task")
    parser.add_argument("--images", type=int, help="fewer training images than all, to try things out")
    parser.add_argument("--validation", type=int, default=0, help="test on so many training images instead")
    parser.add_argument("--out", type=Path, default=cells.RESULTS / "split_mnist")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    x, y, x_test, y_test = data.mnist()
    if options.validation:
        x, y, x_test, y_test = (
            x[: -options.validation],
            y[: -options.validation],
            x[-options.validation :],
            y[-options.validation :],
        )
    images = (x[: options.images], y[: options.images], x_test, y_test)
    for seed in range(options.runs):
        for head in options.heads:
            for method in options.methods:
                path = options.out / head / f"{method}-{seed}.json"
                configuration = {
                    "seed": seed,
                    "epochs": options.epochs,
                    "images": len(images[0]),
                    "units": UNITS,
                    "rate": RATE,
                    "logvar": LOGVAR,
                }
                if not cells.finished(path, configuration):
                    found = run(method, head == "multi", images, seed, options.epochs)
                    cells.write(path, configuration, **found)
                    print(head, method, seed, found["alone"][-1], found["with_coreset"][-1], flush=True)
    print(table(options.out))


if __name__ == "__main__":
    main()

"""Split MNIST: five pairs of digits, learned one after another. `python -m experiments.split_mnist`.

A network of one hidden layer learns 0 and 1, then 2 and 3, and so on, and never sees an earlier pair again.
With several heads each pair has its own two outputs, and it is told which pair an image belongs to. With a
single head all ten digits compete. The posterior of each task is the prior of the next (`vp.update`); a plain
network is trained on. Of each task 40 images, in all 200, are left out as a coreset (Nguyen et al. 2018):
before each test a copy of the network learns those of the tasks so far. The accuracy on each task after each
task is in experiments/results/split_mnist.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import varprop as vp
from varprop.gaussian import Activation, move

from . import cells, data
from .tables import markdown, standard_error

METHODS = {"plain": vp.DETERMINISTIC, "vbp": vp.VBP, "dvi": vp.DVI}
HEADS = ("multi", "single")
TASKS = 5
CORESET = 40
"""Images of each task."""
UNITS, BATCH, RATE, LOGVAR = 256, 128, 0.001, -6.0
FIGURE = cells.FIGURES / "split-mnist.png"
EPOCHS, CORESET_EPOCHS = 2, 40
Rows = tuple[Tensor, Tensor]


class Head(vp.likelihoods.Likelihood):
    """The classes of one task; all classes if there is no task."""

    task: int | None = None

    def __init__(self) -> None:
        super().__init__()
        self.classes = vp.likelihoods.Categorical()

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        return self.classes.log_prob(self._own(f), y)

    def expected_log_prob(self, f: vp.Gaussian, y: Tensor) -> Tensor:
        return self.classes.expected_log_prob(f.map(self._own), y)

    def predictive(self, f: Activation) -> vp.predictive.ClassPredictive:
        return self.classes.predictive(move(self._own, f))

    def target_shape(self, f: Activation) -> torch.Size:
        return self.classes.target_shape(f)

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
    names = {"multi": "five heads", "single": "one head"}
    lines = [["", *(f"{names[head]}, {n} tasks" for head in HEADS for n in range(2, TASKS + 1))]]
    for row in ROWS:
        found = [value for head in HEADS for value in 100 * courses(folder, head, row).T[1:]]
        lines.append([row, *map(_shown, found)])
    return f"{markdown(lines)}\n\n![Accuracy on the tasks so far](../docs/figures/{FIGURE.name})"


def _shown(value: np.ndarray) -> str:
    return f"{value.mean():.1f}" + (f" ± {standard_error(value):.1f}" if len(value) > 1 else "")


def figure(folder: Path, out: Path) -> None:
    """The mean accuracy on the tasks so far as new ones arrive."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    from .figures import COLOURS, LOOK

    colours = dict(zip(METHODS, (COLOURS[3], COLOURS[0], COLOURS[2]), strict=True))
    styles = {"alone": "-", "with_coreset": "--", "coreset_alone": ":"}
    titles = {"multi": "five heads, task known", "single": "one head for ten digits"}
    with plt.rc_context(LOOK):
        drawing, axes = plt.subplots(1, 2, figsize=(8.5, 3.4), layout="constrained")
        for head, axis in zip(HEADS, axes, strict=True):
            for row, (method, kind) in ROWS.items():
                mean = 100 * courses(folder, head, row).mean(0)
                axis.plot(
                    range(1, TASKS + 1), mean, styles[kind], color=colours[method], label=row, marker="."
                )
            axis.set(title=titles[head], xlabel="tasks so far", xticks=range(1, TASKS + 1))
        axes[0].set_ylabel("accuracy on the tasks so far, %")
        drawing.legend(*axes[0].get_legend_handles_labels(), loc="outside right center")
        drawing.savefig(out, dpi=130)
        plt.close(drawing)


def main(arguments: Sequence[str] | None = None) -> None:
    description = __doc__.split("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m experiments.split_mnist", description=description)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=EPOCHS, help="of each task")
    parser.add_argument("--images", type=int, help="fewer training images than all, to try things out")
    parser.add_argument("--out", type=Path, default=cells.RESULTS / "split_mnist")
    parser.add_argument("--figure", type=Path, default=FIGURE, help="file for the figure")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    x, y, x_test, y_test = data.mnist()
    images = x[: options.images], y[: options.images], x_test, y_test
    for seed, head, method in product(range(options.runs), HEADS, METHODS):
        path = options.out / head / f"{method}-{seed}.json"
        configuration = {"seed": seed, "epochs": options.epochs, "images": len(images[0]), "units": UNITS}
        configuration |= {"rate": RATE, "logvar": LOGVAR}
        if not cells.finished(path, configuration):
            found = run(method, head == "multi", images, seed, options.epochs)
            cells.write(path, configuration, **found)
            print(head, method, seed, f"{np.mean(found['alone'][-1]):.3f}", flush=True)
    figure(options.out, options.figure)
    print(table(options.out))


if __name__ == "__main__":
    main()

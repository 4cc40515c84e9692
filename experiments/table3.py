"""Table 3 of the paper, one pass over the data, and rows beyond it.

    python -m experiments.table3 --datasets MNIST --methods vbp dvi --runs 3

Every image is seen once, in the order of the run. All networks are perceptrons with ReLU that start from the
same means. What a row needs to know, such as its rate and the size of its batches, was chosen on training
images (`--validate`, with `--set` for other values).
"""

from __future__ import annotations

import argparse
import json
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from sklearn.linear_model import SGDClassifier
from torch import Tensor, nn

import varprop as vp

from . import cells, curves, data, tables
from .images import ImageSet
from .schedule import Schedule

PUBLISHED = {
    "vrelu": ("92.8 ± 0.2", "47.1 ± 0.2"),
    "varout": ("96.7 ± 0.2", "47.8 ± 0.3"),
    "dvi": ("96.6 ± 0.2", "48.7 ± 0.4"),
    "vbp": ("96.6 ± 0.2", "48.3 ± 0.4"),
}
"""Table 3 of the paper: test accuracies in per cent, ten runs."""
GLANCES = (500, 1000, 2000, 3000, 5000, 7500, 10000, 15000, 20000, 30000, 40000, 50000)
"""Examples seen at the points of a learning curve."""
SIGHT = 2000
"""Test images of a learning curve."""


@dataclass(frozen=True)
class Task:
    """A set of images and the layers of its network."""

    images: Callable[[], data.Images]
    sizes: tuple[int, ...]
    passes: int
    """Of a method that predicts by sampling."""


TASKS = {
    "MNIST": Task(data.mnist, (784, 500, 10), 30),
    "CIFAR-10": Task(data.cifar10, (3072, 2048, 1024, 10), 10),
}


def perceptron(sizes: Sequence[int]) -> nn.Sequential:
    """Linear, ReLU, Linear, ...: weights as by He, biases of zero."""
    layers: list[nn.Module] = []
    for pair in pairwise(sizes):
        linear = nn.Linear(*pair)
        nn.init.kaiming_normal_(linear.weight, nonlinearity="relu")
        nn.init.zeros_(linear.bias)
        layers += [linear, nn.ReLU()]
    return nn.Sequential(*layers[:-1])


# ---------------------------------------------------------------------------------------------- the learners


class Learner(ABC):
    """Something that learns from one batch after another."""

    @abstractmethod
    def learn(self, x: Tensor, y: Tensor) -> None: ...

    @abstractmethod
    def scores(self, x: Tensor) -> Tensor:
        """Of each class, for a learning curve: by the means of the weights."""

    @abstractmethod
    def predict(self, x: Tensor) -> vp.predictive.ClassPredictive: ...

    def facts(self) -> dict[str, Any]:
        """What else a cell shall hold."""
        return {}


class ByGradient(Learner):
    """An objective and Adam, with one cycle of the rate over the pass."""

    def __init__(self, recipe: Gradient, net: nn.Sequential, n_data: int, passes: int) -> None:
        if recipe.method is not vp.DETERMINISTIC:
            vp.variational(net, logvar=recipe.start)
        prior = vp.priors.Normal(recipe.precision)
        self.elbo = vp.ELBO(net, recipe.method, vp.likelihoods.Categorical(), prior, n_data=n_data)
        schedule = Schedule(1, recipe.rate, cycle=True, logvar=recipe.logvar)
        self.adam = schedule.optimiser(net, math.ceil(n_data / recipe.batch))
        self.passes = passes

    def learn(self, x: Tensor, y: Tensor) -> None:
        self.adam.zero_grad()
        self.elbo(x, y).backward()
        self.adam.step()

    @torch.no_grad()
    def scores(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.elbo.net(x))

    def predict(self, x: Tensor) -> vp.predictive.ClassPredictive:
        p = self.elbo.predict(x, self.passes if self.elbo.method.samples else None)
        return cast(vp.predictive.ClassPredictive, p)


class ByAscent(Learner):
    """V-ReLU-Net, or only its last layer on the features of the other layers as they were drawn."""

    def __init__(self, recipe: Ascent, net: nn.Sequential) -> None:
        cut = len(net) - 1 if recipe.frozen else 0
        self.features, top = net[:cut], vp.variational(net[cut:], biases=True)
        options = {field.name: getattr(recipe, field.name) for field in fields(recipe)}
        del options["batch"], options["frozen"]
        self.ascent = vp.CoordinateAscent(top, vp.likelihoods.Categorical(), **options)
        self.first = [q.mean for q in self.ascent.weights[:-1]]

    @torch.no_grad()
    def learn(self, x: Tensor, y: Tensor) -> None:
        self.ascent.update(self.features(x), y)

    @torch.no_grad()
    def scores(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.ascent.net(self.features(x)))

    @torch.no_grad()
    def predict(self, x: Tensor) -> vp.predictive.ClassPredictive:
        return cast(vp.predictive.ClassPredictive, self.ascent.predict(self.features(x)))

    def facts(self) -> dict[str, Any]:
        """How far each hidden layer has moved, relative to where it was."""
        both = zip(self.ascent.weights, self.first, strict=False)
        return {"moved": [((q.mean - first).norm() / first.norm()).item() for q, first in both]}


class ByScikitLearn(Learner):
    """Logistic regression on the pixels by stochastic gradient descent, with averaged weights."""

    def __init__(self, recipe: Linear, classes: int, seed: int) -> None:
        self.model = SGDClassifier(loss="log_loss", alpha=recipe.alpha, average=True, random_state=seed)
        self.classes = np.arange(classes)

    def learn(self, x: Tensor, y: Tensor) -> None:
        self.model.partial_fit(x.numpy(), y.numpy(), classes=self.classes)

    def scores(self, x: Tensor) -> Tensor:
        return torch.from_numpy(self.model.decision_function(x.numpy()))

    def predict(self, x: Tensor) -> vp.predictive.ClassPredictive:
        probs = torch.from_numpy(self.model.predict_proba(x.numpy())).clamp(min=1e-12)
        return vp.predictive.ClassPredictive(probs, torch.special.entr(probs).sum(1))


# ----------------------------------------------------------------------------------------------- the recipes


@dataclass(frozen=True)
class Gradient:
    method: vp.Method
    batch: int = 32
    rate: float = 0.002
    """The peak of the cycle."""
    logvar: float = 0.2
    """The rate of the log-variances relative to it."""
    start: float = -9.0
    """The log-variances at the start."""
    precision: float = 100.0
    """Of the prior."""

    def learner(self, net: nn.Sequential, n_data: int, passes: int, seed: int) -> Learner:
        return ByGradient(self, net, n_data, passes)


@dataclass(frozen=True)
class Ascent:
    batch: int = 500
    frozen: bool = False
    """Whether only the last layer learns."""
    sums: float = 10.0
    units: float = 100.0
    slope: float = 100.0
    labels: float = 1000.0
    window: float = math.inf
    output_window: float = math.inf
    rounds: int = 5

    def learner(self, net: nn.Sequential, n_data: int, passes: int, seed: int) -> Learner:
        return ByAscent(self, net)


@dataclass(frozen=True)
class Linear:
    batch: int = 100
    alpha: float = 0.001

    def learner(self, net: nn.Sequential, n_data: int, passes: int, seed: int) -> Learner:
        return ByScikitLearn(self, cast(nn.Linear, net[-1]).out_features, seed)


Recipe = Gradient | Ascent | Linear
METHODS = {"varout": vp.LOCAL_REPARAM, "dvi": vp.DVI, "vbp": vp.VBP, "plain": vp.DETERMINISTIC}


def rows(gradient: Gradient, ascent: Ascent, linear: Linear) -> dict[str, Recipe]:
    """All rows: those that train by gradient have the same rate and batches."""
    by_gradient: dict[str, Recipe] = {
        row: replace(gradient, method=method) for row, method in METHODS.items()
    }
    frozen = Ascent(frozen=True, batch=ascent.batch)
    return {"vrelu": ascent, **by_gradient, "sgd": linear, "frozen": frozen}


ROWS = {
    "MNIST": rows(Gradient(vp.VBP), Ascent(window=2000.0, output_window=10_000.0), Linear()),
    "CIFAR-10": rows(
        Gradient(vp.VBP, batch=64, rate=0.0005),
        Ascent(batch=1000, window=8000.0, output_window=20_000.0),
        Linear(),
    ),
}
NAMES = tuple(ROWS["MNIST"])


# --------------------------------------------------------------------------------------------------- a cell


def stream(images: ImageSet, batch: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Every training image once, in the order of the run."""
    order = torch.randperm(len(images.x), generator=torch.Generator().manual_seed(seed))
    for part in order.split(batch):
        yield images.standardised(images.x[part]).flatten(1), images.y[part]


def compute(recipe: Recipe, task: Task, images: ImageSet, seed: int) -> dict[str, Any]:
    """Learn in one pass, look at the accuracy on the way, and predict."""
    torch.manual_seed(seed)
    learner = recipe.learner(perceptron(task.sizes), len(images.x), task.passes, seed)
    x_test, y_test = images.standardised(images.x_test).flatten(1), images.y_test
    seconds, processor, seen, curve = 0.0, 0.0, 0, []
    for x, y in stream(images, recipe.batch, seed):
        began = time.perf_counter(), time.process_time()
        learner.learn(x, y)
        seconds += time.perf_counter() - began[0]
        processor += time.process_time() - began[1]
        before, seen = seen, seen + len(x)
        if any(before < glance <= seen for glance in GLANCES):
            right = learner.scores(x_test[:SIGHT]).argmax(1) == y_test[:SIGHT]
            curve.append([seen, right.double().mean().item()])
    torch.manual_seed(seed)
    p = vp.predictive.concatenate([learner.predict(part) for part in x_test.split(1000)])
    own = curves.scores(cast(vp.predictive.ClassPredictive, p), y_test)
    return {"own": own, "seconds": seconds, "processor_seconds": processor, "curve": curve, **learner.facts()}


def describe(recipe: Recipe) -> dict[str, Any]:
    values = {field.name: getattr(recipe, field.name) for field in fields(recipe)}
    return {name: v.name if isinstance(v, vp.Method) else _finite(v) for name, v in values.items()}


def _finite(value: Any) -> Any:
    return "all" if value == math.inf else value


def changed(recipe: Recipe, settings: Sequence[str]) -> Recipe:
    """A recipe with other values, given as NAME=VALUE."""
    for setting in settings:
        name, _, value = setting.partition("=")
        old = getattr(recipe, name, None)
        try:
            recipe = replace(recipe, **{name: cast(Any, type(old))(value)})
        except (TypeError, ValueError):
            names = ", ".join(field.name for field in fields(recipe))
            raise SystemExit(
                f"table3: --set {setting} has no effect; give NAME=VALUE, with {names}."
            ) from None
    return recipe


def cell(row: str, name: str, run: int, options: argparse.Namespace) -> None:
    """Compute a cell, unless it is there."""
    recipe, task = changed(ROWS[name][row], options.set), TASKS[name]
    configuration = {"row": row, "dataset": name, "run": run, "sizes": list(task.sizes), **describe(recipe)}
    configuration |= {"passes": task.passes} if row == "varout" else {}
    configuration |= {"rows": options.rows} if options.rows else {}
    configuration |= {"validation": True} if options.validate else {}
    folder = options.out / "validation" if options.validate else options.out
    path = folder / row / f"{'-'.join([name, *map(cells.slug, options.set), str(run)])}.json"
    if cells.finished(path, configuration):
        return
    images = ImageSet.of(tuple(t[: options.rows] for t in task.images()))  # type: ignore[arg-type]
    images = images.held_out(min(10_000, len(images.x) // 2)) if options.validate else images
    found = compute(recipe, task, images, run)
    cells.write(path, configuration, **found)
    print(f"{row} {name}, run {run}: {1 - found['own']['error']:.2%}, {found['seconds']:.0f} s", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.table3", description=__doc__.split("\n")[0])
    parser.add_argument("--datasets", nargs="+", choices=TASKS, default=list(TASKS), metavar="NAME")
    parser.add_argument("--methods", nargs="+", choices=NAMES, default=list(NAMES), metavar="ROW")
    parser.add_argument("--runs", type=int, default=10, help="how many; the number of a run is its seed")
    parser.add_argument(
        "--validate",
        action="store_true",
        help="score 10,000 held-out training images in the place of the test's",
    )
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE", help="instead of the row's own")
    parser.add_argument("--rows", type=int, help="only the first so many images, to try things out")
    parser.add_argument("--out", type=Path, default=cells.RESULTS / "table3", help="folder of the cells")
    options = parser.parse_args(arguments)
    if options.set and not options.validate:
        parser.error("--set is for --validate: the test images are for the settings of the rows.")
    for run in range(options.runs):
        for name in options.datasets:
            for row in options.methods:
                cell(row, name, run, options)
    print(table(options.out))


# ------------------------------------------------------------------------------------------------- the table


def found(folder: Path, row: str, name: str) -> list[dict[str, Any]]:
    """The cells of a row and a set, by run."""
    paths = sorted((folder / row).glob(f"{name}-*.json"), key=lambda path: int(path.stem.split("-")[-1]))
    return [json.loads(path.read_text()) for path in paths]


def table(folder: Path = cells.RESULTS / "table3") -> str:
    """Test accuracies beside the paper's, then what was compared on held-out training images."""
    head = [
        "images",
        "row",
        "runs",
        "accuracy, %",
        "paper",
        "log-likelihood",
        "hidden layers moved",
        "seconds",
    ]
    lines = [head]
    for k, name in enumerate(TASKS):
        for row in NAMES:
            if runs := found(folder, row, name):
                accuracy = tables.spread([100 - 100 * run["own"]["error"] for run in runs], 2)
                fit = tables.spread([run["own"]["log_likelihood"] for run in runs], 3)
                moved = np.mean([run["moved"] for run in runs], 0) if runs[0].get("moved") else []
                seconds = f"{np.median([run['processor_seconds'] for run in runs]):.0f}"
                paper = PUBLISHED[row][k] if row in PUBLISHED else ""
                shares = ", ".join(f"{100 * share:.0f} %" for share in moved)
                lines.append([name, row, str(len(runs)), accuracy, paper, fit, shares, seconds])
    parts = [tables.markdown(lines)]
    if compared := sorted((folder / "validation").rglob("*.json")):
        parts += ["### One pass, on held-out training images", _compared(compared)]
    return "\n\n".join(parts)


def _compared(paths: Sequence[Path]) -> str:
    lines = [["images", "row", "settings", "accuracy, %", "log-likelihood"]]
    for path in paths:
        cell = json.loads(path.read_text())
        by, own = cell["configuration"], cell["own"]
        known = ("row", "dataset", "run", "sizes", "validation", "method", "frozen", "start", "precision")
        settings = ", ".join(f"{name} {value}" for name, value in by.items() if name not in known)
        scores = f"{100 - 100 * own['error']:.2f}", f"{own['log_likelihood']:.3f}"
        lines.append([by["dataset"], by["row"], settings, *scores])
    return tables.markdown(lines)


if __name__ == "__main__":
    main()

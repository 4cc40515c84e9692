"""Table 2 of the paper, four sets of images with LeNets of full width, and rows beyond it.

    python -m experiments.table2 --datasets MNIST FashionMNIST --methods vbp dvi --runs 3

A row is one recipe for all four sets. The schedule "short" is one cycle of the rate, with a lower one for the
log-variances; "one-rate" has one for both; "paper" is a constant rate. A schedule is the same for all rows. A
run that was stopped goes on from its checkpoint.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

import varprop as vp
from varprop.predictive import ClassPredictive

from . import cells, curves, data, image_tables
from .image_predictions import drawn, predict, scale
from .images import Augmentation, ImageSet, loader
from .lenets import lenet
from .schedule import Schedule

DRAWN = 100
"""Networks drawn from a posterior to compare its own moments with."""
HELD_OUT = 5000
"""Training images that choose a temperature."""


@dataclass(frozen=True)
class Task:
    """A set of images, and what depends on it."""

    images: Callable[[], data.Images]
    strangers: Callable[[], dict[str, Tensor]]
    """Test images of other things, by the name of their set."""
    epochs: int = 20
    rate: float = 0.002
    """The largest rate of the short schedule."""
    logvar: float = 0.2
    """The rate of the log-variances relative to it."""
    batch: int = 128
    flip: bool = False
    """Whether a mirror image is of the same class."""
    passes: int = 100
    """Of a method that predicts by sampling."""
    audited: int = 10_000
    """Test images that the drawn networks see."""
    precision: str | None = None
    """Of the products in training; single by default. Predictions are in single precision."""
    compiled: bool = False
    """Whether the step is compiled."""


def cifar100_test() -> dict[str, Tensor]:
    return {"CIFAR-100": data.cifar100()[2]}


wide = partial(
    Task, epochs=10, logvar=0.4, flip=True, passes=30, audited=2000, precision="bf16-mixed", compiled=True
)
TASKS = {
    "MNIST": Task(data.mnist, data.strangers),
    "FashionMNIST": Task(data.fashion_mnist, dict, flip=True),
    "CIFAR-10": wide(data.cifar10, cifar100_test),
    "CIFAR-100": wide(data.cifar100, dict),
}


@dataclass(frozen=True)
class Recipe:
    """How a row is trained. The defaults are the paper's protocol."""

    method: vp.Method
    prior: vp.priors.Prior = field(default_factory=lambda: vp.priors.Normal(precision=100.0))
    pooled: bool = False
    augmented: int = 0
    """Pixels by which images may move along each axis; with any, also mirror images that keep the class."""
    members: int = 1
    scaled: bool = False
    """Whether a temperature is fitted to training images that were held out."""

    def objective(self, images: ImageSet, seed: int) -> vp.ELBO:
        torch.manual_seed(seed)
        net = lenet(images.x.shape[1], images.classes, self.pooled)
        if self.method is not vp.DETERMINISTIC:
            vp.variational(net)
        net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return vp.ELBO(net, self.method, vp.likelihoods.Categorical(), self.prior, n_data=len(images.x))

    def describe(self) -> dict[str, Any]:
        choices = {name: value for name, value in vars(self).items() if name != "method"}
        return {
            name: value if isinstance(value, bool | int) else repr(value) for name, value in choices.items()
        }


def ours(weight: float = 0.03, shift: int = 1, members: int = 3) -> Recipe:
    """DVI with a part of its divergence, on augmented images."""
    return Recipe(vp.DVI, vp.priors.Tempered(vp.priors.FanIn(4.0), weight), augmented=shift, members=members)


ROWS = {
    "vbp": Recipe(vp.VBP),
    "dvi": Recipe(vp.DVI),
    "varout": Recipe(vp.LOCAL_REPARAM),
    "plain": Recipe(vp.DETERMINISTIC),
    "plain-scaled": Recipe(vp.DETERMINISTIC, scaled=True),
    "ours": ours(),
    "vbp-pooled": Recipe(vp.VBP, pooled=True),
    "dvi-pooled": Recipe(vp.DVI, pooled=True),
    "vbp-varied": Recipe(vp.VBP, augmented=1),
    "one-still": ours(0.1, shift=0, members=1),
    "one-shift-1": ours(0.1, members=1),
    "one-0.03": ours(members=1),
    "one-0.01": ours(0.01, members=1),
}
"""The last five were only compared on held-out training images, to choose the others."""


SCHEDULES: dict[str, Callable[[Task], Schedule]] = {
    "short": lambda task: Schedule(task.epochs, task.rate, cycle=True, logvar=task.logvar),
    "one-rate": lambda task: Schedule(task.epochs, 0.0007, cycle=True),
    "paper": lambda task: Schedule(100, 0.001, cycle=False),
}


def train(
    recipe: Recipe,
    task: Task,
    images: ImageSet,
    schedule: Schedule,
    seed: int,
    checkpoint: Path,
    progress: bool,
) -> tuple[vp.ELBO, list[dict[str, float]]]:
    """One network and its learning curve."""
    elbo = recipe.objective(images, seed)
    augmentation = Augmentation(recipe.augmented, task.flip and recipe.augmented > 0)
    batches = loader(images, task.batch, augmentation)
    checkpoint.parent.mkdir(parents=True, exist_ok=True)
    history = vp.fit(
        elbo,
        batches,
        epochs=schedule.epochs,
        optimizer=lambda _: schedule.optimiser(elbo.net, len(batches)),
        checkpoint=checkpoint,
        resume=True,
        seed=seed,
        progress=progress,
        precision=task.precision,
        compile=task.compiled,
    )
    curve = history[["loss", "data_fit", "kl", "seconds"]].to_dict("records")
    return elbo, cast("list[dict[str, float]]", curve)


def evaluate(members: Sequence[vp.ELBO], task: Task, images: ImageSet) -> dict[str, Any]:
    """Scores on the test images, curves for the figures, the Monte Carlo estimate, and strangers."""
    y = images.y_test
    p = predict(members, images.x_test, images, task.passes)
    found: dict[str, Any] = {"own": curves.scores(p, y)}
    found |= {"reliability": curves.reliability(p, y), "rejection": curves.rejection(p, y)}
    found["entropies"] = {"known": curves.entropies(p)}
    if members[0].method is not vp.DETERMINISTIC:
        n = min(task.audited, len(y))
        own = ClassPredictive(p.probs[:n], p.expected_entropy[:n])
        by_drawing = drawn(members, images.x_test[:n], images, DRAWN)
        found["audit"] = {
            "images": n,
            "own": curves.scores(own, y[:n]),
            "drawn": curves.scores(by_drawing, y[:n]),
        }
    found["auroc"] = {}
    for name, x in task.strangers().items():
        strange = predict(members, x, images, task.passes)
        found["auroc"][name] = curves.aurocs(p, strange)
        found["entropies"][name] = curves.entropies(strange)
    return found


def compute(
    recipe: Recipe,
    task: Task,
    images: ImageSet,
    schedule: Schedule,
    run: int,
    checkpoint: Path,
    progress: bool,
) -> dict[str, Any]:
    """Train and evaluate one run."""
    known = images.held_out(HELD_OUT) if recipe.scaled else images
    seeds = [run + 1000 * member for member in range(recipe.members)]
    trained = [
        train(
            recipe,
            task,
            known,
            schedule,
            seed,
            checkpoint.with_name(f"{checkpoint.name}-{seed}.pt"),
            progress,
        )
        for seed in seeds
    ]
    members = [elbo for elbo, _ in trained]
    found: dict[str, Any] = {}
    if recipe.scaled:
        net = cast(nn.Sequential, members[0].net)
        found["temperature"] = scale(net, known.standardised(known.x_test), known.y_test)
    found |= evaluate(members, task, images)
    seconds = sorted(row["seconds"] for _, curve in trained for row in curve)
    return {
        **found,
        "seconds_per_epoch": seconds[len(seconds) // 2],
        "curves": [curve for _, curve in trained],
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.table2", description=__doc__.split("\n")[0])
    parser.add_argument("--datasets", nargs="+", choices=TASKS, default=list(TASKS), metavar="NAME")
    parser.add_argument(
        "--methods",
        nargs="+",
        choices=ROWS,
        default=list(image_tables.IMAGE_ROWS),
        metavar="ROW",
        help=", ".join(ROWS),
    )
    parser.add_argument("--runs", type=int, default=3, help="how many; the number of a run is its seed")
    parser.add_argument("--epochs", type=int, help="instead of the schedule's own")
    parser.add_argument("--rate", type=float, help="instead of the schedule's own")
    parser.add_argument("--logvar", type=float, help="rate of the log-variances relative to --rate, likewise")
    parser.add_argument("--batch", type=int, help="images of a batch, instead of the set's own")
    parser.add_argument("--schedule", choices=SCHEDULES, default="short")
    parser.add_argument(
        "--validate",
        action="store_true",
        help="score 10,000 held-out training images in the place of the test's",
    )
    parser.add_argument("--rows", type=int, help="only the first so many images, to try things out")
    parser.add_argument("--out", type=Path, default=cells.RESULTS / "table2", help="folder of the cells")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    options = parser.parse_args(arguments)
    for run in range(options.runs):
        for name in options.datasets:
            for row in options.methods:
                cell(row, name, run, options)
    print(image_tables.table2(options.out))


def cell(row: str, name: str, run: int, options: argparse.Namespace) -> None:
    """Compute a cell, unless it is there."""
    recipe, task = ROWS[row], TASKS[name]
    task = replace(task, batch=options.batch or task.batch)
    schedule = SCHEDULES[options.schedule](task)
    given = {key: getattr(options, key) for key in ("epochs", "rate", "logvar")}
    schedule = replace(schedule, **{key: value for key, value in given.items() if value is not None})
    configuration = {
        "row": row,
        "dataset": name,
        "run": run,
        "method": recipe.method.name,
        **recipe.describe(),
    }
    configuration |= {"schedule": options.schedule, **vars(schedule), "batch_size": task.batch}
    configuration |= {"precision": task.precision} if task.precision else {}
    configuration |= {"rows": options.rows} if options.rows else {}
    configuration |= {"validation": True} if options.validate else {}
    path = options.out / options.schedule / row / f"{name}-{run}.json"
    if cells.finished(path, configuration):
        return
    images = ImageSet.of(tuple(t[: options.rows] for t in task.images()))  # type: ignore[arg-type]
    images = images.held_out(min(10_000, len(images.x) // 2)) if options.validate else images
    print(f"{options.schedule} {row} {name}, run {run}", flush=True)
    stem = "-".join(
        [options.schedule, *(f"{value:g}" for value in vars(schedule).values()), str(task.batch), row, name]
    )
    found = compute(
        recipe, task, images, schedule, run, options.out / "checkpoints" / stem, not options.quiet
    )
    cells.write(path, configuration, **found)
    own = found["own"]
    print(f"error {own['error']:.2%}  log-likelihood {own['log_likelihood']:.4f}", flush=True)


if __name__ == "__main__":
    main()

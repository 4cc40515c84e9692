"""A residual network with batch normalisation, trained by each method on FashionMNIST.

    python -m experiments.deep

From scratch, further from the plain network's weights, and calibrated with frozen weights; beside them the
plain network, with and without a temperature. All train on 55,000 images; the other 5,000 choose the
temperature and calibrate. A run that was stopped goes on from its checkpoint.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

import varprop as vp
from varprop.gaussian import as_gaussian

from . import cells, curves, data
from .accuracy import Moments
from .block import Block
from .image_predictions import drawn, outputs_drawn, predict, scale
from .images import Augmentation, ImageSet, loader
from .schedule import Schedule
from .table2 import HELD_OUT
from .tables import markdown

EPOCHS, FURTHER = 6, 2
RATE, BATCH = 0.003, 128
DRAWN, AUDITED = 50, 2000


def resnet(width: int = 16) -> nn.Sequential:
    """Three stages that halve the image, each with a residual block; 28 × 28 pixels."""

    def stage(inputs: int, outputs: int) -> list[nn.Module]:
        convolution = nn.Conv2d(inputs, outputs, 3, 2, padding=1, bias=False)
        return [convolution, nn.BatchNorm2d(outputs), nn.ReLU(), Block(outputs)]

    stages = [*stage(1, width), *stage(width, 2 * width), *stage(2 * width, 4 * width)]
    return nn.Sequential(*stages, nn.AvgPool2d(4), nn.Flatten(), nn.Linear(4 * width, 10))


@dataclass(frozen=True)
class Row:
    """How a network comes about."""

    method: vp.Method = vp.DETERMINISTIC
    start: Literal["scratch", "further", "calibrated"] = "scratch"
    scaled: bool = False
    share: float = 0.1
    """Of the divergence from the prior."""
    logvar: float = 0.2
    """The rate of the log-variances relative to that of the means."""

    def __str__(self) -> str:
        if self.method is vp.DETERMINISTIC:
            return "plain, temperature" if self.scaled else "plain"
        after = {
            "scratch": f"from scratch, {self.share:g} of the divergence" + ", one rate" * (self.logvar == 1),
            "further": "after plain",
            "calibrated": "calibrated",
        }
        return f"{self.method.name}, {after[self.start]}"


ROWS = {
    "plain": Row(),
    "plain-scaled": Row(scaled=True),
    "vbp-calibrated": Row(vp.VBP, "calibrated"),
    "dvi-calibrated": Row(vp.DVI, "calibrated"),
    "vbp-further": Row(vp.VBP, "further"),
    "dvi-further": Row(vp.DVI, "further"),
    "vbp": Row(vp.VBP),
    "vbp-third": Row(vp.VBP, share=0.3),
    "vbp-whole": Row(vp.VBP, share=1.0),
    "dvi": Row(vp.DVI),
    "dvi-third": Row(vp.DVI, share=0.3),
    "dvi-whole": Row(vp.DVI, share=1.0),
    "dvi-wide": Row(vp.DVI, share=1.0, logvar=1.0),
}


@dataclass(frozen=True)
class Run:
    """The images and the size of a run."""

    images: ImageSet
    seed: int
    epochs: int
    further: int
    checkpoints: Path

    def trained(self, net: nn.Module, row: Row, epochs: int, rate: float) -> vp.ELBO:
        """The network after these epochs, in evaluation mode."""
        if row.method is not vp.DETERMINISTIC:
            vp.variational(net)
        net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        prior, n = vp.priors.Tempered(vp.priors.FanIn(4.0), row.share), len(self.images.x)
        elbo = vp.ELBO(net, row.method, vp.likelihoods.Categorical(), prior, n_data=n)
        batches = loader(self.images, BATCH, Augmentation())
        schedule = Schedule(epochs, rate, cycle=True, logvar=row.logvar)
        vp.fit(
            elbo,
            batches,
            epochs=epochs,
            optimizer=lambda _: schedule.optimiser(net, len(batches)),
            checkpoint=self.checkpoints
            / f"{row.start}-{row.method.name}-{row.share:g}-{row.logvar:g}-{self.seed}.pt",
            resume=True,
            seed=self.seed,
            progress=False,
        )
        return elbo.eval()

    def plain(self) -> vp.ELBO:
        torch.manual_seed(self.seed)
        return self.trained(resnet(), ROWS["plain"], self.epochs, RATE)

    def network(self, row: Row) -> vp.ELBO:
        images = self.images
        held_out = images.standardised(images.x_test), images.y_test
        if row.start == "scratch" and not row.scaled:
            torch.manual_seed(self.seed)
            return self.trained(resnet(), row, self.epochs, RATE)
        elbo = self.plain()
        if row.scaled:
            scale(cast(nn.Sequential, elbo.net), *held_out)
            return elbo
        if row.start == "further":
            return self.trained(elbo.net, row, self.further, RATE / 3)
        return vp.calibrate(
            elbo.net, held_out, vp.likelihoods.Categorical(), method=row.method, progress=False
        )

    def scores(self, row: Row, test: ImageSet) -> dict[str, Any]:
        began = time.process_time()
        elbo = self.network(row)
        seconds = time.process_time() - began
        found: dict[str, Any] = curves.scores(predict([elbo], test.x_test, test, 1), test.y_test)
        found["cpu_seconds"] = seconds
        if row.start == "scratch" and not row.scaled:
            known = self.images
            found["held_out"] = curves.scores(predict([elbo], known.x_test, test, 1), known.y_test)
        if row.method is not vp.DETERMINISTIC:
            x, y = test.x_test[:AUDITED], test.y_test[:AUDITED]
            found["own"] = curves.scores(predict([elbo], x, test, 1), y)
            found["drawn"] = curves.scores(drawn([elbo], x, test, DRAWN), y)
            found["variance"] = variance_ratio(elbo, x, test)
        return found


@torch.no_grad()
def variance_ratio(elbo: vp.ELBO, x: Tensor, images: ImageSet) -> float:
    """The predicted variance of an output over that of drawn networks, the median over outputs."""
    moments = Moments()
    for f in outputs_drawn([elbo], x, images, DRAWN):
        moments.add(f.unsqueeze(0))
    parts = [as_gaussian(elbo.method(elbo.net, images.standardised(part))).var for part in x.split(500)]
    return (torch.cat(parts) / moments.result()[1]).median().item()


def table(folder: Path = cells.RESULTS / "deep") -> str:
    head = ["", "held out", "error, %", "log-likelihood", "ECE", "Brier score", "own", "drawn"]
    head += ["variance / drawn", "minutes"]
    lines = []
    for name, row in ROWS.items():
        path = folder / f"{name}.json"
        if path.exists():
            found = json.loads(path.read_text())["scores"]
            held_out, own, drawn = (
                f"{found[part]['log_likelihood']:.3f}" if part in found else ""
                for part in ("held_out", "own", "drawn")
            )
            numbers = f"{found['log_likelihood']:.4f}", f"{found['ece']:.4f}", f"{found['brier']:.4f}"
            variance = f"{found['variance']:.2f}" if "variance" in found else ""
            minutes = f"{found['cpu_seconds'] / 60:.1f}"
            error = f"{100 * found['error']:.2f}"
            lines.append([str(row), held_out, error, *numbers, own, drawn, variance, minutes])
    return markdown([head, *lines])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.deep", description=__doc__.split("\n")[0])
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), metavar="ROW")
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--further", type=int, default=FURTHER, help="epochs after the plain ones")
    parser.add_argument("--images", type=int, help="only the first so many, to try things out")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=cells.RESULTS / "deep")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    sizes = {name: getattr(options, name) for name in ("epochs", "further", "images", "seed")}
    test = ImageSet.of(tuple(t[: options.images] for t in data.fashion_mnist()))  # type: ignore[arg-type]
    known = test.held_out(min(HELD_OUT, len(test.x) // 2))
    run = Run(known, options.seed, options.epochs, options.further, options.out / "checkpoints")
    run.checkpoints.mkdir(parents=True, exist_ok=True)
    for name in options.rows:
        path = options.out / f"{name}.json"
        if not cells.finished(path, sizes):
            found = run.scores(ROWS[name], test)
            cells.write(path, sizes, scores=found)
            print(name, json.dumps(found), flush=True)
    print(table(options.out))


if __name__ == "__main__":
    main()

"""Does a deep network gain if it is trained with the correlations of its activations?

    python -m experiments.correlations

Perceptrons of two and four hidden layers on the five small UCI sets (the first published splits, trained as
replicas), and a strided LeNet on a part of FashionMNIST: each method trained with independent and with
correlated moments (`vp.ELBO(..., moments=...)`). What the method says of its own posterior is compared with
1,000 networks sampled from it, on the test part. Existing results are not computed again.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise, product
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import nn

import varprop as vp
from varprop.objectives import Moments

from . import cells, consistency, data
from .table1 import BATCH, SMALL
from .tables import markdown

DEPTHS, UNITS = (2, 4), 50
SPLITS, EPOCHS = 5, 100
IMAGES, IMAGE_EPOCHS, TESTED = 10_000, 3, 2000
METHODS = {"dvi": vp.DVI, "vbp": vp.VBP}
MOMENTS: tuple[Moments, ...] = ("independent", "correlated")
LENET = "LeNet"


def perceptron(features: int, depth: int, seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise([features, *[UNITS] * depth]):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return vp.variational(nn.Sequential(*layers, nn.Linear(UNITS, 1)), init="he")


def regression(name: str, depth: int, method: str, moments: Moments, splits: int, epochs: int) -> Any:
    """The audit of each split, in the unit of the target."""
    rows = data.regression(name, tuple(range(splits)))
    _, n, features = rows.x.shape
    members = [
        vp.ELBO(
            perceptron(features, depth, seed),
            METHODS[method],
            vp.likelihoods.Normal(),
            vp.priors.FanIn(4.0),
            n_data=n,
            moments=moments,
        )
        for seed in range(splits)
    ]
    began = time.process_time()
    options: dict[str, Any] = {"lr": 0.01, "batch_size": BATCH[name], "noise": "exact", "schedule": "cosine"}
    vp.replicas.fit(members, x=rows.x, y=rows.y, epochs=epochs, seeds=list(range(splits)), **options)
    seconds = time.process_time() - began
    audits = [vp.audit(member, rows.x_test[k], rows.y_test[k]) for k, member in enumerate(members)]
    shift = [math.log(rows.y_scale[k].item()) for k in range(splits)]
    return {"splits": [_scores(a, s) for a, s in zip(audits, shift, strict=True)], "cpu_seconds": seconds}


def images(method: str, moments: Moments, count: int, epochs: int) -> Any:
    """The audit of a LeNet of a fifth of the paper's width."""
    x, y, x_test, y_test = data.mnist("FashionMNIST")
    centre, scale = x.float().mean(), x.float().std()
    x, x_test = ((t.float() - centre) / scale for t in (x[:count], x_test[:TESTED]))
    prior, likelihood = vp.priors.FanIn(4.0), vp.likelihoods.Categorical()
    elbo = vp.ELBO(consistency.lenet(0), METHODS[method], likelihood, prior, n_data=len(x), moments=moments)
    began = time.process_time()
    vp.fit(elbo, (x, y[:count]), epochs=epochs, lr=2e-3, batch_size=64, schedule="cosine", progress=False)
    seconds = time.process_time() - began
    audit = vp.audit(elbo, x_test, y_test[:TESTED], samples=200)
    return {"splits": [_scores(audit, 0.0)], "cpu_seconds": seconds}


def _scores(audit: vp.Audit, shift: float) -> dict[str, float]:
    assert audit.sampled is not None
    return {"own": audit.own.log_likelihood - shift, "sampled": audit.sampled.log_likelihood - shift}


def tables(folder: Path = cells.RESULTS / "correlations") -> str:
    """Own and sampled log-likelihoods, and how many times as long training took."""
    rows = [(method, moments) for method in METHODS for moments in MOMENTS]
    parts = []
    networks = {f"{depth} hidden layers": [f"{name}-{depth}" for name in SMALL] for depth in DEPTHS}
    for title, names in {**networks, LENET: [LENET]}.items():
        heads = [name.rpartition("-")[0] or "FashionMNIST" for name in names]
        lines = [[title, *heads, "time"]]
        for method, moments in rows:
            found = [_cell(folder / f"{method}-{moments}" / f"{name}.json") for name in names]
            base = [_cell(folder / f"{method}-independent" / f"{name}.json") for name in names]
            ratios = [
                a["cpu_seconds"] / b["cpu_seconds"] for a, b in zip(found, base, strict=True) if a and b
            ]
            times = f"{fmean(ratios):.1f}×" if ratios else ""
            lines.append([f"{METHODS[method].name}, {moments}", *map(_shown, found), times])
        parts.append(markdown(lines))
    return "\n\n".join(parts)


def _cell(path: Path) -> Any:
    return json.loads(path.read_text()) if path.exists() else None


def _shown(cell: Any) -> str:
    if cell is None:
        return ""
    own, sampled = (fmean(split[name] for split in cell["splits"]) for name in ("own", "sampled"))
    return f"{own:.2f} ({sampled:.2f})"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.correlations", description=__doc__.split("\n")[0]
    )
    names = [*SMALL, LENET]
    parser.add_argument("--networks", nargs="+", choices=names, default=names, metavar="NAME")
    parser.add_argument("--splits", type=int, default=SPLITS)
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--images", type=int, default=IMAGES)
    parser.add_argument("--image-epochs", type=int, default=IMAGE_EPOCHS)
    parser.add_argument("--out", type=Path, default=cells.RESULTS / "correlations")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    for method, moments in product(METHODS, MOMENTS):
        for name, configuration, compute in _tasks(options, method, moments):
            path = options.out / f"{method}-{moments}" / f"{name}.json"
            if not cells.finished(path, configuration):
                cells.write(path, configuration, **compute())
                print(path.parent.name, name, _shown(_cell(path)), flush=True)
    print(tables(options.out))


def _tasks(
    options: argparse.Namespace, method: str, moments: Moments
) -> Iterator[tuple[str, dict[str, int], Callable[[], Any]]]:
    """Name, configuration and computation of each cell of a row."""
    for name, depth in product([n for n in options.networks if n != LENET], DEPTHS):
        size = {"splits": options.splits, "epochs": options.epochs}

        def compute(name: str = name, depth: int = depth) -> Any:
            return regression(name, depth, method, moments, options.splits, options.epochs)

        yield f"{name}-{depth}", size, compute
    if LENET in options.networks:
        size = {"images": options.images, "epochs": options.image_epochs}
        yield LENET, size, lambda: images(method, moments, options.images, options.image_epochs)


if __name__ == "__main__":
    main()

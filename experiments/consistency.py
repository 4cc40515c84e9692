"""Does the trained posterior predict what the method claims? The method's own moments against exact ones.

    python -m experiments.consistency

There are three parts: the nine regression sets with one hidden layer, using rows of `experiments.table1`; the
small sets again with a gap in the data, for one feature after another; and two sets of images with a strided
LeNet. Each row is one recipe. Results are in experiments/results/consistency and, for regression on the
published splits, in experiments/results/table1.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable, Iterator, Sequence
from copy import deepcopy
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn

import varprop as vp
from varprop.posterior import draw
from varprop.predictive import ClassPredictive, concatenate

from . import cells, data, table1
from .lenets import narrow
from .tables import markdown

REGRESSION = {
    "VBP as in the paper": "vbp-cosine",
    "VBP, gates' divergence × 0.1": "vbp-gates",
    "VBP, gates' divergence × 1": "vbp-gates-1",
    "DVI": "dvi-cosine",
    "CVBP": "cvbp",
    "CVBP, gates' divergence × 0.1": "cvbp-gates",
}
"""Rows of Table 1 that share one schedule."""

IMAGES: dict[str, tuple[vp.Method, float]] = {
    "vbp": (vp.VBP, 0.0),
    "dvi": (vp.DVI, 0.0),
    "cvbp": (vp.CVBP, 0.0),
}
"""Each method with the weight of the gates' divergence."""

EPOCHS, BATCH, SAMPLES = 5, 128, 200
SHARES = (0.5, 0.75, 0.9)

AWAY = {"VBP as in the paper": "vbp-cosine", "VBP, gates' divergence × 1": "vbp-gates-1", "DVI": "dvi-cosine"}
"""Rows compared away from the data."""


def away(row: str, name: str, epochs: int | None) -> list[dict[str, Any]]:
    """Scores in the gap of each feature."""
    recipe = table1.ROWS[row]
    assert isinstance(recipe, table1.Recipe)
    return [vars(result) for result in table1.train(recipe, data.gaps(name), epochs, 0)]


def lenet(seed: int) -> nn.Sequential:
    """The paper's strided LeNet at a fifth of its width."""
    torch.manual_seed(seed)
    return vp.variational(narrow(10, 20, 100), init="he")


def images(kind: str, row: str, epochs: int, seed: int, rows: int | None) -> dict[str, Any]:
    """Train on a set of images, then measure the audit, one sampled network, pruning and OOD detection."""
    x, y, x_test, y_test = (t[:rows] for t in data.mnist(kind))
    centre, scale = x.float().mean(), x.float().std()

    def scaled(t: Tensor) -> Tensor:
        return (t.float() - centre) / scale

    x, x_test = scaled(x), scaled(x_test)
    method, weight = IMAGES[row]
    elbo = vp.ELBO(
        lenet(seed),
        method,
        vp.likelihoods.Categorical(),
        vp.priors.Normal(100.0),
        n_data=len(x),
        kl_z_weight=weight,
    )
    start = time.perf_counter()
    vp.fit(elbo, (x, y), epochs=epochs, lr=1e-3, batch_size=BATCH, seed=seed, progress=False)
    seconds = time.perf_counter() - start
    audit = vp.audit(elbo, x_test, y_test, samples=SAMPLES, tolerance=0.01)
    print(f"{kind} {row}, {seconds:.0f} s\n{audit}", flush=True)
    result = {
        "own": vars(audit.own),
        "exact": vars(audit.exact),
        "gate_kl": audit.gate_kl,
        "seconds": seconds,
    }
    assert audit.sampled is not None
    result |= {"sampled": vars(audit.sampled), "idle": {units.layer: units.idle for units in audit.layers}}
    result["one_draw_error"] = one_draw(elbo.net, x_test, y_test)
    result["pruned_error"] = {str(share): error(pruned(elbo, share), x_test, y_test) for share in SHARES}
    if kind == "MNIST":
        strangers = {name: scaled(t[:rows]) for name, t in data.strangers().items()}
        result["auroc"] = {name: auroc(elbo, x_test, t) for name, t in strangers.items()}
    return result


@torch.no_grad()
def error(elbo: vp.ELBO, x: Tensor, y: Tensor) -> float:
    return float((_predict(elbo, x).probs.argmax(1) != y).double().mean())


def _predict(elbo: vp.ELBO, x: Tensor) -> ClassPredictive:
    p = concatenate([elbo.predict(part) for part in x.split(1000)])
    assert isinstance(p, ClassPredictive)
    return p


@torch.no_grad()
def one_draw(net: nn.Module, x: Tensor, y: Tensor, samples: int = 20) -> float:
    """Mean error of single networks sampled from the posterior."""
    weights = draw(net, samples, torch.Generator().manual_seed(0))
    errors = []
    for k in range(samples):
        outputs = [
            torch.func.functional_call(net, {name: w[k] for name, w in weights.items()}, (part,))
            for part in x.split(1000)
        ]
        errors.append((torch.cat(outputs).argmax(1) != y).double().mean().item())
    return sum(errors) / samples


@torch.no_grad()
def pruned(elbo: vp.ELBO, share: float) -> vp.ELBO:
    """A copy without the given share of the weights, those with the lowest signal-to-noise ratio."""
    elbo = deepcopy(elbo)
    ratios = torch.cat([(q.mean.abs() / q.var.sqrt()).flatten() for _, q in vp.posteriors(elbo.net)])
    least = ratios.quantile(share)
    for _, q in vp.posteriors(elbo.net):
        gone = q.mean.abs() / q.var.sqrt() < least
        q.mean[gone], q.logvar[gone] = 0.0, -torch.inf
    return elbo


@torch.no_grad()
def auroc(elbo: vp.ELBO, known: Tensor, strange: Tensor) -> dict[str, float]:
    """How well uncertainty tells out-of-distribution images from test images.

    Measured by the entropy and the mutual information of the method's own prediction, and by the entropy of
    the average over networks sampled from the posterior ("entropy_drawn").
    """
    x, truth = torch.cat([known, strange]), torch.cat([torch.zeros(len(known)), torch.ones(len(strange))])
    own = _predict(elbo, x)
    scores = {
        "entropy": own.entropy,
        "mutual_information": own.mutual_information,
        "entropy_drawn": torch.cat([torch.special.entr(p).sum(1) for p in _averages(elbo.net, x)]),
    }
    return {name: float(roc_auc_score(truth, score)) for name, score in scores.items()}


def _averages(net: nn.Module, x: Tensor, samples: int = 20) -> Iterator[Tensor]:
    """Class probabilities averaged over sampled networks, for one chunk of images after another."""
    weights = draw(net, samples, torch.Generator().manual_seed(0))
    run = torch.func.vmap(lambda w, part: torch.func.functional_call(net, w, (part,)), in_dims=(0, None))
    for part in x.split(500):
        yield run(weights, part).softmax(2).mean(0)


def tables(folder: Path = cells.RESULTS) -> str:
    """Own and exact log-likelihoods of every row, and the other measurements on images."""
    away = folder / "consistency" / "away"
    parts = (
        _own_and_exact(REGRESSION, data.SPLITS, folder / "table1"),
        _images(folder / "consistency"),
        _own_and_exact(AWAY, table1.SMALL, away),
    )
    return "\n\n".join(parts)


def _own_and_exact(rows: dict[str, str], names: Iterable[str], folder: Path) -> str:
    """Log-likelihoods and, in brackets, the coverage of 90 % intervals, averaged over the splits."""
    lines = [["trained with", *names]]
    for title, row in rows.items():
        line = [title]
        for name in lines[0][1:]:
            path = folder / row / f"{name}.json"
            splits = json.loads(path.read_text())["splits"] if path.exists() else []
            both = [[split["own"], split["exact"] or split["own"]] for split in splits]
            means = [
                [mean(scores[score] for scores in by) for by in zip(*both, strict=True)]
                for score in ("log_likelihood", "coverage")
            ]
            line.append(f"{_joined(means[0], '.3f')} ({_joined(means[1], '.2f')})" if splits else "")
        lines.append(line)
    return markdown(lines)


def _images(folder: Path) -> str:
    head = [
        "images",
        "trained with",
        "error",
        "log-likelihood: own / exact / Monte Carlo",
        "error of one sample",
        "error, 50 / 75 / 90 % pruned",
    ]
    lines = [[*head, "AUROC, own entropy: Fashion / K / notMNIST", "the same, Monte Carlo"]]
    for path in sorted(folder.glob("*MNIST/*.json")):
        cell = json.loads(path.read_text())
        by = [cell[name]["log_likelihood"] for name in ("own", "exact", "sampled")]
        line = [
            cell["configuration"]["images"],
            cell["configuration"]["row"],
            f"{cell['own']['error']:.2%}",
            _joined(by, ".4f"),
        ]
        line += [f"{cell['one_draw_error']:.2%}", _joined(cell["pruned_error"].values(), ".2%")]
        strangers = cell.get("auroc", {}).values()
        for name in ("entropy", "entropy_drawn"):
            line.append(_joined([scores[name] for scores in strangers], ".3f"))
        lines.append(line)
    return markdown(lines)


def _joined(values: Iterable[float], form: str) -> str:
    return " / ".join(format(value, form) for value in values)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.consistency", description=__doc__.split("\n")[0]
    )
    parser.add_argument(
        "--datasets", nargs="+", choices=data.SPLITS, default=list(data.SPLITS), metavar="NAME"
    )
    parser.add_argument(
        "--images", nargs="*", choices=("MNIST", "FashionMNIST"), default=["MNIST", "FashionMNIST"]
    )
    parser.add_argument(
        "--methods", nargs="+", choices=IMAGES, default=list(IMAGES), metavar="ROW", help="for the images"
    )
    parser.add_argument("--runs", type=int, default=1, help="seeds, for the images")
    parser.add_argument("--epochs", type=int, help="default: those of each row")
    parser.add_argument("--splits", type=int, help="use only the first splits")
    parser.add_argument("--rows", type=int, help="use only the first images")
    parser.add_argument("--out", type=Path, default=cells.RESULTS)
    options = parser.parse_args(arguments)
    for kind in options.images:
        for row in options.methods:
            for seed in range(options.runs):
                configuration = {
                    "images": kind,
                    "row": row,
                    "epochs": options.epochs or EPOCHS,
                    "seed": seed,
                    "rows": options.rows,
                }
                path = options.out / "consistency" / kind / f"{row}-{seed}.json"
                if not cells.finished(path, configuration):
                    cells.write(
                        path, configuration, **images(kind, row, options.epochs or EPOCHS, seed, options.rows)
                    )
    for row in REGRESSION.values():
        for name in options.datasets:
            table1.run(row, name, options.splits, options.epochs, 0, options.out / "table1")
    for row in AWAY.values():
        for name in sorted({*options.datasets} & {*table1.SMALL}):
            path = options.out / "consistency" / "away" / row / f"{name}.json"
            configuration = {"row": row, "epochs": options.epochs}
            if not cells.finished(path, configuration):
                cells.write(path, configuration, splits=away(row, name, options.epochs))
    print(tables(options.out))


if __name__ == "__main__":
    main()

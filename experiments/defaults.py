"""How the defaults of the estimators were chosen: one change at a time, on training data only.

    python -m experiments.defaults

The training part of each split is split again, 80 % to train and 20 % to evaluate; the test parts are not
used. Each row changes one setting of the base recipe. The gap of `vp.audit` is how far the log-likelihood by
the method's own moments exceeds that of the posterior it trained.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import varprop as vp
from varprop.inspect.metrics import coverage, ece, log_likelihood, rmse
from varprop.predictive import ClassPredictive, Predictive, Regression

from . import cells, data
from .tables import markdown, standard_error

Scores = dict[str, list[float]]
"""A score's values on all splits, by the name of the score."""


@dataclass(frozen=True)
class Recipe:
    """How an estimator is trained; the defaults are the base recipe of the study."""

    method: str = "dvi"
    kl_z_weight: float = 0.0
    prior: str = "FanIn(gain=4.0)"
    hidden: int = 50
    logvar: float = -9.0
    init: str = "he"
    lr: float = 0.01
    batch: int = 0
    """0 means a hundredth of the rows, but at least 32 and at most 256."""
    epochs: int = 120
    steps: tuple[int, int] = (4000, 20_000)
    """Lower and upper bound on the number of training steps, which `epochs` is adjusted to."""
    schedule: str = "cosine"
    warmup: float = 0.0
    """Share of the epochs over which the weight of the KL term grows to one."""
    members: int = 1

    def batch_size(self, n: int) -> int:
        return self.batch or int(np.clip(n // 100, 32, 256))

    def passes(self, n: int) -> int:
        steps = -(-n // self.batch_size(n))
        return max(1, round(float(np.clip(self.epochs * steps, *self.steps)) / steps))


PRIOR = {
    repr(prior): prior
    for prior in (
        *map(vp.priors.FanIn, (1.0, 2.0, 4.0, 10.0)),
        *map(vp.priors.Normal, (1.0, 10.0)),
        vp.priors.EmpiricalBayes(),
    )
}
BASE = Recipe()
PRIORS = {
    "gain 1": replace(BASE, prior="FanIn(gain=1.0)"),
    "gain 2": replace(BASE, prior="FanIn(gain=2.0)"),
    "gain 10": replace(BASE, prior="FanIn(gain=10.0)"),
    "precision 1": replace(BASE, prior="Normal(precision=1.0)"),
    "precision 10": replace(BASE, prior="Normal(precision=10.0)"),
    "empirical Bayes": replace(BASE, prior="EmpiricalBayes(hyperprior=None)"),
}
METHODS = {
    "vbp": replace(BASE, method="vbp"),
    "vbp, gates x 0.1": replace(BASE, method="vbp", kl_z_weight=0.1),
    "vbp, gates x 1": replace(BASE, method="vbp", kl_z_weight=1.0),
    "cvbp": replace(BASE, method="cvbp"),
    "cvbp, gates x 0.1": replace(BASE, method="cvbp", kl_z_weight=0.1),
    "cvbp, gates x 0.1, precision 1": replace(
        BASE, method="cvbp", kl_z_weight=0.1, prior="Normal(precision=1.0)"
    ),
}
TRAINING = {
    "100 hidden units": replace(BASE, hidden=100),
    "log-variance -5 at the start": replace(BASE, logvar=-5.0),
    "torch's initialisation": replace(BASE, init="torch"),
    "constant rate": replace(BASE, schedule="constant"),
    "rate 0.003": replace(BASE, lr=0.003),
    "rate 0.03": replace(BASE, lr=0.03),
    "warm-up over a quarter": replace(BASE, warmup=0.25),
    "batches of 128": replace(BASE, batch=128),
    "2,000 steps": replace(BASE, steps=(2000, 2000)),
    "8,000 steps": replace(BASE, steps=(8000, 8000)),
    "five members": replace(BASE, members=5),
}
LENGTHS = {f"{n} epochs": replace(BASE, epochs=n, steps=(4000, 10**9)) for n in (30, 60, 240)}
LENGTHS["100 hidden units, 240 epochs"] = replace(LENGTHS["240 epochs"], hidden=100)


@dataclass(frozen=True)
class Study:
    """Recipes to compare on several data sets and splits."""

    title: str
    sets: Sequence[str]
    splits: int
    rows: dict[str, Recipe]


STUDIES = {
    "regression": Study(
        "Regression, small sets",
        ("boston", "concrete", "energy", "wine-red", "yacht", "diabetes"),
        5,
        {"base": BASE, **PRIORS, **METHODS, **TRAINING},
    ),
    "classes": Study(
        "Classification",
        ("breast cancer", "digits", "iris", "wine"),
        5,
        {"base": BASE, **PRIORS, **METHODS, **TRAINING},
    ),
    "large": Study(
        "Regression, large sets",
        ("kin8nm", "power", "naval", "protein"),
        2,
        {"base": BASE, "100 hidden units": TRAINING["100 hidden units"], **LENGTHS},
    ),
}


def inner(name: str, splits: int) -> data.Splits:
    """The training parts of the published splits, split again.

    For a set without published splits, the training part is nine tenths of the rows in a random order.
    """
    numbers = tuple(range(splits))
    if name not in data.BUNDLED:
        return data.regression(name, numbers).inner()
    x, y = data.BUNDLED[name](return_X_y=True)
    orders = np.stack([np.random.RandomState(k).permutation(len(y))[: round(0.9 * len(y))] for k in numbers])
    inputs, target = _standardised(x[orders]), torch.tensor(y[orders])
    target = _standardised(y[orders, None]) if name == "diabetes" else target
    return data.Splits(name, inputs, target, inputs, target, torch.ones(splits), numbers).inner()


def _standardised(a: np.ndarray) -> Tensor:
    scale = a.std(1, keepdims=True)
    return torch.tensor((a - a.mean(1, keepdims=True)) / np.where(scale > 0, scale, 1), dtype=torch.float32)


def objective(recipe: Recipe, features: int, outputs: int, n: int) -> vp.ELBO:
    net = nn.Sequential(nn.Linear(features, recipe.hidden), nn.ReLU(), nn.Linear(recipe.hidden, outputs))
    vp.variational(net, recipe.logvar, init="he" if recipe.init == "he" else None)
    likelihood = vp.likelihoods.Normal() if outputs == 1 else vp.likelihoods.Categorical()
    return vp.ELBO(
        net,
        vp.METHODS[recipe.method],
        likelihood,
        PRIOR[recipe.prior],
        n_data=n,
        kl_z_weight=recipe.kl_z_weight,
    )


def score(recipe: Recipe, splits: data.Splits) -> Scores:
    """Error, log-likelihood, calibration and gap for each split.

    The error is the RMSE in standard deviations of the target, or the share of wrong classes. Calibration is
    the coverage of the 90 % interval, or the expected calibration error of classes.
    """
    m, (n, features) = recipe.members, splits.x.shape[1:]
    outputs = 1 if splits.y.is_floating_point() else int(splits.y.max()) + 1
    objectives = []
    for seed in range(len(splits.x) * m):
        torch.manual_seed(seed)
        objectives.append(objective(recipe, features, outputs, n))
    epochs = recipe.passes(n)
    vp.replicas.fit(
        objectives,
        splits.x.repeat_interleave(m, 0),
        splits.y.repeat_interleave(m, 0),
        epochs=epochs,
        lr=recipe.lr,
        batch_size=recipe.batch_size(n),
        schedule="cosine" if recipe.schedule == "cosine" else None,
        kl_warmup=round(recipe.warmup * epochs),
        noise="exact",
    )
    scores: Scores = {"error": [], "log_likelihood": [], "calibration": [], "gap": []}
    for k, (x, y) in enumerate(zip(splits.x_test, splits.y_test, strict=True)):
        members = objectives[k * m : (k + 1) * m]
        p = vp.predictive.mixture([member.predict(x) for member in members])
        error, calibration = errors(p, y)
        values = error.item(), log_likelihood(p, y).item(), calibration.item(), vp.audit(members[0], x, y).gap
        for name, value in zip(scores, values, strict=True):
            scores[name].append(value)
    return scores


def errors(p: Predictive, y: Tensor) -> tuple[Tensor, Tensor]:
    """Error and calibration of a regression or a classification."""
    if isinstance(p, Regression):
        return rmse(p, y), coverage(p, y)
    assert isinstance(p, ClassPredictive)
    return (p.probs.argmax(1) != y).double().mean(), ece(p, y)


def tables(folder: Path = cells.RESULTS / "defaults") -> str:
    return "\n\n".join(
        f"### {study.title}\n\n{table(study, folder / name)}" for name, study in STUDIES.items()
    )


def table(study: Study, folder: Path) -> str:
    """Paired differences in log-likelihood from the base, errors in brackets, calibration and largest gap."""
    found = {row: _scores(study, folder, row) for row in study.rows}
    base = found["base"]
    lines = []
    for row, sets in found.items():
        shown = [
            _against(sets[name], None if row == "base" else base[name])
            if name in sets and name in base
            else ""
            for name in study.sets
        ]
        if sets:
            gap = max(abs(np.mean(scores["gap"])) for scores in sets.values())
            calibration = np.mean([np.mean(scores["calibration"]) for scores in sets.values()])
            lines.append([row, *shown, f"{calibration:.3f}", f"{gap:.3f}"])
    calibration_title = "ECE" if study is STUDIES["classes"] else "coverage"
    return markdown([["", *study.sets, calibration_title, "largest gap"], *lines])


def _against(scores: Scores, base: Scores | None) -> str:
    """Log-likelihood, as the difference from the base if there is one, and the error in brackets."""
    fit, error = np.array(scores["log_likelihood"]), np.mean(scores["error"])
    if base is None:
        return f"{fit.mean():.3f} ({error:.3f})"
    difference = fit - np.array(base["log_likelihood"])
    return f"{difference.mean():+.3f} ± {standard_error(difference):.3f} ({error:.3f})"


def _scores(study: Study, folder: Path, row: str) -> dict[str, Scores]:
    """The scores by data set, as far as they have been computed."""
    paths = {name: _path(folder, name, row) for name in study.sets}
    return {name: json.loads(path.read_text())["scores"] for name, path in paths.items() if path.exists()}


def _path(folder: Path, name: str, row: str) -> Path:
    return folder / cells.slug(name) / f"{cells.slug(row)}.json"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.defaults", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--studies", nargs="+", default=list(STUDIES), choices=list(STUDIES))
    parser.add_argument("--sets", nargs="+")
    parser.add_argument("--rows", nargs="+")
    parser.add_argument("--out", type=Path, default=cells.RESULTS / "defaults")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    for study_name in options.studies:
        study = STUDIES[study_name]
        for row, recipe in study.rows.items():
            for name in study.sets:
                if (options.rows and row not in options.rows) or (options.sets and name not in options.sets):
                    continue
                path = _path(options.out / study_name, name, row)
                configuration = asdict(recipe) | {"splits": study.splits, "steps": list(recipe.steps)}
                if not cells.finished(path, configuration):
                    cells.write(path, configuration, scores=score(recipe, inner(name, study.splits)))
        print(f"{study.title}\n{table(study, options.out / study_name)}\n")


if __name__ == "__main__":
    main()

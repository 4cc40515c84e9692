"""How the defaults of the estimators were chosen: one choice at a time, on parts of the training splits of small sets.

    python -m experiments.defaults

Each training split of a set (the first four) is split again, 80 % to train and 20 % to score; no test split is read. A row is the base
recipe with one thing changed. Finished cells are kept in `results/defaults.json` and not computed again.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, replace
from statistics import mean

import numpy as np
import torch
from sklearn.datasets import load_diabetes
from torch import nn

import varprop as vp
from varprop.metrics import coverage, log_likelihood, rmse

from . import cells, data

SETS = ("boston", "concrete", "energy", "wine-red", "yacht", "diabetes")
SPLITS = (0, 1, 2, 3)
PATH = cells.RESULTS / "defaults.json"


@dataclass(frozen=True)
class Recipe:
    method: str = "vbp"
    kl_z_weight: float = 0.1
    prior: vp.priors.Prior = vp.priors.Normal(10.0)  # noqa: RUF009  frozen
    logvar: float = -9.0
    init: str = "he"
    lr: float = 0.01
    batch: int = 32
    steps: int = 4000
    schedule: str = "cosine"
    warmup: float = 0.0
    """Share of the epochs over which the divergence is phased in."""
    members: int = 1


BASE = Recipe()
ROWS = {
    "base": BASE,
    "no gates' divergence": replace(BASE, kl_z_weight=0.0),
    "gates' divergence x 1": replace(BASE, kl_z_weight=1.0),
    "dvi": replace(BASE, method="dvi", kl_z_weight=0.0),
    "prior precision 1": replace(BASE, prior=vp.priors.Normal(1.0)),
    "prior empirical Bayes": replace(BASE, prior=vp.priors.EmpiricalBayes()),
    "logvar -5": replace(BASE, logvar=-5.0),
    "torch's initialisation": replace(BASE, init="torch"),
    "constant rate": replace(BASE, schedule="constant"),
    "rate 0.003": replace(BASE, lr=0.003),
    "rate 0.03": replace(BASE, lr=0.03),
    "warm-up over a quarter": replace(BASE, warmup=0.25),
    "batch 128": replace(BASE, batch=128),
    "2000 steps": replace(BASE, steps=2000),
    "8000 steps": replace(BASE, steps=8000),
    "five members": replace(BASE, members=5),
}


def inner(name: str) -> data.Splits:
    """Training parts of the published splits, split again; of diabetes, which has none, nine tenths in four random orders."""
    if name != "diabetes":
        return data.regression(name, SPLITS).inner()
    x, y = load_diabetes(return_X_y=True)
    orders = [np.random.RandomState(k).permutation(len(y))[: round(0.9 * len(y))] for k in SPLITS]
    part = np.stack([np.c_[x, y][order] for order in orders])
    part = torch.tensor((part - part.mean(1, keepdims=True)) / part.std(1, keepdims=True), dtype=torch.float32)
    return data.Splits(name, part[..., :-1], part[..., -1:], part, part, torch.ones(len(SPLITS)), SPLITS).inner()


def score(recipe: Recipe, splits: data.Splits) -> dict[str, float]:
    """Error and log-likelihood in units of the target's standard deviation, and coverage of 90 % intervals, averaged over the splits."""
    m, (n, features) = recipe.members, splits.x.shape[1:]
    objectives = []
    for seed in range(len(SPLITS) * m):
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(features, 50), nn.ReLU(), nn.Linear(50, 1))
        vp.variational(net, recipe.logvar, init="he" if recipe.init == "he" else None)
        likelihood = vp.likelihoods.Normal()
        objectives.append(vp.ELBO(net, vp.METHODS[recipe.method], likelihood, recipe.prior, n_data=n, kl_z_weight=recipe.kl_z_weight))
    epochs = round(recipe.steps / -(-n // recipe.batch))
    vp.replicas.fit(
        objectives,
        splits.x.repeat_interleave(m, 0),
        splits.y.repeat_interleave(m, 0),
        epochs=epochs,
        lr=recipe.lr,
        batch_size=recipe.batch,
        schedule=recipe.schedule,
        warmup=round(recipe.warmup * epochs),
    )
    scores = []
    for k, (x, y) in enumerate(zip(splits.x_test, splits.y_test, strict=True)):
        p = vp.predictive.mixture([member.predict(x) for member in objectives[k * m : (k + 1) * m]])
        scores.append([float(rmse(p, y)), float(log_likelihood(p, y)), float(coverage(p, y))])
    return dict(zip(("rmse", "log_likelihood", "coverage"), np.mean(scores, 0).tolist(), strict=True))


def finished() -> dict[str, dict[str, dict[str, float]]]:
    return json.loads(PATH.read_text())["rows"] if PATH.exists() else {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=list(ROWS))
    parser.add_argument("--sets", nargs="+", default=list(SETS), choices=SETS)
    options = parser.parse_args()
    for row in options.rows:
        for name in options.sets:
            if name not in finished().get(row, {}):
                scores = score(ROWS[row], inner(name))
                results = finished()  # read again, because another process may have added to it
                results.setdefault(row, {})[name] = scores
                cells.write(PATH, {name: repr(recipe) for name, recipe in ROWS.items()}, rows=results)
    results = finished()
    print(f"{'':24}" + "".join(f"{name:>22}" for name in (*SETS, "mean")))
    for row in ROWS:
        scores = results.get(row, {})
        if scores.keys() >= set(SETS):
            columns = [scores[name] for name in SETS]
            columns.append({key: mean(c[key] for c in columns) for key in columns[0]})
            print(f"{row:24}" + "".join(f"{c['rmse']:8.3f}{c['log_likelihood']:8.3f}{c['coverage']:6.2f}" for c in columns))


if __name__ == "__main__":
    main()

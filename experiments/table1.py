"""Table 1 of the paper, nine regression sets on the published splits, with additional rows.

    python -m experiments.table1 --datasets boston yacht --methods vbp dvi

Each row is one recipe for all nine sets. The number of epochs depends only on the size of the set, and
nothing is chosen on test data.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import nn

import varprop as vp
from varprop.inspect.metrics import coverage, crps, log_likelihood, rmse
from varprop.predictive import NormalPredictive, Predictive, Regression, mixture

from . import cells, data, tables, uci_tables

BATCH = {
    "boston": 16,
    "energy": 16,
    "yacht": 16,
    "concrete": 32,
    "wine-red": 32,
    "power": 64,
    "kin8nm": 64,
    "naval": 64,
    "protein": 256,
}
"""Appendix B.3 of the paper."""

SMALL = ("boston", "concrete", "energy", "wine-red", "yacht")
SAMPLES = 100
"""Monte Carlo samples for the prediction of a sampling method."""

Scores = dict[str, float]


@dataclass(frozen=True)
class Result:
    """The scores of one split, by the method's own moments and, if they differ, by exact moments."""

    own: Scores
    exact: Scores | None
    seconds: float


@dataclass(frozen=True)
class Recipe:
    """How a row is trained; the defaults are the paper's protocol."""

    method: vp.Method
    prior: vp.priors.Prior = field(default_factory=lambda: vp.priors.Normal(precision=10.0))
    noise: Literal["type-II", "heteroscedastic"] = "type-II"
    epochs: tuple[int, int] = (100, 100)
    """For the small sets and for the large ones."""
    schedule: Literal["cosine"] | None = None
    settle: float = 0.0
    """Share of the epochs with constant noise; heteroscedastic noise from the start would absorb errors."""
    kl_z_weight: float = 0.0
    members: int = 1

    def objective(self, n: int, features: int, hidden: int, seed: int) -> vp.ELBO:
        torch.manual_seed(seed)
        outputs = 1 if self.noise == "type-II" else 2
        net = nn.Sequential(nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, outputs))
        for layer in net:
            if isinstance(layer, nn.Linear):
                nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
                nn.init.zeros_(layer.bias)
        if not self.method.deterministic:
            vp.variational(net, logvar=-9.0)
        likelihood = (
            vp.likelihoods.Normal() if self.noise == "type-II" else vp.likelihoods.HeteroscedasticNormal()
        )
        return vp.ELBO(net, self.method, likelihood, self.prior, n_data=n, kl_z_weight=self.kl_z_weight)

    def epochs_for(self, name: str) -> int:
        return self.epochs[0 if name in SMALL else 1]

    def describe(self) -> dict[str, Any]:
        """What differs from the paper's protocol."""
        paper = Recipe(self.method)
        different = {
            name: value
            for name, value in vars(self).items()
            if name != "epochs" and value != getattr(paper, name)
        }
        return {"method": self.method.name} | {
            k: v if isinstance(v, str | int | float) else repr(v) for k, v in different.items()
        }


def train(recipe: Recipe, splits: data.Splits, epochs: int | None, seed: int) -> list[Result]:
    """Train all splits, and all members of an ensemble, as replicas of one network."""
    start = time.perf_counter()
    m, (n, features) = recipe.members, splits.x.shape[1:]
    seeds = [seed + split + 1000 * member for split in splits.numbers for member in range(m)]
    hidden = 100 if splits.name == "protein" else 50
    members = [recipe.objective(n, features, hidden, s) for s in seeds]
    epochs, batch = epochs or recipe.epochs_for(splits.name), BATCH[splits.name]
    x, y = splits.x.repeat_interleave(m, 0), splits.y.repeat_interleave(m, 0)
    fit = partial(vp.replicas.fit, x=x, y=y, lr=0.01, batch_size=batch, noise="exact", seeds=seeds)
    if settling := round(recipe.settle * epochs):
        first = replace(recipe, noise="type-II")
        settled = [first.objective(n, features, hidden, s) for s in seeds]
        fit(settled, epochs=settling)
        for member, start_from in zip(members, settled, strict=True):
            take_over(member, start_from)
    fit(members, epochs=epochs - settling, schedule=recipe.schedule, compile=epochs * n / batch > 4000)
    seconds = (time.perf_counter() - start) / len(splits.numbers)
    return [evaluate(members[k * m : (k + 1) * m], splits, k, seconds) for k in range(len(splits.numbers))]


@torch.no_grad()
def take_over(member: vp.ELBO, settled: vp.ELBO) -> None:
    """Initialise a heteroscedastic network with the mean and the constant noise of a trained one."""
    ours, theirs = member.net.state_dict(), settled.net.state_dict()
    for name, value in theirs.items():
        ours[name][: len(value)] = value
    ours["2.weight"][1] = 0
    ours["2.bias"][1] = -settled.likelihood.state_dict()["precision"].log()


@torch.no_grad()
def evaluate(members: Sequence[vp.ELBO], splits: data.Splits, k: int, seconds: float) -> Result:
    method, x = members[0].method, splits.x_test[k]
    own = [elbo.predict(x, SAMPLES if method.samples else None) for elbo in members]
    own_scores = scores(together(own), splits, k)
    if method in (vp.DVI, vp.DETERMINISTIC):
        return Result(own_scores, None, seconds)
    # With one hidden layer the pre-activations are normal and independent, so DVI's moments are exact.
    exact = [elbo.likelihood.predictive(vp.DVI(elbo.net, x)) for elbo in members]
    return Result(own_scores, scores(together(exact), splits, k), seconds)


def together(members: Sequence[Predictive]) -> Regression:
    """The prediction of an ensemble."""
    p = members[0] if len(members) == 1 else mixture(members)
    assert isinstance(p, Regression)
    return p


def scores(p: Regression, splits: data.Splits, k: int) -> Scores:
    """Scores on the test part of split k, in the unit of the target."""
    y, scale = splits.y_test[k], splits.y_scale[k].item()
    return {
        "log_likelihood": log_likelihood(p, y).item() - math.log(scale),
        "rmse": rmse(p, y).item() * scale,
        "crps": crps(p, y).item() * scale,
        "coverage": coverage(p, y, 0.9).item(),
    }


def filtered(splits: data.Splits, epochs: int | None, seed: int) -> list[Result]:
    """Probabilistic backpropagation in double precision, by default for 40 epochs, on all splits at once."""
    start = time.perf_counter()
    epochs = epochs or 40
    hidden, (count, n, features) = (100 if splits.name == "protein" else 50), splits.x.shape
    net = nn.Sequential(nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, 1)).double()
    generator = torch.Generator().manual_seed(seed)
    pbp = vp.AssumedDensityFilter(
        vp.variational(net, biases=True), replicas=count, generator=generator, compile=epochs * n > 4000
    )
    pbp.fit(splits.x, splits.y, epochs)
    seconds = (time.perf_counter() - start) / count
    # With one hidden layer the moments are exact.
    own = [pbp.predict(splits.x_test[k].double(), replica=k) for k in range(count)]
    return [Result(scores(p, splits, k), None, seconds) for k, p in enumerate(own)]


def one_by_one(
    estimator: Callable[[], Any], splits: data.Splits, epochs: int | None, seed: int
) -> list[Result]:
    """Train a scikit-learn regressor that also predicts standard deviations, one split after another."""
    results = []
    for k in range(len(splits.numbers)):
        start = time.perf_counter()
        x, y, x_test = (t.double().numpy() for t in (splits.x[k], splits.y[k], splits.x_test[k]))
        mean, std = estimator().fit(x, y.ravel()).predict(x_test, return_std=True)
        mean, var = (torch.tensor(a, dtype=torch.float32).view(-1, 1) for a in (mean, np.square(std)))
        seconds = time.perf_counter() - start
        p = NormalPredictive(mean, torch.zeros_like(var), var)
        results.append(Result(scores(p, splits, k), None, seconds))
    return results


def gaussian_process() -> Any:
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel

    return GaussianProcessRegressor(ConstantKernel() * RBF() + WhiteKernel())


def bayesian_ridge() -> Any:
    from sklearn.linear_model import BayesianRidge

    return BayesianRidge()


Row: TypeAlias = Recipe | Callable[[data.Splits, int | None, int], list[Result]]
LONG: dict[str, Any] = {"epochs": (300, 60), "schedule": "cosine"}

ROWS: dict[str, Row] = {
    "vbp": Recipe(vp.VBP),
    "dvi": Recipe(vp.DVI),
    "varout": Recipe(vp.LOCAL_REPARAM),
    "pbp": filtered,
    "deterministic": Recipe(vp.DETERMINISTIC),
    "vbp-cosine": Recipe(vp.VBP, **LONG),
    "vbp-gates": Recipe(vp.VBP, **LONG, kl_z_weight=0.1),
    "vbp-gates-1": Recipe(vp.VBP, **LONG, kl_z_weight=1.0),
    "dvi-cosine": Recipe(vp.DVI, **LONG),
    "cvbp": Recipe(vp.CVBP, **LONG),
    "cvbp-gates": Recipe(vp.CVBP, **LONG, kl_z_weight=0.1),
    "vbp-eb": Recipe(vp.VBP, vp.priors.EmpiricalBayes(), **LONG),
    "vbp-hetero": Recipe(vp.VBP, noise="heteroscedastic", settle=0.1, **LONG),
    "vbp-hetero-gates": Recipe(vp.VBP, noise="heteroscedastic", settle=0.1, **LONG, kl_z_weight=0.1),
    "vbp-hetero-eb": Recipe(vp.VBP, vp.priors.EmpiricalBayes(), "heteroscedastic", **LONG),
    "cvbp-hetero-gates": Recipe(vp.CVBP, noise="heteroscedastic", settle=0.1, **LONG, kl_z_weight=0.1),
    "dvi-hetero": Recipe(vp.DVI, noise="heteroscedastic", settle=0.1, **LONG),
    "vbp-ensemble": Recipe(vp.VBP, noise="heteroscedastic", settle=0.1, **LONG, members=5),
    "bayesian-ridge": partial(one_by_one, bayesian_ridge),
    "gp": partial(one_by_one, gaussian_process),
}
"""Each row is a recipe or a function of splits, epochs and seed."""

ONLY = {"gp": SMALL}
"""Rows for some sets only: the cost of an exact Gaussian process is cubic in the number of data points."""


def run(row: str, name: str, splits: int | None, epochs: int | None, seed: int, out: Path) -> None:
    """Compute a cell, unless it exists already."""
    recipe = ROWS[row]
    numbers = tuple(range(data.SPLITS[name] if splits is None else min(splits, data.SPLITS[name])))
    configuration = {"row": row, "dataset": name, "splits": len(numbers), "seed": seed}
    if isinstance(recipe, Recipe):
        configuration |= {
            "epochs": epochs or recipe.epochs_for(name),
            "batch_size": BATCH[name],
            **recipe.describe(),
        }
    elif epochs:
        configuration["epochs"] = epochs
    path = out / row / f"{name}.json"
    if cells.finished(path, configuration):
        return
    start, cpu_start = time.perf_counter(), time.process_time()
    compute = partial(train, recipe) if isinstance(recipe, Recipe) else recipe
    results = compute(data.regression(name, numbers), epochs, seed)
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    cells.write(
        path, configuration, splits=[vars(r) for r in results], seconds=seconds, cpu_seconds=cpu_seconds
    )
    values = np.array([r.own["log_likelihood"] for r in results])
    print(
        f"{row:15} {name:9} {values.mean():7.3f} ± {tables.standard_error(values):.3f}   {seconds:6.1f} s",
        flush=True,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.table1", description=__doc__.split("\n")[0])
    parser.add_argument(
        "--datasets", nargs="+", choices=data.SPLITS, default=list(data.SPLITS), metavar="NAME"
    )
    parser.add_argument(
        "--methods", nargs="+", choices=ROWS, default=list(ROWS), metavar="ROW", help=", ".join(ROWS)
    )
    parser.add_argument("--splits", type=int, help="use only the first splits")
    parser.add_argument("--epochs", type=int, help="default: those of each row")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=cells.RESULTS / "table1", help="folder for the results")
    options = parser.parse_args(arguments)
    for row in options.methods:
        for name in options.datasets:
            if name in ONLY.get(row, data.SPLITS):
                run(row, name, options.splits, options.epochs, options.seed, options.out)
    print(uci_tables.table1(options.out))


if __name__ == "__main__":
    main()

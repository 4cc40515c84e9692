"""What `varprop demo` shows: plain models on real data, the same with uncertainty, and a figure."""

from __future__ import annotations

import copy
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_diabetes, load_digits
from sklearn.ensemble import HistGradientBoostingRegressor
from sklearn.model_selection import KFold, cross_val_predict, train_test_split
from sklearn.neural_network import MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor, nn

from . import likelihoods, priors
from .inspect import metrics
from .methods import DETERMINISTIC, DVI, VBP
from .objectives import ELBO
from .predictive import ClassPredictive, NormalPredictive, Regression
from .randomisation import variational
from .reporting import report
from .sklearn import BayesianMLPRegressor
from .training.loop import fit

METHODS = {"plain network": DETERMINISTIC, "VBP": VBP, "DVI": DVI}
PRIOR = priors.Tempered(priors.FanIn(4.0), weight=0.1)
"""A tenth of the divergence: digits are easy to tell apart."""


def demo(out: str | Path = "demo") -> None:
    """Fit diabetes and digits, print how calibrated each network is, and draw a regression with its band."""
    console = Console()
    console.print("[bold]diabetes[/]: 442 patients, their disease after a year, in five folds")
    console.print(_table("test log-likelihood", "RMSE", "in 90 % interval", **_diabetes()))
    console.print("[bold]digits[/]: 1797 images of 8 × 8 pixels, a small convolutional network")
    console.print(
        _table("test log-likelihood", "error", "calibration error", **_digits(Path(out) / "report.html"))
    )
    console.print(f"A report on the last of these networks: {Path(out) / 'report.html'}")
    console.print(f"A regression with its uncertainty: {_curve(Path(out) / 'regression.png')}")


def _diabetes() -> dict[str, list[float]]:
    """Plain regressors, with noise as large as their errors on held-out rows, and ours with its defaults.

    Averages over five folds; one test set of a hundred patients would say little.
    """
    X, y = load_diabetes(return_X_y=True)
    plain = {
        "plain network": make_pipeline(
            StandardScaler(), MLPRegressor(early_stopping=True, max_iter=2000, random_state=0)
        ),
        "gradient boosting": HistGradientBoostingRegressor(random_state=0),
    }
    found: dict[str, list[list[float]]] = {}
    for train, test in KFold(5, shuffle=True, random_state=0).split(X):
        known, target = (X[train], y[train], X[test]), torch.tensor(y[test]).unsqueeze(-1)
        predictions = {name: _with_error(model, *known) for name, model in plain.items()}
        predictions["BayesianMLPRegressor"] = _ours(*known)
        for name, p in predictions.items():
            scores = metrics.log_likelihood, metrics.rmse, metrics.coverage
            found.setdefault(name, []).append([float(score(p, target)) for score in scores])
    return {name: np.mean(scores, 0).tolist() for name, scores in found.items()}


def _with_error(model: Any, x: np.ndarray, y: np.ndarray, new: np.ndarray) -> Regression:
    """The prediction of a plain regressor, with noise as large as its errors on held-out rows."""
    error = cross_val_predict(model, x, y, cv=5) - y
    mean = torch.tensor(model.fit(x, y).predict(new)).unsqueeze(-1)
    return NormalPredictive(mean, torch.zeros_like(mean), torch.full_like(mean, float(np.mean(error**2))))


def _ours(x: np.ndarray, y: np.ndarray, new: np.ndarray) -> Regression:
    p = BayesianMLPRegressor(random_state=0).fit(x, y).predictive(new)
    assert isinstance(p, Regression)
    return p


def _digits(page: Path) -> dict[str, list[float]]:
    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    x_train, x_test, y_train, y_test = _split(x, torch.tensor(labels))
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 16, 3),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(128, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )
    rows = {}
    for name, method in METHODS.items():
        copied = copy.deepcopy(net)
        random = copied if method.deterministic else variational(copied)
        elbo = ELBO(random, method, likelihoods.Categorical(), PRIOR, n_data=len(x_train))
        history = fit(elbo, (x_train, y_train), epochs=60, lr=0.005, schedule="cosine")
        p = elbo.predict(x_test)
        assert isinstance(p, ClassPredictive)
        error = (p.probs.argmax(1) != y_test).float().mean()
        rows[name] = [float(metrics.log_likelihood(p, y_test)), float(error), float(metrics.ece(p, y_test))]
    report(elbo, x_test, y_test, page, history)
    return rows


def _curve(out: Path) -> Path:
    """A noisy sine with a gap in the data: a plain network with the noise of its errors, and the default."""
    generator = torch.Generator().manual_seed(1)
    x = torch.cat(
        [torch.rand(120, 1, generator=generator) * 2 - 3, torch.rand(120, 1, generator=generator) * 2 + 1]
    )
    y = torch.sin(2 * x) + 0.1 * torch.randn(x.shape, generator=generator)
    grid = torch.linspace(float(x.min()) - 2, float(x.max()) + 2, 400).unsqueeze(-1)
    known = x.numpy(), y.flatten().numpy(), grid.numpy()
    network = MLPRegressor(solver="lbfgs", max_iter=2000, random_state=0)
    fits = {"plain network": _with_error(network, *known), "BayesianMLPRegressor()": _ours(*known)}
    return draw(fits, grid, x, y, out)


def draw(fits: dict[str, Regression], grid: Tensor, x: Tensor, y: Tensor, path: Path) -> Path:
    """Data, mean and 90 % band of regressions in one dimension; the inner band is epistemic."""
    from matplotlib.figure import Figure

    axis, low, high = grid.flatten(), float(y.min()), float(y.max())
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    for axes, (name, p) in zip(figure.subplots(1, len(fits), sharey=True), fits.items(), strict=True):
        band = (end.flatten() for end in p.interval(0.9))
        spread = NormalDist().inv_cdf(0.95) * p.epistemic.sqrt()
        axes.fill_between(axis, *band, color="#9ecae1", alpha=0.5, lw=0, label="90 % of new data")
        inner = ((p.mean + sign * spread).flatten() for sign in (-1, 1))
        axes.fill_between(axis, *inner, color="#3182bd", alpha=0.4, lw=0, label="epistemic part of it")
        axes.plot(axis, p.mean.flatten(), color="#08519c", lw=1.8, label="mean")
        axes.plot(x.flatten(), y.flatten(), ".", color="#333333", ms=3, label="data")
        axes.set(xlabel="x", title=name, ylim=(2 * low - high, 2 * high - low))
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].legend(frameon=False, loc="lower center", fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    return path


def _split(x: Tensor, y: Tensor) -> list[Tensor]:
    parts: list[Tensor] = train_test_split(x, y, test_size=0.25, random_state=0)
    return parts


def _table(*columns: str, **rows: list[float]) -> Table:
    table = Table("", *columns)
    for name, values in rows.items():
        table.add_row(name, *(f"{value:.3f}" for value in values))
    return table

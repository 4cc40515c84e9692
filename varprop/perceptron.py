"""What Bayesian regression and classification share: a multilayer perceptron with random weights and scikit-learn's contract."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from numbers import Integral, Real
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from sklearn.base import BaseEstimator
from sklearn.utils import check_random_state
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
from torch import Tensor, nn

from .inspect.consistency import Audit, audit
from .likelihoods import Likelihood
from .methods import DETERMINISTIC, METHODS, Method
from .objectives import ELBO
from .posterior import variational
from .predictive import mixture
from .priors import FanIn, Horseshoe, Prior
from .training import loop as training
from .training import replicas

MANY = 5000
UNITS, EPOCHS = (50, 100), (120, 240)
"""Hidden units and epochs that "auto" stands for, with few rows and with many."""
STEPS = 4000, 40_000
"""Bounds between which "auto" keeps the steps of training."""
ROWS = 4096
"""Rows predicted at a time."""


class BayesianMLP(BaseEstimator):  # type: ignore[misc]
    """What regression and classification share: a network of ReLU units with random weights, trained on standardised inputs."""

    elbo_: ELBO
    members_: list[ELBO]
    history_: pd.DataFrame

    def __init__(
        self,
        hidden_layer_sizes: int | Sequence[int] | Literal["auto"],
        method: str | Method,
        prior: float | Prior,
        kl_z_weight: float,
        n_replicas: int,
        epochs: int | Literal["auto"],
        lr: float,
        batch_size: int | Literal["auto"],
        early_stopping: bool,
        validation_fraction: float,
        n_iter_no_change: int,
        warm_start: bool,
        random_state: Any,
        verbose: bool,
    ) -> None:
        self.hidden_layer_sizes = hidden_layer_sizes
        self.method = method
        self.prior = prior
        self.kl_z_weight = kl_z_weight
        self.n_replicas = n_replicas
        self.epochs = epochs
        self.lr = lr
        self.batch_size = batch_size
        self.early_stopping = early_stopping
        self.validation_fraction = validation_fraction
        self.n_iter_no_change = n_iter_no_change
        self.warm_start = warm_start
        self.random_state = random_state
        self.verbose = verbose

    # ------------------------------------------------------------------------------------------------ for each kind

    @abstractmethod
    def _learn_target(self, y: np.ndarray, weight: np.ndarray) -> None:
        """What must be known of the targets: their scale, or the classes."""

    @abstractmethod
    def _target(self, y: np.ndarray, dtype: torch.dtype) -> Tensor:
        """Targets as the likelihood takes them."""

    @abstractmethod
    def _likelihood(self) -> tuple[Likelihood, int]:
        """The likelihood, and how many outputs its network has."""

    # ------------------------------------------------------------------------------------------------------ training

    def _start(self, X: np.ndarray, y: np.ndarray, weight: np.ndarray) -> None:
        """Scales from the data and networks from the random state; nothing is trained yet."""
        self.x_mean_, self.x_scale_ = mean_and_scale(X, weight)
        self._learn_target(y, weight)
        self.n_seen_ = 0.0
        self.random_ = int(check_random_state(self.random_state).randint(2**31))
        with torch.random.fork_rng([]):
            torch.manual_seed(self.random_)
            self.members_ = [
                self._objective(len(X), X.shape[1], _dtype(X))
                for _ in range(_positive("n_replicas", self.n_replicas))
            ]
        self.elbo_ = self.members_[0]
        self.history_ = pd.DataFrame()

    def _objective(self, rows: int, features: int, dtype: torch.dtype) -> ELBO:
        method = _method(self.method)
        prior = self.prior if isinstance(self.prior, Prior) else FanIn(float(self.prior))
        likelihood, outputs = self._likelihood()
        sizes = [features, *self._hidden(rows), outputs]
        layers: list[nn.Module] = []
        for inputs, units in pairwise(sizes):
            layers += [nn.Linear(inputs, units), nn.ReLU()]
        net = nn.Sequential(*layers[:-1])
        variational(net, posterior="horseshoe" if isinstance(prior, Horseshoe) else "full", init="he")
        if method.name == DETERMINISTIC.name:
            for layer in net.modules():
                layer._parameters.pop("weight_logvar", None)
        return ELBO(net, method, likelihood, prior, n_data=1, kl_z_weight=self.kl_z_weight).to(dtype)

    def _train(self, X: np.ndarray, y: np.ndarray, weight: np.ndarray, epochs: int | None) -> None:
        """Train the members on weighted rows: for `epochs`, or for as long as `self.epochs` says."""
        self.n_seen_ += float(weight.sum())
        x = self._inputs(X)
        batch_size = self._batch_size(len(x))
        # Weights of mean one, and n_data the sum of the weights as given: a row of weight two counts like two rows.
        data = [x, self._target(y, x.dtype)]
        if np.ptp(weight) or self.n_seen_ != len(x):
            data.append(torch.as_tensor(weight / weight.mean(), dtype=x.dtype))
        for member in self.members_:
            member.n_data = self.n_seen_  # type: ignore[assignment]
        schedule: Any = {"schedule": "cosine"} if epochs is None else {}
        epochs = epochs or self._epochs(len(x), batch_size)
        seed = self.random_ + len(self.history_)
        options: dict[str, Any] = {
            "epochs": epochs,
            "lr": _positive("lr", self.lr, Real),
            "batch_size": batch_size,
            **schedule,
        }
        patience = _positive("n_iter_no_change", self.n_iter_no_change)
        if self.early_stopping and len(x) > 1:
            options |= {"validation": self.validation_fraction, "patience": patience}
        if len(self.members_) == 1:
            self._train_one(data, seed, options)
        else:
            self._train_many(data, seed, options)
        self.n_iter_ = len(self.history_)

    def _train_one(self, data: list[Tensor], seed: int, options: dict[str, Any]) -> None:
        from lightning_fabric import Fabric  # takes seconds to import

        fabric = Fabric(accelerator="cpu", devices=1)
        progress = bool(self.verbose)
        self._note(training.fit(self.elbo_, data, seed=seed, progress=progress, fabric=fabric, **options))

    def _train_many(self, data: list[Tensor], seed: int, options: dict[str, Any]) -> None:
        n = len(self.members_)
        shared = [t.expand(n, *t.shape) for t in data]
        seeds = [seed + 2**32 * k for k in range(n)]
        history = replicas.fit(self.members_, *shared, **options, seeds=seeds)
        self._note(history.groupby("epoch", as_index=False).mean().drop(columns="replica"))

    def _note(self, history: pd.DataFrame) -> None:
        """Add epochs to the history, numbered on from those before."""
        history["epoch"] += len(self.history_)
        self.history_ = (
            history if self.history_.empty else pd.concat([self.history_, history], ignore_index=True)
        )

    def _hidden(self, rows: int) -> list[int]:
        sizes: Any = self.hidden_layer_sizes
        if isinstance(sizes, str) and sizes == "auto":
            return [UNITS[rows >= MANY]]
        sizes = sizes if isinstance(sizes, Iterable) and not isinstance(sizes, str) else [sizes]
        return [_positive("hidden_layer_sizes", size) for size in sizes]

    def _batch_size(self, rows: int) -> int:
        if self.batch_size != "auto":
            return min(_positive("batch_size", self.batch_size), rows)
        return int(np.clip(rows // 100, 32, 256))

    def _epochs(self, rows: int, batch_size: int) -> int:
        if self.epochs != "auto":
            return _positive("epochs", self.epochs)
        steps = -(-rows // batch_size)
        return max(1, round(np.clip(EPOCHS[rows >= MANY] * steps, *STEPS) / steps))

    def _fit(
        self, X: np.ndarray, y: np.ndarray, sample_weight: Any, new: bool, epochs: int | None = None
    ) -> None:
        weight = _check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True)
        X, y, weight = X[weight > 0], y[weight > 0], weight[weight > 0]
        if not len(X):
            raise ValueError("All sample weights are zero; at least one row must count.")
        if new:
            self._start(X, y, weight)
        elif epochs is None:
            self.n_seen_ = 0.0  # fit with warm_start trains on the data given, partial_fit on more data
        self._train(X, y, weight, epochs)

    def _inputs(self, X: np.ndarray) -> Tensor:
        return torch.as_tensor((X - self.x_mean_) / self.x_scale_, dtype=self._weight_dtype())

    def _weight_dtype(self) -> torch.dtype:
        return next(self.elbo_.parameters()).dtype

    # ---------------------------------------------------------------------------------------------------- prediction

    def audit(self, X: Any, y: Any) -> Audit:
        """Whether the posterior of `elbo_` is the one that predicts; log-likelihoods are of the standardised target."""
        check_is_fitted(self)
        X, y = validate_data(self, X, y, dtype=[np.float64, np.float32], multi_output=True, reset=False)
        x = self._inputs(X)
        return audit(self.elbo_, x, self._target(y, x.dtype))

    def _predicted(self, X: Any, read: Callable[[Any], Sequence[Tensor]]) -> list[np.ndarray]:
        """What `read` takes from the predictive distributions at X, a part of the rows at a time."""
        check_is_fitted(self)
        X = validate_data(self, X, dtype=[np.float64, np.float32], reset=False)
        samples = 100 if self.elbo_.method.samples else None
        with torch.random.fork_rng([]):
            torch.manual_seed(self.random_)  # a method that predicts by sampling repeats itself
            mixtures = (
                mixture([member.predict(x, samples) for member in self.members_])
                for x in self._inputs(X).split(ROWS)
            )
            parts = [read(p) for p in mixtures]
        return [torch.cat(columns).numpy() for columns in zip(*parts, strict=True)]


def mean_and_scale(values: np.ndarray, weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Weighted mean and standard deviation of each column, which is one where a column is constant."""
    mean = np.average(values, axis=0, weights=weight)
    scale = np.sqrt(np.average((values - mean) ** 2, axis=0, weights=weight))
    constant = scale <= 10 * np.finfo(values.dtype).eps * np.abs(mean)
    return np.asarray(mean), np.where(constant, 1.0, scale)


def _dtype(X: np.ndarray) -> torch.dtype:
    return torch.float32 if X.dtype == np.float32 else torch.float64


def _method(method: str | Method) -> Method:
    if isinstance(method, Method):
        return method
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}, or a Method, got {method!r}.")
    return METHODS[method]


def _positive(name: str, value: Any, kind: Any = Integral) -> Any:
    if not isinstance(value, kind) or isinstance(value, bool) or not value > 0:
        raise ValueError(
            f"{name} must be a positive {'whole ' if kind is Integral else ''}number, got {value!r}."
        )
    return value

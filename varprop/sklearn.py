"""Bayesian multilayer perceptrons with scikit-learn's contract."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import pairwise
from numbers import Integral, Real
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import pandas as pd
import torch
from numpy.typing import ArrayLike
from sklearn.base import BaseEstimator, ClassifierMixin, MultiOutputMixin, RegressorMixin
from sklearn.preprocessing import StandardScaler
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
from torch import Tensor, nn

from .inspect.consistency import Audit
from .io.description import ModelFileError, describe_estimator
from .likelihoods import Categorical, HeteroscedasticNormal, Likelihood, Normal
from .methods import METHODS, Method
from .model import Classes, Fitted, Model, Numbers, Standardise, Target
from .objectives import ELBO
from .posterior import variational
from .predictive import ClassPredictive, Predictive, Regression
from .priors import FanIn, Horseshoe, Prior
from .training import loop as training
from .training import replicas
from .training.batches import split

MANY = 5000
UNITS, EPOCHS = (50, 100), (120, 240)
"""Hidden units and epochs that "auto" stands for, below `MANY` rows and from there on."""
STEPS = 4000, 40_000
"""The fewest and the most training steps that "auto" makes."""

Self = TypeVar("Self", bound="BayesianMLP")


class Uncertainty(NamedTuple):
    """The parts of a prediction's uncertainty: variances for numbers, entropies in nats for classes.

    They add up to the whole variance or entropy.
    """

    epistemic: np.ndarray
    """From not knowing the weights: it shrinks with more data."""
    aleatoric: np.ndarray
    """From the noise of the data: it does not."""


# ----------------------------------------------------------------------------------------------------- shared


class Learned:
    """What `fit` learns."""

    members_: list[ELBO]
    """The trained objectives, in standardised units."""
    elbo_: ELBO
    """The first of them."""
    history_: pd.DataFrame
    """A row for each epoch."""
    n_iter_: int
    n_seen_: float
    """Sum of the weights of all rows trained on."""
    random_: int
    x_mean_: np.ndarray
    x_scale_: np.ndarray


@dataclass(eq=False, repr=False)
class BayesianMLP(BaseEstimator, Learned, Fitted):  # type: ignore[misc]
    """What regression and classification share: a network of ReLU units, trained on standardised inputs.

    scikit-learn reads the parameters from the signature of the constructor, which `dataclass` writes.
    """

    hidden_layer_sizes: int | Sequence[int] | Literal["auto"] = "auto"
    _: KW_ONLY
    method: str | Method = "dvi"
    prior: float | Prior = 4.0
    kl_z_weight: float = 0.0
    n_replicas: int = 1
    epochs: int | Literal["auto"] = "auto"
    lr: float = 0.01
    batch_size: int | Literal["auto"] = "auto"
    early_stopping: bool = False
    validation_fraction: float = 0.1
    n_iter_no_change: int = 20
    warm_start: bool = False
    random_state: int | np.random.RandomState | None = None
    verbose: bool = False

    @abstractmethod
    def _validated(self, X: ArrayLike, y: ArrayLike, new: bool) -> tuple[np.ndarray, np.ndarray]:
        """The data as arrays, checked; `new` where there is no earlier fit to agree with."""

    @abstractmethod
    def _learn_target(self, y: np.ndarray, weight: np.ndarray) -> None:
        """Learn the scale of the targets, or check the classes."""

    @property
    @abstractmethod
    def _target(self) -> Target:
        """How targets are scaled."""

    @abstractmethod
    def _likelihood(self) -> tuple[Likelihood, int]:
        """The likelihood, and how many outputs its network has."""

    # ----------------------------------------------------------------------------------------------- training

    def fit(self: Self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> Self:
        """Train on rows X with targets y; a row counts as often as its weight says."""
        new = not (self.warm_start and self.__sklearn_is_fitted__())
        X, y = self._validated(X, y, new)
        if not new:
            self.n_seen_ = 0.0  # with warm_start, `fit` keeps the weights but not the count of its data
        return self._train(X, y, sample_weight, new)

    def _train(
        self: Self,
        X: np.ndarray,
        y: np.ndarray,
        sample_weight: ArrayLike | None,
        new: bool,
        *,
        once: bool = False,
        dtype: torch.dtype | None = None,
    ) -> Self:
        """Train on checked data, as `fit` and `partial_fit` do.

        :param new: start from new networks and scales.
        :param once: train for one epoch at a constant rate.
        :param dtype: of new networks; that of X by default.
        """
        weight = _check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True)
        X, y, weight = X[weight > 0], y[weight > 0], weight[weight > 0]
        if not len(X):
            raise ValueError("All sample weights are zero; at least one row must count.")
        if new:
            self.x_mean_, self.x_scale_ = _mean_and_scale(X, weight)
            self._learn_target(y, weight)
            dtype = dtype or (torch.float32 if X.dtype == np.float32 else torch.float64)
            self._make_members(len(X), X.shape[1], dtype)
        model = self.model_
        data = [model.inputs(X), model.targets(y), torch.from_numpy(weight)]
        seed = self.random_ + len(self.history_)
        train, held_out = split(data, self._held_out_share() if len(X) > 1 else 0.0, seed)
        history = self._fit_members(self._counted(train), held_out, seed, once)  # type: ignore[arg-type]
        history["epoch"] += len(self.history_)
        self.history_ = pd.concat([self.history_, history], ignore_index=True) if self.n_iter_ else history
        self.n_iter_ = len(self.history_)
        return self

    def _make_members(self, rows: int, features: int, dtype: torch.dtype) -> None:
        """New networks, initialised from the random state."""
        self.random_ = int(check_random_state(self.random_state).randint(2**31))
        with torch.random.fork_rng([]):
            torch.manual_seed(self.random_)
            n = _count("n_replicas", self.n_replicas)
            self.members_ = [self._objective(rows, features).to(dtype) for _ in range(n)]
        self.elbo_ = self.members_[0]
        self.history_ = pd.DataFrame()
        self.n_seen_, self.n_iter_ = 0.0, 0

    def _objective(self, rows: int, features: int) -> ELBO:
        method = _method(self.method)
        prior = self.prior if isinstance(self.prior, Prior) else FanIn(float(self.prior))
        likelihood, outputs = self._likelihood()
        layers: list[nn.Module] = []
        for inputs, units in pairwise([features, *self._hidden(rows), outputs]):
            layers += [nn.Linear(inputs, units), nn.ReLU()]
        net = nn.Sequential(*layers[:-1])
        variational(net, posterior="horseshoe" if isinstance(prior, Horseshoe) else "full", init="he")
        if method.deterministic:
            for layer in net.modules():
                layer._parameters.pop("weight_logvar", None)
        return ELBO(net, method, likelihood, prior, n_data=1, kl_z_weight=self.kl_z_weight)

    def _counted(self, data: Sequence[Tensor]) -> list[Tensor]:
        """Set n_data to the sum of all weights seen, and scale the weights to mean 1 (none if all are 1)."""
        x, y, weight = data
        self.n_seen_ += float(weight.sum())
        for member in self.members_:
            member.n_data = self.n_seen_  # type: ignore[assignment]
        if self.n_seen_ == len(x) and bool((weight == 1).all()):
            return [x, y]
        return [x, y, (weight / weight.mean()).to(x.dtype)]

    def _fit_members(
        self, train: Sequence[Tensor], held_out: Sequence[Tensor] | None, seed: int, once: bool
    ) -> pd.DataFrame:
        """The only place that calls the trainers: one network alone, several as replicas."""
        rows, n = len(train[0]), len(self.members_)
        batch_size = self._batch_size(rows)
        options: dict[str, Any] = {
            "epochs": 1 if once else self._epochs(rows, batch_size),
            "lr": _positive("lr", self.lr),
            "batch_size": batch_size,
        }
        if not once:
            options["schedule"] = "cosine"
        if held_out is not None:
            held_out = [held_out[0], held_out[1], held_out[2].to(held_out[0].dtype)]
            options["patience"] = _count("n_iter_no_change", self.n_iter_no_change)
            options["validation"] = held_out if n == 1 else [t.expand(n, *t.shape) for t in held_out]
        if n == 1:
            from lightning_fabric import Fabric  # takes seconds to import

            fabric = Fabric(accelerator="cpu", devices=1)
            return training.fit(
                self.elbo_, train, seed=seed, progress=bool(self.verbose), fabric=fabric, **options
            )
        seeds = [seed + 2**32 * k for k in range(n)]
        shared = [t.expand(n, *t.shape) for t in train]
        history = replicas.fit(self.members_, *shared, seeds=seeds, **options)
        return history.drop(columns="replica").groupby("epoch", as_index=False).mean()

    def _held_out_share(self) -> float:
        if not self.early_stopping:
            return 0.0
        if not 0 < self.validation_fraction < 1:
            raise ValueError(
                f"validation_fraction must lie between 0 and 1, got {self.validation_fraction!r}."
            )
        return self.validation_fraction

    def _hidden(self, rows: int) -> list[int]:
        sizes = self.hidden_layer_sizes
        if isinstance(sizes, str) and sizes == "auto":
            return [UNITS[rows >= MANY]]
        several = sizes if isinstance(sizes, Iterable) and not isinstance(sizes, str) else [sizes]
        return [_count("hidden_layer_sizes", size) for size in several]

    def _batch_size(self, rows: int) -> int:
        if self.batch_size != "auto":
            return min(_count("batch_size", self.batch_size), rows)
        return int(np.clip(rows // 100, 32, 256))

    def _epochs(self, rows: int, batch_size: int) -> int:
        if self.epochs != "auto":
            return _count("epochs", self.epochs)
        steps = -(-rows // batch_size)
        return max(1, round(np.clip(EPOCHS[rows >= MANY] * steps, *STEPS) / steps))

    # --------------------------------------------------------------------------------------------- prediction

    @property
    def model_(self) -> Model:
        """The trained networks with the scales of the data."""
        check_is_fitted(self)
        return Model(
            self.members_,
            self._target,
            Standardise(self.x_mean_, self.x_scale_),
            columns=getattr(self, "feature_names_in_", np.array([])).tolist(),
            width=len(self.x_mean_),
            history=self.history_,
            seed=self.random_,
        )

    def description(self) -> dict[str, object]:
        if type(self) not in (BayesianMLPRegressor, BayesianMLPClassifier):
            raise ModelFileError(
                f"save: {type(self).__name__} is a class of yours, which a model file cannot make again; "
                f"save its `elbo_`."
            )
        learned = {name: value for name, value in vars(self).items() if name.endswith("_")}
        learned = {name: value for name, value in learned.items() if name not in ("members_", "elbo_")}
        return {"estimator": describe_estimator(type(self).__name__, self.get_params(deep=False), learned)}

    def audit(self, X: ArrayLike, y: ArrayLike) -> Audit:
        """`vp.audit` of `elbo_` on held-out rows, with log-likelihoods of the standardised target."""
        check_is_fitted(self)
        return self.model_.audit(*self._validated(X, y, new=False))

    def _predictive(self, X: ArrayLike) -> Predictive:
        check_is_fitted(self)
        return self.model_.predict(validate_data(self, X, dtype=[np.float64, np.float32], reset=False))

    def __sklearn_is_fitted__(self) -> bool:
        return "members_" in vars(self)


# ------------------------------------------------------------------------------------------------- regression


@dataclass(eq=False, repr=False)
class BayesianMLPRegressor(RegressorMixin, MultiOutputMixin, BayesianMLP):  # type: ignore[misc]
    """Regression with a multilayer perceptron whose predictions know how uncertain they are.

    Inputs and targets are standardised inside. The defaults were chosen on parts of training sets
    (`experiments/defaults.py`).

    :param hidden_layer_sizes: units of each hidden layer; "auto" is one of 50, or of 100 from 5,000 rows on.
    :param method: how uncertainty passes through the network, a name in `varprop.METHODS` or a Method.
    :param prior: over the weights; a number g is `priors.FanIn(g)`, N(0, g/n) for the weights into a unit of
        n inputs.
    :param heteroscedastic: let the noise differ between inputs.
    :param kl_z_weight: weight of the gates' divergence, for VBP and CVBP.
    :param n_replicas: networks trained together from different starts; the prediction is their mixture.
    :param epochs: "auto" is 120, or 240 from 5,000 rows on, but at least 4,000 steps and at most 40,000.
    :param lr: learning rate of Adam; it falls to zero as a cosine.
    :param batch_size: "auto" is a hundredth of the rows, between 32 and 256.
    :param early_stopping: hold out `validation_fraction` of the rows, stop after `n_iter_no_change` epochs
        without a better log-likelihood on them, and keep the best weights.
    :param warm_start: let `fit` go on from the weights and scales of the last fit.
    :param verbose: show a progress bar.

    After `fit`, `elbo_` is the trained objective, in standardised units (`members_` holds all of them), and
    `history_` has a row for each epoch.

    >>> from sklearn.datasets import load_diabetes
    >>> X, y = load_diabetes(return_X_y=True)
    >>> model = vp.BayesianMLPRegressor(epochs=20, random_state=0).fit(X[:400], y[:400])
    >>> mean, std = model.predict(X[400:], return_std=True)
    >>> lower, upper = model.predict_interval(X[400:], 0.9)
    """

    heteroscedastic: bool = False

    def partial_fit(
        self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None
    ) -> BayesianMLPRegressor:
        """Train for one epoch on more rows. The first call sets the scales, so give it many rows."""
        new = not self.__sklearn_is_fitted__()
        return self._train(*self._validated(X, y, new), sample_weight, new, once=True)

    def _validated(self, X: ArrayLike, y: ArrayLike, new: bool) -> tuple[np.ndarray, np.ndarray]:
        rows, targets = validate_data(
            self, X, y, dtype=[np.float64, np.float32], multi_output=True, y_numeric=True, reset=new
        )
        if not new and targets.shape[1:] != self.y_mean_.shape:
            raise ValueError(
                f"y has the shape {targets.shape}, but the model was first fitted with {self.n_outputs_} "
                "targets."
            )
        return rows, targets

    def _learn_target(self, y: np.ndarray, weight: np.ndarray) -> None:
        self.y_mean_, self.y_scale_ = _mean_and_scale(y, weight)
        self.n_outputs_ = 1 if y.ndim == 1 else y.shape[1]

    @property
    def _target(self) -> Numbers:
        return Numbers(
            *(torch.tensor(v.reshape(-1), dtype=torch.float64) for v in (self.y_mean_, self.y_scale_))
        )

    def _likelihood(self) -> tuple[Likelihood, int]:
        if self.heteroscedastic:
            return HeteroscedasticNormal(), 2 * self.n_outputs_
        return Normal(outputs=self.n_outputs_), self.n_outputs_

    def _regression(self, X: ArrayLike) -> Regression:
        p = self._predictive(X)
        assert isinstance(p, Regression)
        return p

    def predict(self, X: ArrayLike, return_std: bool = False) -> Any:
        """Mean of the prediction; with `return_std`, also its standard deviation."""
        p = self._regression(X)
        return (self._shaped(p.mean), self._shaped(p.std)) if return_std else self._shaped(p.mean)

    def predict_interval(self, X: ArrayLike, level: float = 0.9) -> tuple[np.ndarray, np.ndarray]:
        """Lower and upper ends of the central interval that holds a target with probability `level`."""
        lower, upper = self._regression(X).interval(level)
        return self._shaped(lower), self._shaped(upper)

    def predict_uncertainty(self, X: ArrayLike) -> Uncertainty:
        """Epistemic and aleatoric variance, in the target's unit squared."""
        p = self._regression(X)
        return Uncertainty(self._shaped(p.epistemic), self._shaped(p.aleatoric))

    def log_prob(self, X: ArrayLike, y: ArrayLike) -> np.ndarray:
        """Log density of each row's targets."""
        return self._regression(X).log_prob(self._target.values(y)).numpy()

    def _shaped(self, values: Tensor) -> np.ndarray:
        return values.numpy().reshape(-1, *self.y_mean_.shape)


# --------------------------------------------------------------------------------------------- classification


@dataclass(eq=False, repr=False)
class BayesianMLPClassifier(ClassifierMixin, BayesianMLP):  # type: ignore[misc]
    """Classification with a multilayer perceptron whose probabilities include the uncertainty of its weights.

    The parameters are those of `BayesianMLPRegressor`, but for `heteroscedastic`.

    >>> from sklearn.datasets import load_iris
    >>> X, y = load_iris(return_X_y=True)
    >>> model = vp.BayesianMLPClassifier(epochs=20, random_state=0).fit(X, y)
    >>> model.predict_proba(X).shape
    (150, 3)
    """

    def partial_fit(
        self,
        X: ArrayLike,
        y: ArrayLike,
        classes: ArrayLike | None = None,
        sample_weight: ArrayLike | None = None,
    ) -> BayesianMLPClassifier:
        """Train for one epoch on more rows. The first call sets the scales and must name all classes."""
        new = not self.__sklearn_is_fitted__()
        if new and classes is None:
            raise ValueError("classes must be given with the first call of partial_fit.")
        X, y = self._validated(X, y, new)
        if new:
            self.classes_ = np.unique(np.asarray(classes))
        return self._train(X, y, sample_weight, new, once=True)

    def _validated(self, X: ArrayLike, y: ArrayLike, new: bool) -> tuple[np.ndarray, np.ndarray]:
        rows, targets = validate_data(self, X, y, dtype=[np.float64, np.float32], reset=new)
        check_classification_targets(targets)
        if new:
            self.classes_ = np.unique(targets)
        return rows, targets

    def _learn_target(self, y: np.ndarray, weight: np.ndarray) -> None:
        if len(self.classes_) < 2 or (len(np.unique(y)) < 2 and len(y) > 1):
            raise ValueError(f"{type(self).__name__} needs two classes or more; the data has 1 class.")

    @property
    def _target(self) -> Classes:
        return Classes(self.classes_)

    def _likelihood(self) -> tuple[Likelihood, int]:
        return Categorical(), len(self.classes_)

    def _classification(self, X: ArrayLike) -> ClassPredictive:
        p = self._predictive(X)
        assert isinstance(p, ClassPredictive)
        return p

    def predict(self, X: ArrayLike) -> np.ndarray:
        """The most probable class."""
        best = self.predict_proba(X).argmax(1)
        return self.classes_[best]

    def predict_proba(self, X: ArrayLike) -> np.ndarray:
        """Probability of each class, in the order of `classes_`."""
        return self._classification(X).probs.numpy()

    def predict_log_proba(self, X: ArrayLike) -> np.ndarray:
        return np.log(self.predict_proba(X))

    def predict_uncertainty(self, X: ArrayLike) -> Uncertainty:
        """Mutual information and expected entropy, in nats: they add up to the entropy of `predict_proba`."""
        p = self._classification(X)
        return Uncertainty(p.mutual_information.numpy(), p.expected_entropy.numpy())


def _mean_and_scale(values: np.ndarray, weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Weighted mean and standard deviation of each column in double precision; 1 for a constant column."""
    columns = values.astype(np.float64).reshape(len(values), -1)
    scaler = StandardScaler().fit(columns, sample_weight=weight)
    return scaler.mean_.reshape(values.shape[1:]), scaler.scale_.reshape(values.shape[1:])


def _method(method: str | Method) -> Method:
    if isinstance(method, Method):
        return method
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}, or a Method, got {method!r}.")
    return METHODS[method]


def _positive(name: str, value: object) -> float:
    if not isinstance(value, Real) or isinstance(value, bool) or not float(value) > 0:
        raise ValueError(f"{name} must be a positive number, got {value!r}.")
    return float(value)


def _count(name: str, value: object) -> int:
    if not isinstance(value, Integral) or isinstance(value, bool) or not int(value) > 0:
        raise ValueError(f"{name} must be a positive whole number, got {value!r}.")
    return int(value)

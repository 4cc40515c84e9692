"""Bayesian multilayer perceptrons with scikit-learn's contract."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from sklearn.base import ClassifierMixin, MultiOutputMixin, RegressorMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor

from .likelihoods import Categorical, HeteroscedasticNormal, Likelihood, Normal
from .methods import Method
from .perceptron import ROWS, BayesianMLP, mean_and_scale
from .priors import Prior


class Uncertainty(NamedTuple):
    """The parts of a prediction's uncertainty: variances for numbers, entropies in nats for classes. Their sum is the whole."""

    epistemic: np.ndarray
    """From not knowing the weights: it shrinks with more data."""
    aleatoric: np.ndarray
    """From the noise of the data: it does not."""


class BayesianMLPRegressor(RegressorMixin, MultiOutputMixin, BayesianMLP):  # type: ignore[misc]
    """Regression with a multilayer perceptron whose predictions know how uncertain they are.

    Inputs and targets are standardised inside. The defaults were chosen on parts of training sets (`experiments/defaults.py`).

    :param hidden_layer_sizes: units of each hidden layer; "auto" is one of 50, or of 100 from 5,000 rows on.
    :param method: how uncertainty travels through the network, a name of `varprop.METHODS` or a Method.
    :param prior: over the weights; a number g is `priors.FanIn(g)`, N(0, g/n) for the weights into a unit of n inputs.
    :param heteroscedastic: let the noise differ between inputs.
    :param kl_z_weight: weight of the gates' divergence, for VBP and CVBP.
    :param n_replicas: networks trained at once from different starts; the prediction is their mixture.
    :param epochs: "auto" is 120, or 240 from 5,000 rows on, but no fewer than 4,000 steps and no more than 40,000.
    :param lr: rate of Adam; it falls to zero as a cosine.
    :param batch_size: "auto" is a hundredth of the rows, within 32 and 256.
    :param early_stopping: hold out `validation_fraction` of the rows, stop after `n_iter_no_change` epochs without a better log-likelihood
        on them, and keep the best weights.
    :param warm_start: let `fit` go on from the weights and scales of the last.
    :param verbose: show a progress bar.

    After `fit`: `elbo_` is the trained objective, in standardised units (`members_` all of them), `history_` a row for each epoch.

    >>> from sklearn.datasets import load_diabetes
    >>> X, y = load_diabetes(return_X_y=True)
    >>> model = vp.BayesianMLPRegressor(epochs=20, random_state=0).fit(X[:400], y[:400])
    >>> mean, std = model.predict(X[400:], return_std=True)
    >>> lower, upper = model.predict_interval(X[400:], 0.9)
    """

    def __init__(
        self,
        hidden_layer_sizes: int | Sequence[int] | Literal["auto"] = "auto",
        *,
        method: str | Method = "dvi",
        prior: float | Prior = 4.0,
        heteroscedastic: bool = False,
        kl_z_weight: float = 0.0,
        n_replicas: int = 1,
        epochs: int | Literal["auto"] = "auto",
        lr: float = 0.01,
        batch_size: int | Literal["auto"] = "auto",
        early_stopping: bool = False,
        validation_fraction: float = 0.1,
        n_iter_no_change: int = 20,
        warm_start: bool = False,
        random_state: Any = None,
        verbose: bool = False,
    ) -> None:
        super().__init__(
            hidden_layer_sizes=hidden_layer_sizes,
            method=method,
            prior=prior,
            kl_z_weight=kl_z_weight,
            n_replicas=n_replicas,
            epochs=epochs,
            lr=lr,
            batch_size=batch_size,
            early_stopping=early_stopping,
            validation_fraction=validation_fraction,
            n_iter_no_change=n_iter_no_change,
            warm_start=warm_start,
            random_state=random_state,
            verbose=verbose,
        )
        self.heteroscedastic = heteroscedastic

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> BayesianMLPRegressor:
        """Train on rows X with targets y, one column or several; a row counts as often as its weight says."""
        new = not (self.warm_start and hasattr(self, "members_"))
        X, y = self._validated(X, y, new)
        self._fit(X, y, sample_weight, new)
        return self

    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None) -> BayesianMLPRegressor:
        """Train for one pass over more rows. The scales stay those of the first call, which should hold more than a few rows."""
        new = not hasattr(self, "members_")
        X, y = self._validated(X, y, new)
        self._fit(X, y, sample_weight, new, epochs=1)
        return self

    def _validated(self, X: Any, y: Any, new: bool) -> tuple[np.ndarray, np.ndarray]:
        X, y = validate_data(
            self, X, y, dtype=[np.float64, np.float32], multi_output=True, y_numeric=True, reset=new
        )
        if not new and y.shape[1:] != self.y_mean_.shape:
            raise ValueError(
                f"y has the shape {y.shape} of another task; it was first fitted with {self.n_outputs_} targets."
            )
        return X, y

    def _learn_target(self, y: np.ndarray, weight: np.ndarray) -> None:
        self.y_mean_, self.y_scale_ = mean_and_scale(y.astype(np.float64), weight)
        self.n_outputs_ = 1 if y.ndim == 1 else y.shape[1]

    def _target(self, y: np.ndarray, dtype: torch.dtype) -> Tensor:
        return torch.as_tensor((y - self.y_mean_) / self.y_scale_, dtype=dtype).view(len(y), -1)

    def _likelihood(self) -> tuple[Likelihood, int]:
        if self.heteroscedastic:
            return HeteroscedasticNormal(), 2 * self.n_outputs_
        return Normal(outputs=self.n_outputs_), self.n_outputs_

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """Mean of the prediction; with `return_std`, also its standard deviation."""
        mean, std = self._predicted(X, lambda p: (p.mean, p.std))
        mean = self._unscaled(mean)
        return (mean, self._shaped(std) * self.y_scale_) if return_std else mean

    def predict_interval(self, X: Any, level: float = 0.9) -> tuple[np.ndarray, np.ndarray]:
        """Lower and upper ends of the central interval that holds a target with probability `level`."""
        lower, upper = self._predicted(X, lambda p: p.interval(level))
        return self._unscaled(lower), self._unscaled(upper)

    def predict_uncertainty(self, X: Any) -> Uncertainty:
        """Epistemic and aleatoric variance, in the target's unit squared."""
        parts = self._predicted(X, lambda p: (p.epistemic, p.aleatoric))
        return Uncertainty(*(self._shaped(part) * self.y_scale_**2 for part in parts))

    def log_prob(self, X: Any, y: Any) -> np.ndarray:
        """Log density of each row's targets."""
        check_is_fitted(self)
        target = self._target(
            np.asarray(y, dtype=np.float64).reshape(-1, *self.y_mean_.shape), self._weight_dtype()
        )
        rows = iter(target.split(ROWS))
        (log_prob,) = self._predicted(X, lambda p: (p.log_prob(next(rows)),))
        return log_prob - np.log(self.y_scale_).sum()

    def _shaped(self, values: np.ndarray) -> np.ndarray:
        return values.reshape(-1, *self.y_mean_.shape)

    def _unscaled(self, values: np.ndarray) -> np.ndarray:
        return self._shaped(values) * self.y_scale_ + self.y_mean_


class BayesianMLPClassifier(ClassifierMixin, BayesianMLP):  # type: ignore[misc]
    """Classification with a multilayer perceptron whose probabilities know what the network does not.

    Parameters as of `BayesianMLPRegressor`.

    >>> from sklearn.datasets import load_iris
    >>> X, y = load_iris(return_X_y=True)
    >>> model = vp.BayesianMLPClassifier(epochs=20, random_state=0).fit(X, y)
    >>> model.predict_proba(X).shape
    (150, 3)
    """

    def __init__(
        self,
        hidden_layer_sizes: int | Sequence[int] | Literal["auto"] = "auto",
        *,
        method: str | Method = "dvi",
        prior: float | Prior = 4.0,
        kl_z_weight: float = 0.0,
        n_replicas: int = 1,
        epochs: int | Literal["auto"] = "auto",
        lr: float = 0.01,
        batch_size: int | Literal["auto"] = "auto",
        early_stopping: bool = False,
        validation_fraction: float = 0.1,
        n_iter_no_change: int = 20,
        warm_start: bool = False,
        random_state: Any = None,
        verbose: bool = False,
    ) -> None:
        super().__init__(
            hidden_layer_sizes=hidden_layer_sizes,
            method=method,
            prior=prior,
            kl_z_weight=kl_z_weight,
            n_replicas=n_replicas,
            epochs=epochs,
            lr=lr,
            batch_size=batch_size,
            early_stopping=early_stopping,
            validation_fraction=validation_fraction,
            n_iter_no_change=n_iter_no_change,
            warm_start=warm_start,
            random_state=random_state,
            verbose=verbose,
        )

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> BayesianMLPClassifier:
        """Train on rows X of classes y; a row counts as often as its weight says."""
        new = not (self.warm_start and hasattr(self, "members_"))
        X, y = self._validated(X, y, new)
        if new:
            self.classes_ = np.unique(y)
        self._fit(X, y, sample_weight, new)
        return self

    def partial_fit(
        self, X: Any, y: Any, classes: Any = None, sample_weight: Any = None
    ) -> BayesianMLPClassifier:
        """Train for one pass over more rows; the first call must name all classes. The scales stay those of the first call."""
        new = not hasattr(self, "members_")
        X, y = self._validated(X, y, new)
        if new:
            if classes is None:
                raise ValueError("classes must be given with the first call of partial_fit.")
            self.classes_ = np.unique(classes)
        self._fit(X, y, sample_weight, new, epochs=1)
        return self

    def _validated(self, X: Any, y: Any, new: bool) -> tuple[np.ndarray, np.ndarray]:
        X, y = validate_data(self, X, y, dtype=[np.float64, np.float32], reset=new)
        check_classification_targets(y)
        return X, y

    def _learn_target(self, y: np.ndarray, weight: np.ndarray) -> None:
        if len(self.classes_) < 2 or (len(np.unique(y)) < 2 and len(y) > 1):
            raise ValueError(f"{type(self).__name__} needs two classes or more; the data has 1 class.")

    def _target(self, y: np.ndarray, dtype: torch.dtype) -> Tensor:
        unknown = np.setdiff1d(y, self.classes_)
        if len(unknown):
            raise ValueError(
                f"y has classes {unknown.tolist()} that are not among those of the first fit, {self.classes_.tolist()}."
            )
        return torch.as_tensor(np.searchsorted(self.classes_, y))

    def _likelihood(self) -> tuple[Likelihood, int]:
        return Categorical(), len(self.classes_)

    def predict(self, X: Any) -> np.ndarray:
        """The most probable class."""
        best = self.predict_proba(X).argmax(1)
        return self.classes_[best]

    def predict_proba(self, X: Any) -> np.ndarray:
        """Probability of each class, in the order of `classes_`."""
        (probs,) = self._predicted(X, lambda p: (p.probs,))
        return probs

    def predict_log_proba(self, X: Any) -> np.ndarray:
        return np.log(self.predict_proba(X))

    def predict_uncertainty(self, X: Any) -> Uncertainty:
        """Mutual information and expected entropy, in nats: they add up to the entropy of `predict_proba`."""
        return Uncertainty(*self._predicted(X, lambda p: (p.mutual_information, p.expected_entropy)))

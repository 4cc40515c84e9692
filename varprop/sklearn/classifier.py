"""Classification with a Bayesian multilayer perceptron."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike
from sklearn.base import ClassifierMixin
from sklearn.utils.class_weight import compute_sample_weight
from sklearn.utils.multiclass import check_classification_targets
from torch import Tensor

from ..likelihoods import Categorical, Likelihood
from ..model import Classes
from ..perceptron import BayesianMLP, all_or_nothing
from ..predictive import ClassPredictive, Predictive, tempered
from ..priors import Prior
from ..training.folds import best_factor
from .uncertainty import Uncertainty


@dataclass(eq=False, repr=False)
class BayesianMLPClassifier(ClassifierMixin, BayesianMLP):  # type: ignore[misc]
    """Classification with a multilayer perceptron whose probabilities include the uncertainty of its weights.

    The parameters are those of `BayesianMLPRegressor`, but for `noise`, `log_target` and `laplace`. The prior
    is half as wide.

    :param kl_weight: how much the divergence from the prior counts. "auto" is 0.3, 0.1 or 1, by the
        out-of-fold log-likelihood: where the classes are easy to tell apart, all of it leaves probabilities
        less sure than they should be; where they are not, a part of it lets the network learn the noise.
    :param class_weight: how much the rows of each class count, by name; "balanced" lets every class count the
        same, however rare; probabilities are those of balanced classes then.

    >>> from sklearn.datasets import load_iris
    >>> X, y = load_iris(return_X_y=True)
    >>> model = vp.BayesianMLPClassifier(epochs=5, random_state=0).fit(X, y)
    >>> model.predict_proba(X).shape
    (150, 3)
    """

    prior: float | Prior = 1.0
    class_weight: Mapping[Any, float] | Literal["balanced"] | None = None

    temperature_ = 1.0
    """By which the logarithms of probabilities are divided, as out-of-fold rows have asked for."""

    @all_or_nothing
    def partial_fit(
        self,
        X: ArrayLike,
        y: ArrayLike,
        classes: ArrayLike | None = None,
        sample_weight: ArrayLike | None = None,
    ) -> BayesianMLPClassifier:
        """Learn from more rows as `BayesianMLPRegressor.partial_fit` does.

        The first call sets the scales and must name all classes.
        """
        new = not self.__sklearn_is_fitted__()
        if new and classes is None:
            raise ValueError("classes must be given with the first call of partial_fit.")
        X, y = self._validated(X, y, new)
        if new:
            self.classes_ = np.unique(np.asarray(classes))
        return self._train(X, y, sample_weight, new, once=True)

    def _validated(self, X: ArrayLike, y: ArrayLike, new: bool) -> tuple[np.ndarray, np.ndarray]:
        rows, targets = self._checked(X, y, new=new)
        if targets.dtype == object and (absent := pd.isna(targets)).any():
            raise ValueError(f"y has no class in row {absent.argmax()}; remove the row, or name its class.")
        check_classification_targets(targets)
        if new:
            self.classes_ = np.unique(targets)
        return rows, targets

    def _train(
        self, X: np.ndarray, y: np.ndarray, sample_weight: ArrayLike | None, new: bool, **options: Any
    ) -> BayesianMLPClassifier:
        if self.class_weight is not None:
            self._check_class_weight()
            weight = compute_sample_weight(self.class_weight, y)
            given = 1.0 if sample_weight is None else np.asarray(sample_weight, dtype=np.float64)
            sample_weight = weight * given
        return super()._train(X, y, sample_weight, new, **options)

    def _check_class_weight(self) -> None:
        given = self.class_weight
        if not (isinstance(given, Mapping) or (isinstance(given, str) and given == "balanced")):
            raise ValueError(
                f'class_weight must be None, "balanced" or a dictionary of weights, got {given!r}.'
            )
        if isinstance(given, Mapping) and (unknown := set(given) - set(self.classes_.tolist())):
            raise ValueError(
                f"class_weight has {sorted(map(str, unknown))}, and the classes are {self.classes_.tolist()}."
            )

    @property
    def _shares(self) -> Sequence[float]:
        return 0.3, 1.0, 0.1

    def _learn_target(self, y: np.ndarray, weight: np.ndarray) -> None:
        if len(self.classes_) < 2 or (len(np.unique(y)) < 2 and len(y) > 1):
            raise ValueError(f"{type(self).__name__} needs two classes or more; the data has 1 class.")
        self.temperature_ = 1.0

    @property
    def _target(self) -> Classes:
        return Classes(self.classes_, self.temperature_)

    def _calibrate(self, p: Predictive, y: Tensor, weight: Tensor) -> None:
        assert isinstance(p, ClassPredictive)
        self.temperature_ = best_factor(
            lambda factor: float((weight * tempered(p, factor).log_prob(y)).sum())
        )

    def _keep(self, p: Predictive, values: Tensor, folds: np.ndarray) -> None:
        assert isinstance(p, ClassPredictive)
        self.oof_predict_ = p.probs.numpy()

    def _likelihood(self) -> tuple[Likelihood, int]:
        return Categorical(), len(self.classes_)

    def _classification(self, X: ArrayLike) -> ClassPredictive:
        p = self.predictive(X)
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

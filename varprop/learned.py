"""What the estimators keep of a fit, and what they do with it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike
from sklearn.utils.validation import (
    _check_feature_names,
    check_array,
    check_is_fitted,
    check_X_y,
    validate_data,
)

from .inspect.consistency import Audit
from .inspect.explanation import Explanation, explain
from .io.description import ModelFileError, describe_estimator
from .model import Fitted, Model, Standardise, Target
from .objectives import ELBO
from .predictive import Predictive
from .settings import Settings
from .table.encoding import Encoder, check_names, is_mixed

ALONE = "no_validation"
"""scikit-learn's word for rows without targets; None are targets that someone forgot."""


class Learned(Settings, Fitted):
    """What `fit` learns, and how it predicts."""

    members_: list[ELBO]
    """The trained objectives, in standardised units; member k has not seen fold k modulo their number."""
    elbo_: ELBO
    """The first of them."""
    history_: pd.DataFrame
    """A row for each epoch, averaged over the members."""
    n_iter_: int
    n_seen_: float
    """Sum of the weights of all rows trained on."""
    random_: int
    x_mean_: np.ndarray
    x_scale_: np.ndarray
    choices_: dict[str, object]
    """What each "auto" stands for."""
    candidates_: pd.DataFrame
    """The choices that were compared, with the out-of-fold log-likelihood of each before the best was trained
    further."""
    spread_ = 1.0
    """The factor on all variances of numbers that out-of-fold rows have asked for."""
    encoder_: Encoder | None = None
    """Of a table that is not all numbers."""
    oof_: Predictive
    """Of each row, in the order of the data, by members that have not seen it."""
    oof_rows_: np.ndarray
    """The rows that it is of: all that count, or of a long table some. Model files leave both out."""
    oof_predict_: np.ndarray
    """Its means or probabilities."""
    oof_log_likelihood_: float
    """Its mean log-likelihood, in the target's own unit: what to expect of new rows."""

    @abstractmethod
    def _validated(self, X: ArrayLike, y: ArrayLike, new: bool) -> tuple[np.ndarray, np.ndarray]:
        """The data as arrays, checked; `new` where there is no earlier fit to agree with."""

    @property
    @abstractmethod
    def _target(self) -> Target:
        """How targets are scaled."""

    def _checked(self, X: Any, y: Any = ALONE, *, new: bool = False, **options: Any) -> Any:
        """The rows as an array, with their targets if given; a table that is not all numbers as numbers."""
        options |= {"dtype": [np.float64, np.float32]}
        if isinstance(X, pd.DataFrame):
            check_names(X)
        if new:
            self.encoder_ = Encoder.fit(X) if is_mixed(X) else None
        if self.encoder_ is None:
            return validate_data(self, X, y, **options, reset=new)
        if new:
            self.n_features_in_ = len(X.columns)
            _check_feature_names(self, X, reset=True)
        encoded = self.encoder_.transform(_table(X))
        return (
            check_array(encoded, **options)
            if y is ALONE
            else check_X_y(encoded, y, estimator=self, **options)
        )

    @property
    def model_(self) -> Model:
        """The trained networks with the scales of the data."""
        check_is_fitted(self)
        names = getattr(self, "feature_names_in_", np.array([])).tolist()
        encoder = self.encoder_
        return Model(
            self.members_,
            self._target,
            Standardise(self.x_mean_, self.x_scale_),
            encoder,
            columns=names if encoder is None else encoder.columns,
            width=len(self.x_mean_) if encoder is None else len(encoder.types),
            history=self.history_,
            seed=self.random_,
        )

    def description(self) -> dict[str, object]:
        if type(self).__module__.split(".")[0] != __name__.split(".")[0]:
            raise ModelFileError(
                f"save: {type(self).__name__} is a class of yours, which a model file cannot make again; "
                f"save its `elbo_`."
            )
        learned = {name: value for name, value in vars(self).items() if name.endswith("_")}
        learned = {
            name: value
            for name, value in learned.items()
            if name not in ("members_", "elbo_", "oof_", "oof_rows_")
        }
        return {"estimator": describe_estimator(type(self).__name__, self.get_params(deep=False), learned)}

    def audit(self, X: ArrayLike, y: ArrayLike) -> Audit:
        """`vp.audit` of `elbo_` on held-out rows, with log-likelihoods of the standardised target."""
        check_is_fitted(self)
        return replace(self.model_, encoder=None).audit(*self._validated(X, y, new=False))

    def explain(self, X: ArrayLike, columns: Sequence[str] | None = None) -> Explanation:
        """`vp.explain`: what each column does to the mean and to the uncertainty."""
        check_is_fitted(self)
        return explain(self, X, columns)

    def predictive(self, X: ArrayLike) -> Predictive:
        """The predictive distribution of each row, in the target's own unit."""
        return self._predict(X)

    def _predict(self, X: ArrayLike, **changes: Any) -> Predictive:
        """By the model with some of its fields changed."""
        check_is_fitted(self)
        rows = self._checked(X)
        return replace(self.model_, encoder=None, **changes).predict(rows)

    def __sklearn_is_fitted__(self) -> bool:
        return "members_" in vars(self)


def _table(X: object) -> pd.DataFrame:
    if not isinstance(X, pd.DataFrame):
        raise TypeError(
            f"the model was fitted to a DataFrame with categories and takes the same columns again, "
            f"got {type(X).__name__}."
        )
    return X

"""Regression with a Bayesian multilayer perceptron."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import numpy as np
import pandas as pd
import torch
from numpy.typing import ArrayLike
from scipy.stats import skew
from sklearn.base import MultiOutputMixin, RegressorMixin
from torch import Tensor

from .. import conformal as cv_plus
from ..likelihoods import BoundedNoise, Likelihood, Normal, StudentT
from ..model import Numbers
from ..perceptron import BayesianMLP, Choice, all_or_nothing, mean_and_scale
from ..predictive import Predictive, Regression, RegressionMixture, mixture_of_numbers, widened
from ..priors import FanIn
from ..training.folds import agreement, best_factor
from ..training.rows import Scaled
from .uncertainty import Uncertainty

Noise = Literal["constant", "heteroscedastic", "student"]
SKEWED = 1.0
"""Skewness from which the logarithms of positive targets are tried."""
NOISY = 0.25
"""The part of the variance of targets that the mean leaves unexplained from which all of the divergence is
tried: with less, three tenths of it were better on concrete, energy and yacht."""
FAR, HEAVY = 0.4995, 0.005
"""Student's t is tried if more than this share of targets lies where a right prediction has a thousandth."""


@dataclass(eq=False, repr=False)
class BayesianMLPRegressor(RegressorMixin, MultiOutputMixin, BayesianMLP):  # type: ignore[misc]
    """Regression with a multilayer perceptron whose predictions know how uncertain they are.

    Inputs and targets are standardised inside. Several networks, the members, are each trained without
    another part of the rows, a fold, and stopped by the log-likelihood of these rows. Their mixture predicts.
    What the members predict for rows that they have not seen calibrates the variances, chooses between kinds
    of noise, and is an honest score. The defaults were chosen on parts of training sets
    (`experiments/defaults.py`).

    :param hidden_layer_sizes: units of each hidden layer; "auto" is one of 50, or of 100 from 5,000 rows on.
    :param method: how uncertainty passes through the network, a name in `varprop.METHODS` or a Method.
    :param prior: over the weights; a number g is `priors.FanIn(g)`, N(0, g/n) for the weights into a unit of
        n inputs.
    :param noise: "constant"; "heteroscedastic", which differs between inputs; "student", with heavy tails; or
        "auto", the better of the last two by the out-of-fold log-likelihood.
    :param laplace: let the variances know the correlations between weights (`varprop.laplace`), so that they
        grow away from the data; below 5,000 rows and as many weights, for a prior by the fan-in and a method
        with moments.
    :param pieces: of each column of numbers, cut at its quantiles, as further inputs (`varprop.pieces`), so
        that the target can go up and down along a column; "auto" tries 8 of them and none.
    :param log_target: learn the logarithms of the targets; "auto" tries it for positive and skewed ones.
    :param kl_weight: how much the divergence from the prior counts; less than 1 is a tempered posterior.
        "auto" is 0.3 or, where much of the targets stays unexplained and rows outside training ask for it, 1.
    :param kl_z_weight: weight of the gates' divergence, for VBP and CVBP.
    :param folds: parts of the rows, and with them members; 1 trains on all rows, without any of the above.
    :param n_replicas: networks for each fold, from different starts.
    :param optimizer: "lbfgs" on all rows at once, after a few epochs of Adam; "adam"; "auto" is L-BFGS below
        5,000 rows, if the method does not sample.
    :param epochs: of Adam, or rounds of L-BFGS; "auto" is at most 100 rounds, 4,000 steps of Adam in 120
        epochs or more, and from 5,000 rows on 6,000 steps in 2 to 240 epochs.
    :param lr: learning rate of Adam, which falls to zero as a cosine; "auto" is 0.01, or 0.02 from 5,000 rows
        on.
    :param batch_size: of Adam; "auto" is 32, or 256 from 5,000 rows on.
    :param n_iter_no_change: epochs without a better log-likelihood on its fold after which a member stops;
        "auto" is 4 rounds of L-BFGS, and never with Adam. In any case its best weights are kept.
    :param devices: processes of the CPU that share the training from 5,000 rows on, each with some of the
        members, or with its share of every batch where there is one member only.
    :param warm_start: let `fit` go on from the weights and scales of the last fit.
    :param verbose: show a progress bar.

    After `fit`, `oof_log_likelihood_` is what to expect of new rows, `oof_predict_` the out-of-fold
    predictions, `choices_` what "auto" stood for, `candidates_` what it was compared with, `members_` the
    trained objectives, in standardised units, and `history_` has a row for each epoch.

    >>> from sklearn.datasets import load_diabetes
    >>> X, y = load_diabetes(return_X_y=True)
    >>> model = vp.BayesianMLPRegressor(epochs=5, random_state=0).fit(X[:400], y[:400])
    >>> mean, std = model.predict(X[400:], return_std=True)
    >>> lower, upper = model.predict_interval(X[400:], 0.9)
    """

    noise: Noise | Literal["auto"] = "auto"
    log_target: bool | Literal["auto"] = "auto"
    laplace: bool = True

    agreement_ = 1.0
    """A further factor where all members predict together: they err less than each of them alone."""

    @all_or_nothing
    def partial_fit(
        self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None
    ) -> BayesianMLPRegressor:
        """Learn from more rows, with the posterior so far as the prior; no earlier row is needed again.

        The first call sets the scales, so give it many rows. All members learn from all rows. With "auto",
        further calls make a tenth of the epochs that `fit` would.
        """
        new = not self.__sklearn_is_fitted__()
        return self._train(*self._validated(X, y, new), sample_weight, new, once=True)

    def _validated(self, X: ArrayLike, y: ArrayLike, new: bool) -> tuple[np.ndarray, np.ndarray]:
        rows, targets = self._checked(X, y, new=new, multi_output=True)
        targets = _numbers(targets)
        if not new and targets.shape[1:] != self.y_mean_.shape:
            raise ValueError(
                f"y has the shape {targets.shape}, but the model was first fitted with {self.n_outputs_} "
                "targets."
            )
        return rows, targets

    @property
    def _is_open(self) -> bool:
        return super()._is_open or "auto" in (self.noise, self.log_target)

    def _choice(self, y: np.ndarray, compared: bool) -> Choice:
        if self.noise not in ("auto", *get_args(Noise)):
            raise ValueError(
                f'noise must be "auto" or one of {", ".join(get_args(Noise))}, got {self.noise!r}.'
            )
        if self.log_target not in ("auto", True, False):
            raise ValueError(f'log_target must be "auto", True or False, got {self.log_target!r}.')
        if self.laplace not in (True, False):
            raise ValueError(f"laplace must be True or False, got {self.laplace!r}.")
        log = self.log_target is True
        if log and not (y > 0).all():
            raise ValueError("log_target needs positive targets, and y has some that are zero or negative.")
        automatic = "heteroscedastic" if compared else "constant"
        noise = automatic if self.noise == "auto" else self.noise
        return {"noise": noise, "log_target": log, **super()._choice(y, compared)}

    def _other_kinds(self, y: np.ndarray) -> list[Choice]:
        further: list[Choice] = []
        if self.log_target == "auto" and self.noise != "student" and _is_skewed(y):
            further.append({**self.choices_, "log_target": True})
        if self.noise == "auto" and self.log_target is not True and np.mean(self.oof_scores_ > FAR) > HEAVY:
            further.append({**self.choices_, "noise": "student", "log_target": False})
        return further

    @property
    def _shares(self) -> Sequence[float]:
        return 0.3, 1.0

    def _other_shares(self, y: np.ndarray) -> list[Choice]:
        y = y[self.oof_rows_]
        unexplained = np.mean((y - self.oof_predict_) ** 2, 0)
        return super()._other_shares(y) if np.any(unexplained > NOISY * np.var(y, 0)) else []

    @property
    def _gain(self) -> float | None:
        has_moments = not (self.elbo_.method.samples or self.elbo_.method.deterministic)
        if not (self.laplace and has_moments and isinstance(self.elbo_.prior, FanIn)):
            return None
        return self.elbo_.prior.gain

    def _learn_target(self, y: np.ndarray, weight: np.ndarray) -> None:
        if self.choices_["log_target"] and self.choices_["noise"] == "student":
            raise ValueError(
                'log_target and noise="student" exclude each other: the exponential of a heavy tail has no '
                "mean."
            )
        self.y_mean_, self.y_scale_ = mean_and_scale(np.log(y) if self.choices_["log_target"] else y, weight)
        self.n_outputs_ = 1 if y.ndim == 1 else y.shape[1]
        self.spread_, self.agreement_ = 1.0, 1.0
        if self.choices_["log_target"]:
            scaled = ((np.log(y) - self.y_mean_) / self.y_scale_).reshape(len(y), -1)
            self.log_bounds_ = np.stack([scaled.min(0), scaled.max(0)])

    @property
    def _target(self) -> Numbers:
        mean, scale = (
            torch.tensor(v.reshape(-1), dtype=torch.float64) for v in (self.y_mean_, self.y_scale_)
        )
        log, bounds = bool(self.choices_["log_target"]), None
        if log and hasattr(self, "log_bounds_"):
            low, high = torch.tensor(self.log_bounds_, dtype=torch.float64)
            bounds = low, high
        return Numbers(mean, scale, log, bounds, self.spread_ * self.agreement_)

    def _likelihood(self) -> tuple[Likelihood, int]:
        outputs = self.n_outputs_
        match self.choices_["noise"]:
            case "heteroscedastic":
                # The mean of an exponential grows with the noise: a large one far out would swamp all else.
                bound = 1.0 if self.choices_["log_target"] else 4.0
                return BoundedNoise(outputs, bound), 2 * outputs
            case "student":
                return StudentT(outputs=outputs), outputs
        return Normal(outputs=outputs), outputs

    def _calibrate(self, p: Predictive, y: Tensor, weight: Tensor) -> None:
        self.agreement_ = 1.0
        self.spread_ = best_factor(lambda factor: float((weight * widened(p, factor).log_prob(y)).sum()))

    def _calibrate_together(self, data: Scaled) -> None:
        if data.folds is not None:
            factor = self._agreement(data)
            if self.elbo_.covariance is not None:
                self._keep_prior(factor, data)
                factor = self._agreement(data)
            self.agreement_ = factor

    def _agreement(self, data: Scaled) -> float:
        assert data.folds is not None
        parts = data.folds.predict_apart(self.members_, data.x)
        return agreement([widened(p, self.spread_) for p in parts], data.weight[data.folds.judges])

    def _keep(self, p: Predictive, values: Tensor, folds: np.ndarray) -> None:
        assert isinstance(p, Regression)
        self.oof_predict_ = self._shaped(p.mean)
        self.oof_scores_ = cv_plus.scores(p, values).numpy()
        self.oof_fold_ = folds

    def _regression(self, X: ArrayLike) -> Regression:
        p = self.predictive(X)
        assert isinstance(p, Regression)
        return p

    def predict(self, X: ArrayLike, return_std: bool = False) -> Any:
        """Mean of the prediction; with `return_std`, also its standard deviation."""
        p = self._regression(X)
        return (self._shaped(p.mean), self._shaped(p.std)) if return_std else self._shaped(p.mean)

    def predict_interval(
        self, X: ArrayLike, level: float = 0.9, conformal: bool = False
    ) -> tuple[np.ndarray, np.ndarray]:
        """Lower and upper ends of the central interval that holds a target with probability `level`.

        :param conformal: by CV+ from the out-of-fold rows, whose guarantee needs no model to be true.
        """
        lower, upper = self._conformal(X, level) if conformal else self._regression(X).interval(level)
        return self._shaped(lower), self._shaped(upper)

    def _conformal(self, X: ArrayLike, level: float) -> tuple[Tensor, Tensor]:
        p = self._predict(X, target=replace(self._target, spread=self.spread_))  # as the rows out of fold
        if not hasattr(self, "oof_scores_") or not isinstance(p, RegressionMixture):
            raise ValueError(
                "predict_interval: conformal intervals need out-of-fold rows; fit with folds=2 or more."
            )
        folds = len(self.members_) // self.n_replicas
        predictions = [mixture_of_numbers(p.components[k::folds]) for k in range(folds)]
        found = [torch.from_numpy(self.oof_scores_[self.oof_fold_ == k]) for k in range(folds)]
        return cv_plus.interval(predictions, found, level)

    def predict_uncertainty(self, X: ArrayLike) -> Uncertainty:
        """Epistemic and aleatoric variance, in the target's unit squared."""
        p = self._regression(X)
        return Uncertainty(self._shaped(p.epistemic), self._shaped(p.aleatoric))

    def log_prob(self, X: ArrayLike, y: ArrayLike) -> np.ndarray:
        """Log density of each row's targets."""
        return self._regression(X).log_prob(self._target.values(y)).numpy()

    def _shaped(self, values: Tensor) -> np.ndarray:
        return values.numpy().reshape(-1, *self.y_mean_.shape)


def _numbers(y: np.ndarray) -> np.ndarray:
    """Targets as numbers, if they are; text may be one."""
    if y.dtype.kind in "biuf":
        return y
    values = pd.to_numeric(pd.Series(y.ravel()), errors="coerce").to_numpy(np.float64)
    if not np.isfinite(values).all():
        i = int((~np.isfinite(values)).argmax())
        row = i // (y.shape[1] if y.ndim > 1 else 1)
        raise ValueError(f"y has {y.ravel()[i]!r} in row {row}, where a finite number is needed.")
    return values.reshape(y.shape)


def _is_skewed(y: np.ndarray) -> bool:
    """Whether all targets are positive, and their logarithms less skewed than they are."""
    if not (y > 0).all() or (np.ptp(y, axis=0) < 1e-9 * y.max(0)).any():  # the skewness of rounding errors
        return False
    before, after = skew(y, axis=0), skew(np.log(y), axis=0)
    return bool(((before > SKEWED) & (np.abs(after) < before)).all())

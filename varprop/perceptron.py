"""How the estimators learn: a Bayesian perceptron of ReLU units, its members and how they are trained."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy, deepcopy
from dataclasses import dataclass, replace
from functools import wraps
from itertools import pairwise
from typing import Any, Concatenate, ParamSpec, TypeAlias, TypeVar, cast

import numpy as np
import pandas as pd
import torch
from numpy.typing import ArrayLike
from sklearn.preprocessing import StandardScaler
from sklearn.utils import check_random_state
from sklearn.utils.validation import _check_sample_weight
from torch import Tensor, nn

from . import race
from .laplace import Laplace
from .learned import Learned
from .likelihoods import Likelihood
from .model import Standardise
from .objectives import ELBO
from .pieces import Pieces
from .posterior import posteriors
from .predictive import Predictive
from .priors import Horseshoe
from .randomisation import variational
from .settings import LONG, MANY, count, positive
from .training import groups
from .training import loop as training
from .training.batches import Batch
from .training.epochs import Noise
from .training.folds import PART
from .training.rows import Rows, Scaled
from .training.streaming import learn

COMPARED = 2000
"""Rows of a large table on which choices are compared."""
PIECES = 8
"""Of a column of numbers, where "auto" tries them."""
WIDE = 256
"""Inputs that a network may have with pieces, where "auto" tries them; more take minutes."""
LOGVAR = -7.0
"""The logarithms of the weights' variances at the start."""
FURTHER = 0.1
"""The share of the epochs of Adam that a further call of `partial_fit` makes."""
REACHES = (16.0, 4.0, 1.0, 0.25)
"""How many times the variance in training the prior of the correlations may have; the first is from gaps."""
WORTH = 0.02
"""Nats for each row outside training that a narrower prior must gain."""
KEPT = 1000
"""The latest rows of the history that are kept, so that a stream needs no more memory."""

Self = TypeVar("Self", bound="BayesianMLP")
Given = ParamSpec("Given")
Choice: TypeAlias = Mapping[str, object]
"""Parameters for which "auto" may stand, with values."""


def all_or_nothing(
    method: Callable[Concatenate[Self, Given], Self],
) -> Callable[Concatenate[Self, Given], Self]:
    """Let a method change the estimator only if it ends without an error."""

    @wraps(method)
    def call(self: Self, /, *args: Given.args, **kwargs: Given.kwargs) -> Self:
        self.__dict__ = method(copy(self), *args, **kwargs).__dict__
        return self

    return call


@dataclass(eq=False, repr=False)
class BayesianMLP(Learned):
    """What regression and classification share: a network of ReLU units, trained on standardised inputs."""

    @abstractmethod
    def _learn_target(self, y: np.ndarray, weight: np.ndarray) -> None:
        """Learn the scale of the targets as `choices_` say, or check the classes."""

    @abstractmethod
    def _calibrate(self, p: Predictive, y: Tensor, weight: Tensor) -> None:
        """Learn how much wider or narrower predictions should be from out-of-fold ones."""

    def _calibrate_together(self, data: Scaled) -> None:
        """Learn how much narrower the mixture of all members should be than they are alone."""

    @abstractmethod
    def _likelihood(self) -> tuple[Likelihood, int]:
        """The likelihood, and how many outputs its network has."""

    @abstractmethod
    def _keep(self, p: Predictive, values: Tensor, folds: np.ndarray) -> None:
        """Keep out-of-fold predictions, and what is to be known about their errors."""

    @property
    def _is_open(self) -> bool:
        """Whether any parameter is chosen by the out-of-fold log-likelihood."""
        return "auto" in (self.kl_weight, self.pieces)

    def _choice(self, y: np.ndarray, compared: bool) -> Choice:
        """What "auto" stands for at first, where it can be compared with others and where it cannot."""
        automatic = self._shares[0 if compared else -1]
        share = automatic if self.kl_weight == "auto" else positive("kl_weight", self.kl_weight)
        return {
            "kl_weight": share,
            "pieces": 0 if self.pieces in ("auto", 0) else count("pieces", self.pieces),
        }

    def _other_kinds(self, y: np.ndarray) -> list[Choice]:
        """Which other kinds of noise to try after the first fit."""
        return []

    def _other_shares(self, y: np.ndarray) -> list[Choice]:
        """Which other shares of the divergence to try then."""
        is_open = self.kl_weight == "auto" and not self._moments.deterministic
        others = self._shares[1:] if is_open else ()
        return [{**self.choices_, "kl_weight": share} for share in others]

    def _finer_choices(self, rows: Rows) -> list[Choice]:
        """What else to try in the end."""
        pieces = self._cut(rows, PIECES) if self.pieces == "auto" else None
        fits = pieces is not None and rows.X.shape[1] + len(pieces.columns) <= WIDE
        return [{**self.choices_, "pieces": PIECES}] if fits else []

    @property
    @abstractmethod
    def _shares(self) -> Sequence[float]:
        """Of the divergence, in the order in which "auto" tries them; the last where nothing is compared."""

    @property
    def _share(self) -> float:
        """How much the divergence counts."""
        return positive("kl_weight", self.choices_.get("kl_weight", self.kl_weight))

    @property
    def _gain(self) -> float | None:
        """The prior variance of weights times the inputs of their unit; None to leave correlations out."""
        return None

    @all_or_nothing
    def fit(self: Self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> Self:
        """Train on rows X with targets y; a row counts as often as its weight says.

        X may be a DataFrame with categories, text, dates and missing values, which become numbers as in
        `varprop fit`.
        """
        new = not (self.warm_start and self.__sklearn_is_fitted__())
        X, y = self._validated(X, y, new)
        if not new:
            for member in self.members_:
                member.prior = self._prior  # with warm_start, `fit` keeps the weights but not what they know
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
        :param once: train all members on all rows, with their posteriors so far as priors.
        :param dtype: of new networks; that of X by default.
        """
        weight = _check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True)
        counts = weight > 0
        rows = Rows(X, y, weight) if counts.all() else Rows(X[counts], y[counts], weight[counts])
        if not len(rows):
            raise ValueError("All sample weights are zero; at least one row must count.")
        if new and len(rows) < 2:
            raise ValueError(
                "One row (n_samples=1) says nothing about the spread of others; give two or more."
            )
        if new:
            self._dtype = dtype or (torch.float32 if X.dtype == np.float32 else torch.float64)
            self.random_ = int(check_random_state(self.random_state).randint(2**31))
        if once:
            self._train_on(rows, new)
            for name in [name for name in vars(self) if name.startswith("oof_")]:
                delattr(self, name)  # from now on every member has seen all rows
        else:
            folds = self._fold_count(len(rows))
            self._train_folds(rows, new, folds)
            if folds > 1:
                self.oof_rows_ = np.flatnonzero(counts)[self.oof_rows_]
        return self

    def _train_on(self, rows: Rows, new: bool) -> None:
        """Let all members learn all rows, with their posteriors so far as priors."""
        if new:
            self._start(self._choice(rows.y, compared=False), rows, folds=1)
        data = self._scaled(rows, folds=1)
        batch = data.x, data.t, (data.weight / data.weight.mean()).to(data.x.dtype)
        n_data = rows.total / self._share
        self._note(learn(self.members_, batch, n_data, lambda *given: self._fit_all(batch, *given)))
        self.n_seen_ += rows.total

    def _train_folds(self, rows: Rows, new: bool, folds: int) -> None:
        """Train each member without another fold, and choose what is left open."""
        compared = new and folds > 1 and self._is_open
        if new:
            choice = self._choice(rows.y, compared)
            if compared:
                some = rows if len(rows) < MANY else rows.sample(COMPARED, self.random_)
                best = race.leader(self, choice, some, folds)
                choice, self.candidates_ = best.estimator.choices_, best.estimator.candidates_
                if len(rows) < MANY:
                    best = race.trained_further(best)
                    self.__dict__.update(vars(best.estimator))
                    self._combine(best.data)
                    return
            self._start(choice, rows, folds)
        data = self._scaled(rows, folds)
        self._train_members(data)
        self._combine(data)

    def _start(self, choice: Choice, rows: Rows, folds: int) -> None:
        """New scales, and new networks from the random state."""
        self.choices_ = dict(choice)
        self.x_mean_, self.x_scale_ = mean_and_scale(rows.X, rows.weight)
        self._learn_target(rows.y, rows.weight)
        with torch.random.fork_rng([]):
            torch.manual_seed(self.random_)
            n = folds * count("n_replicas", self.n_replicas)
            pieces = self._cut(rows, cast(int, self.choices_.get("pieces", 0)))
            self.members_ = [self._objective(rows, pieces).to(self._dtype) for _ in range(n)]
        self.elbo_ = self.members_[0]
        self.history_ = pd.DataFrame()
        self.n_seen_, self.n_iter_ = 0.0, 0

    def _cut(self, rows: Rows, pieces: int) -> Pieces | None:
        """How columns of numbers are cut, in standardised units."""
        some = rows if len(rows) <= LONG else rows.sample(LONG, self.random_)
        scaled = Standardise(self.x_mean_, self.x_scale_)
        return Pieces.of(scaled(torch.tensor(np.asarray(some.X))), pieces) if pieces else None

    def _objective(self, rows: Rows, pieces: Pieces | None) -> ELBO:
        method, prior = self._moments, self._prior
        likelihood, outputs = self._likelihood()
        features = rows.X.shape[1] + (0 if pieces is None else len(pieces.columns))
        layers: list[nn.Module] = [] if pieces is None else [deepcopy(pieces)]
        for inputs, units in pairwise([features, *self._hidden(len(rows)), outputs]):
            layers += [nn.Linear(inputs, units), nn.ReLU()]
        net = nn.Sequential(*layers[:-1])
        is_horseshoe = isinstance(prior, Horseshoe)
        variational(net, posterior="horseshoe" if is_horseshoe else "full", init="he", logvar=LOGVAR)
        if method.deterministic:
            for layer in net.modules():
                layer._parameters.pop("weight_logvar", None)
        return ELBO(net, method, likelihood, prior, n_data=1, kl_z_weight=self.kl_z_weight)

    def _scaled(self, rows: Rows, folds: int) -> Scaled:
        return Scaled.by(replace(self.model_, encoder=None), rows, folds, self.random_)

    def _train_members(self, data: Scaled, **options: Any) -> None:
        """Train the members and judge them by the rows that they have not seen."""
        seen = data.total * (1 if data.folds is None else 1 - 1 / data.folds.count)
        self.n_seen_ = seen
        for member in self.members_:
            member.covariance = None
            member.n_data = seen / self._share
        if data.folds is None:
            weight = (data.weight / data.weight.mean()).to(data.x.dtype)
            self._note(self._fit_all((data.x, data.t, weight), self.members_))
            return
        options = {**self._options(len(data.x), data.folds.count), **options}
        options |= {"seeds": self._seeds, "progress": bool(self.verbose)}
        options["devices"] = self._processes(len(data.x))
        with _single_precision(self.members_):
            history = data.folds.fit(self.members_, data.x.float(), _single(data.t), data.weight, **options)
        self._note(history)
        self._judge(data)

    def _fit_all(self, data: Batch, members: Sequence[ELBO], noise: Noise = "running") -> pd.DataFrame:
        """Train every member on all rows; where they go on from earlier ones, with fewer steps."""
        n, rows = len(members), len(data[0])
        batch_size = self._batch_size(rows)
        options: dict[str, Any] = {
            "epochs": self._epochs(rows, batch_size, share=FURTHER if noise == "fixed" else 1.0),
            "lr": self._rate(rows),
            "batch_size": batch_size,
            "schedule": "cosine",
            "noise": noise,
            "progress": bool(self.verbose),
        }
        devices = self._processes(rows)
        if n == 1:
            seed = self._seeds[0]
            return training.fit(members[0], data, seed=seed, devices=devices, accelerator="cpu", **options)
        shared = [v.expand(n, *v.shape) for v in data]
        return groups.fit(members, *shared, seeds=self._seeds, devices=devices, **options)

    @property
    def _seeds(self) -> list[int]:
        return [self.random_ + self.n_iter_ + 2**32 * k for k in range(len(self.members_))]

    def _note(self, history: pd.DataFrame) -> None:
        """Add epochs to the history."""
        mean = history.drop(columns="replica", errors="ignore").groupby("epoch", as_index=False).mean()
        mean["epoch"] += self.n_iter_
        history = pd.concat([self.history_, mean], ignore_index=True) if self.n_iter_ else mean
        self.n_iter_ += len(mean)
        self.history_ = history.tail(max(KEPT, len(mean))).reset_index(drop=True)

    def _combine(self, data: Scaled) -> None:
        """Learn what only matters for the trained members: correlations, and how they predict together."""
        self._correlate(data)
        self._calibrate_together(data)

    def _correlate(self, data: Scaled) -> None:
        """Give the predictions of each member the correlations between its weights, where that can be.

        Their prior is the widest one that the rows outside training do not speak against.
        """
        gain, size = self._gain, sum(q.mean.numel() for _, q in posteriors(self.elbo_.net))
        if data.folds is not None and gain is not None and max(len(data.x), size) < MANY:
            data.folds.correlate(self.members_, gain, data.x, data.weight)
            fitted, score = self._covariances, -math.inf
            for reach in REACHES:
                wider = self._covariances
                self._correlate_by([covariance.with_prior(reach) for covariance in fitted], data)
                self._keep_prior(self.spread_, data)
                if self.oof_log_likelihood_ < score + WORTH:
                    self._correlate_by(wider, data)
                    break
                score = self.oof_log_likelihood_

    @property
    def _covariances(self) -> list[Laplace]:
        return [member.covariance for member in self.members_ if member.covariance is not None]

    def _correlate_by(self, covariances: Sequence[Laplace], data: Scaled) -> None:
        for member, covariance in zip(self.members_, covariances, strict=True):
            member.covariance = covariance
        self._judge(data)

    def _keep_prior(self, factor: float, data: Scaled) -> None:
        """Undo for the prior what a factor does to all variances.

        A factor corrects the noise. Where there are no rows, the prior decides, and should stay.
        """
        self._correlate_by([covariance.with_prior(1 / factor) for covariance in self._covariances], data)

    def _judge(self, data: Scaled) -> None:
        """What rows that a member has not seen say about it: its calibration and its honest score."""
        assert data.folds is not None
        rows = data.folds.judges
        w, values = data.weight[rows], data.values[rows]
        p = data.folds.predict(self.members_, data.x)
        self._calibrate(p, data.t[rows], w)
        p = self.oof_ = self._target.unscaled(p)
        self.oof_rows_ = rows.numpy()
        self.oof_log_likelihood_ = float((w * p.log_prob(values)).sum() / w.sum())
        self._keep(p, values, data.folds.part[rows].numpy())


@contextmanager
def _single_precision(members: Sequence[ELBO]) -> Iterator[None]:
    """Halve the time of training; what members predict afterwards is computed in their own precision."""
    dtype = next(members[0].parameters()).dtype
    for member in members:
        member.float()
    try:
        yield
    finally:
        for member in members:
            member.to(dtype)


def _single(t: Tensor) -> Tensor:
    return t.float() if t.is_floating_point() else t


def mean_and_scale(values: np.ndarray, weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Weighted mean and standard deviation of each column in double precision; 1 for a constant column."""
    scaler = StandardScaler()
    for i in range(0, len(values), PART):
        columns = values[i : i + PART].astype(np.float64)
        scaler.partial_fit(columns.reshape(len(columns), -1), sample_weight=weight[i : i + PART])
    return scaler.mean_.reshape(values.shape[1:]), scaler.scale_.reshape(values.shape[1:])

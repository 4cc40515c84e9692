"""What the estimators share: a Bayesian perceptron of ReLU units, its members and how they are trained."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy, deepcopy
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, TypeAlias, TypeVar

import numpy as np
import pandas as pd
import torch
from numpy.typing import ArrayLike
from sklearn.preprocessing import StandardScaler
from sklearn.utils import check_random_state
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
from torch import Tensor, nn

from .inspect.consistency import Audit
from .inspect.explanation import Explanation, explain
from .io.description import ModelFileError, describe_estimator
from .laplace import RANK, Laplace
from .likelihoods import Likelihood
from .model import Fitted, Model, Standardise, Target
from .objectives import ELBO
from .posterior import posteriors, variational
from .predictive import Predictive, Regression
from .priors import Horseshoe
from .settings import MANY, Settings, count, positive
from .table.encoding import Encoder, is_mixed
from .training import loop as training
from .training import replicas
from .training.batches import Batch
from .training.epochs import Noise, predict
from .training.folds import Folds
from .training.streaming import learn

COMPARED = 2000
"""Rows of a large table on which choices are compared."""
LOGVAR = -7.0
"""The logarithms of the weights' variances at the start."""
RACE = 10
"""Rounds of L-BFGS after which only the best choice is trained further."""
FURTHER = 0.1
"""The share of the epochs of Adam that a further call of `partial_fit` makes."""
KEPT = 1000
"""The latest rows of the history that are kept, so that a stream needs no more memory."""

Self = TypeVar("Self", bound="BayesianMLP")
Choice: TypeAlias = Mapping[str, object]
"""Parameters for which "auto" may stand, with values."""


class Learned:
    """What `fit` learns."""

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
    encoder_: Encoder | None = None
    """Of a table that is not all numbers."""
    oof_: Predictive
    """Of each row, in the order of the data, by members that have not seen it; model files leave it out."""
    oof_predict_: np.ndarray
    """Its means or probabilities."""
    oof_log_likelihood_: float
    """Its mean log-likelihood, in the target's own unit: what to expect of new rows."""


@dataclass(eq=False, repr=False)
class BayesianMLP(Settings, Learned, Fitted):
    """What regression and classification share: a network of ReLU units, trained on standardised inputs."""

    @abstractmethod
    def _validated(self, X: ArrayLike, y: ArrayLike, new: bool) -> tuple[np.ndarray, np.ndarray]:
        """The data as arrays, checked; `new` where there is no earlier fit to agree with."""

    @abstractmethod
    def _learn_target(self, y: np.ndarray, weight: np.ndarray) -> None:
        """Learn the scale of the targets as `choices_` say, or check the classes."""

    @abstractmethod
    def _calibrate(self, p: Predictive, y: Tensor, weight: Tensor) -> None:
        """Learn how much wider or narrower predictions should be from out-of-fold ones."""

    @property
    @abstractmethod
    def _target(self) -> Target:
        """How targets are scaled."""

    @abstractmethod
    def _likelihood(self) -> tuple[Likelihood, int]:
        """The likelihood, and how many outputs its network has."""

    @abstractmethod
    def _keep(self, p: Predictive, values: Tensor, folds: np.ndarray) -> None:
        """Keep out-of-fold predictions, and what is to be known about their errors."""

    @property
    def _is_open(self) -> bool:
        """Whether any parameter is chosen by the out-of-fold log-likelihood."""
        return False

    def _choice(self, y: np.ndarray, compared: bool) -> Choice:
        """What "auto" stands for at first, where it can be compared with others and where it cannot."""
        return {}

    def _other_choices(self, y: np.ndarray) -> list[Choice]:
        """What else to try after the first fit."""
        return []

    @property
    def _gain(self) -> float | None:
        """The prior variance of weights times the inputs of their unit; None to leave correlations out."""
        return None

    def _encoded(self, X: Any, new: bool) -> Any:
        """A table that is not all numbers, as numbers; anything else as it is."""
        if new:
            self.encoder_ = Encoder.fit(X) if is_mixed(X) else None
        return X if self.encoder_ is None else self.encoder_.transform(_table(X))

    # ----------------------------------------------------------------------------------------------- training

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
        X, y, weight = X[weight > 0], y[weight > 0], weight[weight > 0]
        if not len(X):
            raise ValueError("All sample weights are zero; at least one row must count.")
        folds = 1 if once else self._fold_count(len(X))
        if new:
            self._dtype = dtype or (torch.float32 if X.dtype == np.float32 else torch.float64)
            self.random_ = int(check_random_state(self.random_state).randint(2**31))
            compared = folds > 1 and self._is_open
            choice = self._choice(y, compared)
            if compared:
                leader = self._leader(choice, X, y, weight)
                choice = leader.choices_
                if len(X) < MANY:
                    self.__dict__.update(vars(leader))
                    self._train_further(X, y, weight, folds)
                    self._correlate(X, y, weight, folds)
                    return self
            self._start(choice, X, y, weight, folds)
        self._train_members(X, y, weight, folds, once)
        if folds > 1:
            self._correlate(X, y, weight, folds)
        if once:
            for name in [name for name in vars(self) if name.startswith("oof_")]:
                delattr(self, name)  # from now on every member has seen all rows
        return self

    def _leader(self: Self, choice: Choice, X: np.ndarray, y: np.ndarray, weight: np.ndarray) -> Self:
        """The choice with the best out-of-fold log-likelihood in a race; on some rows of a large table."""
        if len(X) >= MANY:
            rows = np.random.RandomState(self.random_).permutation(len(X))[:COMPARED]
            X, y, weight = X[rows], y[rows], weight[rows]
        folds, rounds = self._fold_count(len(X)), self._rounds(len(X))
        options: dict[str, Any] = {} if rounds is None else {"epochs": min(RACE, rounds)}

        def trial(choice: Choice) -> Self:
            found = copy(self)
            found._start(choice, X, y, weight, folds)
            found._train_members(X, y, weight, folds, **options)
            return found

        first = trial(choice)
        trials = [first, *(trial(other) for other in first._other_choices(y))]
        best = max(trials, key=lambda trial: trial.oof_log_likelihood_)
        self.candidates_ = best.candidates_ = pd.DataFrame(
            [{**trial.choices_, "log-likelihood": trial.oof_log_likelihood_} for trial in trials]
        )
        return best

    def _train_further(self, X: np.ndarray, y: np.ndarray, weight: np.ndarray, folds: int) -> None:
        """The rounds of L-BFGS after the race, if they make the out-of-fold log-likelihood better."""
        rounds = self._rounds(len(X))
        if rounds is None or rounds <= RACE:
            return
        longer = copy(self)
        longer.members_ = deepcopy(self.members_)
        longer.elbo_ = longer.members_[0]
        longer._train_members(X, y, weight, folds, epochs=rounds - RACE, warm_up=0)
        if longer.oof_log_likelihood_ > self.oof_log_likelihood_:
            self.__dict__.update(vars(longer))

    def _start(self, choice: Choice, X: np.ndarray, y: np.ndarray, weight: np.ndarray, folds: int) -> None:
        """New scales, and new networks from the random state."""
        self.choices_ = dict(choice)
        self.x_mean_, self.x_scale_ = mean_and_scale(X, weight)
        self._learn_target(y, weight)
        with torch.random.fork_rng([]):
            torch.manual_seed(self.random_)
            n = folds * count("n_replicas", self.n_replicas)
            self.members_ = [self._objective(len(X), X.shape[1]).to(self._dtype) for _ in range(n)]
        self.elbo_ = self.members_[0]
        self.history_ = pd.DataFrame()
        self.n_seen_, self.n_iter_ = 0.0, 0

    def _objective(self, rows: int, features: int) -> ELBO:
        method, prior = self._moments, self._prior
        likelihood, outputs = self._likelihood()
        layers: list[nn.Module] = []
        for inputs, units in pairwise([features, *self._hidden(rows), outputs]):
            layers += [nn.Linear(inputs, units), nn.ReLU()]
        net = nn.Sequential(*layers[:-1])
        is_horseshoe = isinstance(prior, Horseshoe)
        variational(net, posterior="horseshoe" if is_horseshoe else "full", init="he", logvar=LOGVAR)
        if method.deterministic:
            for layer in net.modules():
                layer._parameters.pop("weight_logvar", None)
        return ELBO(net, method, likelihood, prior, n_data=1, kl_z_weight=self.kl_z_weight)

    def _train_members(
        self,
        X: np.ndarray,
        y: np.ndarray,
        weight: np.ndarray,
        folds: int,
        once: bool = False,
        **options: Any,
    ) -> None:
        model = replace(self.model_, encoder=None)  # the rows are encoded already
        x, t, w = model.inputs(X), model.targets(y), torch.from_numpy(weight)
        seen = float(weight.sum()) * (1 if folds == 1 else 1 - 1 / folds)
        n_data = seen / positive("kl_weight", self.kl_weight)
        data = (x, t, (w / w.mean()).to(x.dtype))
        if once:
            self._note(learn(self.members_, data, n_data, lambda *given: self._fit_all(data, *given)))
            self.n_seen_ += seen
            return
        self.n_seen_ = seen
        for member in self.members_:
            member.covariance = None
            member.n_data = n_data
        if folds == 1:
            self._note(self._fit_all(data, self.members_))
            return
        parts = Folds.draw(x, t, folds, self.random_)
        options = {**self._options(len(X), folds), **options}
        options |= {"seeds": self._seeds, "progress": bool(self.verbose)}
        with _single_precision(self.members_):
            self._note(parts.fit(self.members_, x.float(), _single(t), w, **options))
        self._judge(parts, x, model.target.values(y), t, w)

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
        if n == 1:
            from lightning_fabric import Fabric  # takes seconds to import

            fabric = Fabric(accelerator="cpu", devices=1)
            return training.fit(members[0], data, seed=self._seeds[0], fabric=fabric, **options)
        shared = [v.expand(n, *v.shape) for v in data]
        return replicas.fit(members, *shared, seeds=self._seeds, **options)

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

    def _correlate(self, X: np.ndarray, y: np.ndarray, weight: np.ndarray, folds: int) -> None:
        """Give the predictions of each member the correlations between its weights, where that can be."""
        gain, size = self._gain, sum(q.mean.numel() for _, q in posteriors(self.elbo_.net))
        if gain is None or max(len(X), size) >= MANY:
            return
        model = replace(self.model_, encoder=None)
        x, t, w = model.inputs(X), model.targets(y), torch.from_numpy(weight)
        parts = Folds.draw(x, t, folds, self.random_)
        seen = ~parts.held_out(len(self.members_))
        rank = min(RANK, int(seen.sum(1).min()))
        for member, rows in zip(self.members_, seen, strict=True):
            p = predict(member, x[rows])
            assert isinstance(p, Regression)
            assert isinstance(member.net, nn.Sequential)
            weights = w[rows].to(x.dtype)
            member.covariance = Laplace.fit(member.net, gain, x[rows], p.aleatoric, weights, rank)
        self._judge(parts, x, model.target.values(y), t, w)

    def _judge(self, parts: Folds, x: Tensor, values: Tensor, t: Tensor, w: Tensor) -> None:
        """What rows that a member has not seen say about it: its calibration and its honest score."""
        p = parts.predict(self.members_, x)
        self._calibrate(p, t, w)
        p = self.oof_ = self._target.unscaled(p)
        self.oof_log_likelihood_ = float((w * p.log_prob(values)).sum() / w.sum())
        self._keep(p, values, parts.part.numpy())

    # --------------------------------------------------------------------------------------------- prediction

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
            name: value for name, value in learned.items() if name not in ("members_", "elbo_", "oof_")
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
        check_is_fitted(self)
        rows = validate_data(self, self._encoded(X, False), dtype=[np.float64, np.float32], reset=False)
        return replace(self.model_, encoder=None).predict(rows)

    def __sklearn_is_fitted__(self) -> bool:
        return "members_" in vars(self)


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


def _table(X: object) -> pd.DataFrame:
    if not isinstance(X, pd.DataFrame):
        raise TypeError(
            f"the model was fitted to a DataFrame with categories and takes the same columns again, "
            f"got {type(X).__name__}."
        )
    return X


def mean_and_scale(values: np.ndarray, weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Weighted mean and standard deviation of each column in double precision; 1 for a constant column."""
    columns = values.astype(np.float64).reshape(len(values), -1)
    scaler = StandardScaler().fit(columns, sample_weight=weight)
    return scaler.mean_.reshape(values.shape[1:]), scaler.scale_.reshape(values.shape[1:])

"""The parameters of the estimators, and what "auto" stands for."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, dataclass
from numbers import Integral, Real
from typing import Any, Literal

import numpy as np
from sklearn.base import BaseEstimator

from .methods import METHODS, Method
from .priors import FanIn, Prior

MANY = 5000
LONG = 200_000
"""Rows beyond which a table is long: networks are trained on all of them, but what is compared, judged and
calibrated is so by this many rows, drawn at random."""
UNITS, BATCH, RATE = (50, 100), (32, 256), (0.01, 0.02)
"""What "auto" is below `MANY` rows and from there on: hidden units, and the batch and rate of Adam."""
STEPS, EPOCHS = (4000, 6000), ((120, 4000), (2, 240))
"""Steps of Adam below `MANY` rows and from there on, and the fewest and most epochs that they may take."""
BATCHES, LARGEST_BATCH = 4000, 4096
"""Batches of an epoch, beyond which they become larger rather than more, up to this size."""
FEWEST = 10
"""Rows of a fold that can stop a network without flattering it."""
ROUNDS, PATIENCE = 100, 4
"""The most rounds of L-BFGS, and rounds without a better one after which a member stops."""


@dataclass(eq=False, repr=False)
class Settings(BaseEstimator):  # type: ignore[misc]
    """The parameters that regression and classification share.

    scikit-learn reads them from the signature of the constructor, which `dataclass` writes.
    """

    hidden_layer_sizes: int | Sequence[int] | Literal["auto"] = "auto"
    _: KW_ONLY
    method: str | Method = "dvi"
    prior: float | Prior = 2.0
    kl_weight: float | Literal["auto"] = "auto"
    kl_z_weight: float = 0.0
    pieces: int | Literal["auto"] = "auto"
    folds: int = 5
    n_replicas: int = 1
    optimizer: Literal["auto", "lbfgs", "adam"] = "auto"
    epochs: int | Literal["auto"] = "auto"
    lr: float | Literal["auto"] = "auto"
    batch_size: int | Literal["auto"] = "auto"
    n_iter_no_change: int | Literal["auto"] = "auto"
    devices: int = 1
    warm_start: bool = False
    random_state: int | np.random.RandomState | None = None
    verbose: bool = False

    @property
    def _moments(self) -> Method:
        if isinstance(self.method, Method):
            return self.method
        if self.method not in METHODS:
            raise ValueError(f"method must be one of {', '.join(METHODS)}, or a Method, got {self.method!r}.")
        return METHODS[self.method]

    @property
    def _prior(self) -> Prior:
        return self.prior if isinstance(self.prior, Prior) else FanIn(positive("prior", self.prior))

    def _fold_count(self, rows: int) -> int:
        """At least two rows are in each fold; more folds than the default should have ten."""
        wanted = count("folds", self.folds)
        folds = max(1, min(wanted, rows // 2))
        if folds < wanted:
            warnings.warn(f"{rows} rows have no more than {folds} folds, not {wanted}.", stacklevel=1)
        if folds > Settings.folds and rows < FEWEST * folds:
            warnings.warn(
                f"{folds} folds of {rows} rows have fewer than {FEWEST} rows each, and a network stops where"
                " those are predicted best: the score is optimistic; take fewer folds.",
                stacklevel=1,
            )
        return folds

    def _options(self, rows: int, folds: int) -> dict[str, Any]:
        """Of the trainer of folds."""
        rounds, batch_size, rate = self._rounds(rows), self._batch_size(rows), self._rate(rows)
        if rounds is not None:
            return {"optimizer": "lbfgs", "epochs": rounds, "patience": self._patience}
        return {
            "epochs": self._epochs(rows, batch_size, folds),
            "lr": rate,
            "batch_size": batch_size,
            "schedule": "cosine",
            "patience": None if self.n_iter_no_change == "auto" else self._patience,
        }

    def _rounds(self, rows: int) -> int | None:
        """The most rounds of L-BFGS; None with Adam."""
        if self._optimizer(rows) == "adam":
            return None
        return ROUNDS if self.epochs == "auto" else count("epochs", self.epochs)

    @property
    def _patience(self) -> int:
        given = self.n_iter_no_change
        return PATIENCE if isinstance(given, str) and given == "auto" else count("n_iter_no_change", given)

    def _processes(self, rows: int) -> int:
        """To start processes for a small table takes longer than to train."""
        return count("devices", self.devices) if rows >= MANY else 1

    def _optimizer(self, rows: int) -> str:
        if self.optimizer not in ("auto", "lbfgs", "adam"):
            raise ValueError(f'optimizer must be "auto", "lbfgs" or "adam", got {self.optimizer!r}.')
        if self.optimizer == "auto":
            return "lbfgs" if rows < MANY and not self._moments.samples else "adam"
        return self.optimizer

    def _hidden(self, rows: int) -> list[int]:
        sizes = self.hidden_layer_sizes
        if isinstance(sizes, str) and sizes == "auto":
            return [UNITS[rows >= MANY]]
        several = sizes if isinstance(sizes, Iterable) and not isinstance(sizes, str) else [sizes]
        return [count("hidden_layer_sizes", size) for size in several]

    def _batch_size(self, rows: int) -> int:
        if self.batch_size != "auto":
            return min(count("batch_size", self.batch_size), rows)
        return min(max(BATCH[rows >= MANY], min(rows // BATCHES, LARGEST_BATCH)), rows)

    def _rate(self, rows: int) -> float:
        return RATE[rows >= MANY] if self.lr == "auto" else positive("lr", self.lr)

    def _epochs(self, rows: int, batch_size: int, folds: int = 1, share: float = 1.0) -> int:
        if self.epochs != "auto":
            return count("epochs", self.epochs)
        many = rows >= MANY
        seen = rows if folds == 1 else rows - rows // folds
        return max(1, round(share * np.clip(STEPS[many] * batch_size / seen, *EPOCHS[many])))


def positive(name: str, value: object) -> float:
    if not isinstance(value, Real) or isinstance(value, bool) or not float(value) > 0:
        raise ValueError(f"{name} must be a positive number, got {value!r}.")
    return float(value)


def count(name: str, value: object) -> int:
    if not isinstance(value, Integral) or isinstance(value, bool) or not int(value) > 0:
        raise ValueError(f"{name} must be a positive whole number, got {value!r}.")
    return int(value)

"""A trained model with the encoding and scaling of its data: what is saved, exported and reported on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from threading import RLock
from typing import Protocol

import numpy as np
import pandas as pd
import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn

from .inspect.consistency import Audit, audit
from .objectives import ELBO
from .predictive import (
    ClassPredictive,
    Predictive,
    exponential,
    limited,
    mixture,
    rescaled,
    tempered,
    widened,
)

ROWS = 4096
"""Rows that are predicted at once."""
SAMPLES = 100
"""Passes of a method that predicts by sampling."""
EPISTEMIC = 0.25
"""The largest epistemic variance of a standardised logarithm. With that of the targets, means of exponentials
were ten times beyond all that was seen in gaps of yacht, and intervals covered no more targets."""


class Standardise(nn.Module):
    """(x - mean) / scale for each feature, in double precision, so that a large offset costs no digits.

    >>> Standardise([1.7e9], [2.0])(torch.tensor([[1700000001.0]], dtype=torch.float64))
    tensor([[0.5000]], dtype=torch.float64)
    """

    mean: Tensor
    scale: Tensor

    def __init__(self, mean: ArrayLike, scale: ArrayLike) -> None:
        super().__init__()
        for name, value in (("mean", mean), ("scale", scale)):
            self.register_buffer(name, torch.tensor(np.asarray(value, dtype=np.float64)))

    def forward(self, x: Tensor) -> Tensor:
        return (x.double() - self.mean) / self.scale


class Encoder(Protocol):
    """Turns rows that are not all numbers, such as those of a table, into a matrix of numbers."""

    def transform(self, rows: pd.DataFrame) -> np.ndarray: ...

    def module(self) -> nn.Module:
        """The same as tensor operations; a category is given by its place in the column's list."""


# ---------------------------------------------------------------------------------------------------- targets


@dataclass(frozen=True, eq=False)
class Target(ABC):
    """What is predicted: its name, its classes if it has any, and how it is scaled for training."""

    name: str = field(default="", kw_only=True)

    @property
    def classes(self) -> Sequence[str] | None:
        """The names of the classes; None where the prediction has none."""
        return None

    @abstractmethod
    def values(self, y: ArrayLike) -> Tensor:
        """Targets in their own unit, as a prediction takes them."""

    def scaled(self, values: Tensor, dtype: torch.dtype) -> Tensor:
        """The same as the likelihood takes them in training."""
        return values

    def unscaled(self, p: Predictive) -> Predictive:
        """A network's prediction in the target's own unit."""
        return p


class AsGiven(Target):
    """Targets that the likelihood takes directly."""

    def values(self, y: ArrayLike) -> Tensor:
        return torch.as_tensor(y)


@dataclass(frozen=True, eq=False)
class Numbers(Target):
    """One number or several, standardised for training. Their own unit is always in double precision."""

    mean: Tensor
    scale: Tensor
    log: bool = False
    """Whether their logarithms are standardised and learned, with normal noise."""
    bounds: tuple[Tensor, Tensor] | None = None
    """The least and the largest logarithm in training, standardised. A mean beyond the targets that they are
    of would be extrapolated exponentially."""
    spread: float = 1.0
    """A factor on the variances of all networks, which rows that they have not seen have asked for."""

    def values(self, y: ArrayLike) -> Tensor:
        values = np.array(y, dtype=np.float64)
        return torch.from_numpy(values.reshape(len(values), len(self.mean)))

    def scaled(self, values: Tensor, dtype: torch.dtype) -> Tensor:
        values = values.log() if self.log else values
        return ((values - self.mean) / self.scale).to(dtype)

    def unscaled(self, p: Predictive) -> Predictive:
        p = p if self.spread == 1 else widened(p, self.spread)
        p = p if self.bounds is None else limited(p, *self.bounds, self.scale, EPISTEMIC)
        p = rescaled(p, self.mean, self.scale)
        return exponential(p) if self.log else p


@dataclass(frozen=True, eq=False)
class Classes(Target):
    """One of several classes, in sorted order or in that of a table's model."""

    labels: np.ndarray
    temperature: float = 1.0
    """Divides the logarithms of probabilities, as rows that the networks have not seen have asked for."""

    def unscaled(self, p: Predictive) -> Predictive:
        if self.temperature == 1:
            return p
        assert isinstance(p, ClassPredictive)
        return tempered(p, self.temperature)

    @property
    def classes(self) -> Sequence[str]:
        return [str(label) for label in self.labels]

    def values(self, y: ArrayLike) -> Tensor:
        places = pd.Index(self.labels).get_indexer(pd.Index(np.asarray(y)))
        if (places < 0).any():
            unknown = np.unique(np.asarray(y)[places < 0])
            raise ValueError(
                f"y has classes {unknown.tolist()} that are not among those of the first fit, "
                f"{self.labels.tolist()}."
            )
        return torch.tensor(places, dtype=torch.long)


# ------------------------------------------------------------------------------------------------------ model


@dataclass(frozen=True, eq=False)
class Model:
    """Trained networks with the encoding and scaling of their data; they predict as a mixture."""

    members: Sequence[ELBO]
    target: Target = field(default_factory=AsGiven)
    standardise: Standardise | None = None
    """Applied to the features; None where the networks take the data directly."""
    encoder: Encoder | None = None
    """Turns rows into features; None where the data is a matrix already."""
    columns: Sequence[str | Mapping[str, object]] = ()
    """What each column of the data is, where known: its name, or its name and categories."""
    width: int | None = None
    """Number of columns of the data, where known."""
    history: pd.DataFrame | None = None
    seed: int = 0
    """Of a method that predicts by sampling, so that predictions repeat."""

    @property
    def elbo(self) -> ELBO:
        """The first member."""
        return self.members[0]

    def inputs(self, x: object) -> Tensor:
        """Data as the networks take it."""
        if self.encoder is not None:
            if not isinstance(x, pd.DataFrame):
                raise TypeError(
                    f"the model of a table takes a DataFrame with its columns, got {type(x).__name__}."
                )
            x = self.encoder.transform(x)
        if self.standardise is None:
            return torch.as_tensor(x)
        return self.standardise(torch.tensor(np.asarray(x, dtype=np.float64))).to(self._dtype)

    def targets(self, y: ArrayLike) -> Tensor:
        """Targets as the likelihood takes them."""
        return self.target.scaled(self.target.values(y), self._dtype)

    def predict(self, x: object, batch_size: int = ROWS) -> Predictive:
        """The predictive distribution of each row, in the target's own unit."""
        inputs = self.inputs(x)
        samples = SAMPLES if self.elbo.method.samples else None
        with _seeded(self.seed) if samples else nullcontext():
            predictions = [member.predict(inputs, samples, batch_size) for member in self.members]
        return self.target.unscaled(predictions[0] if len(predictions) == 1 else mixture(predictions))

    def audit(self, x: object, y: ArrayLike) -> Audit:
        """`vp.audit` of the first member; its log-likelihoods are those of the scaled target."""
        return audit(self.elbo, self.inputs(x), self.targets(y))

    @property
    def _dtype(self) -> torch.dtype:
        return next(self.elbo.parameters()).dtype


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Draw from the global random state with a seed of one's own; other threads wait for it."""
    with _RANDOM_STATE, torch.random.fork_rng([]):
        torch.manual_seed(seed)
        yield


_RANDOM_STATE = RLock()
"""There is one global random state for all threads."""


class Fitted(ABC):
    """Whatever holds a Model: the estimators, the model of a table."""

    @property
    @abstractmethod
    def model_(self) -> Model:
        """The trained networks with the scales of the data."""

    @abstractmethod
    def description(self) -> dict[str, object]:
        """What a model file keeps besides the networks: "estimator" or "preprocessing", as plain JSON."""


def as_model(model: object, caller: str) -> Model:
    """The Model of an objective, an estimator or a table's model; `caller` is named in the error."""
    if isinstance(model, Fitted):
        return model.model_
    if isinstance(model, ELBO):
        return Model([model])
    raise TypeError(
        f"{caller}: {type(model).__name__} is neither an ELBO nor one of varprop's fitted estimators or "
        "tables."
    )

"""A model of a table: an encoder for the columns, a trained network, and a target column in its own units."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from ..estimators import BayesianMLPClassifier, BayesianMLPRegressor
from ..inspect.consistency import Audit, audit
from ..io import files as modelfile
from ..objectives import ELBO
from ..predictive import ClassPredictive, Predictive, Regression, rescaled
from ..reporting import Trial, predictive
from .encoding import Encoder, TableError, chunks, is_numeric, labels, numbers

Task = Literal["auto", "regression", "classification"]
FEW = 10
"""Whole numbers with at most this many different values are taken for classes."""


@dataclass(frozen=True)
class Target:
    """The column to predict: classes, or a number with its mean and standard deviation."""

    name: str
    classes: Sequence[str] | None = None
    mean: float = 0.0
    scale: float = 1.0

    @classmethod
    def fit(cls, column: pd.Series[Any], task: Task) -> Target:
        _check_complete(column)
        if task == "auto":
            task = guess_task(column)
        if task == "classification":
            classes = sorted(labels(column).unique(), key=_numerically)
            if not 2 <= len(classes) <= 1000:
                raise TableError(
                    f"column {column.name!r} has {len(classes)} different values; classification needs 2 to 1,000."
                )
            return cls(str(column.name), classes)
        numbers(column)
        return cls(str(column.name))

    def encode(self, column: pd.Series[Any]) -> Tensor:
        """Targets as a likelihood takes them: class indices, or numbers in their own units."""
        _check_complete(column)
        if self.classes is None:
            return torch.tensor(numbers(column), dtype=torch.float32).unsqueeze(-1)
        places = pd.Index(self.classes).get_indexer(pd.Index(labels(column)))
        if (places < 0).any():
            i = int((places < 0).argmax())
            raise TableError(
                f"column {self.name!r} has {str(column.iloc[i])!r} in row {column.index[i]}, a class that the model was not trained with."
            )
        return torch.tensor(places, dtype=torch.long)


@dataclass(frozen=True, eq=False)
class TableModel:
    """Predicts one column of a table from others."""

    encoder: Encoder
    target: Target
    mean: np.ndarray
    """Of the encoded columns in training, as `scale`: the network was trained on what is standardised by them."""
    scale: np.ndarray
    elbo: ELBO
    history_: pd.DataFrame

    @property
    def types(self) -> dict[str, str]:
        """The columns that a prediction reads, and how."""
        return self.encoder.types

    def predictive(self, table: pd.DataFrame) -> Predictive:
        """The prediction for each row, in the target's own units."""
        p = predictive(self.elbo, self.inputs(table))
        return rescaled(p, self.target.mean, self.target.scale) if isinstance(p, Regression) else p

    def inputs(self, table: pd.DataFrame) -> Tensor:
        return torch.from_numpy(((self.encoder.transform(table) - self.mean) / self.scale).astype(np.float32))

    def audit(self, table: pd.DataFrame) -> Audit:
        """Whether the posterior is the one that predicts, on rows with the target; log-likelihoods are of the standardised target."""
        return audit(
            self.elbo, self.inputs(table), self.standardised(self.target.encode(table[self.target.name]))
        )

    def standardised(self, y: Tensor) -> Tensor:
        """Encoded targets as the network was trained on them."""
        return y if self.target.classes else ((y - self.target.mean) / self.target.scale).float()

    def trial(self, table: pd.DataFrame, target: pd.Series[Any]) -> Trial:
        """The predictions beside the truth, for a report."""
        y = self.target.encode(target)
        trained_on = self.inputs(table), self.standardised(y)
        return Trial(self.elbo, self.predictive(table), y, *trained_on, self.target.classes, self.target.name)

    def stream(self, path: str | Path) -> Iterator[pd.DataFrame]:
        """The predictions for a file of any length, part by part, as columns."""
        for table in chunks(path, self.types):
            yield columns(self.predictive(table), self.target)

    def save(self, folder: str | Path) -> None:
        history = self.history_.to_dict("list")
        scales = {"mean": self.mean.tolist(), "scale": self.scale.tolist()}
        kept = {
            "columns": self.encoder.to_json(),
            "target": asdict(self.target),
            **scales,
            "history": history,
        }
        modelfile.save(self.elbo, folder, preprocessing=kept)

    @classmethod
    def load(cls, folder: str | Path) -> TableModel:
        elbo, kept = modelfile.load(folder), modelfile.preprocessing(folder)
        try:
            scales = np.array(kept["mean"]), np.array(kept["scale"])
            return cls(
                Encoder.from_json(kept["columns"]),
                Target(**kept["target"]),
                *scales,
                elbo,
                pd.DataFrame(kept["history"]),
            )
        except (KeyError, TypeError) as error:
            raise TableError(
                f"{folder} is a model, but not of a table; make one with `varprop fit`."
            ) from error


def train(table: pd.DataFrame, target: Target, encoder: Encoder, **options: Any) -> TableModel:
    """Fit an estimator, made with `options`, to a table."""
    estimator: Any = (BayesianMLPRegressor if target.classes is None else BayesianMLPClassifier)(**options)
    y = target.encode(table[target.name]).numpy()
    estimator.fit(encoder.transform(table), y.ravel())
    if target.classes is None:
        target = replace(target, mean=float(estimator.y_mean_), scale=float(estimator.y_scale_))
    return TableModel(
        encoder, target, estimator.x_mean_, estimator.x_scale_, estimator.elbo_.eval(), estimator.history_
    )


def split(table: pd.DataFrame, target: Target, share: float, seed: int) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Rows to train on, which have every class, and a share of them held out."""
    order = np.random.default_rng(seed).permutation(len(table))
    if target.classes is not None:
        first = ~table[target.name].iloc[order].duplicated().to_numpy()
        order = np.concatenate([order[first], order[~first]])
    cut = max(len(order) - round(share * len(order)), len(target.classes or ()), 1)
    return table.iloc[order[:cut]], table.iloc[order[cut:]]


def guess_task(column: pd.Series[Any]) -> Task:
    """Text, and whole numbers with few different values, are classes."""
    if not is_numeric(column):
        return "classification"
    values = np.unique(numbers(column))
    return "classification" if len(values) <= FEW and (values == np.floor(values)).all() else "regression"


def columns(p: Predictive, target: Target) -> pd.DataFrame:
    """A prediction as a table."""
    if isinstance(p, ClassPredictive) and target.classes is not None:
        probs = p.probs.numpy(force=True)
        shown: dict[str, Any] = {"class": np.array(target.classes, dtype=object)[probs.argmax(1)]}
        shown |= {f"p_{name}": probs[:, i] for i, name in enumerate(target.classes)}
        return pd.DataFrame(
            {
                **shown,
                "entropy": p.entropy.numpy(force=True),
                "mutual_information": p.mutual_information.numpy(force=True),
            }
        )
    assert isinstance(p, Regression)
    lower, upper = p.interval(0.9)
    parts = {
        "mean": p.mean,
        "std": p.std,
        "lower": lower,
        "upper": upper,
        "epistemic": p.epistemic,
        "aleatoric": p.aleatoric,
    }
    return pd.DataFrame({name: value.squeeze(-1).numpy(force=True) for name, value in parts.items()})


def _check_complete(column: pd.Series[Any]) -> None:
    missing = column.isna().to_numpy()
    if missing.any():
        row = column.index[int(missing.argmax())]
        raise TableError(
            f"column {column.name!r}, the target, has no value in row {row}; remove the row, or fill it in."
        )


def _numerically(label: str) -> tuple[float, str]:
    number = pd.to_numeric(label, errors="coerce")
    return (float("inf") if pd.isna(number) else float(number), label)

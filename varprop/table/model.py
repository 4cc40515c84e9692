"""The model of a table: predicts one column from the others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from ..inspect.consistency import Audit
from ..io import files
from ..io.description import Description
from ..model import Classes, Fitted, Model, Numbers, Standardise
from ..predictive import ClassPredictive, Predictive, Regression
from ..sklearn import BayesianMLPClassifier, BayesianMLPRegressor
from .columns import TargetColumn
from .encoding import Encoder
from .reading import TableError, chunks


@dataclass(frozen=True, eq=False)
class TableModel(Fitted):
    """Predicts one column of a table from the others, in the column's own unit."""

    encoder: Encoder
    target: TargetColumn
    model: Model

    @property
    def model_(self) -> Model:
        return self.model

    @property
    def types(self) -> dict[str, str]:
        """The columns that a prediction reads, and how."""
        return self.encoder.types

    @property
    def types_with_target(self) -> dict[str, str]:
        return {**self.types, self.target.name: "str"}

    def predict(self, table: pd.DataFrame) -> Predictive:
        """The predictive distribution of each row."""
        return self.model.predict(table)

    def truth(self, table: pd.DataFrame) -> np.ndarray:
        """The target column, as numbers or names of classes."""
        return self.target.values(table[self.target.name])

    def values(self, table: pd.DataFrame) -> Tensor:
        """The target column as a prediction takes it, to measure one."""
        return self.model.target.values(self.truth(table))

    @property
    def history(self) -> pd.DataFrame:
        """A row for each epoch of training."""
        assert self.model.history is not None
        return self.model.history

    def audit(self, table: pd.DataFrame) -> Audit:
        """`vp.audit` on rows with the target; its log-likelihoods are those of the standardised target."""
        return self.model.audit(table, self.truth(table))

    def stream(self, path: str | Path) -> Iterator[pd.DataFrame]:
        """The predictions for a file of any length, chunk by chunk, as columns."""
        for table in chunks(path, self.types):
            yield as_columns(self.predict(table), self.target)

    # -------------------------------------------------------------------------------------------------- files

    def save(self, folder: str | Path) -> None:
        """Write the model to a folder, which `load` reads."""
        files.save(self, folder)

    def description(self) -> dict[str, object]:
        standardise, target = self.model.standardise, self.model.target
        assert standardise is not None
        kept: dict[str, object] = {
            **self.encoder.to_json(),
            "scales": {"mean": standardise.mean.tolist(), "scale": standardise.scale.tolist()},
            "target": {"name": self.target.name, "classes": self.target.classes},
            "history": self.history.to_dict("list"),
        }
        if isinstance(target, Numbers):
            kept["target_scales"] = {"mean": target.mean.tolist(), "scale": target.scale.tolist()}
        return {"preprocessing": kept}

    @classmethod
    def load(cls, folder: str | Path) -> TableModel:
        elbo, kept = files.load(folder), files.preprocessing(folder)
        try:
            kept = _from_format_1(kept) if "columns" in kept else kept
            encoder = Encoder(kept["medians"], kept["categories"])
            column = TargetColumn(**kept["target"])
            target = _numbers(column, **kept["target_scales"]) if column.classes is None else _classes(column)
            model = Model(
                [elbo], target, Standardise(**kept["scales"]), history=pd.DataFrame(kept["history"])
            )
        except (KeyError, TypeError) as error:
            raise TableError(
                f"{folder} is a model, but not of a table; make one with `varprop fit`."
            ) from error
        return cls(encoder, column, _with_encoder(model, encoder))


def _from_format_1(kept: Description) -> Description:
    """What varprop 0.1 wrote: numbers were standardised by their column, and then again by the estimator."""
    numeric = [c for c in kept["columns"] if "categories" not in c]
    others = [c for c in kept["columns"] if "categories" in c]
    mean, scale = np.array(kept["mean"]), np.array(kept["scale"])
    n = len(numeric)
    own_mean, own_scale = (np.array([c[name] for c in numeric]) for name in ("mean", "scale"))
    mean[:n] = own_mean + own_scale * mean[:n]
    scale[:n] = own_scale * scale[:n]
    target = kept["target"]
    return {
        "medians": {c["name"]: c["median"] for c in numeric},
        "categories": {c["name"]: c["categories"] for c in others},
        "scales": {"mean": mean.tolist(), "scale": scale.tolist()},
        "target": {"name": target["name"], "classes": target["classes"]},
        "target_scales": {"mean": [target["mean"]], "scale": [target["scale"]]},
        "history": kept["history"],
    }


def _numbers(column: TargetColumn, mean: list[float], scale: list[float]) -> Numbers:
    return Numbers(torch.tensor(mean).double(), torch.tensor(scale).double(), name=column.name)


def _classes(column: TargetColumn) -> Classes:
    return Classes(np.array(column.classes, dtype=object), name=column.name)


def _with_encoder(model: Model, encoder: Encoder) -> Model:
    return replace(model, encoder=encoder, columns=encoder.columns, width=len(encoder.types))


# --------------------------------------------------------------------------------------------------- training


def train(table: pd.DataFrame, column: TargetColumn, encoder: Encoder, **options: Any) -> TableModel:
    """Fit an estimator, made with `options`, to a table."""
    estimator = (BayesianMLPRegressor if column.classes is None else BayesianMLPClassifier)(**options)
    if isinstance(estimator, BayesianMLPClassifier):
        estimator.classes_ = np.array(column.classes, dtype=object)
    X, y = encoder.transform(table), column.values(table[column.name])
    model = estimator._train(X, y, None, new=True).model_
    model = replace(model, target=replace(model.target, name=column.name), seed=0)
    return TableModel(encoder, column, _with_encoder(model, encoder))


def split(
    table: pd.DataFrame, column: TargetColumn, share: float, seed: int
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Rows to train on, which have every class, and the share of all rows that is held out."""
    order = np.random.default_rng(seed).permutation(len(table))
    if column.classes is not None:
        first = ~table[column.name].iloc[order].duplicated().to_numpy()
        order = np.concatenate([order[first], order[~first]])
    cut = max(len(order) - round(share * len(order)), len(column.classes or ()), 1)
    return table.iloc[order[:cut]], table.iloc[order[cut:]]


def as_columns(p: Predictive, target: TargetColumn) -> pd.DataFrame:
    """A prediction as a table."""
    if isinstance(p, ClassPredictive) and target.classes is not None:
        probs = p.probs.numpy(force=True)
        columns = {"class": np.array(target.classes, dtype=object)[probs.argmax(1)]}
        columns |= {f"p_{name}": probs[:, i] for i, name in enumerate(target.classes)}
        columns["entropy"] = p.entropy.numpy(force=True)
        columns["mutual_information"] = p.mutual_information.numpy(force=True)
        return pd.DataFrame(columns)
    assert isinstance(p, Regression)
    lower, upper = p.interval(0.9)
    parts = {"mean": p.mean, "std": p.std, "lower": lower, "upper": upper}
    parts |= {"epistemic": p.epistemic, "aleatoric": p.aleatoric}
    return pd.DataFrame({name: value.squeeze(-1).numpy(force=True) for name, value in parts.items()})

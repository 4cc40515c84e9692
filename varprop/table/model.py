"""The model of a table: predicts one column, or several, from the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from ..inspect.consistency import Audit
from ..io import files
from ..io.objective import Description
from ..model import Classes, Fitted, Model, Numbers, Standardise
from ..objectives import ELBO
from ..perceptron import BayesianMLP
from ..predictive import Predictive
from ..sklearn import BayesianMLPClassifier, BayesianMLPRegressor
from .cache import LongTable
from .encoding import Encoder
from .messages import TableError
from .predictions import as_columns
from .reading import chunks
from .scores import Baseline, Scores, scores
from .target import TargetColumn

FEWEST = 5
"""Rows that a model is trained on at least."""
FARTHEST = 1e9
"""A target may lie this many times farther from the median than the typical one."""


@dataclass(frozen=True, eq=False)
class TableModel(Fitted):
    """Predicts one column of a table, or several, from the others, in the column's own unit."""

    encoder: Encoder
    target: TargetColumn
    model: Model
    baseline: Baseline | None = None
    """What predicts every row alike, to compare with; None in files of varprop 0.1."""
    estimator: BayesianMLP | None = None
    """Fitted to the encoded columns; None in files of varprop 0.1."""
    out_of_fold: Scores | None = None
    """All measures of the rows of training by networks that have not seen them; None without folds, and in a
    model from a file."""

    @property
    def model_(self) -> Model:
        return self.model

    @property
    def types(self) -> dict[str, str]:
        """The columns that a prediction reads, and how."""
        return self.encoder.types

    @property
    def types_with_target(self) -> dict[str, str]:
        return {**self.types, **dict.fromkeys(self.target.names, "str")}

    def predict(self, table: pd.DataFrame) -> Predictive:
        """The predictive distribution of each row."""
        return self.model.predict(table)

    def truth(self, table: pd.DataFrame) -> np.ndarray:
        """The target column, as numbers or names of classes."""
        return self.target.values(table)

    def values(self, table: pd.DataFrame) -> Tensor:
        """The target column as a prediction takes it, to measure one."""
        return self.model.target.values(self.truth(table))

    def scores(self, table: pd.DataFrame) -> Scores:
        """All measures of the predictions for a table with the target."""
        return scores(self.predict(table), self.values(table), self.target, self.baseline)

    @property
    def choices(self) -> dict[str, str]:
        """What was chosen by rows outside training, in words."""
        chosen = {} if self.estimator is None else self.estimator.choices_
        words = {"noise": str(chosen.get("noise", ""))}
        if "kl_weight" in chosen:
            words["divergence"] = f"counts {chosen['kl_weight']:g}"
        if chosen.get("log_target"):
            words["scale"] = "logarithms of the target"
        if chosen.get("pieces"):
            words["numbers"] = f"cut into {chosen['pieces']} pieces"
        return {name: word for name, word in words.items() if word}

    @property
    def history(self) -> pd.DataFrame:
        """A row for each epoch of training."""
        assert self.model.history is not None
        return self.model.history

    @property
    def rows(self) -> float:
        """How many each network has learned from."""
        return 0.0 if self.estimator is None else self.estimator.n_seen_

    def audit(self, table: pd.DataFrame) -> Audit:
        """`vp.audit` on rows with the target; its log-likelihoods are those of the standardised target."""
        return self.model.audit(table, self.truth(table))

    def stream(self, path: str | Path, ids: Sequence[str] = (), level: float = 0.9) -> Iterator[pd.DataFrame]:
        """The predictions for a file of any length, chunk by chunk, as columns.

        :param ids: columns of the file that stand before the predictions.
        :param level: share of the targets that the intervals of numbers should contain.
        """
        for table in chunks(path, dict.fromkeys(ids, "str") | self.types):
            columns = as_columns(self.predict(table), self.target, level)
            kept = {name: table[name].to_numpy() for name in ids}
            yield pd.concat([pd.DataFrame(kept), columns], axis=1)

    def updated(self, parts: Iterable[pd.DataFrame], **options: Any) -> TableModel:
        """The model after it has learned the rows of a table with the target too; this one stays as it is.

        :param parts: of the table, in their order.
        :param options: of the estimator, for this time.
        """
        if self.estimator is None or self.baseline is None:
            raise TableError("a model of varprop 0.1 cannot learn more; fit it anew.")
        estimator = deepcopy(self.estimator).set_params(**options)
        for part in filter(len, map(self.target.complete, parts)):
            y = self.truth(part)
            _check_sizes(part.index.to_numpy(), self.target, y)
            estimator._train(self.encoder.transform(part), y, None, new=False, once=True)
        estimator.set_params(**{name: getattr(self.estimator, name) for name in options})
        return self._of(estimator, self.encoder, self.target, self.baseline)

    # -------------------------------------------------------------------------------------------------- files

    def save(self, folder: str | Path) -> None:
        """Write the model to a folder, which `load` reads."""
        files.save(self, folder)

    def description(self) -> dict[str, object]:
        if self.estimator is None:
            raise TableError("a model of varprop 0.1 cannot be saved again; fit it anew.")
        kept = {
            "encoder": self.encoder.to_json(),
            "target": self.target.to_json(),
            "baseline": None if self.baseline is None else self.baseline.to_json(),
        }
        return {**self.estimator.description(), "preprocessing": kept}

    @classmethod
    def load(cls, folder: str | Path) -> TableModel:
        try:
            loaded = files.load(folder)
            if isinstance(loaded, ELBO):
                return cls._from_objective(loaded, files.preprocessing(folder))
        except (KeyError, TypeError) as error:
            raise _no_table(folder) from error
        if not isinstance(loaded, TableModel):
            raise _no_table(folder)
        return loaded

    @classmethod
    def of_description(cls, kept: Description, estimator: BayesianMLP) -> TableModel:
        """Of an estimator that was fitted to encoded columns, with what `description` says about them."""
        encoder, column = Encoder.from_json(kept["encoder"]), TargetColumn.from_json(kept["target"])
        return cls._of(estimator, encoder, column, Baseline(**kept["baseline"]))

    @classmethod
    def _of(
        cls, estimator: BayesianMLP, encoder: Encoder, column: TargetColumn, baseline: Baseline
    ) -> TableModel:
        model = estimator.model_
        model = replace(model, target=replace(model.target, name=column.name))
        return cls(encoder, column, _with_encoder(model, encoder), baseline, estimator)

    @classmethod
    def _from_objective(cls, elbo: ELBO, kept: Description) -> TableModel:
        """What varprop 0.1 wrote: an objective, with everything else beside it."""
        kept = _from_format_1(kept) if "columns" in kept else kept
        encoder, column = Encoder.from_json(kept), TargetColumn.from_json(kept["target"])
        target = _numbers(column, **kept["target_scales"]) if column.classes is None else _classes(column)
        history = pd.DataFrame(kept["history"])
        model = Model([elbo], target, Standardise(**kept["scales"]), history=history)
        return cls(encoder, column, _with_encoder(model, encoder))


def _no_table(folder: str | Path) -> TableError:
    return TableError(f"{folder} is a model, but not of a table; make one with `varprop fit`.")


def _from_format_1(kept: Description) -> Description:
    """The first format of varprop 0.1, in which numbers were standardised twice."""
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


def train(
    table: pd.DataFrame,
    column: TargetColumn,
    *,
    whole: LongTable | None = None,
    keep: Sequence[str] = (),
    say: Callable[[str], None] = lambda note: None,
    **options: Any,
) -> TableModel:
    """Fit an encoder and an estimator, made with `options`, to a table.

    :param whole: what to train on, if the table is a sample of it.
    :param keep: columns to use even if they seem to be identifiers or free text.
    :param say: told what was recognised and left out, before training begins.
    """
    if len(table) < FEWEST:
        raise TableError(f"{len(table)} rows with a target are too few to learn from; give {FEWEST} or more.")
    encoder = Encoder.fit(table.drop(columns=list(column.names)), keep)
    for note in encoder.notes:
        say(f"{note}.")
    if whole is None:
        X, y, index = encoder.transform(table), column.values(table), table.index.to_numpy()
    else:
        X, y, index = whole.encoded(encoder, column)
    _check_sizes(index, column, y)
    estimator = (BayesianMLPRegressor if column.classes is None else BayesianMLPClassifier)(**options)
    if isinstance(estimator, BayesianMLPClassifier):
        estimator.classes_ = np.array(column.classes, dtype=object)
    # The features are scaled in double precision, but the network needs only single precision.
    estimator._train(X, y, None, new=True, dtype=torch.float32)
    baseline = Baseline.fit(column, y)
    model = TableModel._of(estimator, encoder, column, baseline)
    if (p := getattr(estimator, "oof_", None)) is None:
        return model
    values = model.model.target.values(y[estimator.oof_rows_])
    return replace(model, out_of_fold=scores(p, values, column, baseline))


def _check_sizes(index: np.ndarray, column: TargetColumn, y: np.ndarray) -> None:
    """Refuse a target so far from the others that nothing else could be told apart."""
    if column.classes is not None:
        return
    for name, values in zip(column.names, y.reshape(len(y), -1).T, strict=True):
        distance = np.abs(values - np.median(values))
        typical = np.median(distance[distance > 0]) if distance.any() else 1.0
        if distance.max() > FARTHEST * typical:
            i = int(distance.argmax())
            raise TableError(
                f"column {name!r}, the target, has {values[i]:g} in row {index[i]}, "
                f"{distance[i] / typical:.0e} times the usual distance from the median; correct or remove "
                "the row."
            )


def split(
    table: pd.DataFrame, column: TargetColumn, share: float, seed: int
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Rows to train on, which have every class, and the share of all rows that is held out."""
    order = np.random.default_rng(seed).permutation(len(table))
    if column.classes is not None:
        first = ~table[column.names[0]].iloc[order].duplicated().to_numpy()
        order = np.concatenate([order[first], order[~first]])
    cut = max(len(order) - round(share * len(order)), len(column.classes or ()), 1)
    return table.iloc[order[:cut]], table.iloc[order[cut:]]

"""An estimator as plain JSON, and back."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from .. import priors
from ..methods import Method
from ..objectives import ELBO
from ..table.encoding import Encoder
from .objective import Description, describe_method, describe_prior, make_method, make_prior

if TYPE_CHECKING:
    from ..model import Fitted
    from ..perceptron import BayesianMLP

ARRAY = re.compile(r"[<>|=]?([biuf]\d{1,2}|U\d+|O)")
"""The types of the items of an array."""


class ModelFileError(ValueError):
    """A model that cannot be saved, or a folder that holds no model."""


def describe_estimator(
    kind: str, parameters: Mapping[str, object], learned: Mapping[str, object]
) -> Description:
    """An estimator without its networks."""
    return {
        "type": kind,
        "parameters": {name: _plain(name, value) for name, value in parameters.items()},
        "learned": {name: _plain(name, value) for name, value in learned.items()},
    }


def make_estimator(description: Description, members: list[ELBO]) -> BayesianMLP:
    from ..sklearn import BayesianMLPClassifier, BayesianMLPRegressor

    kinds: dict[str, type[BayesianMLP]] = {
        kind.__name__: kind for kind in (BayesianMLPClassifier, BayesianMLPRegressor)
    }
    parameters = {name: _value(plain) for name, plain in description["parameters"].items()}
    kind, learned = kinds[description["type"]], description["learned"]
    if "folds" not in parameters:
        parameters, learned = _from_format_2(kind, parameters, learned)
    estimator = kind(**parameters)
    for name, plain in learned.items():
        if name.startswith("_") or not name.endswith("_"):
            raise ValueError(f"{name} is not learned by fit")
        setattr(estimator, name, _value(plain))
    estimator.members_, estimator.elbo_ = members, members[0]
    return estimator


def make_table(preprocessing: Description, estimator: BayesianMLP) -> Fitted:
    """The model of a table, if the preprocessing is one of a table; the estimator otherwise."""
    if not {"encoder", "target", "baseline"} <= preprocessing.keys():
        return estimator
    from ..table.model import TableModel

    return TableModel.of_description(preprocessing, estimator)


def _from_format_2(
    kind: type[BayesianMLP], parameters: Description, learned: Description
) -> tuple[Description, Description]:
    """What was written before there were folds: members had seen all rows."""
    gone = ("early_stopping", "validation_fraction", "heteroscedastic")
    kept = {name: value for name, value in parameters.items() if name not in gone}
    choices: Description = {}
    if kind.__name__ == "BayesianMLPRegressor":
        noise = "heteroscedastic" if parameters["heteroscedastic"] else "constant"
        choices = {"noise": noise, "log_target": False}
    return {**kept, **choices, "folds": 1}, {**learned, "choices_": {"mapping": choices}}


def _plain(name: str, value: object) -> object:
    """A parameter or learned value as JSON: a plain value, or anything else under the name of its kind."""
    if isinstance(value, np.generic):
        value = value.item()
    match value:
        case None | bool() | int() | float() | str():
            return value
        case list() | tuple():
            return [_plain(name, item) for item in value]
        case np.ndarray() if value.dtype.kind in "biufU" or all(isinstance(item, str) for item in value.flat):
            return {"array": value.tolist(), "dtype": value.dtype.str}
        case pd.DataFrame():
            # Epochs of several fits may have different columns; a missing value is null.
            columns = {str(name): value[name].tolist() for name in value}
            return {"table": {name: [None if x != x else x for x in xs] for name, xs in columns.items()}}
        case dict() if not all(isinstance(key, str) for key in value):
            return {"pairs": [[_plain(name, part) for part in pair] for pair in value.items()]}
        case dict():
            return {"mapping": {str(key): _plain(name, item) for key, item in value.items()}}
        case priors.Prior() if describe_prior(value):
            return {"prior": describe_prior(value)}
        case Method() if describe_method(value):
            return {"method": describe_method(value)}
        case Encoder():
            return {"encoder": value.to_json()}
    raise ModelFileError(
        f"save: the estimator's {name} is a {type(value).__name__}, which a model file cannot hold; "
        f"use a plain value."
    )


def _value(plain: Any) -> Any:
    match plain:
        case list():
            return tuple(_value(item) for item in plain)
        case {"array": values, "dtype": str(dtype)} if ARRAY.fullmatch(dtype):
            # Text is as long as its longest item; a length in the file could claim any amount of memory.
            return np.array(values, dtype="U" if "U" in dtype else dtype)
        case {"table": columns}:
            return pd.DataFrame(columns)
        case {"mapping": values}:
            return {key: _value(item) for key, item in values.items()}
        case {"pairs": pairs}:
            return {_value(key): _value(item) for key, item in pairs}
        case {"prior": prior}:
            return make_prior(prior)
        case {"method": method}:
            return make_method(method)
        case {"encoder": encoder}:
            return Encoder.from_json(encoder)
        case dict():
            raise ValueError(f"no value is made of {', '.join(plain)}")
    return plain

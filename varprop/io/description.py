"""The parts of a model as plain JSON, and back. Only what the tables here name is ever called."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np
import pandas as pd
import torch
from torch import nn

from .. import likelihoods, priors
from ..laplace import Laplace
from ..methods import METHODS, Method, vbp
from ..objectives import ELBO
from ..pieces import Pieces
from ..posterior import centred, is_random, remembered
from ..randomisation import variational
from ..table.encoding import Encoder

if TYPE_CHECKING:
    from ..model import Fitted
    from ..perceptron import BayesianMLP

ARRAY = re.compile(r"[<>|=]?([biuf]\d{1,2}|U\d+|O)")
"""The types of the items of an array."""
Part = TypeVar("Part")
Description: TypeAlias = dict[str, Any]
"""What JSON holds: nothing is known about the values of a file until they are used."""


class ModelFileError(ValueError):
    """A model that cannot be saved, or a folder that holds no model."""


SHAPES = (
    "Flatten Unflatten Unfold Identity PixelShuffle PixelUnshuffle ChannelShuffle "
    "Upsample UpsamplingNearest2d UpsamplingBilinear2d"
)
WEIGHTED = "Linear Embedding EmbeddingBag PReLU LayerNorm GroupNorm RMSNorm"
DROPOUTS = "Dropout Dropout1d Dropout2d Dropout3d AlphaDropout FeatureAlphaDropout"
ACTIVATIONS = (
    "ReLU LeakyReLU ReLU6 Hardtanh Hardsigmoid Softshrink Tanh Sigmoid GELU SiLU Mish Softplus ELU SELU CELU "
    "LogSigmoid Softsign Tanhshrink Hardswish Softmax LogSoftmax Softmin Softmax2d GLU"
)
IN_DIMENSIONS = (
    "Conv ConvTranspose MaxPool AvgPool AdaptiveMaxPool AdaptiveAvgPool BatchNorm InstanceNorm "
    "ZeroPad ConstantPad ReflectionPad ReplicationPad CircularPad"
)
LAYERS: dict[str, type[nn.Module]] = {"Pieces": Pieces} | {
    name: getattr(nn, name)
    for name in (
        *f"{SHAPES} {WEIGHTED} {DROPOUTS} {ACTIVATIONS}".split(),
        *(f"{kind}{n}d" for kind in IN_DIMENSIONS.split() for n in (1, 2, 3)),
    )
}
"""The layers that a file may name. Nothing else in a file is ever looked up or called."""
PRIORS: dict[str, type[priors.Prior]] = {
    name: getattr(priors, name)
    for name in ("Normal", "FanIn", "Centred", "Earlier", "LogUniform", "EmpiricalBayes", "Horseshoe")
}
LIKELIHOODS: dict[str, type[likelihoods.Likelihood]] = {
    name: getattr(likelihoods, name)
    for name in (
        "Normal",
        "HeteroscedasticNormal",
        "BoundedNoise",
        "StudentT",
        "Categorical",
        "Bernoulli",
        "MultiLabel",
    )
}


# ------------------------------------------------------------------------------------------------- objectives


def describe_objective(elbo: ELBO) -> Description:
    """An objective without its values; None for a part that a file cannot describe."""
    return {
        "net": describe_net(elbo.net),
        "method": describe_method(elbo.method),
        "likelihood": _describe_likelihood(elbo.likelihood),
        "prior": describe_prior(elbo.prior),
        "n_data": elbo.n_data,
        "seen": elbo.seen,
        "kl_z_weight": elbo.kl_z_weight,
        "moments": elbo.moments,
        "covariance": None if elbo.covariance is None else list(elbo.covariance.directions.shape),
    }


@dataclass(frozen=True)
class Given:
    """The parts of an objective that the caller of `load` passes, because the file does not describe them."""

    net: nn.Module | None = None
    method: Method | None = None
    likelihood: likelihoods.Likelihood | None = None
    prior: priors.Prior | None = None


def make_objective(description: Description, given: Given) -> ELBO:
    """An objective without values, of the parts that are given and, for the others, as described."""
    # On the meta device nothing is allocated, whatever size a file claims.
    with torch.device("meta"):
        net = make_net(description["net"]) if given.net is None else given.net
        method = given.method or make_method(description["method"])
        likelihood = given.likelihood or _make(LIKELIHOODS, description["likelihood"])
        prior = given.prior or make_prior(description["prior"])
    options = {name: description[name] for name in ("n_data", "kl_z_weight")}
    elbo = ELBO(net, method, likelihood, prior, moments=description.get("moments", "independent"), **options)
    if shape := description.get("covariance"):
        with torch.device("meta"):
            elbo.covariance = Laplace(*shape)
    elbo.seen = description.get("seen", elbo.n_data)
    return elbo


def describe_net(net: nn.Module) -> Description | None:
    shared = len(list(net.modules())) < len(list(net.named_modules(remove_duplicate=False)))
    return None if shared else _describe_layer(net)


def _describe_layer(layer: nn.Module) -> Description | None:
    if type(layer) is nn.Sequential:
        layers = {name: _describe_layer(child) for name, child in layer.named_children()}
        return None if None in layers.values() else {"type": "Sequential", "layers": layers}
    if type(layer) is not LAYERS.get(type(layer).__name__):
        return None
    description: Description = {"type": type(layer).__name__, "arguments": _arguments(layer)}
    if is_random(layer):
        factored, horseshoe = hasattr(layer, "weight_logvar_out"), hasattr(layer, "scales")
        description["posterior"] = "horseshoe" if horseshoe else "factored" if factored else "full"
        description["random_bias"] = hasattr(layer, "bias_logvar")
        description["centred"] = hasattr(layer, "weight_centre")
        description["remembered"] = hasattr(layer, "weight_earlier")
    return description


def _arguments(part: object) -> Description:
    """A part's constructor arguments, which torch and this package keep as attributes of the same name."""
    names = inspect.signature(type(part)).parameters.keys() - {"device", "dtype", "inplace"}
    values = {name: getattr(part, name) for name in sorted(names) if hasattr(part, name)}
    return {
        name: value is not None if name == "bias" and not isinstance(value, bool) else value
        for name, value in values.items()
    }


def _make(kinds: Mapping[str, type[Part]], description: Description) -> Part:
    arguments = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in description["arguments"].items()
    }
    return kinds[description["type"]](**arguments)


def make_net(description: Description) -> nn.Module:
    if description["type"] == "Sequential":
        net = nn.Sequential()
        for name, child in description["layers"].items():
            net.add_module(name, make_net(child))
        return net
    layer: nn.Module = _make(LAYERS, description)
    if "posterior" in description:
        variational(layer, posterior=description["posterior"], biases=description["random_bias"])
        if description.get("centred"):
            centred(layer)
        if description.get("remembered"):
            remembered(layer)
    return layer


def describe_method(method: Method) -> Description | None:
    """A method of the library by its key in METHODS and its slope; None for one with rules of its own."""
    if method.key is None:
        return None
    return {"name": method.key, "slope": None if method.slope in (None, math.inf) else method.slope}


def make_method(description: Description) -> Method:
    slope = description["slope"]
    return METHODS[description["name"]] if slope is None else vbp(slope)


def _describe_likelihood(likelihood: likelihoods.Likelihood) -> Description | None:
    if type(likelihood) is not LIKELIHOODS.get(type(likelihood).__name__):
        return None
    arguments = _arguments(likelihood)
    if isinstance(likelihood, likelihoods.Normal | likelihoods.StudentT):
        # What is learned is among the weights.
        arguments = {name: value for name, value in arguments.items() if not isinstance(value, torch.Tensor)}
        arguments["outputs"] = next(iter(likelihood.state_dict().values())).numel()
    return {"type": type(likelihood).__name__, "arguments": arguments}


def describe_prior(prior: priors.Prior) -> Description | None:
    if type(prior) is not PRIORS.get(type(prior).__name__):
        return None
    return {"type": type(prior).__name__, "arguments": _arguments(prior)}


def make_prior(description: Description) -> priors.Prior:
    return _make(PRIORS, description)


# ------------------------------------------------------------------------------------------------- estimators


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
        case {"prior": prior}:
            return make_prior(prior)
        case {"method": method}:
            return make_method(method)
        case {"encoder": encoder}:
            return Encoder.from_json(encoder)
        case dict():
            raise ValueError(f"no value is made of {', '.join(plain)}")
    return plain

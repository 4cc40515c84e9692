"""Descriptions: the parts of a model as plain JSON, and the parts made again. Nothing is called but what the tables here name."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import numpy as np
import pandas as pd
import torch
from torch import nn

from .. import likelihoods, priors
from ..methods import METHODS, Method, vbp
from ..objectives import ELBO
from ..posterior import centred, is_random, variational

Part = TypeVar("Part")


class ModelFileError(ValueError):
    """A model that cannot be written as a file, or a file that is no model."""


def _by_name(kinds: Iterable[type]) -> dict[str, type]:
    return {kind.__name__: kind for kind in kinds}


LAYERS = _by_name(
    getattr(nn, name)
    for name in (
        *(
            "Linear",
            "Embedding",
            "EmbeddingBag",
            "Flatten",
            "Unflatten",
            "Identity",
            "PixelShuffle",
            "PixelUnshuffle",
            "ChannelShuffle",
        ),
        *(
            f"{kind}{n}d"
            for kind in ("Conv", "ConvTranspose", "MaxPool", "AvgPool", "AdaptiveMaxPool", "AdaptiveAvgPool")
            for n in (1, 2, 3)
        ),
        *(
            f"{kind}{n}d"
            for kind in (
                "BatchNorm",
                "InstanceNorm",
                "ZeroPad",
                "ConstantPad",
                "ReflectionPad",
                "ReplicationPad",
            )
            for n in (1, 2, 3)
        ),
        *("Upsample", "Softmax", "LogSoftmax", "Softmin", "Softmax2d", "GLU"),
        *(
            "LayerNorm",
            "GroupNorm",
            "RMSNorm",
            "Dropout",
            "Dropout1d",
            "Dropout2d",
            "Dropout3d",
            "AlphaDropout",
            "FeatureAlphaDropout",
        ),
        *(
            "ReLU",
            "LeakyReLU",
            "PReLU",
            "ReLU6",
            "Hardtanh",
            "Hardsigmoid",
            "Softshrink",
            "Tanh",
            "Sigmoid",
            "GELU",
            "SiLU",
            "Mish",
        ),
        *("Softplus", "ELU", "SELU", "CELU", "LogSigmoid", "Softsign", "Tanhshrink", "Hardswish"),
    )
)
"""The layers that a file may name. Nothing else in a file is ever looked up or called."""
PRIORS = _by_name(
    (priors.Normal, priors.FanIn, priors.Centred, priors.LogUniform, priors.EmpiricalBayes, priors.Horseshoe)
)
LIKELIHOODS = _by_name(
    (
        likelihoods.Normal,
        likelihoods.HeteroscedasticNormal,
        likelihoods.Categorical,
        likelihoods.Bernoulli,
        likelihoods.MultiLabel,
    )
)


# ------------------------------------------------------------------------------------------------------------- objectives


def describe_objective(elbo: ELBO) -> dict[str, Any]:
    """An objective without its values; None for a part that only its owner can make again."""
    return {
        "net": describe_net(elbo.net),
        "method": describe_method(elbo.method),
        "likelihood": _describe_likelihood(elbo.likelihood),
        "prior": describe_prior(elbo.prior),
        "n_data": elbo.n_data,
        "kl_z_weight": elbo.kl_z_weight,
    }


def make_objective(description: Mapping[str, Any], given: Mapping[str, Any]) -> ELBO:
    """An objective without values, of the parts that are given and, for the others, as described."""
    makers = {"net": make_net, "method": make_method, "likelihood": _make_likelihood, "prior": make_prior}
    # On the meta device nothing is allocated, whatever size a file claims.
    with torch.device("meta"):
        parts: dict[str, Any] = {
            name: make(description[name]) if given[name] is None else given[name]
            for name, make in makers.items()
        }
    return ELBO(**parts, n_data=description["n_data"], kl_z_weight=description["kl_z_weight"])


def describe_net(net: nn.Module) -> dict[str, Any] | None:
    shared = len(list(net.modules())) < len(list(net.named_modules(remove_duplicate=False)))
    return None if shared else _describe_layer(net)


def _describe_layer(layer: nn.Module) -> dict[str, Any] | None:
    if type(layer) is nn.Sequential:
        layers = {name: _describe_layer(child) for name, child in layer.named_children()}
        return None if None in layers.values() else {"type": "Sequential", "layers": layers}
    if type(layer) is not LAYERS.get(type(layer).__name__):
        return None
    description: dict[str, Any] = {"type": type(layer).__name__, "arguments": _arguments(layer)}
    if is_random(layer):
        factored, horseshoe = hasattr(layer, "weight_logvar_out"), hasattr(layer, "scales")
        description["posterior"] = "horseshoe" if horseshoe else "factored" if factored else "full"
        description["random_bias"] = hasattr(layer, "bias_logvar")
        description["centred"] = hasattr(layer, "weight_centre")
    return description


def _arguments(part: Any) -> dict[str, Any]:
    """A part's constructor arguments, which torch and this package keep as attributes of the same names."""
    names = inspect.signature(type(part)).parameters.keys() - {"device", "dtype", "inplace"}
    values = {name: getattr(part, name) for name in sorted(names) if hasattr(part, name)}
    return {
        name: value is not None if name == "bias" and not isinstance(value, bool) else value
        for name, value in values.items()
    }


def _make(kinds: Mapping[str, type[Part]], description: Mapping[str, Any]) -> Part:
    arguments = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in description["arguments"].items()
    }
    return kinds[description["type"]](**arguments)


def make_net(description: dict[str, Any]) -> nn.Module:
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
    return layer


def describe_method(method: Method) -> dict[str, Any] | None:
    name = method.name.lower().partition("(")[0]
    if name not in METHODS:
        return None
    slope = None if method.slope in (None, float("inf")) else method.slope
    known = make_method({"name": name, "slope": slope})
    # Equal rules are equal in print, though each partial is equal only to itself; a row added or replaced shows.
    return {"name": name, "slope": slope} if str(method.rules) == str(known.rules) else None


def make_method(description: dict[str, Any]) -> Method:
    slope = description["slope"]
    return METHODS[description["name"]] if slope is None else vbp(slope)


def _describe_likelihood(likelihood: likelihoods.Likelihood) -> dict[str, Any] | None:
    if type(likelihood) is not LIKELIHOODS.get(type(likelihood).__name__):
        return None
    arguments = _arguments(likelihood)
    if isinstance(likelihood, likelihoods.Normal):
        arguments = {"outputs": likelihood.precision.numel()}  # the precision itself is one of the weights
    return {"type": type(likelihood).__name__, "arguments": arguments}


def _make_likelihood(description: dict[str, Any]) -> likelihoods.Likelihood:
    return _make(LIKELIHOODS, description)


def describe_prior(prior: priors.Prior) -> dict[str, Any] | None:
    if type(prior) is not PRIORS.get(type(prior).__name__):
        return None
    return {"type": type(prior).__name__, "arguments": _arguments(prior)}


def make_prior(description: dict[str, Any]) -> priors.Prior:
    return _make(PRIORS, description)


# ------------------------------------------------------------------------------------------------------------- estimators


def describe_estimator(estimator: Any) -> dict[str, Any]:
    learned = {
        name: value
        for name, value in vars(estimator).items()
        if name.endswith("_") and name not in ("members_", "elbo_")
    }
    return {
        "type": type(estimator).__name__,
        "parameters": {name: _plain(name, value) for name, value in estimator.get_params(deep=False).items()},
        "learned": {name: _plain(name, value) for name, value in learned.items()},
    }


def make_estimator(description: dict[str, Any], members: list[Any]) -> Any:
    from ..estimators import BayesianMLPClassifier, BayesianMLPRegressor

    kinds = _by_name((BayesianMLPClassifier, BayesianMLPRegressor))
    estimator: Any = kinds[description["type"]](
        **{name: _value(plain) for name, plain in description["parameters"].items()}
    )
    for name, plain in description["learned"].items():
        if name.startswith("_") or not name.endswith("_"):
            raise ValueError(f"{name} is not learned by fit")
        setattr(estimator, name, _value(plain))
    estimator.members_, estimator.elbo_ = members, members[0]
    return estimator


def _plain(name: str, value: Any) -> Any:
    """A parameter or learned value as JSON: a plain value as it is, anything else under the name of its kind."""
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
            # Epochs of several fits may have different columns; what is missing is null.
            return {
                "table": {
                    str(column): [None if x != x else x for x in value[column].tolist()] for column in value
                }
            }
        case priors.Prior() if describe_prior(value):
            return {"prior": describe_prior(value)}
        case Method() if describe_method(value):
            return {"method": describe_method(value)}
    raise ModelFileError(
        f"save: the estimator's {name} is a {type(value).__name__}, which a model file cannot hold; use a plain value."
    )


def _value(plain: Any) -> Any:
    match plain:
        case list():
            return tuple(_value(item) for item in plain)
        case {"array": values, "dtype": dtype} if np.dtype(dtype).kind in "biufUO":
            return np.array(values, dtype=dtype)
        case {"table": columns}:
            return pd.DataFrame(columns)
        case {"prior": prior}:
            return make_prior(prior)
        case {"method": method}:
            return make_method(method)
        case dict():
            raise ValueError(f"no value is made of {', '.join(plain)}")
    return plain

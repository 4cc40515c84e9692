"""The parts of an objective as plain JSON, and back. Only what the tables here name is ever called."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, TypeAlias, TypeVar

import torch
from torch import nn

from .. import likelihoods, priors
from ..laplace import Laplace
from ..methods import METHODS, Method, vbp
from ..objectives import ELBO
from ..pieces import Pieces
from ..posterior import centred, is_random, remembered
from ..randomisation import variational

Part = TypeVar("Part")
Description: TypeAlias = dict[str, Any]
"""What JSON holds: nothing is known about the values of a file until they are used."""

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


def _kinds(module: ModuleType, names: str) -> dict[str, Any]:
    return {name: getattr(module, name) for name in names.split()}


PRIORS: dict[str, type[priors.Prior]] = _kinds(
    priors, "Normal FanIn Centred Earlier LogUniform EmpiricalBayes Horseshoe Tempered"
)
LIKELIHOODS: dict[str, type[likelihoods.Likelihood]] = _kinds(
    likelihoods, "Normal HeteroscedasticNormal BoundedNoise StudentT Categorical Bernoulli MultiLabel"
)


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
    arguments = _arguments(prior)
    if isinstance(prior, priors.Tempered):
        arguments["prior"] = describe_prior(prior.prior)
        if arguments["prior"] is None:
            return None
    return {"type": type(prior).__name__, "arguments": arguments}


def make_prior(description: Description) -> priors.Prior:
    arguments = description["arguments"]
    if description["type"] == "Tempered":
        arguments = arguments | {"prior": make_prior(arguments["prior"])}
    return _make(PRIORS, {**description, "arguments": arguments})

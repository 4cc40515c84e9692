"""Model files: a folder with the weights as safetensors and everything else as JSON. Loading runs no code from it."""

from __future__ import annotations

import hashlib
import inspect
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import numpy as np
import pandas as pd
import safetensors.torch
import torch
from torch import Tensor, nn

from . import likelihoods, priors
from .methods import METHODS, Method, vbp
from .objectives import ELBO
from .posterior import centred, is_random, variational
from .storage import replacing

FORMAT = 1
DESCRIPTION = "model.json"
Part = TypeVar("Part")


class ModelFileError(ValueError):
    """A model that cannot be written as a file, or a file that is no model."""


def _by_name(kinds: Iterable[type]) -> dict[str, type]:
    return {kind.__name__: kind for kind in kinds}


LAYERS = _by_name(
    getattr(nn, name)
    for name in (
        *("Linear", "Embedding", "EmbeddingBag", "Flatten", "Unflatten", "Identity", "PixelShuffle", "PixelUnshuffle", "ChannelShuffle"),
        *(f"{kind}{n}d" for kind in ("Conv", "ConvTranspose", "MaxPool", "AvgPool", "AdaptiveAvgPool", "BatchNorm") for n in (1, 2, 3)),
        *(f"{kind}{n}d" for kind in ("InstanceNorm", "ZeroPad", "ConstantPad", "ReflectionPad", "ReplicationPad") for n in (1, 2, 3)),
        *("Upsample", "Softmax", "LogSoftmax", "Softmin", "Softmax2d", "GLU"),
        *("LayerNorm", "GroupNorm", "RMSNorm", "Dropout", "Dropout1d", "Dropout2d", "Dropout3d", "AlphaDropout", "FeatureAlphaDropout"),
        *("ReLU", "LeakyReLU", "PReLU", "ReLU6", "Hardtanh", "Hardsigmoid", "Softshrink", "Tanh", "Sigmoid", "GELU", "SiLU", "Mish"),
        *("Softplus", "ELU", "SELU", "CELU", "LogSigmoid", "Softsign", "Tanhshrink", "Hardswish"),
    )
)
"""The layers that a file may name. Nothing else in a file is ever looked up or called."""
PRIORS = _by_name((priors.Normal, priors.Centred, priors.LogUniform, priors.EmpiricalBayes, priors.Horseshoe))
LIKELIHOODS = _by_name(
    (likelihoods.Normal, likelihoods.HeteroscedasticNormal, likelihoods.Categorical, likelihoods.Bernoulli, likelihoods.MultiLabel)
)


def save(model: Any, folder: str | Path, *, preprocessing: Mapping[str, Any] | None = None) -> None:
    """Write a trained objective or a fitted estimator to a folder: `model.json` and the weights it names.

    A network of nested `nn.Sequential` with layers of `torch.nn` is described in the file; of any other, and of a method, likelihood or
    prior of your own, only the weights are kept, and `load` wants the part itself. The description is replaced last and as a whole, so
    that a save that fails leaves the model that was there.

    :param preprocessing: what was done to the data, as anything JSON can hold; `modelfile.preprocessing(folder)` gives it back.
    """
    members = [model] if isinstance(model, ELBO) else _members(model)
    description = {
        "preprocessing": dict(preprocessing or {}),
        "objective": _describe(members[0]),
        "members": len(members),
        "estimator": None if isinstance(model, ELBO) else _describe_estimator(model),
    }
    write(folder, description, (members[0] if isinstance(model, ELBO) else nn.ModuleList(members)).state_dict())


def load(
    folder: str | Path,
    net: nn.Module | None = None,
    *,
    method: Method | None = None,
    likelihood: likelihoods.Likelihood | None = None,
    prior: priors.Prior | None = None,
) -> Any:
    """Read what `save` wrote, an objective or an estimator, on the CPU.

    :param net: the network, where the file cannot describe it (made random as it was); it takes the values of the file.
    :param method: the method, likewise, as `likelihood` and `prior`.

    >>> import tempfile
    >>> net = vp.variational(nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1)))
    >>> elbo = vp.ELBO(net, vp.VBP, vp.likelihoods.Normal(), vp.priors.Normal(10.0), n_data=100)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     vp.save(elbo, folder)
    ...     again = vp.load(folder)
    >>> bool((again.predict(torch.ones(1, 2)).var == elbo.predict(torch.ones(1, 2)).var).all())
    True
    """
    description, weights = read(folder)
    given = {"net": net, "method": method, "likelihood": likelihood, "prior": prior}
    try:
        if description["estimator"] is None:
            elbo = _objective(folder, description["objective"], given)
            elbo.load_state_dict(weights, assign=True)
            return elbo.eval()
        members = nn.ModuleList(_objective(folder, description["objective"], given) for _ in range(description["members"]))
        members.load_state_dict(weights, assign=True)
        return _make_estimator(description["estimator"], list(members.eval()))
    except ModelFileError:
        raise
    except Exception as error:  # whatever a constructor makes of arguments that no save has written
        _refuse(folder, f"does not fit its weights or the parts given ({_first_line(error)})", error)


def preprocessing(folder: str | Path) -> dict[str, Any]:
    """The preprocessing that was saved with a model."""
    return read(folder)[0]["preprocessing"]


# ------------------------------------------------------------------------------------------------------------- the files


def write(folder: str | Path, description: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
    """Write a description and its weights so that a reader finds the old pair or the new one, and no mixture."""
    from . import __version__

    folder = Path(folder)
    content = safetensors.torch.save({name: value.detach().cpu().contiguous().clone() for name, value in weights.items()})
    try:
        # Through JSON once, so that the checksum is of what a reader will see: tuples as lists, keys as strings.
        full = json.loads(json.dumps({"format": FORMAT, "varprop": __version__, **description}, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ModelFileError(f"save: the description cannot be written as JSON: {_first_line(error)}; give plain values.") from error
    if folder.exists() and not folder.is_dir():
        raise ModelFileError(f"save: {folder} is a file; give a folder.")
    checksum = _checksum(full, content)
    with replacing(_weights(folder, checksum)) as file:
        file.write(content)
    # From this rename on, the folder holds the new model; before it, the old one.
    with replacing(folder / DESCRIPTION) as file:
        file.write(json.dumps({"sha256": checksum, **full}, indent=2).encode())
    for other in folder.glob("weights-*.safetensors"):
        if other != _weights(folder, checksum):
            other.unlink(missing_ok=True)


def read(folder: str | Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The description and the weights of a folder, checked to be what was written."""
    folder = Path(folder)
    try:
        description = json.loads((folder / DESCRIPTION).read_text(encoding="utf-8"))
    except OSError as error:
        _refuse(folder, f"has no readable {DESCRIPTION} ({error.strerror})", error)
    except (ValueError, RecursionError) as error:
        _refuse(folder, f"has a {DESCRIPTION} that is damaged or no JSON", error)
    version = description.get("format") if isinstance(description, dict) else None
    if not isinstance(version, int) or not re.fullmatch("[0-9a-f]{64}", str(description.get("sha256"))):
        _refuse(folder, f"has a {DESCRIPTION} that varprop did not write")
    if version > FORMAT:
        writer = str(description.get("varprop"))[:20]
        _refuse(folder, f"was written by varprop {writer} in format {version}, this version reads up to {FORMAT}; upgrade varprop")
    checksum = description.pop("sha256")
    try:
        content = _weights(folder, checksum).read_bytes()
    except OSError as error:
        _refuse(folder, f"lacks its weights, {_weights(folder, checksum).name} ({error.strerror})", error)
    if _checksum(description, content) != checksum:
        _refuse(folder, "was changed or cut short after it was written: its checksum is wrong")
    try:
        return description, safetensors.torch.load(content)
    except Exception as error:
        _refuse(folder, f"has weights that are no safetensors ({_first_line(error)})", error)


def _weights(folder: Path, checksum: str) -> Path:
    return folder / f"weights-{checksum[:16]}.safetensors"


def _checksum(description: Mapping[str, Any], weights: bytes) -> str:
    text = json.dumps(description, sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode() + b"\0" + weights).hexdigest()


def _refuse(folder: str | Path, reason: str, cause: Exception | None = None) -> NoReturn:
    raise ModelFileError(f"load: {folder} {reason}.") from cause


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".:")


# ----------------------------------------------------------------------------------------------------- parts as plain JSON


def _describe(elbo: ELBO) -> dict[str, Any]:
    """An objective without its values; None for a part that only its owner can make again."""
    return {
        "net": _describe_net(elbo.net),
        "method": _describe_method(elbo.method),
        "likelihood": _describe_likelihood(elbo.likelihood),
        "prior": describe_prior(elbo.prior),
        "n_data": elbo.n_data,
        "kl_z_weight": elbo.kl_z_weight,
    }


def _objective(folder: str | Path, description: dict[str, Any], given: Mapping[str, Any]) -> ELBO:
    makers = {"net": _make_net, "method": _make_method, "likelihood": _make_likelihood, "prior": make_prior}
    parts: dict[str, Any] = {}
    for name, make in makers.items():
        if given[name] is None and description[name] is None:
            _refuse(folder, f"does not describe its {name}; pass it, as in load(folder, {name}=...)")
        # On the meta device nothing is allocated, whatever size a file claims.
        with torch.device("meta"):
            parts[name] = make(description[name]) if given[name] is None else given[name]
    return ELBO(**parts, n_data=description["n_data"], kl_z_weight=description["kl_z_weight"])


def _describe_net(net: nn.Module) -> dict[str, Any] | None:
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
    return {name: value is not None if name == "bias" and not isinstance(value, bool) else value for name, value in values.items()}


def _make(kinds: Mapping[str, type[Part]], description: Mapping[str, Any]) -> Part:
    arguments = {name: tuple(value) if isinstance(value, list) else value for name, value in description["arguments"].items()}
    return kinds[description["type"]](**arguments)


def _make_net(description: dict[str, Any]) -> nn.Module:
    if description["type"] == "Sequential":
        net = nn.Sequential()
        for name, child in description["layers"].items():
            net.add_module(name, _make_net(child))
        return net
    layer: nn.Module = _make(LAYERS, description)
    if "posterior" in description:
        variational(layer, posterior=description["posterior"], biases=description["random_bias"])
        if description.get("centred"):
            centred(layer)
    return layer


def _describe_method(method: Method) -> dict[str, Any] | None:
    name = method.name.lower().partition("(")[0]
    if name not in METHODS:
        return None
    slope = None if method.slope in (None, float("inf")) else method.slope
    known = _make_method({"name": name, "slope": slope})
    # Equal rules are equal in print, though each partial is equal only to itself; a row added or replaced shows.
    return {"name": name, "slope": slope} if str(method.rules) == str(known.rules) else None


def _make_method(description: dict[str, Any]) -> Method:
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


def _members(estimator: Any) -> list[ELBO]:
    from sklearn.exceptions import NotFittedError

    from .estimators import BayesianMLPClassifier, BayesianMLPRegressor

    if type(estimator) not in (BayesianMLPClassifier, BayesianMLPRegressor):
        raise ModelFileError(f"save: {type(estimator).__name__} is neither an ELBO nor one of varprop's estimators.")
    if not hasattr(estimator, "members_"):
        raise NotFittedError(f"save: this {type(estimator).__name__} is not fitted yet; call fit first.")
    return estimator.members_


def _describe_estimator(estimator: Any) -> dict[str, Any]:
    learned = {name: value for name, value in vars(estimator).items() if name.endswith("_") and name not in ("members_", "elbo_")}
    return {
        "type": type(estimator).__name__,
        "parameters": {name: _plain(name, value) for name, value in estimator.get_params(deep=False).items()},
        "learned": {name: _plain(name, value) for name, value in learned.items()},
    }


def _make_estimator(description: dict[str, Any], members: list[Any]) -> Any:
    from .estimators import BayesianMLPClassifier, BayesianMLPRegressor

    kinds = _by_name((BayesianMLPClassifier, BayesianMLPRegressor))
    estimator: Any = kinds[description["type"]](**{name: _value(plain) for name, plain in description["parameters"].items()})
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
            return {"table": {str(column): [None if x != x else x for x in value[column].tolist()] for column in value}}
        case priors.Prior() if describe_prior(value):
            return {"prior": describe_prior(value)}
        case Method() if _describe_method(value):
            return {"method": _describe_method(value)}
    raise ModelFileError(f"save: the estimator's {name} is a {type(value).__name__}, which a model file cannot hold; use a plain value.")


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
            return _make_method(method)
        case dict():
            raise ValueError(f"no value is made of {', '.join(plain)}")
    return plain

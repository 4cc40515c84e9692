"""Normalising functions, which are their layers without parameters, then a scale and a shift."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from torch import nn
from torch.nn import functional as F

from .. import moments
from ..gaussian import Activation, as_gaussian, move
from ..methods.base import Call, Function, Method, Value, missing
from ..methods.facts import Rule, Table
from .layer_forms import form

Given = Mapping[str, Value]
"""The arguments of a function after the input by name, in order."""
Build = Callable[[Activation, Given], nn.Module]
Scale = Callable[..., Value]


def _normalising(build: Build, defaults: Given, scale: Scale, **facts: Value) -> Rule:
    return form(partial(_layer, build, defaults), partial(_normalised, build, defaults, scale), **facts)


def _layer(build: Build, defaults: Given, x: Activation, *args: Value, **options: Value) -> nn.Module:
    return build(x, _filled(defaults, args, options))


def _normalised(
    build: Build,
    defaults: Given,
    scale: Scale,
    method: Method,
    function: Function,
    x: Activation,
    *args: Value,
    **options: Value,
) -> Value:
    given = _filled(defaults, args, options)
    return scale(method(build(x, given), x), given.get("weight"), given.get("bias"))


def _filled(defaults: Given, args: tuple[Value, ...], options: Given) -> Given:
    return {**defaults, **dict(zip(defaults, args, strict=False)), **options}


def _scaled(x: Activation, scale: Activation | None, shift: Activation | None) -> Activation:
    y = as_gaussian(x if scale is None else moments.product(x, scale))
    return y if shift is None else y.plus(shift)


def _scaled_by_channel(x: Activation, scale: Activation | None, shift: Activation | None) -> Activation:
    shape = (-1, *(1,) * (len(x.shape) - 2))
    scale, shift = (None if t is None else move(lambda t: t.view(shape), t) for t in (scale, shift))
    return _scaled(x, scale, shift)


def _layer_norm(x: Activation, given: Given) -> nn.Module:
    return nn.LayerNorm(given["normalized_shape"], given["eps"], elementwise_affine=False)


def _rms_norm(x: Activation, given: Given) -> nn.Module:
    return nn.RMSNorm(given["normalized_shape"], given["eps"], elementwise_affine=False)


def _group_norm(x: Activation, given: Given) -> nn.Module:
    return nn.GroupNorm(given["num_groups"], x.shape[1], given["eps"], affine=False)


def _by_statistics(
    switch: str, kinds: Mapping[int, Callable[..., nn.Module]], x: Activation, given: Given
) -> nn.Module:
    """Batch or instance normalisation by the given statistics or by those of the input.

    Given statistics are updated in training, as those of the layer are.

    :param switch: the argument that asks for the statistics of the input.
    :param kinds: the layer for an input of so many dimensions.
    """
    mean, var = given["running_mean"], given["running_var"]
    layer = kinds[len(x.shape)](
        x.shape[1], given["eps"], given["momentum"], affine=False, track_running_stats=mean is not None
    )
    if mean is not None:
        layer.register_buffer("running_mean", mean)
        layer.register_buffer("running_var", var)
    return layer.train(given[switch])


def _unknown(call: Call) -> None:
    """No gain: that of the layer would leave out the scale given to the function."""


def _unit_length_layer(
    x: Activation, p: float = 2.0, dim: int = 1, eps: float = 1e-12, out: None = None
) -> nn.Module:
    return nn.RMSNorm(x.shape[dim], eps**2, elementwise_affine=False)


def _unit_length(
    method: Method,
    function: Function,
    x: Activation,
    p: float = 2.0,
    dim: int = 1,
    eps: float = 1e-12,
    out: None = None,
) -> Value:
    """F.normalize: x divided by its length, which is its root mean square times √n."""
    if p != 2:
        raise missing(method, function, f" with p={p}")
    y = method(_unit_length_layer(x, p, dim, eps), move(lambda t: t.movedim(dim, -1), x))
    return as_gaussian(y).times(x.shape[dim] ** -0.5).map(lambda t: t.movedim(-1, dim))


_AFFINE = {"weight": None, "bias": None}
_STATISTICS = {"running_mean": None, "running_var": None, **_AFFINE}
_RATES = {"momentum": 0.1, "eps": 1e-5}
_BATCH_NORMS = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}
_INSTANCE_NORMS = {3: nn.InstanceNorm1d, 4: nn.InstanceNorm2d, 5: nn.InstanceNorm3d}

NORMALISING: Table = {
    F.layer_norm: _normalising(_layer_norm, {"normalized_shape": None, **_AFFINE, "eps": 1e-5}, _scaled),
    F.rms_norm: _normalising(_rms_norm, {"normalized_shape": None, "weight": None, "eps": None}, _scaled),
    F.normalize: form(_unit_length_layer, _unit_length),
    F.group_norm: _normalising(_group_norm, {"num_groups": None, **_AFFINE, "eps": 1e-5}, _scaled_by_channel),
    F.batch_norm: _normalising(
        partial(_by_statistics, "training", _BATCH_NORMS),
        {**_STATISTICS, "training": False, **_RATES},
        _scaled_by_channel,
        gain=_unknown,
    ),
    F.instance_norm: _normalising(
        partial(_by_statistics, "use_input_stats", _INSTANCE_NORMS),
        {**_STATISTICS, "use_input_stats": True, **_RATES},
        _scaled_by_channel,
        gain=_unknown,
    ),
}
"""Table entries for functions that normalise."""

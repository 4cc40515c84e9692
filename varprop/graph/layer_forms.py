"""Functions that are equivalent to a layer: the layer is built, and the method's rule for it applies.

So no moment is written twice: F.relu follows the rule for nn.ReLU.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..gaussian import Activation, Gaussian, move
from ..methods.base import Function, Method, NoRuleError, Value, missing
from ..methods.facts import Rule, Table

Build = Callable[..., nn.Module]
"""Builds the layer from the function's arguments, the input first."""


def form(build: Build, apply: Function | None = None, **facts: Value) -> Rule:
    return Rule(apply or partial(_as_layer, build), "as its layer", layer=build, **facts)


def _as_layer(
    build: Build, method: Method, function: Function, x: Activation, *args: Value, **options: Value
) -> Value:
    """Apply the method's rule for the equivalent layer."""
    if options.get("return_indices"):
        raise missing(method, function, " with return_indices=True")
    if any(isinstance(value, Tensor | Gaussian) for value in (*args, *options.values())):
        raise missing(method, function, " with a tensor among its options")
    dtype = next((value for value in (*args, *options.values()) if isinstance(value, torch.dtype)), None)
    return method(build(x, *args, **options), x if dtype is None else move(lambda t: t.to(dtype), x))


# --------------------------------------------------------------- functions with the same options as the layer


def _layer(kind: Build, names: str, x: Activation, *args: Value, **options: Value) -> nn.Module:
    """The layer of this kind, for a function whose arguments after the input have these names."""
    options = {**dict(zip(names.split(), args, strict=False)), **options}
    for name in ("inplace", "_stacklevel", "dtype", "antialias"):
        options.pop(name, None)
    training = options.pop("training", True)
    return kind(**options).train(training)


def _named(names: str, **kinds: Build) -> Table:
    """Table entries for functions by name in torch.nn.functional and torch, and for their in-place forms."""
    rows: Table = {}
    for name, kind in kinds.items():
        entry = form(partial(_layer, kind, names))
        for module in (F, torch):
            for spelling in (name, f"{name}_"):
                function = getattr(module, spelling, None)
                # Some functions of torch.nn.functional cannot be pickled; `in_torch` finds their names.
                if function is not None and "<locals>" not in getattr(function, "__qualname__", ""):
                    rows[function] = entry
    return rows


def _absolute() -> nn.Module:
    """|x|, a leaky ReLU that flips the sign of negative values."""
    return nn.LeakyReLU(-1.0)


def _clamped(min: float | None = None, max: float | None = None) -> nn.Module:
    return nn.Hardtanh(-math.inf if min is None else min, math.inf if max is None else max)


def _threshold(threshold: float, value: float) -> nn.Module:
    if threshold != value:
        raise NoRuleError(
            f"F.threshold jumps from {value} to its threshold {threshold}, and there is no rule for jumps; "
            "set both to one value, or add a rule with `method | {torch.nn.functional.threshold: rule}`."
        )
    return _clamped(min=threshold)


_POOL = "kernel_size stride padding"
_NAMED: Table = {
    **_named("inplace", relu=nn.ReLU, relu6=nn.ReLU6, hardsigmoid=nn.Hardsigmoid, hardswish=nn.Hardswish),
    **_named("inplace", silu=nn.SiLU, mish=nn.Mish, selu=nn.SELU, tanh=nn.Tanh, sigmoid=nn.Sigmoid),
    **_named("inplace", softsign=nn.Softsign, tanhshrink=nn.Tanhshrink, logsigmoid=nn.LogSigmoid),
    **_named("negative_slope inplace", leaky_relu=nn.LeakyReLU),
    **_named("min_val max_val inplace", hardtanh=nn.Hardtanh),
    **_named("min max", clamp=_clamped, clip=_clamped, clamp_min=_clamped),
    **_named("max", clamp_max=_clamped),
    **_named("threshold value inplace", threshold=_threshold),
    **_named("", abs=_absolute, absolute=_absolute),
    **_named("lambd", softshrink=nn.Softshrink),
    **_named("approximate", gelu=nn.GELU),
    **_named("beta threshold", softplus=nn.Softplus),
    **_named("alpha inplace", elu=nn.ELU, celu=nn.CELU),
    **_named("dim", softmax=nn.Softmax, log_softmax=nn.LogSoftmax, softmin=nn.Softmin, glu=nn.GLU),
    **_named("p training inplace", dropout=nn.Dropout, dropout1d=nn.Dropout1d, dropout2d=nn.Dropout2d),
    **_named("p training inplace", dropout3d=nn.Dropout3d, alpha_dropout=nn.AlphaDropout),
    **_named("p training inplace", feature_alpha_dropout=nn.FeatureAlphaDropout),
    **_named(f"{_POOL} dilation ceil_mode return_indices", max_pool1d=nn.MaxPool1d, max_pool2d=nn.MaxPool2d),
    **_named(f"{_POOL} dilation ceil_mode return_indices", max_pool3d=nn.MaxPool3d),
    **_named(f"{_POOL} ceil_mode count_include_pad divisor_override", avg_pool1d=nn.AvgPool1d),
    **_named(f"{_POOL} ceil_mode count_include_pad divisor_override", avg_pool2d=nn.AvgPool2d),
    **_named(f"{_POOL} ceil_mode count_include_pad divisor_override", avg_pool3d=nn.AvgPool3d),
    **_named(
        "output_size", adaptive_avg_pool1d=nn.AdaptiveAvgPool1d, adaptive_avg_pool2d=nn.AdaptiveAvgPool2d
    ),
    **_named("output_size", adaptive_avg_pool3d=nn.AdaptiveAvgPool3d),
    **_named("output_size return_indices", adaptive_max_pool1d=nn.AdaptiveMaxPool1d),
    **_named("output_size return_indices", adaptive_max_pool2d=nn.AdaptiveMaxPool2d),
    **_named("output_size return_indices", adaptive_max_pool3d=nn.AdaptiveMaxPool3d),
}


# ----------------------------------------------------------------- functions with tensors among their options


_UPSAMPLE = partial(_layer, nn.Upsample, "size scale_factor mode align_corners recompute_scale_factor")


def _interpolate(
    method: Method, function: Function, x: Activation, *args: Value, antialias: bool = False, **options: Value
) -> Value:
    """As `nn.Upsample`, which has no antialiasing filter."""
    if antialias:
        raise missing(method, function, " with antialias=True")
    return _as_layer(_UPSAMPLE, method, function, x, *args, **options)


def _prelu_layer(x: Activation, weight: Tensor) -> nn.Module:
    """A leaky ReLU with a slope for each channel, which torch keeps in dimension 1."""
    slopes: Value = weight.view(-1, *(1,) * (len(x.shape) - 2)) if weight.numel() > 1 else weight
    return nn.LeakyReLU(slopes)


def _prelu(method: Method, function: Function, x: Activation, weight: Tensor) -> Value:
    return method(_prelu_layer(x, weight), x)


LAYER_FORMS: Table = {
    **_NAMED,
    F.interpolate: form(_UPSAMPLE, _interpolate),
    torch.prelu: form(_prelu_layer, _prelu),
}
"""Table entries for all functions that are equivalent to a layer, but for those that normalise."""

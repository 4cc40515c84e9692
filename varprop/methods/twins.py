"""Functions with a twin among torch's layers: the layer is built and the method asked about it, so that no moment is written twice."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .. import moments as fn
from ..gaussian import Activation, Gaussian, as_gaussian, move
from .base import Method, NoRuleError, Rule, in_torch, missing


def twin_of(function: Callable[..., Any] | str, args: Any, kwargs: Any) -> nn.Module | None:
    """The layer that computes a function with these arguments beside its input, where there is one."""
    rule: Any = TWINS.get(function, TWINS.get(in_torch(function)))
    return None if rule is None else twin(*rule.args, *args, **kwargs)


def twin(kind: Callable[..., nn.Module], names: str, *args: Any, **kwargs: Any) -> nn.Module:
    """The layer that computes a function with these arguments beside its input."""
    options = {**dict(zip(names.split(), args, strict=False)), **kwargs}
    for name in ("inplace", "_stacklevel"):
        options.pop(name, None)
    if options.get("dtype", ...) is None:
        del options["dtype"]
    training = options.pop("training", True)
    return kind(**options).train(training)


def by_twin(
    kind: Callable[..., nn.Module],
    names: str,
    method: Method,
    function: Callable[..., Any],
    x: Activation,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Ask the method about the layer that computes the function."""
    if kwargs.get("return_indices"):
        raise missing(method, function, " with return_indices=True")
    if any(isinstance(value, Tensor | Gaussian) for value in (*args, *kwargs.values())):
        raise missing(method, function, " with a tensor among its options")
    return method(twin(kind, names, *args, **kwargs), x)


def _named(names: str, **kinds: Callable[..., nn.Module]) -> dict[Any, Rule]:
    """Rows for functions by their names in torch.nn.functional, torch and, with an underscore behind, in place."""
    rows: dict[Any, Rule] = {}
    for name, kind in kinds.items():
        for module in (F, torch):
            for spelling in (name, f"{name}_"):
                function = getattr(module, spelling, None)
                # Some functions of torch.nn.functional cannot be pickled; they are found by their names in torch.
                if function is not None and "<locals>" not in getattr(function, "__qualname__", ""):
                    rows[function] = partial(by_twin, kind, names)
    return rows


def _absolute() -> nn.Module:
    """|x|, a leaky unit that turns the sign of what is negative."""
    return nn.LeakyReLU(-1.0)


def _clamped(min: float | None = None, max: float | None = None) -> nn.Module:
    return nn.Hardtanh(-math.inf if min is None else min, math.inf if max is None else max)


def _threshold(threshold: float, value: float) -> nn.Module:
    if threshold != value:
        raise NoRuleError(
            f"F.threshold jumps from {value} to its threshold {threshold}, and functions that jump have no rule; give both one value, "
            "or add a rule with `method | {torch.nn.functional.threshold: rule}`."
        )
    return _clamped(min=threshold)


_POOL = "kernel_size stride padding"
TWINS: dict[Any, Rule] = {
    **_named(
        "inplace",
        relu=nn.ReLU,
        relu6=nn.ReLU6,
        hardsigmoid=nn.Hardsigmoid,
        hardswish=nn.Hardswish,
        silu=nn.SiLU,
        mish=nn.Mish,
    ),
    **_named(
        "inplace",
        selu=nn.SELU,
        tanh=nn.Tanh,
        sigmoid=nn.Sigmoid,
        softsign=nn.Softsign,
        tanhshrink=nn.Tanhshrink,
        logsigmoid=nn.LogSigmoid,
    ),
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
    **_named(
        "p training inplace",
        dropout=nn.Dropout,
        dropout1d=nn.Dropout1d,
        dropout2d=nn.Dropout2d,
        dropout3d=nn.Dropout3d,
    ),
    **_named(
        "p training inplace", alpha_dropout=nn.AlphaDropout, feature_alpha_dropout=nn.FeatureAlphaDropout
    ),
    **_named(
        f"{_POOL} dilation ceil_mode return_indices",
        max_pool1d=nn.MaxPool1d,
        max_pool2d=nn.MaxPool2d,
        max_pool3d=nn.MaxPool3d,
    ),
    **_named(
        f"{_POOL} ceil_mode count_include_pad divisor_override",
        avg_pool1d=nn.AvgPool1d,
        avg_pool2d=nn.AvgPool2d,
        avg_pool3d=nn.AvgPool3d,
    ),
    **_named(
        "output_size", adaptive_avg_pool1d=nn.AdaptiveAvgPool1d, adaptive_avg_pool2d=nn.AdaptiveAvgPool2d
    ),
    **_named("output_size", adaptive_avg_pool3d=nn.AdaptiveAvgPool3d),
}


def interpolated(
    method: Method,
    function: Callable[..., Any],
    x: Activation,
    *args: Any,
    antialias: bool = False,
    **kwargs: Any,
) -> Any:
    """As `nn.Upsample`, which has no filter."""
    if antialias:
        raise missing(method, function, " with antialias=True")
    return by_twin(
        nn.Upsample,
        "size scale_factor mode align_corners recompute_scale_factor",
        method,
        function,
        x,
        *args,
        **kwargs,
    )


def prelu(method: Method, function: Callable[..., Any], x: Activation, weight: Tensor) -> Any:
    """As `nn.LeakyReLU` with a slope for each channel, which torch counts in dimension 1."""
    slopes: Any = weight.view(-1, *(1,) * (len(x.shape) - 2)) if weight.numel() > 1 else weight
    return method(nn.LeakyReLU(slopes), x)


# ------------------------------------------------------------------------------------------------------------------ normalisation


def layer_norm(
    method: Method,
    function: Any,
    x: Activation,
    normalized_shape: Any,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
) -> Any:
    return _scaled(method(nn.LayerNorm(normalized_shape, eps, elementwise_affine=False), x), weight, bias)


def rms_norm(
    method: Method,
    function: Any,
    x: Activation,
    normalized_shape: Any,
    weight: Any = None,
    eps: float | None = None,
) -> Any:
    return _scaled(method(nn.RMSNorm(normalized_shape, eps, elementwise_affine=False), x), weight)


def unit_length(
    method: Method,
    function: Any,
    x: Activation,
    p: float = 2.0,
    dim: int = 1,
    eps: float = 1e-12,
    out: None = None,
) -> Any:
    """x over its length, which is that over its root mean square over √n."""
    if p != 2:
        raise missing(method, function, f" with p={p}")
    n = x.shape[dim]
    y = method(nn.RMSNorm(n, eps**2, elementwise_affine=False), move(lambda t: t.movedim(dim, -1), x))
    return as_gaussian(y).times(n**-0.5).map(lambda t: t.movedim(-1, dim))


def group_norm(
    method: Method,
    function: Any,
    x: Activation,
    num_groups: int,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
) -> Any:
    return _by_channel(method(nn.GroupNorm(num_groups, x.shape[1], eps, affine=False), x), weight, bias)


def by_statistics(
    kinds: dict[int, Any],
    options: dict[str, Any],
    method: Method,
    function: Any,
    x: Activation,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Batch or instance normalisation by the statistics given or those of the input; given ones move in training, as the layer's do."""
    running_mean, running_var, weight, bias, training, momentum, eps = {
        **options,
        **dict(zip(options, args, strict=False)),
        **kwargs,
    }.values()
    layer = kinds[len(x.shape)](
        x.shape[1], eps, momentum, affine=False, track_running_stats=running_mean is not None
    )
    if running_mean is not None:
        layer.register_buffer("running_mean", running_mean)
        layer.register_buffer("running_var", running_var)
    return _by_channel(method(layer.train(training), x), weight, bias)


def _by_channel(x: Activation, *scale_and_shift: Activation | None) -> Activation:
    shape = (-1, *(1,) * (len(x.shape) - 2))
    return _scaled(x, *(None if t is None else move(lambda t: t.view(shape), t) for t in scale_and_shift))


def _scaled(x: Activation, scale: Activation | None = None, shift: Activation | None = None) -> Activation:
    y = as_gaussian(x if scale is None else fn.product(x, scale))
    return y if shift is None else y.plus(shift)


_GIVEN = dict.fromkeys(("running_mean", "running_var", "weight", "bias"))
_RATES = {"momentum": 0.1, "eps": 1e-5}
_BATCH = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}
_INSTANCE = {3: nn.InstanceNorm1d, 4: nn.InstanceNorm2d, 5: nn.InstanceNorm3d}
BY_LAYERS: dict[Any, Rule] = {
    **TWINS,
    F.interpolate: interpolated,
    torch.prelu: prelu,
    F.layer_norm: layer_norm,
    F.rms_norm: rms_norm,
    F.normalize: unit_length,
    F.group_norm: group_norm,
    F.batch_norm: partial(by_statistics, _BATCH, {**_GIVEN, "training": False, **_RATES}),
    F.instance_norm: partial(by_statistics, _INSTANCE, {**_GIVEN, "use_input_stats": True, **_RATES}),
}
"""Rows for all of these functions."""
_ASKED = {
    interpolated: nn.Upsample,
    prelu: nn.LeakyReLU,
    layer_norm: nn.LayerNorm,
    rms_norm: nn.RMSNorm,
    unit_length: nn.RMSNorm,
    group_norm: nn.GroupNorm,
}


def layer_type(rule: Rule) -> type[nn.Module] | None:
    """The type of layer that a rule asks the method about, where it is the same for all arguments."""
    if isinstance(rule, partial) and rule.func is by_statistics:
        return rule.args[0][3]
    return _ASKED.get(rule)

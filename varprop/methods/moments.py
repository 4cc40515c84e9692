"""The moment table: mean and variance through every layer but the activations and the maxima, in which methods differ."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .. import moments as fn
from ..gaussian import Activation, Gaussian, mean_of, move
from ..posterior import Layer, random_bias, random_weight
from .attention import ATTENTION
from .base import Method, NoRuleError, Rule, activation, sequential
from .embedding import EMBEDDING
from .normalisation import NORMALISATION
from .recurrent import RECURRENT
from .resampling import RESAMPLING

# --------------------------------------------------------------------------------------------------- layers with weights


def _linear(layer: nn.Linear) -> fn.Op:
    return F.linear


def _conv(op: fn.Op, layer: Layer) -> fn.Op:
    padding = layer.padding if layer.padding_mode == "zeros" else 0
    return partial(
        _call, op, stride=layer.stride, padding=padding, dilation=layer.dilation, groups=layer.groups
    )


def _conv_transpose(op: fn.Op, layer: Layer) -> fn.Op:
    return partial(
        _call,
        op,
        stride=layer.stride,
        padding=layer.padding,
        output_padding=layer.output_padding,
        groups=layer.groups,
        dilation=layer.dilation,
    )


def _call(op: fn.Op, x: Tensor, weight: Tensor, bias: Tensor | None = None, **options: object) -> Tensor:
    return op(x, weight, bias, **options)


def _pad(layer: Layer, x: Activation) -> Activation:
    """Padding other than with zeros repeats entries, which then count as independent of their originals."""
    if getattr(layer, "padding_mode", "zeros") == "zeros":
        return x
    return move(partial(F.pad, pad=layer._reversed_padding_repeated_twice, mode=layer.padding_mode), x)


def affine(operation: Callable[[Layer], fn.Op], method: Method, layer: Layer, x: Activation) -> Activation:
    """A layer with weights (Eq. 1)."""
    x, op = _pad(layer, x), operation(layer)
    weight, bias = random_weight(layer), random_bias(layer)
    if not hasattr(layer, "scales"):
        return fn.affine(op, x, weight, bias)
    return _scaled_affine(op, layer, x, weight, bias)


def _scaled_affine(
    op: fn.Op, layer: Layer, x: Activation, weight: fn.Weight, bias: Activation | None
) -> Activation:
    """A layer with the scales of a horseshoe on its inputs (linear) or filters (convolution) and on its whole output (Eq. 18)."""
    per_channel = partial(fn.per_channel, weight=layer.weight)
    group, whole = layer.scales.group, layer.scales.layer
    if isinstance(layer, nn.Linear):
        out = fn.affine(op, fn.product(x, group), weight)
    else:
        out = fn.product(fn.affine(op, x, weight), move(per_channel, group))
    scaled: Any = fn.product(out, move(per_channel, whole))
    return scaled if bias is None else scaled.plus(move(per_channel, bias))


AFFINE: dict[type[nn.Module], Rule] = {
    nn.Linear: partial(affine, _linear),
    nn.Conv1d: partial(affine, partial(_conv, F.conv1d)),
    nn.Conv2d: partial(affine, partial(_conv, F.conv2d)),
    nn.Conv3d: partial(affine, partial(_conv, F.conv3d)),
    nn.ConvTranspose1d: partial(affine, partial(_conv_transpose, F.conv_transpose1d)),
    nn.ConvTranspose2d: partial(affine, partial(_conv_transpose, F.conv_transpose2d)),
    nn.ConvTranspose3d: partial(affine, partial(_conv_transpose, F.conv_transpose3d)),
}


# ------------------------------------------------------------------------------------------------------- rules that vary


def piecewise(module: Layer) -> fn.Piecewise:
    """The piecewise-linear function that a torch activation computes."""
    match module:
        case nn.ReLU():
            return fn.RELU
        case nn.LeakyReLU():
            return fn.Piecewise((0.0,), (module.negative_slope, 1.0))
        case nn.PReLU():
            return fn.Piecewise((0.0,), (module.weight, 1.0))
        case nn.Hardtanh():  # and ReLU6, its subclass
            return _between(module.min_val, module.max_val)
        case nn.Hardsigmoid():
            return fn.Piecewise((-3.0, 3.0), (0.0, 1 / 6, 0.0))
        case nn.Softshrink():
            return fn.Piecewise((-module.lambd, module.lambd), (1.0, 0.0, 1.0))
    raise TypeError(f"{type(module).__name__} is not piecewise linear.")


def _between(low: float, high: float) -> fn.Piecewise:
    """The identity, cut off at both ends; an infinite bound is no knot."""
    if math.isinf(high):
        return fn.RELU if low == 0 else fn.Piecewise((low,), (0.0, 1.0), low)
    if math.isinf(low):
        return fn.Piecewise((high,), (1.0, 0.0), high)
    return fn.Piecewise((low, high), (0.0, 1.0, 0.0), low)


def _bent(moments: Callable[[Gaussian, fn.Piecewise], Any], module: Layer, x: Gaussian) -> Any:
    if isinstance(module, nn.PReLU) and module.weight.numel() > 1:
        # PReLU has one slope for each channel, which torch counts in dimension 1.
        slopes = module.weight.view(-1, *(1,) * (x.mean.dim() - 2))
        return moments(x, fn.Piecewise((0.0,), (slopes, 1.0)))
    return moments(x, piecewise(module))


PIECEWISE = (nn.ReLU, nn.LeakyReLU, nn.PReLU, nn.ReLU6, nn.Hardtanh, nn.Hardsigmoid, nn.Softshrink)


def bent(moments: Callable[[Gaussian, fn.Piecewise], Gaussian]) -> dict[type[nn.Module], Rule]:
    """Rows for all piecewise-linear activations from one function of their moments."""
    return dict.fromkeys(PIECEWISE, partial(activation, partial(_bent, moments)))


def _smooth(module: nn.Module, x: Gaussian) -> Gaussian:
    return fn.quadrature(module, x)


def _gated_linear(module: Layer, x: Gaussian) -> Gaussian:
    """GLU: one half times the sigmoid of the other (Eq. 3, 11)."""
    (a, b), (a_var, b_var) = x.mean.chunk(2, module.dim), x.var.chunk(2, module.dim)
    return fn.product(Gaussian.of(a, a_var), fn.quadrature(torch.sigmoid, Gaussian.of(b, b_var)))  # type: ignore[return-value]


SMOOTH = (
    nn.Tanh,
    nn.Sigmoid,
    nn.GELU,
    nn.SiLU,
    nn.Mish,
    nn.Softplus,
    nn.ELU,
    nn.SELU,
    nn.CELU,
    nn.LogSigmoid,
    nn.Softsign,
    nn.Tanhshrink,
    nn.Hardswish,
)


# --------------------------------------------------------------------------------------------------------------- pooling


def per_dimension(value: int | Sequence[int], n: int) -> tuple[int, ...]:
    return (value,) * n if isinstance(value, int) else tuple(value)


def _average(n: int, module: Layer, x: Gaussian) -> Gaussian:
    """Average pooling; windows cut by the border or by padding average fewer entries."""
    divisor = getattr(module, "divisor_override", None)
    if divisor is not None:
        return fn.average(x, module, divisor)
    kernel, stride, padding = (
        per_dimension(a, n) for a in (module.kernel_size, module.stride, module.padding)
    )
    if not module.ceil_mode and (module.count_include_pad or not any(padding)):
        return fn.average(x, module, math.prod(kernel))
    outputs = module(x.mean).shape[-n:]
    lengths = []
    for size, out, k, step, pad in zip(x.shape[-n:], outputs, kernel, stride, padding, strict=True):
        start = torch.arange(out, device=x.mean.device) * step - pad
        end = (start + k).clamp(max=size + pad)
        if not module.count_include_pad:
            start, end = start.clamp(min=0), end.clamp(max=size)
        lengths.append(end - start)
    return fn.average(x, module, _window_sizes(lengths, x))


def _adaptive_average(n: int, module: Layer, x: Gaussian) -> Gaussian:
    lengths = []
    for size, out in zip(x.shape[-n:], module(x.mean).shape[-n:], strict=True):
        i = torch.arange(out, device=x.mean.device)
        lengths.append(-((-(i + 1) * size) // out) - (i * size) // out)
    return fn.average(x, module, _window_sizes(lengths, x))


def adaptive_max(n: int, plain: Layer, method: Method, module: Layer, x: Activation) -> Activation:
    """The maximum over windows of one size, as the method's own rule of max-pooling takes it."""
    sizes, outputs = x.shape[-n:], module(mean_of(x)).shape[-n:]
    if any(size % out for size, out in zip(sizes, outputs, strict=True)):
        raise NoRuleError(
            f"{method.name} has no rule for {type(module).__name__} with windows of several sizes, from {tuple(sizes)} to "
            f"{tuple(outputs)}; choose an output size that divides the input's."
        )
    return method(plain(tuple(size // out for size, out in zip(sizes, outputs, strict=True))), x)


def _window_sizes(lengths: list[Tensor], x: Gaussian) -> Tensor:
    size = torch.ones((), dtype=x.mean.dtype, device=x.mean.device)
    for length in lengths:
        size = size.unsqueeze(-1) * length
    return size


# ------------------------------------------------------------------------------------------------------ moving, dropping


MOVES = (
    *(
        nn.Identity,
        nn.Flatten,
        nn.Unflatten,
        nn.PixelShuffle,
        nn.PixelUnshuffle,
        nn.ChannelShuffle,
        nn.Unfold,
    ),
    *(
        nn.ReflectionPad1d,
        nn.ReflectionPad2d,
        nn.ReflectionPad3d,
        nn.ReplicationPad1d,
        nn.ReplicationPad2d,
        nn.ReplicationPad3d,
    ),
    *(nn.CircularPad1d, nn.CircularPad2d, nn.CircularPad3d),
)


def moved(method: Method, module: nn.Module, x: Activation) -> Activation:
    """A module that only moves entries, or repeats them: copies count as independent in what follows."""
    return move(module, x)


def dropout(method: Method, module: Layer, x: Activation) -> Activation:
    """Dropout in training as the variance it causes (Eq. 10); nothing in evaluation. Channel-wise dropout has the same marginals."""
    if not module.training or module.p == 0:
        return x
    keep = 1 - module.p
    return fn.mask(x, keep) * (1 / keep if keep else 0.0)


def alpha_dropout(method: Method, module: Layer, x: Activation) -> Activation:
    """Dropout to SELU's floor, rescaled to keep mean 0 and variance 1 (Klambauer et al. 2017)."""
    if not module.training or module.p == 0:
        return x
    floor, keep = -1.7580993408473766, 1 - module.p
    scale = (keep * (1 + module.p * floor**2)) ** -0.5 if keep else 0.0
    return fn.mask(x, keep, floor) * scale + -scale * floor * module.p


SHARED: dict[type[nn.Module], Rule] = {
    nn.Sequential: sequential,
    nn.ModuleList: sequential,
    **AFFINE,
    **EMBEDDING,
    **ATTENTION,
    **RECURRENT,
    **NORMALISATION,
    **dict.fromkeys(SMOOTH, partial(activation, _smooth)),
    nn.GLU: partial(activation, _gated_linear),
    nn.AvgPool1d: partial(activation, partial(_average, 1)),
    nn.AvgPool2d: partial(activation, partial(_average, 2)),
    nn.AvgPool3d: partial(activation, partial(_average, 3)),
    nn.AdaptiveAvgPool1d: partial(activation, partial(_adaptive_average, 1)),
    nn.AdaptiveAvgPool2d: partial(activation, partial(_adaptive_average, 2)),
    nn.AdaptiveAvgPool3d: partial(activation, partial(_adaptive_average, 3)),
    nn.AdaptiveMaxPool1d: partial(adaptive_max, 1, nn.MaxPool1d),
    nn.AdaptiveMaxPool2d: partial(adaptive_max, 2, nn.MaxPool2d),
    nn.AdaptiveMaxPool3d: partial(adaptive_max, 3, nn.MaxPool3d),
    **RESAMPLING,
    **dict.fromkeys(MOVES, moved),
    **dict.fromkeys((nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d), dropout),
    **dict.fromkeys((nn.AlphaDropout, nn.FeatureAlphaDropout), alpha_dropout),
}
MAX_POOLS: dict[type[nn.Module], int] = {nn.MaxPool1d: 1, nn.MaxPool2d: 2, nn.MaxPool3d: 3}

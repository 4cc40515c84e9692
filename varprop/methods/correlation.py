"""Sums of two values that come from one, such as h + g(h): the covariance that independence forgets (Eq. 41).

With gates frozen, each operand is a linear map of their common source x, whose entries are independent:

    Cov(a_j, b_j) = Σ_i A_ji B_ji Var[x_i],    A = D_n M_n … M_1 D_0

M are the mean matrices of affine layers, D the mean slopes of what stands between them. The diagonal is cheap where the paths hold no
more than (0, 0), (0, 1), (0, 2) or (1, 1) affine layers: identities, residual blocks, two projections. Other sums stay independent.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .. import functional as fn
from ..gaussian import Gaussian, mean_of, sqrt
from ..posterior import Layer
from . import functions
from .base import Method, row
from .graph import Ref, Step, Values, filled, layer
from .moments import AFFINE, PIECEWISE, SMOOTH, affine, piecewise
from .twins import twin_of

Gain = Tensor | float


@dataclass(frozen=True)
class Path:
    """The mean Jacobian from a source to an operand, D_n M_n … M_1 D_0."""

    layers: Sequence[Layer]
    gains: Sequence[Gain]
    inputs: Sequence[Tensor]
    """The mean that enters each layer."""


def corrected(method: Method, module: nn.Module, step: Step, values: Values, out: Any) -> Any:
    """A sum with the covariance of its operands, where there is one and it is known (Eq. 41)."""
    both = covariance(method, module, step, values)
    if both is None:
        return out
    return Gaussian.of(out.mean, F.relu(out.var + 2 * both))


def covariance(method: Method, module: nn.Module, step: Step, values: Values) -> Tensor | None:
    """Covariance of the two terms of a sum or difference, entry by entry; None where it is not known."""
    fork, rule = step.fork, method.function_rule(step.target)
    if fork is None or (rule is not functions.add and rule is not functions.subtract):
        return None
    source, operands = values[fork.source], [values[a.name] for a in step.args if isinstance(a, Ref)]
    if not isinstance(source, Gaussian) or operands[0].shape != operands[1].shape:
        return None
    a, b = path(method, module, fork.left, values), path(method, module, fork.right, values)
    if a is None or b is None or any(layer in a.layers for layer in b.layers):
        return None
    both = _diagonal(source.var, *((a, b) if len(a.layers) <= len(b.layers) else (b, a)))
    sign = 1 if rule is functions.add else -1
    return None if both is None else sign * step.kwargs.get("alpha", 1) * both


def path(method: Method, module: nn.Module, steps: Sequence[Step], values: Values) -> Path | None:
    """The Jacobian of a chain of steps; None where one of them is no affine layer and has no gain."""
    layers: list[Layer] = []
    inputs: list[Tensor] = []
    gains: list[Gain] = [1.0]
    for step in steps:
        operation = layer(module, step) or twin_of(step.target, *filled((step.args[1:], step.kwargs), values))
        kind = None if operation is None else row(AFFINE, operation)
        if kind is not None:
            if getattr(method.rules[kind], "func", None) is not affine or hasattr(operation, "scales") or operation in layers:
                return None
            layers.append(operation)
            inputs.append(mean_of(values[step.sources[0]]))
            gains.append(1.0)
        else:
            gain = _function_gain(step, values) if operation is None else _gain(method, operation, step, values)
            if gain is None:
                return None
            gains[-1] = gains[-1] * gain
    return Path(layers, gains, inputs)


# --------------------------------------------------------------------------------------------------------------------------- gains


def _gain(method: Method, operation: nn.Module, step: Step, values: Values) -> Gain | None:
    """E[∂out/∂in] of each entry, with gates frozen: Cov(out, in) = gain · Var[in] (Eq. 42)."""
    x, y = values[step.sources[0]], values[step.name]
    if not isinstance(x, Gaussian) or not isinstance(y, Gaussian):
        return None
    if isinstance(operation, PIECEWISE):
        if isinstance(operation, nn.PReLU) and operation.weight.numel() > 1:
            return None
        return fn.slope(x, piecewise(operation), method.slope)
    if isinstance(operation, SMOOTH):
        return fn.smooth_slope(operation, x)
    if isinstance(operation, nn.modules.batchnorm._BatchNorm):
        # A scale for each channel, of whichever statistics the rule has used.
        size = sqrt(y.var / torch.where(x.var > 0, x.var, 1.0))
        return size if operation.weight is None else size * operation.weight.sign().view(-1, *(1,) * (x.mean.dim() - 2))
    return 1.0 if isinstance(operation, nn.Identity | nn.modules.dropout._DropoutNd) and not isinstance(operation, _ALPHA) else None


_ALPHA = (nn.AlphaDropout, nn.FeatureAlphaDropout)
_TIMES = (operator.mul, operator.imul, torch.mul, "mul", "mul_")
_OVER = (operator.truediv, operator.itruediv, torch.div, "div", "div_")
_PLUS = (operator.add, operator.iadd, torch.add, "add", "add_")
_MINUS = (operator.sub, operator.isub, torch.sub, "sub", "sub_")
_STILL = (torch.clone, "clone", "contiguous")


def _function_gain(step: Step, values: Values) -> Gain | None:
    """Of arithmetic with a certain second operand."""
    function = step.target
    if function in _STILL:
        return 1.0
    if function in (operator.neg, torch.neg, "neg"):
        return -1.0
    if len(step.args) != 2 or step.kwargs:
        return None
    a, b = (values[arg.name] if isinstance(arg, Ref) else arg for arg in step.args)
    if isinstance(a, Gaussian) == isinstance(b, Gaussian):
        return None
    first, other = isinstance(a, Gaussian), b if isinstance(a, Gaussian) else a
    if function in _TIMES:
        return other
    if function in _PLUS:
        return 1.0
    if function in _MINUS:
        return 1.0 if first else -1.0
    return 1 / other if function in _OVER and first else None


# ----------------------------------------------------------------------------------------------------------------------- diagonals


def _diagonal(var: Tensor, a: Path, b: Path) -> Tensor | None:
    """Σ_i A_ji B_ji v_i, where a has no more layers than b."""
    outer = a.gains[-1] * b.gains[-1]
    if not a.layers and not b.layers:
        return outer * var
    inner = a.gains[0] * b.gains[0] * var
    if not a.layers:
        jacobian = _own(b)
        return None if jacobian is None else a.gains[0] * b.gains[-1] * jacobian * b.gains[0] * var
    common = _common(a.layers[0], b.layers[0], inner) if len(b.layers) == 1 else None
    return None if common is None else outer * common


def _own(path: Path) -> Tensor | None:
    """How each entry acts on itself through one or two layers that keep the shape, inner gains included (Eq. 43)."""
    kernels = [_centred(layer) for layer in path.layers]
    if len(kernels) > 2 or any(kernel is None for kernel in kernels):
        return None
    first, *rest = [kernel for kernel in kernels if kernel is not None]
    if not rest:
        return _cropped(first, [1] * (first.dim() - 2)).diagonal().reshape(-1, *(1,) * (first.dim() - 2))
    sizes = [min(pair) for pair in zip(first.shape[2:], rest[0].shape[2:], strict=True)]
    there, back = _cropped(rest[0], sizes), _cropped(first, sizes).flip(tuple(range(2, first.dim()))).transpose(0, 1)
    gains = path.gains[1] * torch.ones_like(path.inputs[1])
    if first.dim() == 2:
        return F.linear(gains, there * back)
    return _CONV[first.dim()](gains, there * back, padding=tuple(size // 2 for size in sizes))


def _centred(layer: Layer) -> Tensor | None:
    """The kernel of a layer whose output has the shape of its input, position by position; None for other layers."""
    if isinstance(layer, nn.Linear):
        return layer.weight
    centred = _plain(layer) and all(step == 1 for step in layer.stride)
    centred = centred and all(size == 2 * pad + 1 for size, pad in zip(layer.kernel_size, _padding(layer), strict=True))
    return layer.weight if centred else None


def _padding(layer: Layer) -> tuple[int, ...]:
    if isinstance(layer.padding, str):
        return tuple([size // 2 if layer.padding == "same" else 0 for size in layer.kernel_size])
    return layer.padding


def _cropped(kernel: Tensor, sizes: Sequence[int]) -> Tensor:
    for axis, size in enumerate(sizes, 2):
        kernel = kernel.narrow(axis, (kernel.shape[axis] - size) // 2, size)
    return kernel


def _common(a: Layer, b: Layer, var: Tensor) -> Tensor | None:
    """Σ_i A_ji B_ji v_i of two layers side by side: where both read an input, the product of their kernels (Eq. 44)."""
    if isinstance(a, nn.Linear) and isinstance(b, nn.Linear):
        return F.linear(var, a.weight * b.weight)
    if type(a) is not type(b) or not (_plain(a) and _plain(b)) or a.stride != b.stride:
        return None
    left, right, padding = a.weight, b.weight, []
    for axis, (p, q, k, n) in enumerate(zip(_padding(a), _padding(b), a.kernel_size, b.kernel_size, strict=True), 2):
        low, high = max(-p, -q), min(k - p, n - q)
        left, right = left.narrow(axis, low + p, high - low), right.narrow(axis, low + q, high - low)
        padding.append(-low)
    return _CONV[left.dim()](var, left * right, stride=a.stride, padding=tuple(padding))


def _plain(layer: Layer) -> bool:
    """A convolution, not transposed, without groups or dilation, with as many zeros on the one side as on the other."""
    if not isinstance(layer, nn.modules.conv._ConvNd) or layer.transposed or layer.groups != 1 or layer.padding_mode != "zeros":
        return False
    even = layer.padding != "same" or all(size % 2 for size in layer.kernel_size)
    return even and all(d == 1 for d in layer.dilation)


_CONV = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}

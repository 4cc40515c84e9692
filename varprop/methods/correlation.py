"""Sums of two values that come from one, such as h + g(h): the covariance that independence forgets (Eq. 41).

With gates frozen, each operand is a linear map of their common source x, whose entries are independent:

    Cov(a_j, b_j) = Σ_i A_ji B_ji Var[x_i],    A = D_n M_n … M_1 D_0

M are the mean matrices of affine layers, D the mean slopes of what stands between them. `diagonals.py` has the sum where it is cheap: paths
of (0, 0), (0, 1), (0, 2) or (1, 1) affine layers, which are identities, residual blocks and two projections, and paths of (1, 2), (0, 3)
and (1, 3) convolutions, which are projections and bottlenecks. Other sums stay independent.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .. import moments as fn
from ..gaussian import Gaussian, mean_of, sqrt
from ..posterior import Layer
from . import functions
from .base import Method, row, watched
from .diagonals import Gain, Path, diagonal
from .moments import AFFINE, PIECEWISE, SMOOTH, _bent, affine
from .steps import Ref, Step, Values, filled, layer
from .twins import twin_of


def corrected(method: Method, module: nn.Module, step: Step, values: Values, out: Any) -> Any:
    """A sum with the covariance of its operands, where there is one and it is known (Eq. 41)."""
    known = covariance(method, module, step, values)
    if known is None:
        return out
    return Gaussian.of(out.mean, F.relu(out.var + 2 * known[0]))


def covariance(method: Method, module: nn.Module, step: Step, values: Values) -> tuple[Tensor, int] | None:
    """Covariance of the two terms of a sum or difference, entry by entry, and its equation; None where it is not known."""
    fork, rule = step.fork, method.function_rule(step.target)
    if fork is None or (rule is not functions.add and rule is not functions.subtract):
        return None
    source, operands = values[fork.source], [values[a.name] for a in step.args if isinstance(a, Ref)]
    if not isinstance(source, Gaussian) or operands[0].shape != operands[1].shape:
        return None
    a, b = path(method, module, fork.left, values), path(method, module, fork.right, values)
    if a is None or b is None or any(layer in a.layers for layer in b.layers):
        return None
    both = diagonal(source.var, *((a, b) if len(a.layers) <= len(b.layers) else (b, a)))
    sign = 1 if rule is functions.add else -1
    equation = 41 if len(a.layers) + len(b.layers) <= 2 else 53
    return None if both is None else (sign * step.kwargs.get("alpha", 1) * both, equation)


def path(method: Method, module: nn.Module, steps: Sequence[Step], values: Values) -> Path | None:
    """The Jacobian of a chain of steps; None where one of them is no affine layer and has no gain."""
    layers: list[Layer] = []
    inputs: list[Tensor] = []
    gains: list[Gain] = [1.0]
    for step in steps:
        operation = layer(module, step) or twin_of(step.target, *filled((step.args[1:], step.kwargs), values))
        kind = None if operation is None else row(AFFINE, operation)
        if kind is not None:
            if (
                getattr(watched(method.rules[kind]), "func", None) is not affine
                or hasattr(operation, "scales")
                or operation in layers
            ):
                return None
            layers.append(operation)
            inputs.append(mean_of(values[step.sources[0]]))
            gains.append(1.0)
        else:
            x, y = values[step.sources[0]], values[step.name]
            slope = _function_gain(step, values) if operation is None else gain(method, operation, x, y)
            if slope is None:
                return None
            gains[-1] = gains[-1] * slope
    return Path(layers, gains, inputs)


# --------------------------------------------------------------------------------------------------------------------------- gains


def gain(method: Method, operation: nn.Module, x: Any, y: Any) -> Gain | None:
    """E[∂y/∂x] of each entry, with gates frozen: Cov(y, x) = gain · Var[x] (Eq. 42)."""
    if not isinstance(x, Gaussian) or not isinstance(y, Gaussian):
        return None
    if isinstance(operation, PIECEWISE):
        return _bent(partial(fn.slope, sharpness=method.slope), operation, x)
    if isinstance(operation, SMOOTH):
        return fn.smooth_slope(operation, x)
    if isinstance(operation, nn.modules.batchnorm._BatchNorm):
        channels = (-1, *(1,) * (x.mean.dim() - 2))
        scale = x.mean.new_ones(()) if operation.weight is None else operation.weight
        if not operation.training and operation.running_var is not None:
            return (scale * torch.rsqrt(operation.running_var + operation.eps)).view(channels)
        # Of the batch's own statistics, which the rule has used.
        return sqrt(y.var / torch.where(x.var > 0, x.var, 1.0)) * scale.sign().view(channels)
    return (
        1.0
        if isinstance(operation, nn.Identity | nn.modules.dropout._DropoutNd)
        and not isinstance(operation, _ALPHA)
        else None
    )


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

"""Activations: piecewise-linear ones, where methods differ, and smooth ones, by quadrature."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ... import moments
from ...gaussian import Gaussian
from ...posterior import Layer
from ..base import Call, Method
from ..facts import Rule, Table, on_random
from ..noise import unexplained

PIECEWISE = (nn.ReLU, nn.LeakyReLU, nn.PReLU, nn.ReLU6, nn.Hardtanh, nn.Hardsigmoid, nn.Softshrink)
SMOOTH = (
    *(nn.Tanh, nn.Sigmoid, nn.GELU, nn.SiLU, nn.Mish, nn.Softplus, nn.ELU, nn.SELU, nn.CELU),
    *(nn.LogSigmoid, nn.Softsign, nn.Tanhshrink, nn.Hardswish),
)


def piecewise(module: Layer, dims: int = 2) -> moments.Piecewise:
    """The piecewise-linear function that an activation computes on a tensor of this many dimensions."""
    match module:
        case nn.ReLU():
            return moments.RELU
        case nn.LeakyReLU():
            return moments.Piecewise((0.0,), (module.negative_slope, 1.0))
        case nn.PReLU():
            # One slope for each channel; torch keeps the channels in dimension 1.
            slopes = (
                module.weight.view(-1, *(1,) * (dims - 2)) if module.weight.numel() > 1 else module.weight
            )
            return moments.Piecewise((0.0,), (slopes, 1.0))
        case nn.Hardtanh():  # and ReLU6, its subclass
            return _between(module.min_val, module.max_val)
        case nn.Hardsigmoid():
            return moments.Piecewise((-3.0, 3.0), (0.0, 1 / 6, 0.0))
        case nn.Softshrink():
            return moments.Piecewise((-module.lambd, module.lambd), (1.0, 0.0, 1.0))
    raise TypeError(f"{type(module).__name__} is not piecewise linear.")


def _between(low: float, high: float) -> moments.Piecewise:
    """The identity clipped to [low, high]; an infinite bound is not a knot."""
    if math.isinf(high):
        return moments.RELU if low == 0 else moments.Piecewise((low,), (0.0, 1.0), low)
    if math.isinf(low):
        return moments.Piecewise((high,), (1.0, 0.0), high)
    return moments.Piecewise((low, high), (0.0, 1.0, 0.0), low)


def _pieces(module: nn.Module, x: Gaussian) -> moments.Piecewise:
    return piecewise(module, x.mean.dim())


def _knots(module: nn.Module) -> Sequence[float]:
    return piecewise(module).knots


def _sharpness(method: Method) -> float:
    """The slope of the method's gates; a method that states none has step gates."""
    return math.inf if method.slope is None else method.slope


def _gate_slope(call: Call) -> Tensor | None:
    """The mean slope of the gates (Eq. 25)."""
    if not isinstance(call.x, Gaussian):
        return None
    return moments.gate_slope(call.x, _sharpness(call.method), _pieces(call.module, call.x))


def _step_slope(call: Call) -> Tensor | None:
    """The slope at the mean."""
    return _pieces(call.module, call.x).slope(call.x.mean) if isinstance(call.x, Gaussian) else None


def _mean_slope(call: Call) -> Tensor | None:
    """The mean slope of the activation itself (Eq. 25)."""
    return moments.slope(call.x, _pieces(call.module, call.x)) if isinstance(call.x, Gaussian) else None


@on_random("approximate", 6, gain=_gate_slope, noise=unexplained, knots=_knots)
def gated(method: Method, module: nn.Module, x: Gaussian) -> Gaussian:
    """A gate on the mean chooses the linear piece (VBP; Eq. 6)."""
    return moments.gate(x, _sharpness(method), _pieces(module, x))


@on_random("exact", 8, gain=_mean_slope, noise=unexplained, knots=_knots)
def rectified(method: Method, module: nn.Module, x: Gaussian) -> Gaussian:
    """The exact moments for a normal input (DVI; Eq. 8)."""
    return moments.rectify(x, _pieces(module, x))


@on_random("approximate", 9, gain=_step_slope, noise=unexplained, knots=_knots)
def anchored(method: Method, module: nn.Module, x: Gaussian) -> Gaussian:
    """The gate's mean, with the mean squared deviation of the true activation from it (CVBP; Eq. 9)."""
    return moments.anchored(x, _pieces(module, x))


def piecewise_by(rule: Rule) -> Table:
    """Table entries that give one rule to all piecewise-linear activations."""
    return dict.fromkeys(PIECEWISE, rule)


def _smooth_slope(call: Call) -> Tensor | None:
    return moments.smooth_slope(call.module, call.x) if isinstance(call.x, Gaussian) else None


@on_random("approximate", 16, gain=_smooth_slope, noise=unexplained)
def smooth(method: Method, module: nn.Module, x: Gaussian) -> Gaussian:
    """Any smooth function of each entry, by quadrature (Eq. 16)."""
    return moments.quadrature(module, x)


@on_random("approximate", 16)
def gated_linear(method: Method, module: Layer, x: Gaussian) -> Gaussian:
    """GLU: one half times the sigmoid of the other (Eq. 3, 16)."""
    (a, b), (a_var, b_var) = x.mean.chunk(2, module.dim), x.var.chunk(2, module.dim)
    gate = moments.quadrature(torch.sigmoid, Gaussian.of(b, b_var))
    return moments.product(Gaussian.of(a, a_var), gate)  # type: ignore[return-value]


ACTIVATIONS: Table = {**dict.fromkeys(SMOOTH, smooth), nn.GLU: gated_linear}
"""The activations that all methods share."""

"""Sums of two values with a common source, such as h + g(h): their covariance (Eq. 24).

With fixed gates, each operand is a linear map of their common source x, whose entries are independent:

    Cov(a_j, b_j) = Σ_i A_ji B_ji Var[x_i],    A = D_n M_n … M_1 D_0

M are the mean matrices of affine layers, D the mean slopes of the operations between them. `diagonals.py`
computes the sum if it is cheap: for paths of (0, 0), (0, 1), (0, 2) or (1, 1) affine layers, which are
identities, residual blocks and two projections, and for paths of (1, 2), (0, 3) and (1, 3) convolutions,
which are projections and bottlenecks. The terms of other sums are treated as independent.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional as F

from ..gaussian import Gaussian, mean_of
from ..methods.base import Call, Gain, Method, Value
from ..methods.facts import Rule
from ..posterior import Layer
from .diagonals import Path, diagonal
from .steps import Place, Ref, Step, filled, layer


def corrected(method: Method, rule: Rule, place: Place, out: Value) -> Value:
    """A sum with the covariance of its operands, if it is known (Eq. 24)."""
    known = covariance(method, rule, place, out)
    if known is None:
        return out
    return Gaussian.of(out.mean, F.relu(out.var + 2 * known[0]))


def covariance(method: Method, rule: Rule, place: Place, out: Value) -> tuple[Tensor, int] | None:
    """Elementwise covariance of the two terms of a sum, and its equation; None if it is unknown."""
    step, fork, values = place.step, place.step.fork, place.values
    if fork is None:
        return None
    source, operands = values[fork.source], [values[a.name] for a in step.args if isinstance(a, Ref)]
    if not isinstance(source, Gaussian) or operands[0].shape != operands[1].shape:
        return None
    gains = call_of(method, rule, place, out).gain
    a, b = (path(method, place, branch) for branch in (fork.left, fork.right))
    if not isinstance(gains, tuple) or a is None or b is None or any(layer in a.layers for layer in b.layers):
        return None
    both = diagonal(source.var, *((a, b) if len(a.layers) <= len(b.layers) else (b, a)))
    equation = 24 if len(a.layers) + len(b.layers) <= 2 else 28
    return None if both is None else (gains[0] * gains[1] * both, equation)


def call_of(method: Method, rule: Rule, place: Place, out: Value) -> Call:
    step, values = place.step, place.values
    args: Value = filled(step.args, values)
    return Call(
        method, rule, layer(place.net, step) or step.target, args, filled(step.kwargs, values), out, place
    )


def path(method: Method, place: Place, steps: Sequence[Step]) -> Path | None:
    """The Jacobian of a chain of steps; None if one of them states no gain."""
    layers: list[Layer] = []
    inputs: list[Tensor] = []
    gains: list[Gain] = [1.0]
    for step in steps:
        gain = _gain(method, Place(place.net, step, place.values))
        if isinstance(gain, nn.Module):
            if gain in layers:
                return None
            layers.append(gain)
            inputs.append(mean_of(place.values[step.sources[0]]))
            gains.append(1.0)
        elif isinstance(gain, Tensor | float):
            gains[-1] = gains[-1] * gain
        else:
            return None
    return Path(layers, gains, inputs)


def _gain(method: Method, place: Place) -> Gain | nn.Module | tuple[Gain, Gain] | None:
    """The gain of a step."""
    step, values = place.step, place.values
    child = layer(place.net, step)
    rule = method.function_rule(step.target) if child is None else method.rule(child)
    if rule is None:
        return None
    return call_of(method, rule, place, values[step.name]).gain

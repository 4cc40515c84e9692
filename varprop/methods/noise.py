"""What operations add to the first-order variance of a network: second-order terms and terms shared by
positions.

`vp.correlated` propagates every source of randomness to the output by the Jacobian of the mean. For a rule
whose output is not linear in its random inputs, the functions here give the remainder: independent noise, or
noise that positions have in common.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from ..gaussian import Activation, Gaussian, mean_of, sqrt
from ..posterior import is_random, posteriors
from .base import Call, Value

TOGETHER = 0.5
"""Correlation of the deviations of one feature at two positions that share weights: midway between 0 and 1
(Eq. 31)."""


class Noise:
    """The noise of one pass: its variances, and for each a shift of the mean to differentiate by."""

    def __init__(self, alone: set[nn.Module], shifts: Sequence[Tensor] | None = None) -> None:
        self.alone, self.variances = alone, list[Tensor]()
        self._shifts = None if shifts is None else iter(shifts)

    def shift(self, var: Tensor) -> Tensor:
        """Record a noise variance and return the shift that represents the noise."""
        self.variances.append(var)
        return torch.zeros_like(var) if self._shifts is None else next(self._shifts)

    def added(self, x: Gaussian, var: Tensor) -> Gaussian:
        """x with independent noise of this variance."""
        return Gaussian.of(x.mean + self.shift(var), x.var)

    def inputs(self, x: Sequence[Activation]) -> list[Activation]:
        return [self.added(a, a.var) if isinstance(a, Gaussian) else a for a in x]

    def watch(self, call: Call) -> Value:
        """Add the noise of a call if its rule states one."""
        return call.output if call.rule.noise is None else call.rule.noise(self, call)


class Bound(nn.Module):
    """A wrapper whose `forward` passes a network through a method or a rule, so that `functional_call` can
    replace its weights."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, method: Value, *x: Activation) -> Value:
        return method(self.net, *x)


def unexplained(noise: Noise, call: Call) -> Gaussian:
    """For an elementwise operation: the variance beyond its mean slope, Var[y] - gain² Var[x] (Eq. 30)."""
    x, y = call.x, call.output
    gain = call.gain if isinstance(x, Gaussian) else None
    if not isinstance(gain, Tensor | float):
        return y
    return noise.added(y, F.relu(y.var - gain**2 * x.var))


def of_products(noise: Noise, call: Call) -> Value:
    """For a product of two random values: the product of their deviations (Eq. 30)."""
    a, b, *rest = call.args
    if a is b or not (isinstance(a, Gaussian) and isinstance(b, Gaussian)):
        return call.output
    deviations = [Gaussian.of(torch.zeros_like(g.mean), g.var) for g in (a, b)]
    options = {name: value for name, value in call.options.items() if name != "bias"}
    return noise.added(
        call.output, call.again(*deviations, *(None for _ in rest[:1]), *rest[1:], **options).var
    )


def of_averages(noise: Noise, call: Call) -> Value:
    """For an average over positions, which share weights: their deviations are partly in common (Eq. 31)."""
    x, y = call.x, call.output
    if not isinstance(x, Gaussian):
        return y
    together = call.function(x.std, *call.args[1:], **call.options).square()
    return Gaussian.of(y.mean, torch.lerp(y.var, together, TOGETHER))


def of_weights(noise: Noise, call: Call) -> Value:
    """For a layer with random weights: deviations of its weights times deviations of its input (Eq. 30).

    A layer that is applied once per example has independent outputs, and all of its variance is noise.
    """
    layer, x, y = call.module, call.x, call.output
    if layer in noise.alone:
        return noise.added(y, y.var if isinstance(x, Tensor) else call.again(sqrt(x.second_moment)).var)
    if isinstance(x, Tensor) or not is_random(layer):
        return y
    apart = call.again(x.std).var - call.again(torch.zeros_like(x.mean)).var
    if hasattr(layer, "scales"):
        return noise.added(y, apart)
    return _shared(noise, call, noise.added(y, (1 - TOGETHER) * apart))


def _shared(noise: Noise, call: Call, y: Gaussian) -> Gaussian:
    """The part of the second-order term that positions have in common because they share weights (Eq. 31)."""
    layer = call.module
    weight = dict(posteriors(layer))["weight"]
    shift = {"net.weight": noise.shift(TOGETHER * weight.var.expand_as(weight.mean))}
    if isinstance(layer.bias, Tensor):
        shift["net.bias"] = torch.zeros_like(layer.bias)
    common = functional_call(Bound(layer), shift, (lambda _, x: call.again(x), call.x.std))
    return Gaussian.of(y.mean + mean_of(common), y.var)

"""What operations add to the first-order variance of a network: second-order terms and terms shared by
positions.

`vp.correlated` propagates every source of randomness to the output by the Jacobian of the mean. For a rule
whose output is not linear in its random inputs, the functions here give the remainder: independent noise, or
noise that positions have in common.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from ..gaussian import Gaussian, mean_of, sqrt
from ..moments import per_channel
from ..posterior import is_random, posteriors
from .base import Call, Value
from .slopes import bias_slopes, taken_apart, weight_slopes

TOGETHER = 0.5
"""Correlation of the deviations of one feature at two positions that share weights: midway between 0 and 1
(Eq. 31)."""

BLOCK = 2**20
"""How many gradients by weights to form at once, so that they stay in a processor's cache."""


@dataclass(frozen=True)
class Source:
    """A source of randomness: how it reaches the output of an operation, where its effect is measured."""

    shift: int
    """The number of the operation's shift."""
    var: Tensor
    """The variance of its entries, which are independent."""
    layer: nn.Module | None = None
    """The layer whose weights it moves; None for noise in the entries of the output themselves."""
    part: str = "weight"
    """Which of the layer's sources it is: its weights, its bias, or the deviations of its weights times those
    of its input."""
    x: Tensor | None = None
    """What the weights are multiplied by; None for a bias."""

    def slopes(self, shift: Tensor, n: int) -> Tensor:
        """The gradients by a layer's weights in each of n examples, from those by the shift."""
        if self.x is None:
            return bias_slopes(self.layer, shift, n)
        return weight_slopes(self.layer, self.x, shift, n)

    def part_of(self, n: int, start: int, stop: int) -> Source:
        """The source in some of n examples."""
        return self if self.x is None else replace(self, x=examples(self.x, n, start, stop))


def examples(t: Tensor, n: int, start: int, stop: int) -> Tensor:
    """Some of n examples, which lie one after the other."""
    rows = len(t) // n
    return t[start * rows : stop * rows]


def variances(uses: Sequence[Source], shifts: Sequence[Tensor], n: int) -> Tensor:
    """What a source adds to the variance of an output, in each of n examples.

    :param uses: of one layer's weights, or one source of noise.
    :param shifts: the gradients of the output by the shift of each.
    """
    first, g = uses[0], shifts[0]
    if first.layer is None:
        return torch.linalg.vecdot(g.reshape(n, -1).square(), first.var.expand_as(g).reshape(n, -1))
    if first.part == "deviations":
        return torch.linalg.vecdot(first.slopes(g, n).flatten(1).square(), first.var)
    found, at_once = [], max(1, BLOCK // first.var.numel())
    for start in range(0, n, at_once):
        stop = min(n, start + at_once)
        slopes: Tensor = reduce(
            torch.add,
            (
                use.part_of(n, start, stop).slopes(examples(shift, n, start, stop), stop - start)
                for use, shift in zip(uses, shifts, strict=True)
            ),
        )
        found.append(slopes.flatten(1).square() @ first.var.flatten())
    return torch.cat(found)


def _source(facts: tuple[int, nn.Module | None, str], var: Tensor, x: Tensor | None = None) -> Source:
    shift, layer, part = facts
    return Source(shift, var, layer, part, x)


pytree.register_pytree_node(
    Source,
    lambda s: ([s.var] if s.x is None else [s.var, s.x], (s.shift, s.layer, s.part)),
    lambda tensors, facts: _source(facts, *tensors),
)


@dataclass(frozen=True)
class Uses:
    """How the layers of a network are used in a pass."""

    alone: frozenset[nn.Module]
    """Linear layers applied once per example: no two outputs share weights, so their noise is independent."""
    shared: frozenset[nn.Module]
    """Other layers whose weights are used by the layer alone."""


class Noise:
    """The sources of randomness in one pass, and the means that they shift.

    :param n: how many examples the pass has.
    :param shifts: to add to these means, for torch.func to differentiate by.
    :param recorded: whether autograd records the pass, to differentiate by the means themselves.
    :param factor: of the variance of an average over positions, from all that came before it.
    """

    def __init__(
        self,
        uses: Uses,
        n: int = 1,
        shifts: Sequence[Tensor] | None = None,
        recorded: bool = False,
        factor: Callable[[Noise, Gaussian], Tensor] | None = None,
    ) -> None:
        self.uses, self.n = uses, n
        self.means: list[Tensor] = []
        self.averages: list[Gaussian] = []
        """Averages over positions, with the variances that independent positions would give."""
        self.sources: list[Source] = []
        self._shifts = None if shifts is None else iter(shifts)
        self._recorded = recorded
        self._factor = factor

    def averaged(self, y: Gaussian) -> Gaussian:
        """An average with its variance times the factor that correlations between its positions give."""
        self.averages.append(y)
        return y if self._factor is None else Gaussian.of(y.mean, y.var * self._factor(self, y))

    def shifted(self, y: Gaussian) -> Gaussian:
        """y with a mean to differentiate by, which the sources that are added next shift."""
        mean = y.mean if self._shifts is None else y.mean + next(self._shifts)
        if self._recorded and not mean.requires_grad:
            mean = mean.detach().requires_grad_()
        self.means.append(mean)
        return Gaussian.of(mean, y.var)

    def add(
        self, var: Tensor, layer: nn.Module | None = None, part: str = "weight", x: Tensor | None = None
    ) -> None:
        """Add a source that acts by the last shift."""
        self.sources.append(Source(len(self.means) - 1, var, layer, part, x))

    def added(self, x: Gaussian, var: Tensor) -> Gaussian:
        """x with independent noise of this variance."""
        x = self.shifted(x)
        self.add(var)
        return x

    def inputs(self, x: Value) -> Value:
        """Inputs of a network, with the variance of the random ones as noise."""

        def added(a: Value) -> Value:
            return self.added(a, a.var) if isinstance(a, Gaussian) else a

        return pytree.tree_map(added, x, is_leaf=lambda a: isinstance(a, Gaussian))

    def watch(self, call: Call) -> Value:
        """Add the noise of a call if its rule states one.

        Slopes are taken of the means with the variances held: how a variance moves a later mean is of second
        order, and following it would make a backward pass much dearer.
        """
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self._recorded):
            y = call.output if call.rule.noise is None else call.rule.noise(self, call)
        return Gaussian.of(y.mean, _held(y.var)) if isinstance(y, Gaussian) else y


def _held(t: Tensor) -> Tensor:
    """A constant of the innermost derivative, which outer ones, such as those of training, still see."""
    level: int | None = torch._C._functorch.maybe_current_level()
    return t.detach() if level is None else torch._C._functorch._unwrap_for_grad(t, level)


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
    """For an average over positions, which share weights: its variance with their correlations (Eq. 31)."""
    y = call.output
    return noise.averaged(y) if isinstance(call.x, Gaussian) else y


def of_weights(noise: Noise, call: Call) -> Value:
    """For a layer with random weights: the weights, and their deviations times those of its input (Eq. 30).

    A layer that is applied once per example has independent outputs, and all of its variance is noise.
    """
    layer, x, y = call.module, call.x, call.output
    if layer in noise.uses.alone:
        return noise.added(y, y.var if isinstance(x, Tensor) else call.again(sqrt(x.second_moment)).var)
    if not is_random(layer):
        return y
    if layer not in noise.uses.shared:
        return y if isinstance(x, Tensor) else noise.added(y, _independent(call, x.std))
    y = noise.shifted(y)
    q = dict(posteriors(layer))
    weight = q["weight"].var.expand_as(q["weight"].mean)
    noise.add(weight, layer, "weight", mean_of(x))
    if "bias" in q:
        noise.add(q["bias"].var, layer, "bias")
    if isinstance(x, Gaussian):
        apart = taken_apart(layer, x.std, noise.n)
        noise.add(_independent(call, sqrt((1 - TOGETHER) * x.var + TOGETHER * apart.rest)))
        noise.add(TOGETHER * apart.variances(layer, weight), layer, "deviations", apart.positions)
    return y


def _independent(call: Call, std: Tensor) -> Tensor:
    """The variance of the weights' deviations times those of the input, if positions are independent."""
    x, layer = call.x, call.module
    var: Tensor = call.again(std).var
    if hasattr(layer, "scales"):
        return var - call.again(torch.zeros_like(x.mean)).var
    q = dict(posteriors(layer))
    return var - per_channel(q["bias"].var, q["weight"].mean) if "bias" in q else var

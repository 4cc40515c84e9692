"""The mean of a network as a linear function of every source of randomness in it (Eq. 29).

`recorded` takes it from one pass that autograd records. `followed` takes it by torch.func, where the result
is to be differentiated itself, as in training, or where a network is transformed by `vmap`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import vjp, vmap

from .gaussian import Gaussian
from .methods.base import Value
from .methods.noise import Noise, Source, Uses, variances

Pass = Callable[[Mapping[str, Tensor], Noise], Gaussian]
"""A pass of a network with these weights in the place of its own, and with this noise."""
Gradients = Callable[[Tensor], tuple[Sequence[Tensor], Sequence[Tensor | None]]]


@dataclass(frozen=True)
class Tangent:
    """A mean of n examples near the means of all sources."""

    n: int
    mean: Tensor
    gradients: Gradients
    """Of a weighted sum of the entries, by the weights that are followed and by the shifts."""
    weights: Sequence[Tensor]
    """Variances of the weights that are followed by autograd; with any, n is 1."""
    sources: Sequence[Source]
    together: bool
    """Whether the variances of several sums can be computed at once, by `vmap`."""
    size: int = 0
    """The largest number of entries of a shift."""

    def variances(self, rows: Tensor) -> Tensor:
        """Of weighted sums of the entries, given as (sums, n, entries), for each example and sum."""
        if self.together:
            return vmap(self.variance)(rows).mT
        return torch.stack([self.variance(row) for row in rows], 1)

    def variance(self, row: Tensor) -> Tensor:
        """Of one weighted sum, for each example."""
        by_weights, by_shifts = self.gradients(row.reshape(self.mean.shape))
        parts = [
            (slope.flatten().square() @ var.flatten()).unsqueeze(0)
            for slope, var in zip(by_weights, self.weights, strict=True)
        ]
        for uses in _grouped(self.sources):
            reached = [use for use in uses if by_shifts[use.shift] is not None]
            if reached:
                slopes = [cast(Tensor, by_shifts[use.shift]) for use in reached]
                parts.append(variances(reached, slopes, self.n))
        return sum(parts, row.new_zeros(self.n))

    def factor(self, independent: Tensor) -> Tensor:
        """The variance of an average over positions, divided by that of independent positions (Eq. 31)."""
        by_example = independent.reshape(self.n, -1)
        rows = signs(by_example).unsqueeze(1).expand(-1, self.n, -1)
        var, total = self.variances(rows).mean(1), by_example.sum(1)
        factor = torch.where(total > 0, var / torch.where(total > 0, total, 1.0), 1.0)
        if self.n == 1:
            return factor[0]
        return factor.repeat_interleave(len(independent) // self.n).view(-1, *(1,) * (independent.dim() - 1))


def recorded(run: Pass, uses: Uses, n: int, net: nn.Module) -> Tangent:
    """The factor of an average is computed where the pass meets it."""
    constant = {name: nn.Parameter(p.detach(), requires_grad=False) for name, p in net.named_parameters()}

    def tangent(noise: Noise, y: Gaussian) -> Tangent:
        size = max((mean.numel() for mean in noise.means), default=0)
        slopes = partial(gradients, y.mean, noise.means)
        return Tangent(n, y.mean, slopes, (), noise.sources, together=False, size=size)

    with torch.enable_grad():
        noise = Noise(uses, n, recorded=True, factor=lambda noise, y: tangent(noise, y).factor(y.var))
        return tangent(noise, run(constant, noise))


def gradients(
    mean: Tensor, shifted: Sequence[Tensor], row: Tensor
) -> tuple[tuple[()], Sequence[Tensor | None]]:
    """Of a weighted sum of a recorded mean, by the means that are shifted; None for one that it is not of."""
    if not mean.requires_grad:
        return (), [None] * len(shifted)
    with torch.no_grad():
        return (), torch.autograd.grad(mean, list(shifted), row, retain_graph=True, allow_unused=True)


def followed(
    run: Pass, uses: Uses, n: int, weights: Mapping[str, Gaussian], shifts: Sequence[Tensor]
) -> Tangent:
    """The factors of averages take a pass of their own.

    :param weights: those that no rule states as a source.
    :param shifts: zeros, shaped like the means that are shifted.
    """

    def tangents(factors: Sequence[Tensor] | None) -> tuple[Tangent, Iterator[Tensor]]:
        def means(weights: Mapping[str, Tensor], shifts: Sequence[Tensor]) -> Value:
            known = None if factors is None else iter(factors)
            noise = Noise(uses, n, shifts, factor=None if known is None else lambda *_: next(known))
            f = run(weights, noise)
            return [f.mean, *(y.mean for y in noise.averages)], (noise.sources, noise.averages)

        def slopes(place: int, row: Tensor) -> Value:
            by_weights, by_shifts = pulled(
                [row if i == place else torch.zeros_like(t) for i, t in enumerate(found)]
            )
            return list(by_weights.values()), by_shifts

        at = {name: w.mean for name, w in weights.items()}
        taken: Value = vjp(means, at, list(shifts), has_aux=True)
        found, pulled, (sources, averages) = taken
        of_weights = [w.var for w in weights.values()]
        every = [
            Tangent(n, m, partial(slopes, i), of_weights, sources, together=True) for i, m in enumerate(found)
        ]
        return every[0], (t.factor(y.var) for t, y in zip(every[1:], averages, strict=True))

    first, factors = tangents(None)
    known = list(factors)
    return tangents(known)[0] if known else first


def signs(y: Tensor, rows: int = 2) -> Tensor:
    """Rows of random signs for the entries of an example, the same in every call."""
    # NumPy's, because torch draws nothing under `vmap`.
    return torch.tensor(np.random.default_rng(0).choice([-1.0, 1.0], (rows, y.shape[-1]))).to(y)


def _grouped(sources: Sequence[Source]) -> Iterator[list[Source]]:
    """All uses of a layer's weights together, and other sources one by one."""
    groups: dict[Hashable, list[Source]] = {}
    for i, source in enumerate(sources):
        shared = source.layer is not None and source.part != "deviations"
        groups.setdefault((source.layer, source.part) if shared else i, []).append(source)
    yield from groups.values()

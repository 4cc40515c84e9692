"""Piecewise-linear functions: what VBP's gates and the rectified normal are moments of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class Piecewise:
    """A continuous piecewise-linear function.

    It has slope `slopes[k]` to the left of `knots[k]`, slope `slopes[-1]` beyond the last knot, and the value
    `level` at the first knot.

    >>> Piecewise(knots=(-1, 1), slopes=(0, 1, 0), level=-1)(torch.tensor([-3.0, 0.5, 3.0]))     # hard tanh
    tensor([-1.0000,  0.5000,  1.0000])
    """

    knots: Sequence[float]
    slopes: Sequence[float | Tensor]
    level: float = 0.0

    @property
    def bends(self) -> list[tuple[float, float | Tensor]]:
        """Each knot with the change of slope there."""
        changes = [after - before for before, after in pairwise(self.slopes)]
        return list(zip(self.knots, changes, strict=True))

    def __call__(self, x: Tensor) -> Tensor:
        first = self.slopes[0] * (x - self.knots[0]) + self.level
        return first + sum(bend * F.relu(x - knot) for knot, bend in self.bends)

    def slope(self, x: Tensor) -> Tensor:
        steps = [bend * (x > knot).to(x.dtype) for knot, bend in self.bends]
        return self.slopes[0] + sum(steps[1:], steps[0])

    def lines(self, x: Tensor) -> Tensor:
        """The lines through all pieces, evaluated at x and stacked in front."""
        lines = [self.slopes[0] * (x - self.knots[0]) + self.level]
        for knot, bend in self.bends:
            lines.append(lines[-1] + bend * (x - knot))
        return torch.stack(lines)


RELU = Piecewise(knots=(0.0,), slopes=(0.0, 1.0))


def step(t: Tensor, m: Tensor) -> Tensor:
    """t where m is positive, and zero elsewhere; the backward pass of ReLU, in one pass over memory."""
    return torch.ops.aten.threshold_backward(t, m.detach(), 0)

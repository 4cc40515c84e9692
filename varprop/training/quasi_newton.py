"""L-BFGS for objectives without noise, on all rows: for one network, or for many at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer

ITERATIONS = 20
"""Evaluations of an epoch, after which the noise is updated and the model validated."""
MEMORY = 10
"""Steps from which the curvature is estimated."""
WARM_UP, RATE = 30, 0.03
"""Steps of Adam before the first round of a training run, and their rate."""
DECREASE = 1e-4
"""The share of the slope by which an accepted step must lower the loss (Armijo)."""


Closure: TypeAlias = Callable[[], Tensor]
"""Computes the loss on all data and its gradients."""


class LBFGS(Optimizer):
    """L-BFGS as a torch optimiser: one `step` is a round of evaluations, each a trial of a line search.

    The closure is that of `torch.optim.LBFGS`: it computes the loss on all data and its gradients.

    :param iterations: evaluations of one step.
    :param warm_up: steps of Adam before the first one. From random weights, the first directions of L-BFGS
        are poor, and noise that varies is learned where the mean should be.

    >>> w = nn.Parameter(torch.tensor([3.0, -2.0]))
    >>> optimiser = LBFGS([w])
    >>> def closure():
    ...     optimiser.zero_grad()
    ...     loss = (w - torch.tensor([1.0, 5.0])).square().sum()
    ...     loss.backward()
    ...     return loss
    >>> _ = optimiser.step(closure)
    >>> w.round(decimals=4).tolist()
    [1.0, 5.0]
    """

    def __init__(self, params: Iterable[Tensor], iterations: int = ITERATIONS, warm_up: int = 0) -> None:
        self.warm_up = warm_up
        super().__init__(params, {"lr": 1.0, "iterations": iterations})

    def step(self, closure: Closure | None = None) -> Tensor:  # type: ignore[override]
        """A round from where the parameters are; returns the loss where they end."""
        if closure is None:
            raise ValueError(
                "LBFGS: step needs a closure that computes the loss on all data and its gradients."
            )
        parameters = [p for group in self.param_groups for p in group["params"]]
        rounds = Rounds(parameters, 1, self.param_groups[0]["iterations"], self.warm_up)
        rounds.memory = self.state[parameters[0]]
        return rounds.step(closure)[0]


class Rounds:
    """L-BFGS for the stacked parameters of several members, whose closure returns a loss for each.

    One evaluation tries a point for every member: each has its own curvature and line search, and none waits
    for another. It is no torch optimiser, because making the first of these takes seconds in any process.
    """

    def __init__(
        self, parameters: Sequence[Tensor], members: int, iterations: int = ITERATIONS, warm_up: int = 0
    ) -> None:
        self.parameters, self.members, self.iterations = parameters, members, iterations
        self.warm_up = warm_up
        self.memory: dict[str, Tensor] = {}

    @torch.no_grad()
    def step(self, closure: Closure) -> Tensor:
        """A round from where the parameters are; returns the losses where they end."""
        if not self.memory:
            self._warm_up(closure)
        start = _Point(self._read(), *self._evaluate(closure))
        search = _Search(start, _Curvature(self.memory, start.x))
        for _ in range(self.iterations):
            trial = search.trial
            self._write(trial)
            search.judge(_Point(trial, *self._evaluate(closure)))
        if not bool(search.accepted.all()):
            # The gradients and totals that a caller reads are those of the point where the round ends.
            self._write(search.best.x)
            self._evaluate(closure)
        return search.best.loss

    def _warm_up(self, closure: Closure) -> None:
        """Steps of Adam (Kingma and Ba 2015)."""
        x = self._read()
        mean, square = torch.zeros_like(x), torch.zeros_like(x)
        for k in range(1, self.warm_up + 1):
            _, gradient = self._evaluate(closure)
            mean.lerp_(gradient, 0.1)
            square.lerp_(gradient.square(), 0.001)
            x -= RATE / (1 - 0.9**k) * mean / ((square / (1 - 0.999**k)).sqrt() + 1e-8)
            self._write(x)

    def _rows(self, values: Iterable[Tensor]) -> Tensor:
        """A row for each member."""
        return torch.cat([value.detach().reshape(self.members, -1) for value in values], 1)

    def _read(self) -> Tensor:
        return self._rows(self.parameters)

    def _write(self, x: Tensor) -> None:
        parts = x.split([p.numel() // self.members for p in self.parameters], 1)
        for p, part in zip(self.parameters, parts, strict=True):
            p.copy_(part.reshape(p.shape))

    def _evaluate(self, closure: Closure) -> tuple[Tensor, Tensor]:
        """The loss of each member and its gradient."""
        with torch.enable_grad():
            loss = closure().detach().reshape(-1).double()
        return loss, self._rows(torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters)


def take_step(kind: Optimizer | Rounds, optimiser: Optimizer | Rounds, closure: Closure) -> None:
    """A step on a batch: an optimiser with a line search evaluates the closure itself, others once before.

    :param kind: the optimiser, which Fabric may have wrapped in `optimiser`.
    """
    if isinstance(kind, Rounds | LBFGS | torch.optim.LBFGS):
        optimiser.step(closure)  # type: ignore[arg-type]
    else:
        closure()
        optimiser.step()  # type: ignore[call-arg]


@dataclass(frozen=True)
class _Point:
    """Where the members are: a row of parameters and of the gradient, and a loss, for each."""

    x: Tensor
    loss: Tensor
    gradient: Tensor

    def where(self, chosen: Tensor, other: _Point) -> _Point:
        """This point for the chosen members, another for the rest."""
        row = chosen.unsqueeze(1)
        return _Point(
            torch.where(row, self.x, other.x),
            torch.where(chosen, self.loss, other.loss),
            torch.where(row, self.gradient, other.gradient),
        )


class _Search:
    """The line search of every member, by backtracking with a quadratic through what is known."""

    def __init__(self, start: _Point, curvature: _Curvature) -> None:
        self.best, self.curvature = start, curvature
        self.accepted = torch.ones_like(start.loss, dtype=torch.bool)
        self.direction, self.slope, self.length = start.x, start.loss, start.loss
        self._turn(self.accepted)

    @property
    def trial(self) -> Tensor:
        """The next point to evaluate."""
        return self.best.x + self.length.unsqueeze(1).to(self.best.x) * self.direction

    def judge(self, tried: _Point) -> None:
        """Accept the trial of each member whose loss has fallen enough; shorten the steps of the others."""
        best = self.best
        finite = tried.loss.isfinite() & tried.gradient.isfinite().all(1)
        rounding = 4 * torch.finfo(best.x.dtype).eps * best.loss.abs()
        self.accepted = finite & (tried.loss <= best.loss + DECREASE * self.length * self.slope + rounding)
        self.curvature.learn(self.accepted, tried.x - best.x, tried.gradient - best.gradient)
        self.best = tried.where(self.accepted, best)
        excess = tried.loss - best.loss - self.length * self.slope
        shortest = -self.slope * self.length.square() / (2 * excess)
        shorter = torch.where(finite, shortest.nan_to_num(), 0.0).clamp(0.1 * self.length, 0.5 * self.length)
        lost = ~self.accepted & (shorter < 1e-6)
        self.curvature.forget(lost)
        self.length = shorter
        self._turn(self.accepted | lost)

    def _turn(self, turning: Tensor) -> None:
        """A new direction, and the length of its first trial, for some members."""
        direction, known = self.curvature.direction(self.best.gradient)
        norm = self.best.gradient.double().norm(dim=1)
        length = torch.where(known, 1.0, (1 / norm).clamp(max=1.0))
        self.direction = torch.where(turning.unsqueeze(1), direction, self.direction)
        self.slope = torch.linalg.vecdot(self.direction, self.best.gradient).double()
        self.length = torch.where(turning, length, self.length)


class _Curvature:
    """The last steps of each member and the changes of the gradient along them, kept between rounds."""

    def __init__(self, memory: dict[str, Tensor], like: Tensor) -> None:
        if not memory:
            members, n = like.shape
            memory["pairs"] = like.new_zeros(members, 2 * MEMORY, n)
            memory["products"] = like.new_zeros(members, 2 * MEMORY, MEMORY)
            # Whole numbers as floating-point ones: an optimiser turns its state into these as it is loaded.
            memory["newest"] = like.new_zeros(members)
        self.memory = memory
        self.members, self.places = (torch.arange(n, device=like.device) for n in (len(like), MEMORY))

    @property
    def newest(self) -> Tensor:
        """The place of the last pair of each member."""
        return self.memory["newest"].long()

    def learn(self, members: Tensor, step: Tensor, change: Tensor) -> None:
        """Put a step of some members in the place of their oldest, unless the loss curves downwards there."""
        along, square = (torch.linalg.vecdot(a, change) for a in (step, change))
        keep = members & (along > 1e-10 * square)
        newest = torch.where(keep, (self.newest + 1) % MEMORY, self.newest)
        for place, new in ((newest, step), (newest + MEMORY, change)):
            at = self.members, place
            self.memory["pairs"][at] = torch.where(keep.unsqueeze(1), new, self.memory["pairs"][at])
        self.memory["newest"].copy_(newest)

    def forget(self, members: Tensor) -> None:
        if bool(members.any()):
            for name in ("pairs", "products"):
                self.memory[name].masked_fill_(members.view(-1, 1, 1), 0.0)

    def direction(self, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """-H g by the compact form of Byrd, Nocedal and Schnabel (1994), and which members know curvature.

        With the steps S and changes Y as rows, R the upper triangle of S Y', D its diagonal and c the newest
        ratio s'y / y'y: H = c I + [S; c Y]' [[R^-T (D + c Y Y') R^-1, -R^-T], [-R^-1, 0]] [S; c Y].
        """
        pairs, products, newest = self.memory["pairs"], self.memory["products"], self.newest
        # Most products are known; a pass over the long rows finds those with the newest change.
        change = pairs[self.members, newest + MEMORY]
        found = (torch.stack([change, gradient], 1) @ pairs.mT).mT
        products[self.members, :, newest] = found[:, :, 0]
        products[self.members, newest + MEMORY] = found[:, MEMORY:, 0]
        in_time = (newest.unsqueeze(1) + 1 + self.places) % MEMORY
        rows = torch.cat([in_time, in_time + MEMORY], 1)
        products = products.gather(1, rows.unsqueeze(2).expand(-1, -1, MEMORY))
        products = products.gather(2, in_time.unsqueeze(1).expand(-1, 2 * MEMORY, -1))
        sy, yy = products.double().split(MEMORY, 1)
        sg, yg = found[:, :, 1:].double().gather(1, rows.unsqueeze(2)).split(MEMORY, 1)
        along = sy.diagonal(dim1=1, dim2=2)
        known = along[:, -1] > 0
        scale = torch.where(known, along[:, -1] / yy[:, -1, -1], 1.0).view(-1, 1, 1)
        # A row of zeros stands for a step that is not known; a 1 on the diagonal leaves it out.
        upper = sy.triu() + torch.diag_embed((along <= 0).double())
        u = torch.linalg.solve_triangular(upper, sg, upper=True)
        inner = along.unsqueeze(2) * u + scale * (yy @ u - yg)
        weights = torch.cat([torch.linalg.solve_triangular(upper.mT, inner, upper=False), -scale * u], 1)
        weights = torch.zeros_like(weights).scatter(1, rows.unsqueeze(2), weights)
        towards = scale.to(gradient).squeeze(1) * gradient + (weights.to(pairs).mT @ pairs).squeeze(1)
        return -towards, known

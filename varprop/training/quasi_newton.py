"""L-BFGS for objectives without noise: SciPy's optimiser on all rows, for one network or many together."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from threading import Condition

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

ITERATIONS = 20
"""Iterations of an epoch, after which the noise is updated and the model validated."""
MEMORY = 10
"""Steps from which the curvature is estimated."""
FORBIDDEN = 1e50
"""The loss of a point where it is not finite, which a line search then avoids."""

Evaluation = tuple[np.ndarray, np.ndarray]
"""The loss of each member, and its gradient as a row."""


class LBFGS(Optimizer):
    """SciPy's L-BFGS-B as a torch optimiser: one `step` is a round of iterations with line searches.

    The closure computes the loss on all data and its gradients, as for `torch.optim.LBFGS`. With `members`,
    parameters are stacked in front and the closure returns a loss for each member: every member has its own
    line search, and one evaluation answers all of them.

    :param iterations: of one step, each about one evaluation.

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

    def __init__(
        self, params: Iterable[Tensor], members: int | None = None, iterations: int = ITERATIONS
    ) -> None:
        self.members = members
        super().__init__(params, {"lr": 1.0, "iterations": iterations})

    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor:  # type: ignore[override]
        """A round of iterations from where the parameters are; returns the loss where they end."""
        if closure is None:
            raise ValueError(
                "LBFGS: step needs a closure that computes the loss on all data and its gradients."
            )
        iterations = self.param_groups[0]["iterations"]
        evaluations = _Evaluations(lambda points: self._evaluate(closure, points), self._read(lambda p: p))
        self._write(evaluations.minimise(iterations))
        with torch.enable_grad():
            return closure()  # the gradients and totals that a caller reads are those of the last point

    @property
    def _parameters(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def _read(self, part: Callable[[Tensor], Tensor | None]) -> np.ndarray:
        """A row for each member, in double precision."""
        rows = []
        for p in self._parameters:
            value = part(p)
            value = torch.zeros_like(p) if value is None else value
            rows.append(value.detach().reshape(self.members or 1, -1).to("cpu", torch.float64))
        return torch.cat(rows, 1).numpy()

    @torch.no_grad()
    def _write(self, points: np.ndarray) -> None:
        sizes = [p.numel() // (self.members or 1) for p in self._parameters]
        for p, part in zip(self._parameters, torch.from_numpy(points).split(sizes, 1), strict=True):
            p.copy_(part.reshape(p.shape))

    def _evaluate(self, closure: Callable[[], Tensor], points: np.ndarray) -> Evaluation:
        self._write(points)
        with torch.enable_grad():
            losses = closure().detach().reshape(-1).to("cpu", torch.float64).numpy()
        gradients = self._read(lambda p: p.grad)
        wrong = ~(np.isfinite(losses) & np.isfinite(gradients).all(1))
        return np.where(wrong, FORBIDDEN, losses), np.where(wrong[:, None], 0.0, gradients)


def take_step(kind: Optimizer, optimiser: Optimizer, closure: Callable[[], Tensor]) -> None:
    """A step on a batch: an optimiser with a line search evaluates the closure itself, others once before.

    :param kind: the optimiser, which Fabric may have wrapped in `optimiser`.
    """
    if isinstance(kind, LBFGS | torch.optim.LBFGS):
        optimiser.step(closure)  # type: ignore[arg-type]
    else:
        closure()
        optimiser.step()


class _Evaluations:
    """The points of several optimisers, each in a thread, evaluated together.

    A member that asks for the loss at a point waits until every other member that still runs has asked too;
    then one evaluation answers all of them. No member waits for the end of another's line search.
    """

    def __init__(self, evaluate: Callable[[np.ndarray], Evaluation], start: np.ndarray) -> None:
        self.evaluate, self.points = evaluate, start.copy()
        self.running, self.asking = set(range(len(start))), set[int]()
        self.changed, self.count = Condition(), 0
        self.answer: Evaluation = (np.zeros(0), np.zeros((0, 0)))
        self.error: BaseException | None = None

    def minimise(self, iterations: int) -> np.ndarray:
        """The points where the members end."""
        if len(self.points) == 1:
            return np.stack([self._member(0, iterations)])
        with ThreadPoolExecutor(len(self.points)) as threads:
            members = [threads.submit(self._member, k, iterations) for k in range(len(self.points))]
            try:
                return np.stack([member.result() for member in members])
            except BaseException as error:
                self._fail(error)
                raise

    def _member(self, k: int, iterations: int) -> np.ndarray:
        from scipy.optimize import minimize

        options = {
            "maxiter": iterations,
            "maxfun": 20 * iterations,
            "maxcor": MEMORY,
            "ftol": 0.0,
            "gtol": 0.0,
        }
        try:
            start = self.points[k].copy()
            end: np.ndarray = minimize(self._ask, start, (k,), method="L-BFGS-B", jac=True, options=options).x
        finally:
            with self.changed:
                self.running.discard(k)
                self._answer_if_all_asked()
        return end

    def _ask(self, point: np.ndarray, k: int) -> tuple[float, np.ndarray]:
        with self.changed:
            self.points[k] = point
            self.asking.add(k)
            mine = self.count
            self._answer_if_all_asked()
            self.changed.wait_for(lambda: self.count > mine or self.error is not None)
            if self.error is not None:
                raise self.error
            losses, gradients = self.answer
            return float(losses[k]), gradients[k]

    def _answer_if_all_asked(self) -> None:
        if self.asking and self.asking >= self.running:
            try:
                self.answer = self.evaluate(self.points)
            except BaseException as error:
                self._fail(error)
                raise
            self.asking.clear()
            self.count += 1
            self.changed.notify_all()

    def _fail(self, error: BaseException) -> None:
        with self.changed:
            self.error = error
            self.changed.notify_all()

"""The step of `fit` as recorded operations: small networks spend most of a step on Python and on autograd."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules
from torch.optim.lr_scheduler import LRScheduler

from ..methods.keys import is_foreign
from ..objectives import ELBO
from ..priors import Tempered
from . import batches
from .batches import Batch
from .epochs import step
from .tape import NotRecordableError, Program, record

if TYPE_CHECKING:
    from lightning_fabric import Fabric

FIRST = 30
"""Steps before one is recorded, which takes about as long as so many."""
MEMORY = 64e6
"""Bytes of all values in a step, above which the operations take nearly all of its time."""


class Recorded:
    """The gradients of batches that are like the first one, by the operations of its step.

    They are those of autograd, bit for bit.
    """

    def __init__(self, elbo: ELBO) -> None:
        self.elbo = elbo
        self.parameters = [p for p in elbo.parameters() if p.requires_grad]
        self.buffers = list(elbo.buffers())
        self.state: list[Tensor] = [*elbo.parameters(), *self.buffers]
        self.form: tuple[object, ...] = ()
        """Of the first batch."""
        self.steps = 0
        """Of batches like it."""
        self.program: Program | None = None
        """(state, kl_weight, batch) -> averages and gradients."""
        self.trained: list[nn.Parameter] = []
        """The parameters that the loss depends on."""

    @torch.no_grad()
    def gradients(self, kl_weight: float, batch: Batch) -> dict[str, Tensor] | None:
        """Add a batch's gradients and return its averages; None if this batch takes a step of its own."""
        form = batches.form(batch)
        self.form = self.form or form
        if form != self.form:
            return None
        self.steps += 1
        weight = self.parameters[0].new_tensor(kl_weight)
        if self.steps == FIRST + 1:
            self.program = self._record(weight, batch)
        if self.program is None:
            return None
        averages, gradients = self.program(self.state, weight, batch)
        for parameter, gradient in zip(self.trained, gradients, strict=True):
            if parameter.grad is None:
                # A copy, because two parameters may have one tensor as their gradient, and other strides.
                parameter.grad = torch.empty_like(parameter).copy_(gradient)
            else:
                parameter.grad += gradient
        return averages

    def _record(self, kl_weight: Tensor, batch: Batch) -> Program | None:
        def gradient(
            state: Sequence[Tensor], weight: Tensor, batch: Batch
        ) -> tuple[dict[str, Tensor], Sequence[Tensor]]:
            loss, averages = step(self.elbo, weight, *batch)
            found = torch.autograd.grad(loss, self.parameters, allow_unused=True)
            known = [(p, g) for p, g in zip(self.parameters, found, strict=True) if g is not None]
            self.trained = [p for p, _ in known]
            return averages, [g for _, g in known]

        # Recording runs the step once, which must move neither running statistics nor the random state.
        before = [buffer.clone() for buffer in self.buffers]
        try:
            with torch.random.fork_rng([]), torch.enable_grad():
                return record(gradient, self.state, kl_weight, batch, memory=MEMORY)
        except NotRecordableError:
            return None
        finally:
            for buffer, value in zip(self.buffers, before, strict=True):
                buffer.copy_(value)


def can_be_recorded(elbo: ELBO, scheduler: LRScheduler | None = None) -> bool:
    """Whether each step is made of the same operations: all parts are this library's or torch's own."""
    method = elbo.method
    is_ours = method.key is not None and method.watch is None and elbo.output is None
    is_ours = is_ours and elbo.moments == "independent" and all(map(_is_known, _parts(elbo)))
    is_ours = is_ours and (scheduler is None or type(scheduler).__module__.startswith("torch."))
    return is_ours and not _has_hooks(elbo)


def is_alone(fabric: Fabric) -> bool:
    """Whether one process of the CPU trains in the precision of the parameters."""
    is_same = fabric.strategy.precision.precision == "32-true" and not torch.is_autocast_enabled("cpu")
    return fabric.world_size == 1 and fabric.device.type == "cpu" and is_same


def _parts(elbo: ELBO) -> Iterator[object]:
    yield from elbo.modules()
    prior = elbo.prior
    while isinstance(prior, Tempered):
        prior = prior.prior
    yield prior


def _is_known(part: object) -> bool:
    """Whether a part is of a class of this library or of torch, with the methods of its class.

    A layer of torch may have been given a function of another package, and a traced network may call one.
    """
    kind = type(part)
    if any(callable(getattr(kind, name, None)) for name in vars(part)):
        return False
    if kind.__module__.partition(".")[0] == __name__.partition(".")[0]:
        return True
    return kind.__module__.startswith("torch.nn.") and not any(map(is_foreign, vars(part).values()))


HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def _has_hooks(elbo: ELBO) -> bool:
    """Whether code of the user's runs in a pass, or when a gradient is known."""
    if modules._has_any_global_hook() or any(getattr(m, name) for m in elbo.modules() for name in HOOKS):
        return True
    return any(p._backward_hooks or p._post_accumulate_grad_hooks for p in elbo.parameters())

"""The step of `fit` as recorded operations: small networks spend most of a step on all that leads to them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..objectives import ELBO
from ..priors import Tempered
from .batches import Batch
from .epochs import step
from .tape import Program, record

if TYPE_CHECKING:
    from lightning_fabric import Fabric


class Recorded:
    """The gradients of batches that are shaped like the first one, by the operations of its step.

    They are those of autograd, bit for bit.
    """

    def __init__(self, elbo: ELBO) -> None:
        self.elbo = elbo
        self.parameters = [p for p in elbo.parameters() if p.requires_grad]
        self.buffers = list(elbo.buffers())
        self.state: list[Tensor] = [*elbo.parameters(), *self.buffers]
        self.like: list[tuple[torch.Size, torch.dtype]] = []
        """Of the first batch."""
        self.program: Program | None = None
        """(state, kl_weight, batch) -> averages and gradients."""
        self.trained: list[nn.Parameter] = []
        """The parameters that the loss depends on."""

    def takes(self, batch: Batch) -> bool:
        """Whether a batch is like the first, which is any before there is one."""
        like = [(t.shape, t.dtype) for t in pytree.tree_leaves(batch)]
        self.like = self.like or like
        return like == self.like

    @torch.no_grad()
    def gradients(self, kl_weight: float, batch: Batch) -> dict[str, Tensor]:
        """Set the gradients of a batch and return its averages."""
        weight = self.parameters[0].new_tensor(kl_weight)
        if self.program is None:
            self.program = self._record(weight, batch)
        averages, gradients = self.program(self.state, weight, batch)
        for parameter, gradient in zip(self.trained, gradients, strict=True):
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
            # A copy, because two parameters may have one tensor as their gradient, and other strides.
            parameter.grad.copy_(gradient)
        return averages

    def _record(self, kl_weight: Tensor, batch: Batch) -> Program:
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
        with torch.random.fork_rng([]), torch.enable_grad():
            program = record(gradient, self.state, kl_weight, batch)
        for buffer, value in zip(self.buffers, before, strict=True):
            buffer.copy_(value)
        return program


def can_be_recorded(elbo: ELBO) -> bool:
    """Whether each step is made of the same operations: all parts are this library's or torch's own."""
    method = elbo.method
    is_ours = method.key is not None and method.watch is None and elbo.output is None
    is_ours = is_ours and elbo.moments == "independent" and all(map(_is_known, _parts(elbo)))
    return is_ours and not _has_hooks(elbo)


def is_alone(fabric: Fabric) -> bool:
    """Whether one process of the CPU trains in the precision of the parameters."""
    precision = fabric.strategy.precision.precision
    return fabric.world_size == 1 and fabric.device.type == "cpu" and precision == "32-true"


def _parts(elbo: ELBO) -> Iterator[object]:
    yield from elbo.modules()
    prior = elbo.prior
    while isinstance(prior, Tempered):
        prior = prior.prior
    yield prior


def _is_known(part: object) -> bool:
    """Whether a part is of a class of this library or of torch, with the methods of its class."""
    kind = type(part)
    is_ours = kind.__module__.partition(".")[0] in ("torch", __name__.partition(".")[0])
    return is_ours and not any(callable(getattr(kind, name, None)) for name in vars(part))


HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def _has_hooks(elbo: ELBO) -> bool:
    """Whether code of the user's runs in a pass, or when a gradient is known."""
    if any(getattr(module, name) for module in elbo.modules() for name in HOOKS):
        return True
    return any(p._backward_hooks or p._post_accumulate_grad_hooks for p in elbo.parameters())

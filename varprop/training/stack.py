"""Objectives of one architecture as a single one: parameters stacked in front, functions mapped over them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.func import stack_module_state, vmap

from ..objectives import ELBO
from ..substitution import substituted
from .epochs import step
from .tape import NotRecordableError, Program, record

Result = TypeVar("Result")
Tensors: TypeAlias = dict[str, Tensor]


class Stack:
    """The parameters and buffers of several objectives, stacked in front."""

    def __init__(self, members: Sequence[ELBO]) -> None:
        self.members = list(members)
        for member in self.members:
            member.train(members[0].training)  # the first runs for all
        self.params: Tensors
        self.buffers: Tensors
        self.params, self.buffers = stack_module_state(list[nn.Module](self.members))
        self.trained = [p for p in self.params.values() if p.requires_grad]
        self.programs: dict[int, Program] = {}
        """(params, buffers, kl_weight, *batch) -> averages and gradients, by the size of the batch."""

    def __len__(self) -> int:
        return len(self.members)

    @property
    def state(self) -> Tensors:
        return self.params | self.buffers

    def train(self, mode: bool = True) -> None:
        """Set the mode of the first objective, whose operations are run for all."""
        self.members[0].train(mode)

    @torch.no_grad()
    def map(self, function: Callable[..., Result], *args: Tensor) -> Result:
        """function(objective, *args) for each replica and its slice of the arguments.

        Only a method that samples draws anew for each replica: fixed quasi-random points are the same for
        all.
        """
        samples = self.members[0].method.samples
        randomness = "different" if samples else "same"
        return self._mapped(function, randomness, self.params, self.buffers, *args)

    @torch.no_grad()
    def gradients(self, kl_weight: Tensor, batch: Sequence[Tensor], compile: bool) -> Tensors:
        """Set the gradients of a batch and return its averages."""
        size = batch[0].shape[1]
        if size not in self.programs:
            self.programs[size] = self._traced(kl_weight, *batch, compile=compile)
        averages, gradients = self.programs[size](self.params, self.buffers, kl_weight, *batch)
        for parameter, gradient in zip(self.trained, gradients, strict=True):
            parameter.grad = gradient
        return averages

    @torch.no_grad()
    def write_back(self) -> None:
        """Give each objective the values of its replica, in evaluation mode."""
        state = self.state
        for r, member in enumerate(self.members):
            for name, value in (*member.named_parameters(), *member.named_buffers()):
                value.copy_(state[name][r])
            member.eval()
            member.seen = member.n_data

    def _mapped(
        self,
        function: Callable[..., Result],
        randomness: str,
        params: Tensors,
        buffers: Tensors,
        *args: Tensor,
    ) -> Result:
        def one(params: Tensors, buffers: Tensors, *args: Tensor) -> Result:
            return substituted(self.members[0], params | buffers, function, *args)

        return vmap(one, randomness=randomness)(params, buffers, *args)

    def _traced(self, *arguments: Tensor, compile: bool) -> Program:
        """The step on a batch of this shape."""

        def gradient(
            params: Tensors, buffers: Tensors, *arguments: Tensor
        ) -> tuple[Tensors, Sequence[Tensor]]:
            loss, averages = self._mapped(step, "different", params, buffers, *arguments)
            trained = [p for p in params.values() if p.requires_grad]
            # A parameter belongs to one replica, so the gradient of the sum is that of the replica's loss.
            gradients = torch.autograd.grad(loss.sum(), trained, allow_unused=True, materialize_grads=True)
            # The fused optimiser reads memory in order and ignores strides.
            return averages, [g.contiguous() for g in gradients]

        # Tracing runs the step once, which must not move running statistics.
        copies = {name: buffer.clone() for name, buffer in self.buffers.items()}
        try:
            with torch.enable_grad():
                program = record(gradient, self.params, copies, *arguments)
        except NotRecordableError as error:
            raise ValueError(
                f"replicas.fit: {error} in a step; train such networks one by one with fit."
            ) from error
        if not compile:
            return program
        return replace(program, operations=torch.compile(program.operations, dynamic=False))

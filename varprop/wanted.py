"""The outputs of a network that are wanted: some by their numbers, those of the largest mean, or sums."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

Outputs: TypeAlias = int | Sequence[int] | Tensor | None
"""How many, by their numbers, a matrix with a row of weights for each sum, or all."""


@dataclass(frozen=True)
class Wanted:
    """The wanted outputs of a network with `every` outputs."""

    outputs: Outputs
    every: int

    def __post_init__(self) -> None:
        outputs, every = self.outputs, self.every
        if self.sums is not None:
            fits = self.sums.shape[1] == every and len(self.sums) > 0
        elif isinstance(outputs, int):
            fits = 0 < outputs <= every
        else:
            numbers = range(every) if outputs is None else list(outputs)
            fits = len(numbers) > 0 and all(0 <= int(i) < every for i in numbers)
        if not fits:
            raise ValueError(
                f"correlated: outputs={outputs} does not fit the network's {every} "
                f"output{'s' * (every > 1)}; give numbers from 0 to {every - 1}, how many with the "
                f"largest mean, or {every} columns."
            )

    @property
    def sums(self) -> Tensor | None:
        """The weights of the wanted sums, if these are wanted."""
        return self.outputs if isinstance(self.outputs, Tensor) and self.outputs.dim() == 2 else None

    def __len__(self) -> int:
        if self.outputs is None:
            return self.every
        return self.outputs if isinstance(self.outputs, int) else len(self.outputs)

    def rows(self, f: Tensor, at_once: int) -> Iterator[Tensor]:
        """The weights of the outputs in what is wanted, as (wanted, examples, outputs), part by part.

        :param f: the means of all outputs, a row for each example.
        """
        n = len(f)
        if self.sums is not None:
            for part in self.sums.to(f).split(at_once):
                yield part.unsqueeze(1).expand(-1, n, -1)
            return
        if isinstance(self.outputs, int):
            numbers = f.topk(self.outputs).indices.T
        else:
            given = range(self.every) if self.outputs is None else self.outputs
            numbers = torch.as_tensor(given, device=f.device).unsqueeze(1).expand(-1, n)
        for part in numbers.split(at_once):
            yield (part.unsqueeze(-1) == torch.arange(self.every, device=f.device)).to(f)

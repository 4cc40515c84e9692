"""How long a network is trained, and at which rates of Adam."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn
from torch.optim import Adam, Optimizer


@dataclass(frozen=True)
class Schedule:
    """Epochs, and the rate of Adam: constant, or the peak of one cycle."""

    epochs: int
    rate: float
    cycle: bool
    logvar: float = 1.0
    """The rate of the log-variances relative to that of all else."""

    def optimiser(self, net: nn.Module, steps: int) -> Optimizer:
        parts: dict[bool, list[nn.Parameter]] = {False: [], True: []}
        for name, parameter in net.named_parameters():
            parts[name.endswith("_logvar")].append(parameter)
        rates = {False: self.rate, True: self.rate * self.logvar}
        adam = Adam([{"params": part, "lr": rates[key]} for key, part in parts.items() if part], fused=True)
        if self.cycle:
            peaks = [group["lr"] for group in adam.param_groups]
            adam.register_step_pre_hook(partial(_set_rate, peaks, self.epochs * steps))
        return adam


def _set_rate(peaks: Sequence[float], steps: int, adam: Optimizer, *_: Any) -> None:
    # The optimiser's own count of steps is in the checkpoint: a resumed run goes on in the same cycle.
    done = next((float(state["step"]) for state in adam.state.values()), 0.0) / steps
    for group, peak in zip(adam.param_groups, peaks, strict=True):
        group["lr"] = peak * one_cycle(done)


def one_cycle(done: float, rise: float = 0.2) -> float:
    """The rate relative to its peak: up from a twentieth, then down to zero, each along half a cosine."""
    if done < rise:
        return 0.05 + 0.95 * (1 - math.cos(math.pi * done / rise)) / 2
    return (1 + math.cos(math.pi * (done - rise) / (1 - rise))) / 2

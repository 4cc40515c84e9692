"""The state of a training run, written to a file and resumed from it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ..io.storage import discard_partials, replacing
from ..objectives import ELBO
from .epochs import Best, Record


class Run:
    """Everything that training changes: weights, optimiser, scheduler, history and the best epoch.

    :param patience: epochs without a better validation after which the run stops; None for never.
    """

    def __init__(
        self,
        elbo: ELBO,
        optimiser: Optimizer,
        scheduler: LRScheduler | None,
        seed: int,
        patience: int | None,
    ) -> None:
        self.elbo, self.optimiser, self.scheduler, self.seed = elbo, optimiser, scheduler, seed
        self.epoch = 0
        self.history: list[Record] = []
        self.rates: list[float] = [group["lr"] for group in optimiser.param_groups]
        self.best = Best(patience)

    def add(self, record: Record) -> None:
        """Note an epoch that is over."""
        if "validation" in record:
            self.best.offer(self.epoch, torch.tensor(record["validation"]), self.elbo.state_dict())
        self.history.append(record)
        self.epoch += 1

    def is_over(self, epochs: int) -> bool:
        return self.epoch >= epochs or bool(self.best.stopped(self.epoch))

    def save(self, path: str | Path) -> None:
        """Write the file as a whole, or leave the one before."""
        with replacing(path) as file:
            torch.save(self._content(), file)

    def _content(self) -> dict[str, object]:
        return {
            "seed": self.seed,
            "progress": {
                "epoch": self.epoch,
                "history": self.history,
                "rates": self.rates,
                "best": self.best.state,
                "best_score": self.best.score,
                "best_epoch": self.best.epoch,
            },
            "elbo": self.elbo.state_dict(),
            "optimiser": self.optimiser.state_dict(),
            "scheduler": self.scheduler and self.scheduler.state_dict(),
        }

    def load(self, path: str | Path) -> None:
        """Go on from a file; one that does not fit this run is refused before anything changes."""
        discard_partials(path)
        try:
            content = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # a damaged or foreign file makes torch raise many kinds of errors
            raise _cannot_resume(path, "it is damaged, or no checkpoint") from error
        if not isinstance(content, dict) or content.keys() != self._content().keys():
            raise _cannot_resume(path, "fit did not write it")
        if content["seed"] != self.seed:
            raise _cannot_resume(path, f"it was written with seed={content['seed']}")
        if _shapes(content["elbo"]) != _shapes(self.elbo.state_dict()):
            raise _cannot_resume(path, "it belongs to another network or likelihood")
        if (content["scheduler"] is None) != (self.scheduler is None):
            raise _cannot_resume(path, "it was written with another schedule")
        try:
            self.optimiser.load_state_dict(content["optimiser"])
            if self.scheduler is not None:
                self.scheduler.load_state_dict(content["scheduler"])
        except (ValueError, KeyError) as error:
            raise _cannot_resume(path, "it was written with another optimiser or schedule") from error
        self.elbo.load_state_dict(content["elbo"])
        progress = content["progress"]
        self.epoch, self.history, self.rates = progress["epoch"], progress["history"], progress["rates"]
        # Version 0.1 wrote numbers here, and None for no state.
        self.best.state = progress["best"] or {}
        self.best.score = torch.as_tensor(progress["best_score"], dtype=torch.float64)
        self.best.epoch = torch.as_tensor(progress["best_epoch"])


def _cannot_resume(path: str | Path, reason: str) -> ValueError:
    return ValueError(f"fit: cannot resume from {path}: {reason}; delete the file, or give another.")


def _shapes(state: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    return {name: value.shape for name, value in state.items()}

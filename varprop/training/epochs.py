"""What `fit` and `replicas.fit` share: a step, the totals of an epoch, validation and early stopping.

Everything works on one objective and, mapped over stacked parameters, on many: a number of the one is then a
tensor with an entry for each replica.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from ..objectives import ELBO
from ..predictive import Predictive

if TYPE_CHECKING:
    from lightning_fabric import Fabric

Noise: TypeAlias = Literal["running", "exact", "fixed"]
"""When the likelihood's parameters are set: from an epoch as it ran, by a further pass, or never."""
Record: TypeAlias = dict[str, float]
"""A row of the history."""
SAMPLES = 32
"""Monte Carlo samples of a validation, for a method that predicts by sampling."""


def step(
    elbo: ELBO,
    kl_weight: float | Tensor,
    x: Tensor,
    y: Tensor,
    weight: Tensor | None = None,
    *,
    share: float = 1.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of a batch, and its averages for the totals of the epoch.

    :param share: the batch's rows over the average of those that other processes have; its data count so much
        in the loss, and the divergence once.
    """
    terms = elbo.terms(x, y, weight)
    divergence = kl_weight * terms.kl
    loss = elbo.loss(replace(terms, kl=divergence))
    with torch.no_grad():
        # One tensor for the three, because a small network's step is made of small operations.
        averages = {"terms": torch.stack([loss, terms.data_fit, terms.kl])}
        statistic = elbo.likelihood.statistic(terms.f, y, weight)
        if statistic is not None:
            averages["statistic"] = statistic
        if weight is not None:
            averages["weight"] = weight.mean()
            if statistic is not None:
                averages["statistic"] = statistic * averages["weight"]
    if share != 1:
        loss = share * loss + (1 - share) * divergence / elbo.n_data
    return loss, averages


class Totals:
    """Sums over the batches of an epoch, kept on the device."""

    def __init__(self) -> None:
        self.rows = 0
        self.sums: dict[str, Tensor] = {}

    def add(self, rows: int, averages: Mapping[str, Tensor]) -> None:
        """Add the averages of a batch of so many rows."""
        self.rows += rows
        for name, value in averages.items():
            total = self.sums.get(name)
            self.sums[name] = value * rows if total is None else total.add(value, alpha=rows)

    def reduce(self, fabric: Fabric) -> None:
        """Add up what the processes have seen, each its share of the data."""
        totals = {"rows": torch.tensor(self.rows, device=fabric.device), **self.sums}
        if fabric.world_size > 1:
            totals = {name: summed(fabric, value) for name, value in totals.items()}
        self.rows, self.sums = int(totals.pop("rows")), totals

    @property
    def statistic(self) -> Tensor | None:
        """The average over the data of what the likelihood's parameters are set from; None if it has none."""
        total = self.sums.get("statistic")
        if total is None or "weight" not in self.sums:
            return total if total is None else total / self.rows
        return total / _beside(self.sums["weight"], total)

    def records(self, epoch: int, seconds: float) -> list[Record]:
        """The epoch as rows of the history: one, or one for each replica."""
        return [
            {
                "epoch": epoch,
                "loss": loss,
                "data_fit": data_fit,
                "kl": kl,
                "seconds": seconds,
                "rows_per_second": self.rows / seconds,
            }
            for loss, data_fit, kl in (self.sums["terms"] / self.rows).view(-1, 3).tolist()
        ]


def summed(fabric: Fabric, value: Tensor) -> Tensor:
    """The sum over all processes."""
    total = fabric.all_reduce(value, reduce_op="sum")
    assert isinstance(total, Tensor)
    return total


def predict(elbo: ELBO, x: Tensor) -> Predictive:
    """The prediction for rows that are held out; a method that samples makes a fixed number of passes."""
    return elbo.predict(x, samples=SAMPLES if elbo.method.samples else None)


def log_likelihood(elbo: ELBO, x: Tensor, y: Tensor, weight: Tensor | None = None) -> Tensor:
    """The predictive log-likelihood of rows, each as often as its weight says, and the sum of the weights."""
    log_prob = predict(elbo, x).log_prob(y)
    weight = torch.ones_like(log_prob) if weight is None else weight
    return torch.stack([(weight * log_prob).sum(), weight.sum()])


class Best:
    """Early stopping: the state of the epoch with the best validation so far, separately for each replica.

    :param patience: epochs without a better one after which training, or a replica, stops; None for never.
    :param shape: () for one objective, (replicas,) for several.
    """

    def __init__(self, patience: int | None, shape: tuple[int, ...] = ()) -> None:
        self.patience = patience
        self.score = torch.full(shape, -math.inf, dtype=torch.float64)
        self.epoch = torch.zeros(shape, dtype=torch.long)
        self.state: dict[str, Tensor] = {}

    def stopped(self, epochs: int) -> Tensor:
        """Whether training has stopped after so many epochs."""
        if self.patience is None:
            return torch.zeros_like(self.epoch, dtype=torch.bool)
        return epochs > self.epoch + self.patience

    @torch.no_grad()
    def offer(self, epoch: int, score: Tensor, state: Mapping[str, Tensor]) -> None:
        """Keep the state of an epoch where its score is the best."""
        score = score.detach().to(self.score)
        better = (score > self.score) & ~self.stopped(epoch)
        if not better.any():
            return
        self.score = torch.where(better, score, self.score)
        self.epoch = torch.where(better, epoch, self.epoch)
        self.state = {
            name: torch.where(_beside(better.to(value.device), value), value, self.state.get(name, value))
            for name, value in state.items()
        }

    @torch.no_grad()
    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Write the best values into the tensors of a state; without any finite score they stay."""
        found = self.score > -math.inf
        for name, best in self.state.items():
            value = state[name]
            value.copy_(torch.where(_beside(found.to(value.device), value), best.to(value), value))


def _beside(replicas: Tensor, value: Tensor) -> Tensor:
    """A tensor with one entry for each replica, in a shape that broadcasts against the replicas' values."""
    return replicas.view((*replicas.shape, *(1,) * (value.dim() - replicas.dim())))


def cosine(done: float) -> float:
    """The factor of the learning rate after a share of the training: 1 at its start, 0 at its end."""
    return (1 + math.cos(math.pi * done)) / 2


def kl_weight(epoch: int, kl_warmup: int) -> float:
    return min(1.0, (epoch + 1) / (kl_warmup + 1))


def epoch_seed(seed: int, epoch: int) -> int:
    """Each epoch has its own seed, so that a resumed run draws what the uninterrupted one does.

    All bits of both numbers are mixed into 32, because a generator of the CPU uses no more of a seed.
    """
    return int(np.random.SeedSequence(seed % 2**64, spawn_key=(epoch,)).generate_state(1)[0])

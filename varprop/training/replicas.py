"""Many copies of one network trained at once: splits of a data set, seeds, or members of an ensemble.

The parameters of the copies are stacked and the objective is mapped over them (`torch.func`), so that a step
of all copies is a step of one network with larger tensors. Each copy has its own data, order of batches,
noise and early stopping: it ends where `fit` would have taken it alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from numbers import Real
from typing import Literal

import pandas as pd
import torch
from torch import Tensor
from torch.optim import Adam, Optimizer

from ..objectives import ELBO, check_objective
from .alike import check_members
from .batches import Batch, Chosen, Stacked, check_data, split_rows, wrong_size
from .divergence import Kept, diverged
from .epochs import (
    Best,
    Noise,
    Record,
    Totals,
    cosine,
    epoch_seed,
    kl_weight,
    log_likelihood,
    step,
)
from .plan import check_noiseless, check_options
from .progress import Bar
from .quasi_newton import WARM_UP, Rounds, take_step
from .stack import Stack

ROWS = 4096
"""Rows of a replica that a pass without gradients takes at a time."""


def fit(
    members: Sequence[ELBO],
    x: Tensor | Chosen,
    y: Tensor | Chosen,
    weight: Tensor | Chosen | None = None,
    *,
    epochs: int = 100,
    lr: float = 0.01,
    batch_size: int = 64,
    optimizer: Literal["lbfgs"] | None = None,
    warm_up: int = WARM_UP,
    schedule: Literal["cosine"] | None = None,
    kl_warmup: int = 0,
    noise: Noise = "running",
    validation: float | Stacked = 0.0,
    patience: int | None = None,
    seeds: Sequence[int] | None = None,
    compile: bool = False,
    progress: bool = False,
) -> pd.DataFrame:
    """Train objectives of one architecture, all at once and in place, and return their history.

    The options are those of `fit`, and so are the results: with a method that does not sample, a member ends
    at the weights at which `fit(member, (x[r], y[r]), seed=seeds[r], ...)` ends, up to rounding. The history
    has the columns of `fit` and `replica`, and a row for each epoch and replica, until the replica stops.

    :param members: objectives that differ only in the values of their parameters.
    :param x: inputs with the replicas in the first dimension; data that all members share is given as
        `x.expand(len(members), *x.shape)`.
    :param y: targets, with the replicas in the first dimension.
    :param weight: how often each data point counts, of shape (replicas, rows).
    :param optimizer: None for Adam; "lbfgs" for L-BFGS on all rows, a round of 20 evaluations an epoch. Every
        member has its own line search, and no member waits for another's.
    :param warm_up: steps of Adam before the first round of L-BFGS; 0 for members that are trained already.
    :param schedule: None for a constant rate; "cosine" lowers it to zero over the run.
    :param kl_warmup: epochs over which the weight of the KL divergence rises to 1.
    :param noise: the likelihood's parameters, such as the noise, are set after each epoch from statistics
        gathered during it ("running") or in an extra pass with the new weights ("exact"), or stay fixed
        ("fixed").
    :param validation: a share of each replica's rows to hold out, or tensors (x, y) or (x, y, weight) with
        the replicas in the first dimension. Their mean predictive log-likelihood is in the history, and each
        replica ends with the weights of its best epoch.
    :param patience: epochs without a better validation after which a replica stops; training ends when all
        have.
    :param seeds: one for each replica, which fixes its held-out rows and the order of its batches; 0, 1, 2,
        ... by default. The first one also fixes the sampling of a method that samples. The global random
        state is not changed.
    :param compile: compile the step with `torch.compile`, which takes about ten seconds and pays off after a
        few thousand steps.
    :param progress: show a progress bar, with the numbers of the first replica.

    >>> def member():
    ...     net = vp.variational(nn.Sequential(nn.Linear(1, 8), nn.ReLU(), nn.Linear(8, 1)), init="he")
    ...     return vp.ELBO(net, vp.VBP, vp.likelihoods.Normal(), vp.priors.Normal(10.0), n_data=64)
    >>> members, x = [member() for _ in range(5)], torch.linspace(-1, 1, 64).view(-1, 1)
    >>> history = vp.replicas.fit(members, x.expand(5, 64, 1), x.abs().expand(5, 64, 1), epochs=20)
    >>> history.pivot(index="epoch", columns="replica", values="loss").shape
    (20, 5)
    >>> ensemble = vp.predictive.mixture([member.predict(x) for member in members])
    """
    for member in members:
        check_objective("replicas.fit", member)
    seeds = range(len(members)) if seeds is None else seeds
    data = (x, y) if weight is None else (x, y, weight)
    check_options(
        "replicas.fit",
        whole={"epochs": epochs, "batch_size": batch_size},
        rates={"lr": lr},
        flags={"compile": compile},
        noise=noise,
        kl_warmup=kl_warmup,
        validation=validation,
        patience=patience,
        seeds=seeds,
    )
    if schedule not in (None, "cosine"):
        raise ValueError(f'replicas.fit: schedule must be None or "cosine", got {schedule!r}.')
    if optimizer not in (None, "lbfgs"):
        raise ValueError(f'replicas.fit: optimizer must be None or "lbfgs", got {optimizer!r}.')
    if len(seeds) != len(members):
        raise ValueError(
            f"replicas.fit: there are {len(seeds)} seeds for {len(members)} members; give one for each."
        )
    check_members(members)
    _check_shapes("data", data, len(members))
    for targets in y if isinstance(y, Tensor) else ():
        members[0].likelihood.check(targets)
    if optimizer == "lbfgs":
        check_noiseless("replicas.fit", members[0])
        batch_size = x.shape[1]
    train, held_out = _split(data, validation, seeds)
    if weight is None and members[0].n_data not in (x.shape[1], train[0].shape[1]):
        raise wrong_size("replicas.fit", members[0].n_data, x.shape[1], train[0].shape[1])

    stack = Stack(members)
    optimiser: Optimizer | Rounds
    if optimizer == "lbfgs":
        optimiser = Rounds(stack.trained, len(members), warm_up=warm_up)
    else:
        optimiser = Adam(stack.trained, lr, fused=True)
    trainer = _Trainer(
        stack, train, seeds, epochs, lr, batch_size, optimiser, schedule, kl_warmup, noise, compile
    )
    best = Best(patience, (len(members),))
    history: list[Record] = []
    with (
        torch.random.fork_rng([x.device] if x.device.type == "cuda" else []),
        Bar(progress, epochs, 0) as bar,
    ):
        for epoch in range(epochs):
            running = (~best.stopped(epoch)).tolist()
            kept = Kept(stack.state)
            try:
                records = trainer.epoch(epoch, running)
            except FloatingPointError:
                kept.restore(stack.state)
                stack.write_back()
                raise
            if held_out is not None:
                scores = trainer.validate(held_out)
                best.offer(epoch, scores, stack.state)
                for record, score in zip(records, scores.tolist(), strict=True):
                    record["validation"] = score
            records = [record for record, runs in zip(records, running, strict=True) if runs]
            history += records
            bar.show(records[0], members[0].likelihood)
            if bool(best.stopped(epoch + 1).all()):
                break
    best.restore(stack.state)
    stack.write_back()
    return pd.DataFrame(history)


class _Trainer:
    """An epoch of all replicas: a step for each batch, then the noise."""

    def __init__(
        self,
        stack: Stack,
        data: Stacked,
        seeds: Sequence[int],
        epochs: int,
        lr: float,
        batch_size: int,
        optimiser: Optimizer | Rounds,
        schedule: str | None,
        kl_warmup: int,
        noise: Noise,
        compile: bool,
    ) -> None:
        self.stack, self.data, self.seeds, self.epochs, self.lr = stack, data, seeds, epochs, lr
        self.batch_size, self.schedule, self.kl_warmup = batch_size, schedule, kl_warmup
        self.optimiser, self.noise, self.compile = optimiser, noise, compile
        self.replicas = torch.arange(len(stack), device=data[0].device).unsqueeze(1)

    def epoch(self, epoch: int, running: Sequence[bool]) -> list[Record]:
        """Train for an epoch and return its rows of the history.

        :param running: whether each replica still trains; what the others compute does not matter.
        """
        began, runs = time.perf_counter(), torch.tensor(running, device=self.data[0].device)
        torch.manual_seed(epoch_seed(self.seeds[0], epoch))
        self.stack.train()
        totals, kl_weights = Totals(), self._kl_weights(kl_weight(epoch, self.kl_warmup))
        batches = self._order(epoch).split(self.batch_size, dim=1)
        for i, rows in enumerate(batches):
            if self.schedule == "cosine" and isinstance(self.optimiser, Optimizer):
                done = (epoch + i / len(batches)) / self.epochs
                self.optimiser.param_groups[0]["lr"] = self.lr * cosine(done)
            batch = [t[self.replicas, rows] for t in self.data]
            compile = self.compile and rows.shape[1] == self.batch_size
            check = partial(self._check_finite, runs, epoch, i, batch)
            totals.add(rows.shape[1], self._train_on(batch, kl_weights, compile, check))
        self.stack.train(False)
        self._update_noise(totals)
        check(torch.stack([value.reshape(len(self.stack), -1).sum(1) for value in self.stack.trained]).sum(0))
        records = totals.records(epoch, time.perf_counter() - began)
        return [{"epoch": epoch, "replica": r, **record} for r, record in enumerate(records)]

    def _train_on(
        self, batch: Batch, kl_weights: Tensor, compile: bool, check: Callable[[Tensor], None]
    ) -> dict[str, Tensor]:
        averages: dict[str, Tensor] = {}
        # A line search may try a point where the loss is not finite, and leaves it again.
        searches = isinstance(self.optimiser, Rounds)

        def losses() -> Tensor:
            averages.update(self.stack.gradients(kl_weights, batch, compile))
            if not searches:
                check(averages["terms"][:, 0])
            return averages["terms"][:, 0]

        take_step(self.optimiser, self.optimiser, losses)
        if searches:
            check(averages["terms"][:, 0])
        return averages

    def _check_finite(self, runs: Tensor, epoch: int, i: int, batch: Batch, losses: Tensor) -> None:
        """End the run if a replica that still trains has no finite loss."""
        failed = ~losses.isfinite() & runs
        if bool(failed.any()):
            self.stack.write_back()
            r = int(failed.long().argmax())
            elbo = self.stack.members[r]
            raise diverged(f"replicas.fit: the loss of replica {r}", epoch, i, elbo, [t[r] for t in batch])

    def validate(self, held_out: Stacked) -> Tensor:
        """Mean predictive log-likelihood of each replica's held-out rows."""
        totals = [self.stack.map(log_likelihood, *part) for part in _parts(held_out)]
        log_prob, weight = torch.stack(totals).sum(0).unbind(1)
        return log_prob / weight

    def _order(self, epoch: int) -> Tensor:
        """The rows of each replica in the order in which `fit` takes them."""
        n = self.data[0].shape[1]
        generators = [torch.Generator().manual_seed(epoch_seed(seed, epoch)) for seed in self.seeds]
        order = torch.stack(
            [torch.randperm(n, generator=generator, dtype=torch.int32) for generator in generators]
        )
        return order.to(self.data[0].device)

    def _kl_weights(self, value: float) -> Tensor:
        parameter = self.stack.trained[0]
        return parameter.new_full((len(self.stack),), value)

    def _update_noise(self, totals: Totals) -> None:
        if self.noise == "exact":
            totals, weights = Totals(), self._kl_weights(1.0)
            for part in _parts(self.data):
                _, averages = self.stack.map(step, weights, *part)
                totals.add(part[0].shape[1], averages)
        if self.noise != "fixed" and totals.statistic is not None:
            self.stack.map(_update, totals.statistic)


def _update(elbo: ELBO, statistic: Tensor) -> Tensor:
    elbo.likelihood.update(statistic)
    return statistic


def _parts(data: Stacked) -> Iterator[Sequence[Tensor]]:
    return zip(*(t.split(ROWS, dim=1) for t in data), strict=True)


def _split(
    data: Stacked, validation: float | Stacked, seeds: Sequence[int]
) -> tuple[Stacked, Stacked | None]:
    """Training data, and the data to validate on: rows held out of `data`, or data given for it."""
    if not isinstance(validation, float | Real):
        _check_shapes("validation", validation, len(seeds))
        return data, validation
    if validation == 0:
        return data, None
    halves = [split_rows("replicas.fit", data[0].shape[1], validation, seed) for seed in seeds]
    replicas = torch.arange(len(seeds)).unsqueeze(1)
    train, held_out = (torch.stack(rows) for rows in zip(*halves, strict=True))
    return [t[replicas, train] for t in data], [t[replicas, held_out] for t in data]


def _check_shapes(name: str, data: Stacked, replicas: int) -> None:
    check_data("replicas.fit", name, data, dims=2)
    if len(data[0]) != replicas:
        raise ValueError(
            f"replicas.fit: {name} is for {len(data[0])} replicas, but there are {replicas} members; data"
            f" that all share is given as x.expand({replicas}, *x.shape)."
        )

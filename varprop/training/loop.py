"""Training: fit an objective to data on any device, and lose nothing when the process dies."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import pandas as pd
import torch
from torch import Tensor, nn
from torch.optim import Adam, Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from ..objectives import ELBO
from .batches import Data, check_size, size, split
from .checkpoints import Run
from .divergence import Kept, diverged, is_finite, learned
from .epochs import (
    Noise,
    Record,
    Totals,
    check_noiseless,
    check_options,
    cosine,
    epoch_seed,
    kl_weight,
    log_likelihood,
    step,
    summed,
)
from .processes import engine, launch
from .progress import Bar
from .quasi_newton import LBFGS, WARM_UP, take_step
from .shares import Batches, Share, batches

if TYPE_CHECKING:
    from lightning_fabric import Fabric
    from lightning_fabric.strategies.strategy import Strategy


def fit(
    elbo: ELBO,
    data: Data,
    *,
    epochs: int = 100,
    lr: float = 0.01,
    batch_size: int = 64,
    optimizer: Literal["lbfgs"] | Callable[[Iterable[nn.Parameter]], Optimizer] | None = None,
    schedule: Literal["cosine"] | Callable[[Optimizer], LRScheduler] | None = None,
    kl_warmup: int = 0,
    noise: Noise = "running",
    validation: float | Data = 0.0,
    patience: int | None = None,
    clip: float | None = None,
    checkpoint: str | Path | None = None,
    every: int = 1,
    resume: bool = False,
    seed: int = 0,
    progress: bool | None = None,
    devices: int | str | list[int] | None = None,
    num_nodes: int | None = None,
    strategy: str | Strategy | None = None,
    accelerator: str | None = None,
    precision: str | int | None = None,
    fabric: Fabric | None = None,
) -> pd.DataFrame:
    """Minimise the objective over the data and return the history, a row for each epoch.

    The columns are `epoch`, `loss`, `data_fit`, `kl` (averages over the epoch), `seconds`, `rows_per_second`
    and, with validation data, `validation`. `replicas.fit` takes the same options for many objectives at
    once. A loss that is not finite ends the run with an error that names the epoch, the batch and the first
    operation to blame; the objective keeps the weights from before this epoch, and a checkpoint stays.

    :param data: tensors (x, y) or (x, y, weight), a Dataset of such rows, or a DataLoader of such batches,
        which then sets the batch size.
    :param optimizer: "lbfgs" for L-BFGS on all rows at once, for objectives that do not sample: an epoch is
        then a round of 20 iterations, and `lr`, `batch_size` and `schedule` have no effect. Or a function
        that makes a torch optimiser from parameters; Adam with `lr` by default.
    :param schedule: None for a constant rate; "cosine" lowers it to zero over the run; or a function that
        makes a torch scheduler, which is stepped after each epoch.
    :param kl_warmup: epochs over which the weight of the KL divergence rises to 1.
    :param noise: the likelihood's parameters, such as the noise, are set after each epoch from statistics
        gathered during it ("running") or in an extra pass with the new weights ("exact"), or stay fixed
        ("fixed").
    :param validation: a share of the data to hold out, or separate data. Its mean predictive log-likelihood
        is in the history, and the weights of the best epoch are restored at the end.
    :param patience: stop after this many epochs without a better validation.
    :param clip: largest gradient norm.
    :param checkpoint: a file that always holds the latest state, replaced as a whole every `every` epochs.
        With `resume`, training continues from it and ends at the same weights, bit for bit, as without
        interruption.
    :param seed: fixes the order of the data and all sampling. The global random state is not changed.
    :param progress: show a progress bar; by default only on a terminal.
    :param devices: how many devices share each batch, or which; by default one, a GPU if there is one. Each
        has a process, and `batch_size` counts the rows of all, so that their number changes the speed and not
        the result. See `docs/scaling.md`, also for the next four.
    :param num_nodes: of machines with as many devices each.
    :param strategy: "ddp_spawn" (by default on one machine), "ddp" or another kind of DDP that Fabric knows.
    :param accelerator: "cpu", "gpu" or another that Fabric knows.
    :param precision: such as "bf16-mixed" or "64-true".
    :param fabric: a Lightning Fabric for all of these and for loggers, which has started its processes.

    >>> net = vp.variational(nn.Sequential(nn.Linear(1, 8), nn.ReLU(), nn.Linear(8, 1)))
    >>> elbo = vp.ELBO(net, vp.VBP, vp.likelihoods.Normal(), vp.priors.Normal(), n_data=64)
    >>> x = torch.linspace(-1, 1, 64).unsqueeze(-1)
    >>> history = vp.fit(elbo, (x, x.abs()), epochs=40)
    >>> bool(history.loss.iloc[-1] < history.loss.iloc[0])
    True
    """
    check_options(
        "fit",
        whole={"epochs": epochs, "batch_size": batch_size, "every": every},
        rates={"lr": lr, "clip": clip},
        noise=noise,
        kl_warmup=kl_warmup,
        validation=validation,
        patience=patience,
        seeds=[seed],
    )
    if not (schedule is None or schedule == "cosine" or callable(schedule)):
        raise ValueError(
            'fit: schedule must be None, "cosine" or a function that makes a torch scheduler,'
            f" got {schedule!r}."
        )
    if resume and checkpoint is None:
        raise ValueError("fit: resume needs the file to go on from; give `checkpoint`.")
    if optimizer == "lbfgs":
        if clip is not None:
            raise ValueError('fit: optimizer="lbfgs" needs the gradient as it is; leave `clip` out.')
        batch_size = _all_rows(elbo, data)
    elif not (optimizer is None or callable(optimizer)):
        raise ValueError(
            f'fit: optimizer must be "lbfgs" or a function that makes a torch optimiser, got {optimizer!r}.'
        )
    given = fabric is not None
    fabric = engine(fabric, devices, num_nodes, strategy, accelerator, precision)
    if optimizer == "lbfgs" and fabric.world_size > 1:
        raise ValueError(
            f'fit: optimizer="lbfgs" needs all rows in one process, and the fabric has {fabric.world_size}.'
        )
    plan = Plan(
        epochs,
        lr,
        batch_size,
        optimizer,
        schedule,
        kl_warmup,
        noise,
        validation,
        patience,
        clip,
        checkpoint,
        every,
        resume,
        seed,
        progress,
    )
    check_size(elbo.n_data, data, split(data, validation, seed)[0])
    check_parameters(elbo)
    return train(fabric, elbo, data, plan) if given else launch(fabric, train, elbo, data, plan)


@dataclass(frozen=True)
class Plan:
    """The options of `fit`, checked."""

    epochs: int
    lr: float
    batch_size: int
    optimizer: Literal["lbfgs"] | Callable[[Iterable[nn.Parameter]], Optimizer] | None
    schedule: Literal["cosine"] | Callable[[Optimizer], LRScheduler] | None
    kl_warmup: int
    noise: Noise
    validation: float | Data
    patience: int | None
    clip: float | None
    checkpoint: str | Path | None
    every: int
    resume: bool
    seed: int
    progress: bool | None


def train(fabric: Fabric, elbo: ELBO, data: Data, plan: Plan) -> pd.DataFrame:
    """Train in this process, which is one of the fabric's, and return the history."""
    with _separate_random_state(fabric):
        rows, held_out = split(data, plan.validation, plan.seed)
        loader = batches(rows, plan.batch_size, fabric, shuffle=True)
        run = _start(elbo, plan, fabric)
        trainer = _Trainer(run, loader, fabric, plan)
        validation_loader = (
            None if held_out is None else batches(held_out, 4 * plan.batch_size, fabric, shuffle=False)
        )
        with Bar(plan.progress if fabric.is_global_zero else False, plan.epochs, run.epoch) as bar:
            while not run.is_over(plan.epochs):
                kept = Kept(elbo.state_dict())
                try:
                    record = trainer.epoch()
                except FloatingPointError:
                    kept.restore(elbo.state_dict())
                    elbo.eval()
                    raise
                if validation_loader is not None:
                    record["validation"] = validate(elbo, validation_loader, fabric)
                run.add(record)
                bar.show(record, elbo.likelihood)
                fabric.log_dict(record, step=run.epoch)
                due = run.epoch % plan.every == 0 or run.is_over(plan.epochs)
                if plan.checkpoint is not None and due and fabric.is_global_zero:
                    run.save(plan.checkpoint)
        run.best.restore(elbo.state_dict())
        elbo.eval()
        elbo.seen = elbo.n_data
        for logger in fabric.loggers:
            logger.finalize("success")
    return pd.DataFrame(run.history)


def _all_rows(elbo: ELBO, data: Data) -> int:
    """The batch size of L-BFGS; data or methods that it cannot use are refused."""
    rows = None if isinstance(data, DataLoader) else size(data)
    if rows is None:
        raise ValueError(
            'fit: optimizer="lbfgs" needs all rows at once; give `data` as tensors or a Dataset.'
        )
    check_noiseless("fit", elbo)
    return rows


@contextmanager
def _separate_random_state(fabric: Fabric) -> Iterator[None]:
    with torch.random.fork_rng([fabric.device] if fabric.device.type == "cuda" else []):
        yield


def check_parameters(elbo: ELBO) -> None:
    if not any(p.requires_grad for p in elbo.parameters()):
        raise ValueError("fit: no parameter of the objective requires a gradient; there is nothing to train.")


def _start(elbo: ELBO, plan: Plan, fabric: Fabric) -> Run:
    """A new run, or the one of the checkpoint."""
    parameters = [p for p in elbo.parameters() if p.requires_grad]
    if plan.optimizer == "lbfgs":
        optimiser: Optimizer = LBFGS(parameters, warm_up=WARM_UP)
    else:
        optimiser = plan.optimizer(parameters) if plan.optimizer else Adam(parameters, lr=plan.lr, fused=True)
    scheduler = plan.schedule(optimiser) if callable(plan.schedule) else None
    run = Run(elbo, optimiser, scheduler, plan.seed, plan.patience)
    if plan.resume and plan.checkpoint is not None:
        if Path(plan.checkpoint).exists():
            run.load(plan.checkpoint)
        _check_same_epoch(run, plan, fabric)
    return run


def _check_same_epoch(run: Run, plan: Plan, fabric: Fabric) -> None:
    epochs = summed(fabric, torch.tensor(run.epoch, device=fabric.device))
    if int(epochs) != fabric.world_size * run.epoch:
        raise ValueError(
            f"fit: the processes would go on from different epochs, this one from {run.epoch}; put "
            f"{plan.checkpoint} where all of them can read it."
        )


class _Trainer:
    """An epoch of training: a step for each batch, then the noise."""

    def __init__(self, run: Run, loader: Batches, fabric: Fabric, plan: Plan) -> None:
        self.run, self.elbo, self.loader, self.fabric, self.plan = run, run.elbo, loader, fabric, plan
        module, optimiser = fabric.setup(_Step(run.elbo), run.optimiser)
        self.step: nn.Module = module
        self.optimiser: Optimizer = optimiser

    def epoch(self) -> Record:
        """Train for an epoch and return its row of the history."""
        began, epoch = time.perf_counter(), self.run.epoch
        self._seed(epoch)
        self.elbo.train()
        totals = Totals()
        for i, share in enumerate(self.loader):
            if self.plan.schedule == "cosine":
                self._set_rate((epoch + i / len(self.loader)) / self.plan.epochs)
            totals.add(share.rows, self._train_on(i, share, kl_weight(epoch, self.plan.kl_warmup)))
        if self.run.scheduler is not None:
            self.run.scheduler.step()
        self.elbo.eval()
        totals.reduce(self.fabric)
        if not totals.rows:
            raise ValueError(
                "fit: the data gave no batch; is it empty, or smaller than a batch with drop_last?"
            )
        self._update_noise(totals)
        if not is_finite(learned(self.elbo)):
            raise self._diverged(i, share.batch)
        (record,) = totals.records(epoch, time.perf_counter() - began)
        return record

    def _check_finite(self, loss: Tensor, i: int, batch: Sequence[Tensor]) -> None:
        """End the run, in all processes at the same batch, if the loss of one is not finite."""
        if self.fabric.world_size > 1:
            loss = summed(self.fabric, loss.detach())
        if not bool(loss.isfinite()):
            raise self._diverged(i, batch)

    def _diverged(self, i: int, batch: Sequence[Tensor]) -> FloatingPointError:
        return diverged("fit: the loss", self.run.epoch, i, self.elbo, batch)

    def _seed(self, epoch: int) -> None:
        seed = epoch_seed(self.run.seed, epoch)
        torch.manual_seed(seed)
        for generator in self.loader.generators:
            generator.manual_seed(seed)

    def _set_rate(self, done: float) -> None:
        for group, rate in zip(self.optimiser.param_groups, self.run.rates, strict=True):
            group["lr"] = rate * cosine(done)

    def _train_on(self, i: int, share: Share, kl_weight: float) -> dict[str, Tensor]:
        averages: dict[str, Tensor] = {}
        # A line search may try a point where the loss is not finite, and leaves it again.
        searches = isinstance(self.run.optimiser, LBFGS | torch.optim.LBFGS)

        def closure() -> Tensor:
            self.optimiser.zero_grad()
            loss, of_batch = self.step(kl_weight, share.weight, *share.batch)
            if not searches:
                self._check_finite(loss, i, share.batch)
            self.fabric.backward(loss)
            if self.plan.clip is not None:
                self.fabric.clip_gradients(self.step, self.optimiser, max_norm=self.plan.clip)
            averages.update(of_batch)
            return loss

        take_step(self.run.optimiser, self.optimiser, closure)
        if searches:
            self._check_finite(averages["terms"][0], i, share.batch)
        return averages

    @torch.no_grad()
    def _update_noise(self, totals: Totals) -> None:
        if self.plan.noise == "exact":
            totals = Totals()
            for share in self.loader:
                _, averages = self.step(1.0, share.weight, *share.batch)
                totals.add(share.rows, averages)
            totals.reduce(self.fabric)
        if self.plan.noise != "fixed" and totals.statistic is not None:
            self.elbo.likelihood.update(totals.statistic)


class _Step(nn.Module):
    """The step as a module, which precision plugins and distributed wrappers can wrap."""

    def __init__(self, elbo: ELBO) -> None:
        super().__init__()
        self.elbo = elbo

    def forward(self, kl_weight: float, share: float, *batch: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return step(self.elbo, kl_weight, *batch, share=share)


@torch.no_grad()
def validate(elbo: ELBO, loader: Batches, fabric: Fabric) -> float:
    """Mean predictive log-likelihood, each data point as often as its weight says."""
    total = torch.zeros(2, device=fabric.device)
    for share in loader:
        if share.rows:
            total = total + log_likelihood(elbo, *share.batch)
    log_prob, weight = summed(fabric, total)
    return float(log_prob / weight)

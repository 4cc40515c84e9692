"""An epoch of `fit`: a step for each batch, in every process; and the validation after it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..objectives import ELBO
from .batches import form
from .checkpoints import Run
from .divergence import diverged, is_finite, learned
from .epochs import Record, Totals, cosine, epoch_seed, kl_weight, log_likelihood, step, summed
from .plan import Plan
from .quasi_newton import LBFGS, take_step
from .recorded import Recorded, can_be_recorded, is_alone
from .shares import Batches, Share

if TYPE_CHECKING:
    from lightning_fabric import Fabric


class Trainer:
    """An epoch of training: a step for each batch, then the noise."""

    def __init__(self, run: Run, loader: Batches, fabric: Fabric, plan: Plan) -> None:
        self.run, self.elbo, self.loader, self.fabric, self.plan = run, run.elbo, loader, fabric, plan
        module, optimiser = fabric.setup(_Step(run.elbo, plan.compile), run.optimiser)
        self.step: nn.Module = module
        self.optimiser: Optimizer = optimiser
        records = not plan.compile and is_alone(fabric) and can_be_recorded(run.elbo, run.scheduler)
        self.recorded = Recorded(run.elbo) if records else None

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
            loss, of_batch = self._gradients(i, share, kl_weight, may_be_infinite=searches)
            if self.plan.clip is not None:
                self.fabric.clip_gradients(self.step, self.optimiser, max_norm=self.plan.clip)
            averages.update(of_batch)
            return loss

        take_step(self.run.optimiser, self.optimiser, closure)
        if searches:
            self._check_finite(averages["terms"][0], i, share.batch)
        return averages

    def _gradients(
        self, i: int, share: Share, kl_weight: float, may_be_infinite: bool
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Set the gradients of a batch, and return its loss and averages."""
        self.optimiser.zero_grad()
        again = None if self.recorded is None else self.recorded.gradients(kl_weight, share.batch)
        if again is None:
            loss, averages = self.step(kl_weight, share.weight, *share.batch)
        else:
            loss, averages = again["terms"][0], again
        if not may_be_infinite:
            self._check_finite(loss, i, share.batch)
        if again is None:
            self.fabric.backward(loss)
        return loss, averages

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

    def __init__(self, elbo: ELBO, compile: bool = False) -> None:
        super().__init__()
        self.elbo = elbo
        self.compiled = torch.compile(step, dynamic=False) if compile else None
        self.form: tuple[object, ...] = ()
        """Of the first batch: to compile for others takes longer than they do."""

    def forward(self, kl_weight: float, share: float, *batch: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        self.form = self.form or form(batch)
        if self.compiled is None or form(batch) != self.form:
            return step(self.elbo, kl_weight, *batch, share=share)
        # A tensor, because the compiler would take each number of a warm-up for a constant.
        weight = next(self.elbo.parameters()).new_tensor(kl_weight)
        return self.compiled(self.elbo, weight, *batch, share=share)


@torch.no_grad()
def validate(elbo: ELBO, loader: Batches, fabric: Fabric) -> float:
    """Mean predictive log-likelihood, each data point as often as its weight says."""
    total = torch.zeros(2, device=fabric.device)
    for share in loader:
        if share.rows:
            total = total + log_likelihood(elbo, *share.batch)
    log_prob, weight = summed(fabric, total)
    return float(log_prob / weight)

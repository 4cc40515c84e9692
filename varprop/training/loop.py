"""Training: fit an objective to data on any device, and lose nothing when the process dies."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import pandas as pd
import torch
from torch import nn
from torch.optim import Adam, Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset

from ..objectives import ELBO, check_objective
from .batches import Data, check_size, split
from .checkpoints import Run
from .divergence import Kept
from .epochs import Noise, summed
from .plan import Plan
from .processes import engine, launch
from .progress import Bar
from .quasi_newton import LBFGS, WARM_UP
from .shares import batches
from .trainer import Trainer, validate

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
    compile: bool = False,
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
    once. On a CPU the steps of a small network are recorded after the first ones and run again as they are,
    unless code from outside torch and varprop runs in them, as a layer, a rule, a hook or a scheduler: the
    numbers are the same, bit for bit. A loss that is not finite ends the run with an error that names the
    epoch, the batch and the first operation to blame; the objective keeps the weights from before this epoch,
    and a checkpoint stays.

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
    :param compile: compile the step with `torch.compile`, which takes up to a minute and pays off after a few
        thousand steps. Batches that are not shaped like the first one, such as the last, run as they are.
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
    check_objective("fit", elbo)
    plan = Plan(
        epochs=epochs,
        lr=lr,
        batch_size=batch_size,
        optimizer=optimizer,
        schedule=schedule,
        kl_warmup=kl_warmup,
        noise=noise,
        validation=validation,
        patience=patience,
        clip=clip,
        compile=compile,
        checkpoint=checkpoint,
        every=every,
        resume=resume,
        seed=seed,
        progress=progress,
    )
    if optimizer == "lbfgs":
        plan = plan.on_all_rows(elbo, data)
    given = fabric is not None
    fabric = engine(fabric, devices, num_nodes, strategy, accelerator, precision)
    if optimizer == "lbfgs" and fabric.world_size > 1:
        raise ValueError(
            f'fit: optimizer="lbfgs" needs all rows in one process, and the fabric has {fabric.world_size}.'
        )
    check_size(elbo.n_data, data, split(data, validation, seed)[0])
    if not isinstance(data, Dataset | DataLoader):
        elbo.likelihood.check(data[1])
    _check_parameters(elbo)
    return train(fabric, elbo, data, plan) if given else launch(fabric, train, elbo, data, plan)


def train(fabric: Fabric, elbo: ELBO, data: Data, plan: Plan) -> pd.DataFrame:
    """Train in this process, which is one of the fabric's, and return the history."""
    with torch.random.fork_rng([fabric.device] if fabric.device.type == "cuda" else []):
        rows, held_out = split(data, plan.validation, plan.seed)
        loader = batches(rows, plan.batch_size, fabric, shuffle=True, check=elbo.likelihood.check)
        run = _start(elbo, plan, fabric)
        trainer = Trainer(run, loader, fabric, plan)
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


def _check_parameters(elbo: ELBO) -> None:
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

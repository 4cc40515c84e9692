"""Training: fit an objective to data, on any device, with nothing lost when the process dies."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

import pandas as pd
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column
from torch import Tensor, nn
from torch.optim import Adam, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ..io.storage import discard_partials, replacing
from ..objectives import ELBO
from .batches import Data, batches, generators, size, split

if TYPE_CHECKING:
    from lightning_fabric import Fabric


def fit(
    elbo: ELBO,
    data: Data,
    *,
    epochs: int = 100,
    lr: float = 0.01,
    batch_size: int = 64,
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] | None = None,
    schedule: Literal["cosine"] | Callable[[Optimizer], LRScheduler] | None = None,
    kl_warmup: int = 0,
    noise: Literal["running", "exact", "fixed"] = "running",
    validation: float | Data = 0.0,
    patience: int | None = None,
    clip: float | None = None,
    checkpoint: str | Path | None = None,
    every: int = 1,
    resume: bool = False,
    seed: int = 0,
    progress: bool | None = None,
    fabric: Fabric | None = None,
) -> pd.DataFrame:
    """Minimise the objective over the data and return the history, a row for each epoch.

    :param data: tensors (x, y) or (x, y, weight), a Dataset of such rows, or a DataLoader of such batches (which sets the batch size).
    :param optimizer: makes an optimiser from parameters; Adam with `lr` by default.
    :param schedule: "cosine" lowers the rate to zero over the run; or a function that makes a torch scheduler, stepped each epoch.
    :param kl_warmup: epochs over which the weight of the divergence rises to 1.
    :param noise: the likelihood's own parameters after each epoch, from statistics gathered during it ("running"), from a pass of its
        own ("exact"), or left alone ("fixed").
    :param validation: a share of the data to hold out, or data of its own. Its predictive log-likelihood is in the history, and the
        weights of its best epoch are restored at the end.
    :param patience: stop after this many epochs without a better validation.
    :param clip: largest gradient norm.
    :param checkpoint: a file that always holds the latest state, written every `every` epochs and replaced as a whole; with `resume`,
        training goes on from it and ends at the same weights, bit for bit, as if it had never stopped.
    :param seed: fixes the order of the data and every draw. Global random state is left as it was.
    :param progress: show a progress bar; by default on a terminal only.
    :param fabric: a Lightning Fabric for devices, precision, processes and loggers; by default one device, chosen by itself.

    >>> net = vp.variational(nn.Sequential(nn.Linear(1, 8), nn.ReLU(), nn.Linear(8, 1)))
    >>> elbo = vp.ELBO(net, vp.VBP, vp.likelihoods.Normal(), vp.priors.Normal(), n_data=64)
    >>> x = torch.linspace(-1, 1, 64).unsqueeze(-1)
    >>> history = vp.fit(elbo, (x, x.abs()), epochs=40)
    >>> bool(history.loss.iloc[-1] < history.loss.iloc[0])
    True
    """
    for name, value in {"epochs": epochs, "lr": lr, "batch_size": batch_size, "every": every}.items():
        if not value > 0:
            raise ValueError(f"fit: {name} must be positive, got {value}.")
    if noise not in ("running", "exact", "fixed"):
        raise ValueError(f'fit: noise must be "running", "exact" or "fixed", got {noise!r}.')
    if schedule is not None and schedule != "cosine" and not callable(schedule):
        raise ValueError(
            f'fit: schedule must be "cosine" or a function that makes a torch scheduler, got {schedule!r}.'
        )
    if patience is not None and isinstance(validation, int | float) and not validation:
        raise ValueError(
            "fit: patience needs validation data; give `validation`, a share such as 0.1 or data of its own."
        )
    if resume and checkpoint is None:
        raise ValueError("fit: resume needs the file to go on from; give `checkpoint`.")
    if fabric is None:
        from lightning_fabric import Fabric  # takes seconds to import

        fabric = Fabric(devices=1)
    with torch.random.fork_rng([fabric.device] if fabric.device.type == "cuda" else []):
        train, held_out = split(data, validation, seed)
        _check_size(elbo, data, train)
        parameters = [p for p in elbo.parameters() if p.requires_grad]
        optimiser = optimizer(parameters) if optimizer else Adam(parameters, lr=lr, fused=True)
        run = _Run(elbo, optimiser, schedule(optimiser) if callable(schedule) else None, seed)
        if resume and checkpoint is not None and Path(checkpoint).exists():
            run.load(checkpoint)
        step, optimiser = fabric.setup(_Step(elbo), optimiser)
        loader = batches(train, batch_size, fabric, shuffle=True)
        held_out_loader = (
            None if held_out is None else batches(held_out, 4 * batch_size, fabric, shuffle=False)
        )

        with _Bar(progress, epochs, run.epoch) as bar:
            while run.epoch < epochs and not run.stale(patience):
                # Each epoch has a seed of its own, so that a resumed run draws as the uninterrupted one does.
                torch.manual_seed(seed * 2**20 + run.epoch)
                for generator in generators(loader):
                    generator.manual_seed(seed * 2**20 + run.epoch)
                began = time.perf_counter()
                elbo.train()
                totals = _Totals()
                for i, batch in enumerate(loader):
                    if schedule == "cosine":
                        _set_rate(optimiser, run.rates, (run.epoch + i / len(loader)) / epochs)
                    optimiser.zero_grad()
                    out = step(min(1.0, (run.epoch + 1) / (kl_warmup + 1)), *batch)
                    fabric.backward(out["loss"])
                    if clip is not None:
                        fabric.clip_gradients(step, optimiser, max_norm=clip)
                    optimiser.step()
                    totals.add(out)
                if run.scheduler is not None:
                    run.scheduler.step()
                elbo.eval()
                if noise == "exact":
                    totals.statistic = _statistic(step, loader)
                if not totals.rows:
                    raise ValueError(
                        "fit: the data gave no batch; is it empty, or smaller than a batch with drop_last?"
                    )
                totals.reduce(fabric)
                if noise != "fixed" and totals.statistic is not None:
                    elbo.likelihood.update(totals.statistic / totals.weight)
                row = totals.row(run.epoch, time.perf_counter() - began)
                if not math.isfinite(row["loss"]):
                    raise FloatingPointError(
                        f"fit: the loss is {row['loss']} in epoch {run.epoch}; check the data, lower lr, or set clip."
                    )
                if held_out_loader is not None:
                    row["validation"] = validate(elbo, held_out_loader, fabric)
                    run.judge(row["validation"])
                run.history.append(row)
                run.epoch += 1
                bar.show(row, elbo)
                fabric.log_dict(row, step=run.epoch)
                over = run.epoch == epochs or run.stale(patience)
                if checkpoint is not None and fabric.is_global_zero and (over or run.epoch % every == 0):
                    run.save(checkpoint)
        if run.best is not None:
            elbo.load_state_dict(run.best)
        elbo.eval()
        for logger in fabric.loggers:
            logger.finalize("success")
    return pd.DataFrame(run.history)


class _Step(nn.Module):
    """One pass of an objective, as plain tensors: what precision plugins and distributed wrappers understand."""

    def __init__(self, elbo: ELBO) -> None:
        super().__init__()
        self.elbo = elbo

    def forward(
        self, kl_weight: float, x: Tensor, y: Tensor, weight: Tensor | None = None
    ) -> dict[str, Tensor | None]:
        terms = self.elbo.terms(x, y, weight)
        rows = terms.kl.new_tensor(float(len(y)))
        with torch.no_grad():
            statistic = self.elbo.likelihood.statistic(terms.f, y, weight)
        return {
            "loss": self.elbo.loss(terms, kl_weight),
            "data_fit": terms.data_fit.detach(),
            "kl": terms.kl.detach(),
            "statistic": statistic,
            "rows": rows,
            "weight": rows if weight is None else weight.sum(),
        }


@dataclass
class _Totals:
    """Sums over an epoch, kept on the device."""

    loss: Any = 0.0
    data_fit: Any = 0.0
    kl: Any = 0.0
    rows: Any = 0.0
    weight: Any = 0.0
    statistic: Tensor | None = None

    def add(self, out: dict[str, Any]) -> None:
        self.loss = self.loss + out["loss"].detach() * out["rows"]
        self.data_fit = self.data_fit + out["data_fit"] * out["rows"]
        self.kl = out["kl"]
        self.rows = self.rows + out["rows"]
        self.weight = self.weight + out["weight"]
        if out["statistic"] is not None:
            seen = 0.0 if self.statistic is None else self.statistic
            self.statistic = seen + out["statistic"] * out["weight"]

    def reduce(self, fabric: Fabric) -> None:
        """Add up what the processes have seen, each its share."""
        for name in ("loss", "data_fit", "rows", "weight", "statistic"):
            if getattr(self, name) is not None:
                setattr(self, name, fabric.all_reduce(getattr(self, name), reduce_op="sum"))

    def row(self, epoch: int, seconds: float) -> dict[str, Any]:
        rows = float(self.rows)
        return {
            "epoch": epoch,
            "loss": float(self.loss) / rows,
            "data_fit": float(self.data_fit) / rows,
            "kl": float(self.kl),
            "seconds": seconds,
            "rows_per_second": rows / seconds,
        }


@dataclass
class _Progress:
    """How far a run has come, beside the weights."""

    epoch: int = 0
    history: list[dict[str, Any]] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    best: dict[str, Tensor] | None = None
    best_score: float = -math.inf
    best_epoch: int = 0


class _Run(_Progress):
    """A run that can be written to a file and gone on with."""

    def __init__(self, elbo: ELBO, optimiser: Optimizer, scheduler: LRScheduler | None, seed: int) -> None:
        super().__init__(rates=[group["lr"] for group in optimiser.param_groups])
        self.elbo, self.optimiser, self.scheduler, self.seed = elbo, optimiser, scheduler, seed

    def judge(self, score: float) -> None:
        if score > self.best_score:
            self.best, self.best_score, self.best_epoch = deepcopy(self.elbo.state_dict()), score, self.epoch

    def stale(self, patience: int | None) -> bool:
        return patience is not None and self.epoch > self.best_epoch + patience

    def save(self, path: str | Path) -> None:
        with replacing(path) as file:
            torch.save(self._content(), file)

    def _content(self) -> dict[str, Any]:
        return {
            "seed": self.seed,
            "progress": {name: getattr(self, name) for name in asdict(_Progress())},
            "elbo": self.elbo.state_dict(),
            "optimiser": self.optimiser.state_dict(),
            "scheduler": self.scheduler and self.scheduler.state_dict(),
        }

    def load(self, path: str | Path) -> None:
        discard_partials(path)
        try:
            content = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # whatever a damaged or foreign file makes torch raise
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
        for name, value in content["progress"].items():
            setattr(self, name, value)


def _cannot_resume(path: str | Path, reason: str) -> ValueError:
    return ValueError(f"fit: cannot resume from {path}: {reason}; delete the file, or give another.")


def _shapes(state: dict[str, Tensor]) -> dict[str, torch.Size]:
    return {name: value.shape for name, value in state.items()}


def _check_size(elbo: ELBO, data: Data, train: Data) -> None:
    """Refuse an objective whose n_data is not the size of the data: its divergence would be mis-scaled."""
    rows = size(data)
    weighted = isinstance(data, Sequence) and len(data) > 2
    # With weights, rows do not tell how much data there is: n_data may be their sum, and the weights relative.
    if rows is not None and elbo.n_data not in (rows, size(train)) and not weighted:
        raise ValueError(
            f"fit: the objective has n_data={elbo.n_data}, the data has {rows} rows; make the ELBO with n_data={rows}."
        )


def _set_rate(optimiser: Any, rates: list[float], done: float) -> None:
    for group, rate in zip(optimiser.param_groups, rates, strict=True):
        group["lr"] = rate * (1 + math.cos(math.pi * done)) / 2


@torch.no_grad()
def _statistic(step: Any, loader: Any) -> Tensor | None:
    totals = _Totals()
    for batch in loader:
        totals.add(step(1.0, *batch))
    return totals.statistic


@torch.no_grad()
def validate(elbo: ELBO, loader: Any, fabric: Fabric) -> float:
    """Mean predictive log-likelihood, each data point as often as its weight says."""
    sums: Any = torch.zeros(2, device=fabric.device)
    for x, y, *weights in loader:
        log_prob = elbo.predict(x, samples=32 if elbo.method.samples else None).log_prob(y)
        weight = weights[0] if weights else torch.ones_like(log_prob)
        sums = sums + torch.stack([(weight * log_prob).sum(), weight.sum()])
    sums = fabric.all_reduce(sums, reduce_op="sum")
    return float(sums[0] / sums[1])


class _Bar:
    """A progress bar that is told each epoch's row; silent where nobody looks."""

    def __init__(self, progress: bool | None, epochs: int, start: int) -> None:
        console = Console(stderr=True)
        visible = console.is_terminal if progress is None else progress
        # On a narrow terminal the text takes a second line, in the place of the bar.
        text = TextColumn("{task.description}", table_column=Column(ratio=1))
        columns = (TextColumn("fit"), BarColumn(16), MofNCompleteColumn(), TimeRemainingColumn(), text)
        self.progress = Progress(*columns, console=console, disable=not visible, expand=True)
        self.task = self.progress.add_task("", total=epochs, completed=start)

    def __enter__(self) -> _Bar:
        self.progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.progress.stop()

    def show(self, row: dict[str, Any], elbo: ELBO) -> None:
        text = f"ELBO {-row['loss']:.3f}  fit {row['data_fit']:.3f}  KL {row['kl']:.0f}"
        precision = getattr(elbo.likelihood, "precision", None)
        if isinstance(precision, Tensor):
            text += f"  noise {float(precision.mean()) ** -0.5:.3g}"
        if "validation" in row:
            text += f"  validation {row['validation']:.3f}"
        self.progress.update(
            self.task, advance=1, description=f"{text}  {row['rows_per_second']:,.0f} rows/s"
        )

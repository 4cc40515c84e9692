"""The options of training, checked before it starts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from numbers import Integral, Real
from pathlib import Path
from typing import Literal, get_args

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from ..objectives import ELBO
from .batches import Data, size
from .epochs import Noise


@dataclass(frozen=True)
class Plan:
    """The options of `fit`."""

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
    compile: bool
    checkpoint: str | Path | None
    every: int
    resume: bool
    seed: int
    progress: bool | None

    def __post_init__(self) -> None:
        check_options(
            "fit",
            whole={"epochs": self.epochs, "batch_size": self.batch_size, "every": self.every},
            rates={"lr": self.lr, "clip": self.clip},
            flags={"compile": self.compile, "resume": self.resume},
            noise=self.noise,
            kl_warmup=self.kl_warmup,
            validation=self.validation,
            patience=self.patience,
            seeds=[self.seed],
        )
        if not (self.schedule is None or self.schedule == "cosine" or callable(self.schedule)):
            raise ValueError(
                'fit: schedule must be None, "cosine" or a function that makes a torch scheduler,'
                f" got {self.schedule!r}."
            )
        if self.resume and self.checkpoint is None:
            raise ValueError("fit: resume needs the file to go on from; give `checkpoint`.")
        if self.optimizer == "lbfgs":
            if self.clip is not None:
                raise ValueError('fit: optimizer="lbfgs" needs the gradient as it is; leave `clip` out.')
        elif not (self.optimizer is None or callable(self.optimizer)):
            raise ValueError(
                'fit: optimizer must be "lbfgs" or a function that makes a torch optimiser, '
                f"got {self.optimizer!r}."
            )

    def on_all_rows(self, elbo: ELBO, data: Data) -> Plan:
        """With one batch, for L-BFGS; data and objectives that it cannot use are refused."""
        rows = None if isinstance(data, DataLoader) else size(data)
        if rows is None:
            raise ValueError(
                'fit: optimizer="lbfgs" needs all rows at once; give `data` as tensors or a Dataset.'
            )
        check_noiseless("fit", elbo)
        return replace(self, batch_size=rows)


def check_options(
    caller: str,
    *,
    whole: Mapping[str, int | None],
    rates: Mapping[str, float | None],
    flags: Mapping[str, object],
    noise: str,
    kl_warmup: int,
    validation: object,
    patience: int | None,
    seeds: Iterable[int],
) -> None:
    """Refuse options that training could not follow.

    :param whole: options that are positive whole numbers, by name; None where one is not set.
    :param rates: options that are positive numbers.
    :param flags: options that are True or False.
    """
    for name, value in {**whole, "patience": patience}.items():
        if value is not None and not (isinstance(value, Integral) and value > 0):
            raise ValueError(f"{caller}: {name} must be positive and a whole number, got {value!r}.")
    for name, rate in rates.items():
        if rate is not None and not (isinstance(rate, Real) and 0 < rate < math.inf):
            raise ValueError(f"{caller}: {name} must be positive and finite, got {rate!r}.")
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise ValueError(f"{caller}: {name} must be True or False, got {flag!r}.")
    if not (isinstance(kl_warmup, Integral) and kl_warmup >= 0):
        raise ValueError(
            f"{caller}: kl_warmup must be a whole number of epochs, zero or more, got {kl_warmup!r}."
        )
    if noise not in get_args(Noise):
        raise ValueError(f'{caller}: noise must be "running", "exact" or "fixed", got {noise!r}.')
    if isinstance(validation, Real) and not 0 <= validation < 1:
        raise ValueError(
            f"{caller}: validation must be a share from 0 to below 1, or data, got {validation}."
        )
    if patience is not None and isinstance(validation, Real) and not validation:
        raise ValueError(
            f"{caller}: patience needs validation data; give `validation`, such as 0.1 or separate data."
        )
    for seed in seeds:
        if not (isinstance(seed, Integral) and abs(seed) < 2**43):
            raise ValueError(f"{caller}: a seed must be a whole number below 2**43, got {seed!r}.")


def check_noiseless(caller: str, elbo: ELBO) -> None:
    """Refuse an objective that samples to an optimiser that compares its values."""
    method, dropout = elbo.method, nn.modules.dropout._DropoutNd
    drops = any(isinstance(part, dropout) and part.p > 0 for part in elbo.net.modules())
    # Methods with moments take dropout as variance; the plain network samples it.
    source = method.name if method.samples else "Dropout" if method.deterministic and drops else None
    if source:
        raise ValueError(
            f'{caller}: optimizer="lbfgs" needs an objective without noise, and {source} samples; use Adam.'
        )

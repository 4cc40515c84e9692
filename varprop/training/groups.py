"""Replicas in groups, each group trained by a process of its own."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import pandas as pd
import torch
from torch import Tensor

from ..objectives import ELBO
from . import replicas
from .batches import Chosen, Stacked
from .processes import engine, start

if TYPE_CHECKING:
    from lightning_fabric import Fabric


def fit(
    members: Sequence[ELBO],
    x: Tensor | Chosen,
    y: Tensor | Chosen,
    weight: Tensor,
    *,
    devices: int = 1,
    seeds: Sequence[int],
    validation: Stacked | None = None,
    **options: Any,
) -> pd.DataFrame:
    """`replicas.fit` by several processes of the CPU, each with some of the members.

    Members have nothing to tell each other, so that the processes do not wait for one another. A member ends
    where it would in one process, up to rounding; a method that samples draws other noise.
    """
    whole = _Group(list(members), [x, y, weight], validation, list(seeds), options)
    processes = min(devices, len(members))
    if processes == 1:
        return whole.fit()
    with TemporaryDirectory(prefix="varprop-") as folder:
        fabric, job = engine(None, devices=processes, accelerator="cpu"), _Job(deepcopy(whole), Path(folder))
        start(fabric, job, remedy=lambda: "nothing was changed, fit it again")
        histories = []
        for rank in range(processes):
            content = torch.load(_result(Path(folder), rank), weights_only=True)
            for member, state in zip(members[rank::processes], content["members"], strict=True):
                member.load_state_dict(state)
                member.eval()
                member.seen = member.n_data
            history = pd.DataFrame(content["history"])
            histories.append(history.assign(replica=rank + processes * history.replica))
    return pd.concat(histories).sort_values(["epoch", "replica"], ignore_index=True)


@dataclass(frozen=True)
class _Group:
    """Members with their data, which have the members in their first dimension."""

    members: list[ELBO]
    data: Stacked
    validation: Stacked | None
    seeds: list[int]
    options: dict[str, Any] = field(default_factory=dict)

    def share(self, fabric: Fabric) -> _Group:
        own = slice(fabric.global_rank, None, fabric.world_size)
        validation = None if self.validation is None else [t[own] for t in self.validation]
        options = self.options if fabric.is_global_zero else {**self.options, "progress": False}
        return _Group(self.members[own], [t[own] for t in self.data], validation, self.seeds[own], options)

    def fit(self) -> pd.DataFrame:
        held_out: dict[str, Any] = {} if self.validation is None else {"validation": self.validation}
        x, y, weight = self.data
        return replicas.fit(self.members, x, y, weight, seeds=self.seeds, **held_out, **self.options)


@dataclass(frozen=True)
class _Job:
    """What each of the processes does."""

    whole: _Group
    folder: Path

    def __call__(self, fabric: Fabric) -> None:
        own = self.whole.share(fabric)
        members = deepcopy(own.members)  # whose tensors came in memory that all processes share
        own = _Group(members, own.data, own.validation, own.seeds, own.options)
        history = own.fit()
        content = {"members": [m.state_dict() for m in members], "history": history.to_dict("records")}
        torch.save(content, _result(self.folder, fabric.global_rank))


def _result(folder: Path, rank: int) -> Path:
    return folder / f"{rank}.pt"

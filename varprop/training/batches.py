"""Data as training wants it: shuffled batches, and a part held out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, random_split

if TYPE_CHECKING:
    from lightning_fabric import Fabric

Data: TypeAlias = Sequence[Tensor] | Dataset[Any] | DataLoader[Any]
"""Tensors (x, y) or (x, y, weight); a dataset of such rows; or a loader of such batches."""


class TensorBatches:
    """Batches of tensors already on the device: one permutation an epoch, and no collation."""

    def __init__(self, tensors: Sequence[Tensor], batch_size: int, fabric: Fabric, shuffle: bool) -> None:
        if len({len(t) for t in tensors}) != 1:
            raise ValueError(
                f"fit: the tensors have {', '.join(str(len(t)) for t in tensors)} rows; give one target for each input."
            )
        if len(tensors[0]) == 0:
            raise ValueError("fit: the data has no rows.")
        self.tensors = [fabric.to_device(t) for t in tensors]
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.share = slice(fabric.global_rank, None, fabric.world_size)

    def __len__(self) -> int:
        rows = len(range(len(self.tensors[0]))[self.share])
        return -(-rows // self.batch_size)

    def __iter__(self) -> Iterator[list[Tensor]]:
        n = len(self.tensors[0])
        order = (torch.randperm(n) if self.shuffle else torch.arange(n))[self.share]
        for rows in order.split(self.batch_size):
            yield [t[rows] for t in self.tensors]


def batches(data: Data, batch_size: int, fabric: Fabric, shuffle: bool) -> Any:
    """An iterable of batches with a length."""
    if isinstance(data, DataLoader):
        return fabric.setup_dataloaders(data)
    if isinstance(data, Dataset):
        return fabric.setup_dataloaders(DataLoader(data, batch_size, shuffle=shuffle))
    return TensorBatches(data, batch_size, fabric, shuffle)


def split(data: Data, validation: float | Data, seed: int) -> tuple[Data, Data | None]:
    """Training data, and what is held out of it or given besides."""
    if not isinstance(validation, int | float):
        return data, validation
    if not 0 <= validation < 1:
        raise ValueError(
            f"fit: validation must be a share from 0 to below 1, or data of its own, got {validation}."
        )
    if validation == 0:
        return data, None
    if isinstance(data, DataLoader):
        raise ValueError(
            "fit: a DataLoader cannot be split; give `validation` data of its own, or `data` as tensors or a Dataset."
        )
    generator = torch.Generator().manual_seed(seed)
    if isinstance(data, Dataset):
        train, held_out = random_split(data, [1 - validation, validation], generator)
        return train, held_out
    order = torch.randperm(len(data[0]), generator=generator)
    cut = max(1, round(validation * len(order)))
    return [t[order[cut:]] for t in data], [t[order[:cut]] for t in data]


def size(data: Data) -> int | None:
    """Rows of the data, where it knows."""
    if isinstance(data, DataLoader):
        data = data.dataset
    if isinstance(data, Dataset):
        return len(data) if hasattr(data, "__len__") else None
    return len(data[0])


def generators(loader: Any) -> list[torch.Generator]:
    """The generators of its own that a loader draws from, beside the global one."""
    owners: tuple[Any, ...] = (
        loader,
        getattr(loader, "sampler", None),
        getattr(getattr(loader, "batch_sampler", None), "sampler", None),
    )
    return [
        owner.generator for owner in owners if isinstance(getattr(owner, "generator", None), torch.Generator)
    ]

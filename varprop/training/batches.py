"""Data for training: checked, and split into training and held-out rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Sized
from numbers import Real
from typing import TypeAlias, overload

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

Batch: TypeAlias = Sequence[Tensor]
"""Tensors (x, y) or (x, y, weight) with a row for each data point."""
Data: TypeAlias = Batch | Dataset[Batch] | DataLoader[Batch]
"""Tensors (x, y) or (x, y, weight); a dataset of such rows; or a loader of such batches."""


def form(batch: Batch) -> tuple[object, ...]:
    """What batches have in common that the same operations can take, and which tensors are one."""
    tensors, structure = tree_flatten(batch)
    names = [id(t) for t in tensors]
    return structure, *[(t.shape, t.stride(), t.dtype, names.index(id(t))) for t in tensors]


class Chosen:
    """values[rows], taken where they are needed: rows that replicas choose from values that they share.

    >>> chosen = Chosen(torch.tensor([10.0, 20.0, 30.0]), torch.tensor([[0, 1], [1, 2]]))
    >>> chosen.shape, chosen[torch.tensor([[0], [1]]), torch.tensor([[1], [0]])].tolist()
    (torch.Size([2, 2]), [[20.0], [20.0]])
    """

    def __init__(self, values: Tensor, rows: Tensor) -> None:
        self.values, self.rows = values, rows
        self.shape = rows.shape + values.shape[1:]
        self.device = values.device

    def dim(self) -> int:
        return len(self.shape)

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, at: slice) -> Chosen: ...

    @overload
    def __getitem__(self, at: tuple[Tensor, Tensor]) -> Tensor: ...

    def __getitem__(self, at: slice | tuple[Tensor, Tensor]) -> Chosen | Tensor:
        """The values at places of replicas and rows, or all rows of some of the replicas."""
        rows = self.rows[at]
        return Chosen(self.values, rows) if isinstance(at, slice) else self.values[rows]

    def split(self, size: int, dim: int) -> Iterator[Tensor]:
        return (self.values[rows] for rows in self.rows.split(size, dim))


Stacked: TypeAlias = Sequence[Tensor | Chosen]
"""The same as `Batch` for several replicas, which are the first dimension."""


def split(data: Data, validation: float | Data, seed: int) -> tuple[Data, Data | None]:
    """Training data, and the data to validate on: rows held out of `data`, or data given for it."""
    check_data("fit", "data", data)
    if not isinstance(validation, float | Real):
        check_data("fit", "validation", validation)
        return data, validation
    if validation == 0:
        return data, None
    rows = size(data)
    if isinstance(data, DataLoader) or rows is None:
        kind = "a DataLoader" if isinstance(data, DataLoader) else "a Dataset without a length"
        raise ValueError(
            f"fit: {kind} cannot be split; give `validation` as separate data, or `data` as tensors."
        )
    train, held_out = split_rows("fit", rows, validation, seed)
    if isinstance(data, Dataset):
        return Subset(data, train.tolist()), Subset(data, held_out.tolist())
    return [t[train.to(t.device)] for t in data], [t[held_out.to(t.device)] for t in data]


def split_rows(caller: str, rows: int, share: float, seed: int) -> tuple[Tensor, Tensor]:
    """Indices of the rows to train on and of those to hold out, at least one."""
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))
    cut = max(1, round(share * rows))
    if cut >= rows:
        raise ValueError(
            f"{caller}: validation={share} leaves none of the {rows} rows to train on; hold out less."
        )
    return order[cut:], order[:cut]


def size(data: Data) -> int | None:
    """Number of rows, or None for a dataset without a length."""
    if isinstance(data, DataLoader):
        data = data.dataset
    if isinstance(data, Dataset):
        return len(data) if isinstance(data, Sized) else None
    return len(data[0])


def _is_weighted(data: Data) -> bool:
    """Whether rows have weights, as the first row of a dataset tells."""
    if isinstance(data, DataLoader):
        data = data.dataset
    if isinstance(data, Dataset):
        return not isinstance(data, IterableDataset) and len(data[0]) > 2
    return len(data) > 2


def check_data(caller: str, name: str, data: Data | Stacked, dims: int = 1) -> None:
    """Refuse what is neither tensors of the same first dimensions, nor a dataset, nor a loader."""
    if isinstance(data, Dataset | DataLoader):
        return
    if not isinstance(data, Sequence) or not all(isinstance(t, Tensor | Chosen) for t in data):
        got = type(data).__name__
        if isinstance(data, Sequence) and not isinstance(data, str):
            got += f" of {', '.join(type(t).__name__ for t in data)}"
        raise TypeError(
            f"{caller}: {name} must be tensors (x, y) or (x, y, weight), a Dataset or DataLoader, got {got}."
        )
    if len(data) not in (2, 3):
        raise ValueError(
            f"{caller}: {name} must be tensors (x, y) or (x, y, weight), got {len(data)} of them."
        )
    if any(t.dim() < dims for t in data) or len({t.shape[:dims] for t in data}) != 1:
        shapes = ", ".join(str(tuple(t.shape)) for t in data)
        first = "dimension" if dims == 1 else "two dimensions, replicas and rows,"
        raise ValueError(f"{caller}: {name} has shapes {shapes}; the first {first} must be the same.")
    if 0 in data[0].shape[:dims]:
        raise ValueError(f"{caller}: {name} has no rows.")
    weight = data[2] if len(data) == 3 else None
    if isinstance(weight, Tensor) and not bool((weight >= 0).all() and (weight.sum(-1) > 0).all()):
        raise ValueError(f"{caller}: the weights of {name} must be zero or more, and not all zero.")


def check_size(n_data: float, data: Data, train: Data) -> None:
    """Refuse an objective whose n_data is not the size of the data: its divergence would be mis-scaled.

    With weights, the rows do not tell how much data there is: n_data may be the sum of the weights.
    """
    rows, trained = size(data), size(train)
    if rows is not None and trained is not None and n_data not in (rows, trained) and not _is_weighted(data):
        raise wrong_size("fit", n_data, rows, trained)


def wrong_size(caller: str, n_data: float, rows: int, trained: int) -> ValueError:
    split, right = ("", f"n_data={rows}")
    if trained != rows:
        split, right = f", {trained} of them to train on", f"n_data={rows} or n_data={trained}"
    return ValueError(
        f"{caller}: the objective has n_data={n_data}, the data has {rows} rows{split}; make the ELBO with"
        f" {right}."
    )

"""Batches shared among processes: every row counts once, however many processes there are.

A batch has the same rows for any number of processes, and each takes its share of them. Samplers that give
every process as many rows as the others repeat some rows or drop them; here shares may differ in size.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias, TypeVar, cast

import torch
from torch.utils import _pytree as pytree
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
)
from torch.utils.data.distributed import DistributedSampler

from .batches import Batch, Data

if TYPE_CHECKING:
    from lightning_fabric import Fabric

Item = TypeVar("Item")
Check: TypeAlias = Callable[[torch.Tensor], None]
SEEDS_APART = 0x9E3779B9
"""Between the seeds of two processes. Odd, because a generator of the CPU uses 32 bits of its seed only."""


class Share(NamedTuple):
    """What a process has of a batch."""

    batch: Batch
    """One row even where the share is empty, because every process takes every step."""
    rows: int
    """How many rows the share has; none where the batch has fewer than there are processes."""
    weight: float
    """The rows over the processes' average: averages with these weights have the gradient of the batch."""


class Batches(Protocol):
    """What an epoch runs over."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Share]: ...

    @property
    def generators(self) -> list[torch.Generator]:
        """What the order of the rows is drawn from, beside the global random state."""


class TensorBatches:
    """Batches of tensors that are already on the device: one permutation an epoch, and no collation."""

    generators: list[torch.Generator] = []  # noqa: RUF012  it stays empty

    def __init__(self, tensors: Batch, batch_size: int, fabric: Fabric, shuffle: bool) -> None:
        self.tensors = [fabric.to_device(t) for t in _in_precision(fabric, tensors)]
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.fabric = fabric

    def __len__(self) -> int:
        return -(-len(self.tensors[0]) // self.batch_size)

    def __iter__(self) -> Iterator[Share]:
        _meet(self.fabric)
        n = len(self.tensors[0])
        order = torch.randperm(n) if self.shuffle else torch.arange(n)
        _part_ways(self.fabric)
        for rows in order.split(self.batch_size):
            own = _own(rows, self.fabric)
            chosen = own if len(own) else rows[:1]
            yield _share([t[chosen] for t in self.tensors], len(own), len(rows), self.fabric)


class LoaderBatches:
    """Batches of a DataLoader. Where it has indices of rows, a process loads its share only."""

    def __init__(self, loader: DataLoader[Batch], fabric: Fabric, check: Check) -> None:
        self.generators = _generators(loader)
        self.indices: _Indices | None = None
        if fabric.world_size > 1 and _has_indices(loader):
            self.indices = _Indices(loader, fabric)
            kept = {name: getattr(loader, name) for name in KEPT}
            loader = DataLoader(loader.dataset, batch_sampler=self.indices, **kept)
        self.loader = cast(
            "DataLoader[Batch]", fabric.setup_dataloaders(loader, use_distributed_sampler=False)
        )
        self.fabric, self.check = fabric, check

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Share]:
        _meet(self.fabric)
        if self.indices is not None:
            self.indices.draw()
            _part_ways(self.fabric)
            for batch in self.loader:
                yield _share(self._checked(batch), *self.indices.sizes.popleft(), self.fabric)
            return
        several = self.fabric.world_size > 1
        whole = _with_own_random_state(self.loader) if several else self.loader
        _part_ways(self.fabric)
        for batch in whole:
            parts, total = self._checked(batch), len(batch[1])
            own = pytree.tree_map(partial(_own, fabric=self.fabric), parts) if several else parts
            rows = len(own[1])
            yield _share(
                own if rows else pytree.tree_map(itemgetter(slice(1)), parts), rows, total, self.fabric
            )

    def _checked(self, batch: Batch) -> Sequence[torch.Tensor]:
        converted = _in_precision(self.fabric, batch)
        self.check(converted[1])
        return converted


KEPT = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "prefetch_factor",
    "persistent_workers",
)
"""What a loader of shares has from the user's loader; not the generator, or workers of all processes would
draw the same."""


class _Indices(Sampler[list[int]]):
    """The indices of this process's share of each batch that a loader would give a single process."""

    def __init__(self, loader: DataLoader[Batch], fabric: Fabric) -> None:
        sampler = loader.batch_sampler
        assert isinstance(sampler, Sampler)
        if isinstance(loader.sampler, DistributedSampler) and loader.batch_size is not None:
            rows = _rows(loader.sampler)
            sampler = BatchSampler(rows, loader.batch_size * fabric.world_size, loader.drop_last)
        # A loader that loads nothing draws the random numbers that a loader of the rows would draw.
        self.order: DataLoader[Any] = DataLoader(
            _Itself(), batch_sampler=sampler, collate_fn=list, generator=loader.generator
        )
        self.fabric = fabric
        self.drawn: Iterator[list[int]] = iter(())
        self.sizes: deque[tuple[int, int]] = deque()
        """Rows of the share and of the batch, of batches that are being loaded."""

    def draw(self) -> None:
        """Begin an epoch from the global random state, which is still that of all processes."""
        self.drawn = _with_own_random_state(self.order)
        self.sizes.clear()

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self) -> Iterator[list[int]]:
        for rows in self.drawn:
            own = _own(rows, self.fabric)
            self.sizes.append((len(own), len(rows)))
            yield own or rows[:1]


class _Itself(Dataset[int]):
    """A dataset whose rows are their indices."""

    def __getitem__(self, index: int) -> int:
        return index


def batches(
    data: Data, batch_size: int, fabric: Fabric, shuffle: bool, check: Check = lambda y: None
) -> Batches:
    """The data as batches on the device of this process.

    :param check: of the targets that a loader loads.
    """
    if isinstance(data, Dataset):
        shuffle = shuffle and not isinstance(data, IterableDataset)
        data = DataLoader(data, batch_size, shuffle=shuffle)
    if isinstance(data, DataLoader):
        return LoaderBatches(data, fabric, check)
    return TensorBatches(data, batch_size, fabric, shuffle)


def _own(rows: Any, fabric: Fabric) -> Any:
    return rows[fabric.global_rank :: fabric.world_size]


def _share(batch: Batch, rows: int, total: int, fabric: Fabric) -> Share:
    return Share(batch, rows, rows * fabric.world_size / total if total else 1.0)


def _in_precision(fabric: Fabric, batch: Batch) -> Sequence[torch.Tensor]:
    """In the type that the fabric gives the parameters: predictions do not pass through its wrapper."""
    if not isinstance(batch, Sequence) or len(batch) not in (2, 3):
        got = f"keys {', '.join(map(str, batch))}" if isinstance(batch, Mapping) else type(batch).__name__
        raise TypeError(
            f"fit: a loader's batches must be (x, y) or (x, y, weight), got {got}; give it a collate_fn that "
            "makes them."
        )
    converted: Sequence[torch.Tensor] = fabric.strategy.precision.convert_input(list(batch))
    return converted


def _has_indices(loader: DataLoader[Batch]) -> bool:
    """Whether a loader is one of torch's own over rows that can be loaded one by one."""
    own = type(loader).__iter__ is not DataLoader.__iter__
    return not (own or isinstance(loader.dataset, IterableDataset) or loader.batch_sampler is None)


def _rows(sampler: DistributedSampler[Any]) -> Sampler[int]:
    """All rows, for a sampler that gives a process its share of them."""
    rows: Sampler[int] = (RandomSampler if sampler.shuffle else SequentialSampler)(sampler.dataset)  # type: ignore[arg-type]
    return rows


def _meet(fabric: Fabric) -> None:
    """Let all processes go on from the random state of the first, so that they draw the same order."""
    if fabric.world_size > 1:
        torch.random.set_rng_state(fabric.broadcast(torch.random.get_rng_state()))


def _part_ways(fabric: Fabric) -> None:
    """Let every process draw its own noise from here on; the first one goes on as it would alone."""
    if fabric.global_rank:
        torch.manual_seed(int(torch.randint(2**32, ())) ^ SEEDS_APART * fabric.global_rank)


def _with_own_random_state(items: DataLoader[Item]) -> Iterator[Item]:
    """Items that are drawn from the global random state of now, whatever is drawn from it in between."""
    state = torch.random.get_rng_state()

    def drawn() -> Iterator[Item]:
        nonlocal state
        iterator: Iterator[Item] | None = None
        while True:
            outside = torch.random.get_rng_state()
            torch.random.set_rng_state(state)
            iterator = iter(items) if iterator is None else iterator
            try:
                item = next(iterator)
            except StopIteration:
                return
            finally:
                state = torch.random.get_rng_state()
                torch.random.set_rng_state(outside)
            yield item

    return drawn()


def _generators(loader: DataLoader[Batch]) -> list[torch.Generator]:
    owners = (loader, loader.sampler, getattr(loader.batch_sampler, "sampler", None))
    found = (getattr(owner, "generator", None) for owner in owners)
    return [generator for generator in found if isinstance(generator, torch.Generator)]

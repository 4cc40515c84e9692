"""Images for training: bytes in memory, standardised, shifted and mirrored as a batch is drawn."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler

from . import data


@dataclass(frozen=True)
class ImageSet:
    """Training and test images of one set, as bytes, and how to standardise them."""

    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor
    centre: Tensor
    scale: Tensor
    """Mean and standard deviation of each channel over the training images."""

    @classmethod
    def of(cls, images: data.Images) -> ImageSet:
        centre, scale = moments(images[0])
        return cls(*images, centre, scale)

    @property
    def classes(self) -> int:
        return int(self.y.max()) + 1

    def standardised(self, x: Tensor) -> Tensor:
        """In the memory format in which convolutions of a processor are fastest."""
        return ((x - self.centre) / self.scale).contiguous(memory_format=torch.channels_last)

    def held_out(self, n: int) -> ImageSet:
        """The last n training images in the place of the test images, which are left alone."""
        return replace(self, x=self.x[:-n], y=self.y[:-n], x_test=self.x[-n:], y_test=self.y[-n:])


def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each channel; part by part, to save memory."""
    sums = torch.stack([_sums(part.double()) for part in x.split(5000)]).sum(0) * x.shape[1] / x.numel()
    mean, square = sums.view(2, -1, 1, 1)
    return mean.float(), (square - mean.square()).sqrt().float()


def _sums(x: Tensor) -> Tensor:
    return torch.stack([x.sum((0, 2, 3)), x.square().sum((0, 2, 3))])


@dataclass(frozen=True)
class Augmentation:
    """Shifts by up to `shift` pixels along each axis, and mirror images."""

    shift: int = 0
    flip: bool = False

    def __call__(self, x: Tensor) -> Tensor:
        x = shifted(x, self.shift) if self.shift else x
        return torch.where(torch.rand(len(x), 1, 1, 1) < 0.5, x.flip(3), x) if self.flip else x


def shifted(x: Tensor, most: int) -> Tensor:
    """Each image moved by a random number of pixels; what moves in repeats the border."""
    n, channels, height, width = x.shape
    down, right = torch.randint(-most, most + 1, (2, n, 1))
    rows = (torch.arange(height) + down).clamp(0, height - 1).view(n, 1, height, 1)
    columns = (torch.arange(width) + right).clamp(0, width - 1).view(n, 1, 1, width)
    return x[torch.arange(n).view(n, 1, 1, 1), torch.arange(channels).view(1, channels, 1, 1), rows, columns]


class Batches(Dataset[tuple[Tensor, Tensor]]):
    """The training images; an index is the list of a batch's rows."""

    def __init__(self, images: ImageSet, augmentation: Augmentation) -> None:
        self.images, self.augmentation = images, augmentation

    def __len__(self) -> int:
        return len(self.images.x)

    def __getitem__(self, rows: list[int]) -> tuple[Tensor, Tensor]:
        return self.images.standardised(self.augmentation(self.images.x[rows])), self.images.y[rows]


def loader(images: ImageSet, batch_size: int, augmentation: Augmentation) -> DataLoader[Any]:
    """Shuffled batches. All draws are torch's own, which `vp.fit` seeds for each epoch."""
    batches = Batches(images, augmentation)
    rows = BatchSampler(RandomSampler(range(len(batches))), batch_size, drop_last=False)
    return DataLoader(batches, sampler=rows, batch_size=None)

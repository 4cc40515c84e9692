"""The networks that are measured. This file needs torch alone, so that every peer can build the same ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from experiments.block import Block
from experiments.lenets import lenet


def perceptron(inputs: int, hidden: int, outputs: int, depth: int = 1) -> nn.Sequential:
    widths = [inputs, *[hidden] * depth]
    layers: list[nn.Module] = []
    for i in range(depth):
        layers += [nn.Linear(widths[i], widths[i + 1]), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(hidden, outputs))


def resnet() -> nn.Sequential:
    """Three residual blocks of 16, 32 and 64 channels, for images of 32 × 32."""

    def stage(inputs: int, outputs: int, stride: int) -> list[nn.Module]:
        return [nn.Conv2d(inputs, outputs, 3, stride, padding=1), nn.ReLU(), Block(outputs)]

    stages = [*stage(3, 16, 1), *stage(16, 32, 2), *stage(32, 64, 2)]
    return nn.Sequential(*stages, nn.AvgPool2d(8), nn.Flatten(), nn.Linear(64, 10))


@dataclass(frozen=True)
class Case:
    """A network with the shape of its inputs."""

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    classes: int | None
    """None for a number as the target."""
    batch: int = 128
    """The batch that most is measured with."""

    def net(self) -> nn.Module:
        """The network, with the same weights at each call."""
        torch.manual_seed(0)
        return self.build()

    def data(self, rows: int) -> tuple[Tensor, Tensor]:
        """Random inputs and targets."""
        generator = torch.Generator().manual_seed(rows)
        x = torch.randn(rows, *self.shape, generator=generator)
        if self.classes is None:
            return x, torch.randn(rows, 1, generator=generator)
        return x, torch.randint(self.classes, (rows,), generator=generator)


CASES = {
    "perceptron": Case(lambda: perceptron(13, 50, 1), (13,), None, batch=32),
    "wide perceptron": Case(lambda: perceptron(784, 1200, 10, depth=2), (784,), 10),
    "LeNet-small": Case(lambda: lenet(1, 10), (1, 28, 28), 10),
    "LeNet-CIFAR": Case(lambda: lenet(3, 10), (3, 32, 32), 10),
    "ResNet": Case(resnet, (3, 32, 32), 10),
}

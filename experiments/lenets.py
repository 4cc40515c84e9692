"""LeNets: those of Table 2 (appendix B.3 of the paper), the same with pooling, and narrower ones."""

from __future__ import annotations

from torch import nn


def lenet(channels: int, classes: int, pooled: bool = False) -> nn.Sequential:
    """LeNet-small for 28 × 28 images of one channel, LeNet-CIFAR for 32 × 32 of three; weights as by He.

    Pooled, a convolution takes every position and the largest of each two by two stays; shapes are the same.
    """
    first, second, hidden, features = (20, 50, 500, 800) if channels == 1 else (192, 192, 1000, 4800)
    net = nn.Sequential(
        *_reduced(channels, first, pooled),
        *_reduced(first, second, pooled),
        nn.Flatten(),
        nn.Linear(features, hidden),
        nn.ReLU(),
        nn.Linear(hidden, classes),
    )
    for layer in net:
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            nn.init.zeros_(layer.bias)  # type: ignore[arg-type]
    return net


def narrow(first: int, second: int, hidden: int) -> nn.Sequential:
    """LeNet-small with so many channels and hidden units; weights as torch draws them."""
    return nn.Sequential(
        *_reduced(1, first, pooled=False),
        *_reduced(first, second, pooled=False),
        nn.Flatten(),
        nn.Linear(16 * second, hidden),
        nn.ReLU(),
        nn.Linear(hidden, 10),
    )


def _reduced(inputs: int, outputs: int, pooled: bool) -> list[nn.Module]:
    """Half as many positions along each axis: 28 to 12 to 4, 32 to 14 to 5."""
    if pooled:
        return [nn.Conv2d(inputs, outputs, 5), nn.MaxPool2d(2), nn.ReLU()]
    return [nn.Conv2d(inputs, outputs, 5, stride=2), nn.ReLU()]

"""Networks as users write them: modules with their own `forward` that use nothing from this library."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class BasicBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        identity = x
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return F.relu(out)


class Bottleneck(nn.Module):
    """A block of ResNet-50."""

    def __init__(self, inputs: int, width: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = (
            nn.Conv2d(width, width, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )
        self.conv3, self.bn3 = nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width)
        self.downsample = None
        if stride != 1 or inputs != 4 * width:
            self.downsample = nn.Sequential(
                nn.Conv2d(inputs, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width)
            )

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        out = F.relu(self.bn1(self.conv1(x)))
        out = F.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += identity
        return F.relu(out)


class ResNet(nn.Module):
    """ResNet-18 with narrow layers."""

    def __init__(self, width: int = 4, depths: tuple[int, ...] = (2, 2, 2, 2), classes: int = 5) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        self.layers = nn.ModuleList()
        channels = width
        for i, depth in enumerate(depths):
            blocks = [BasicBlock(channels, width << i, 1 if i == 0 else 2)]
            blocks += [BasicBlock(width << i, width << i) for _ in range(depth - 1)]
            self.layers.append(nn.Sequential(*blocks))
            channels = width << i
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.maxpool(x)
        for layer in self.layers:
            x = layer(x)
        x = torch.flatten(self.avgpool(x), 1)
        return self.fc(x)


class DenseBlock(nn.Module):
    def __init__(self, channels: int = 3, growth: int = 2, depth: int = 3) -> None:
        super().__init__()
        self.convs = nn.ModuleList(
            nn.Conv2d(channels + i * growth, growth, 3, padding=1) for i in range(depth)
        )

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for conv in self.convs:
            features.append(conv(torch.cat(features, 1).relu()))
        return torch.cat(features, dim=1)


class SqueezeExcite(nn.Module):
    def __init__(self, channels: int = 3) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)
        self.down = nn.Linear(channels, 2)
        self.up = nn.Linear(2, channels)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        b, c, _, _ = x.shape
        s = x.mean((2, 3))
        s = torch.sigmoid(self.up(F.relu(self.down(s))))
        return x * s.view(b, c, 1, 1)


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.inner = nn.Conv2d(4, 6, 3, padding=1)
        self.up = nn.ConvTranspose2d(6, 4, 2, stride=2)
        self.decoder = Decoder()

    def forward(self, x: Tensor) -> Tensor:
        skip = F.relu(self.first(x))
        inner = F.relu(self.inner(F.max_pool2d(skip, 2)))
        return self.decoder(self.up(inner), skip) + F.interpolate(self.decoder.small(inner), scale_factor=2)


class Decoder(nn.Module):
    """A module with two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 2, 1)
        self.small = nn.Conv2d(6, 2, 1)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        return self.conv(torch.cat([x, skip], dim=1))


class Residual(nn.Module):
    """A pre-activation block of linear layers."""

    def __init__(self, size: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(size, size + 2)
        self.second = nn.Linear(size + 2, size)
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.second(F.relu(self.first(torch.tanh(x))))


class Twice(nn.Module):
    """One module, used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.part = Residual(4)
        self.drop_rate = 0.5

    def forward(self, x: Tensor) -> Tensor:
        return self.part(F.dropout(self.part(x), self.drop_rate, self.training))


class Branching(nn.Module):
    """Control flow that depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) if x.sum() > 0 else x


class Function(nn.Module):
    """A function as a network."""

    def __init__(self, function: Callable[..., object]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> object:
        return self.function(x)

"""The table of layers on which every rule is checked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

import varprop as vp


@dataclass(frozen=True)
class Case:
    """A layer, the shape of its input (with the batch), and how closely its rule should match sampling."""

    name: str
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    deterministic_input: bool = False
    """Whether the rule is exact for a deterministic input only; in a random one, padding repeats entries."""
    training: bool = False
    mean_error: float = 0.0
    """For an approximation, the tolerated average error of the mean, in sampled standard deviations."""
    var_error: float = 0.0
    """For an approximation, the tolerated average of |log(predicted variance / sampled variance)|."""

    def build(
        self, dtype: torch.dtype = torch.float64, logvar: float = -2.0
    ) -> tuple[nn.Module, vp.Gaussian]:
        """The layer with random weights, and a random input."""
        torch.manual_seed(len(self.name))
        module = self.make().to(dtype).train(self.training)
        if any(isinstance(m, vp.randomisation.RANDOM_LAYERS) for m in module.modules()):
            vp.variational(module, logvar=logvar, biases=True)
        x = vp.Gaussian(torch.randn(self.shape, dtype=dtype), torch.rand(self.shape, dtype=dtype) + 0.1)
        return module, x


AFFINE = [
    Case("linear", lambda: nn.Linear(5, 4), (3, 5)),
    Case("linear without bias", lambda: nn.Linear(5, 4, bias=False), (3, 5)),
    Case("linear over time", lambda: nn.Linear(5, 4), (2, 3, 5)),
    Case("conv1d", lambda: nn.Conv1d(3, 4, 3, stride=2, padding=1), (2, 3, 8)),
    Case("conv2d", lambda: nn.Conv2d(2, 4, 3), (2, 2, 6, 6)),
    Case(
        "conv2d stride padding dilation",
        lambda: nn.Conv2d(2, 3, 3, stride=2, padding=2, dilation=2),
        (2, 2, 7, 7),
    ),
    Case("conv2d groups", lambda: nn.Conv2d(4, 6, 3, groups=2, bias=False), (2, 4, 5, 5)),
    Case("conv2d same", lambda: nn.Conv2d(2, 3, (3, 5), padding="same"), (2, 2, 5, 6)),
    Case("conv2d valid", lambda: nn.Conv2d(2, 3, 3, padding="valid"), (2, 2, 5, 5)),
    Case("conv2d circular", lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"), (2, 2, 5, 5)),
    Case(
        "conv2d circular same",
        lambda: nn.Conv2d(2, 3, 3, padding="same", padding_mode="circular"),
        (2, 2, 5, 5),
    ),
    Case(
        "conv2d reflect",
        lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="reflect"),
        (2, 2, 5, 5),
        deterministic_input=True,
    ),
    Case(
        "conv2d replicate",
        lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="replicate"),
        (2, 2, 5, 5),
        deterministic_input=True,
    ),
    Case("conv3d", lambda: nn.Conv3d(1, 2, 2, padding=(1, 0, 1)), (2, 1, 3, 3, 3)),
    Case(
        "conv transpose1d",
        lambda: nn.ConvTranspose1d(3, 2, 3, stride=2, padding=1, output_padding=1),
        (2, 3, 4),
    ),
    Case("conv transpose2d", lambda: nn.ConvTranspose2d(2, 4, 3, stride=2, groups=2), (2, 2, 3, 3)),
    Case("conv transpose3d", lambda: nn.ConvTranspose3d(2, 1, 2), (1, 2, 2, 2, 2)),
    Case("unbatched conv2d", lambda: nn.Conv2d(2, 3, 3), (2, 5, 5)),
]

NORMALISATION = [
    Case("batch norm1d", lambda: settled(nn.BatchNorm1d(3)), (4, 3)),
    Case("batch norm1d over time", lambda: settled(nn.BatchNorm1d(3)), (2, 3, 4)),
    Case("batch norm2d", lambda: settled(nn.BatchNorm2d(3)), (2, 3, 2, 4)),
    Case(
        "instance norm2d settled",
        lambda: settled(nn.InstanceNorm2d(3, track_running_stats=True)),
        (2, 3, 2, 4),
    ),
    Case("batch norm3d without scale", lambda: settled(nn.BatchNorm3d(2, affine=False)), (1, 2, 2, 2, 2)),
]
"""Affine maps: normalisation by running statistics."""

APPROXIMATE = [
    Case(
        "batch norm1d in training",
        lambda: scaled(nn.BatchNorm1d(3)),
        (16, 3),
        training=True,
        mean_error=0.03,
        var_error=0.1,
    ),
    Case(
        "batch norm2d in training",
        lambda: scaled(nn.BatchNorm2d(3)),
        (4, 3, 3, 3),
        training=True,
        mean_error=0.03,
        var_error=0.05,
    ),
    Case("layer norm", lambda: scaled(nn.LayerNorm(16)), (4, 16), mean_error=0.03, var_error=0.08),
    Case(
        "layer norm over two",
        lambda: nn.LayerNorm((3, 4), elementwise_affine=False),
        (2, 3, 4),
        mean_error=0.04,
        var_error=0.1,
    ),
    Case(
        "layer norm without bias",
        lambda: scaled(nn.LayerNorm(16, bias=False)),
        (2, 3, 16),
        mean_error=0.03,
        var_error=0.08,
    ),
    Case("rms norm", lambda: scaled(nn.RMSNorm(16)), (4, 16), mean_error=0.03, var_error=0.08),
    Case("group norm", lambda: scaled(nn.GroupNorm(2, 4)), (2, 4, 3, 3), mean_error=0.03, var_error=0.08),
    Case("instance norm1d", lambda: nn.InstanceNorm1d(3), (2, 3, 16), mean_error=0.03, var_error=0.08),
    Case(
        "instance norm2d",
        lambda: scaled(nn.InstanceNorm2d(3, affine=True)),
        (2, 3, 4, 4),
        mean_error=0.03,
        var_error=0.08,
    ),
    Case(
        "instance norm2d unbatched", lambda: nn.InstanceNorm2d(3), (3, 4, 4), mean_error=0.03, var_error=0.08
    ),
    Case("softmax", lambda: nn.Softmax(1), (4, 6), mean_error=0.02, var_error=0.08),
    Case("softmax of two", lambda: nn.Softmax(-1), (4, 3, 2), mean_error=0.02, var_error=0.03),
    Case("softmin", lambda: nn.Softmin(1), (4, 6), mean_error=0.02, var_error=0.08),
    Case("log softmax", lambda: nn.LogSoftmax(1), (4, 6), mean_error=0.02, var_error=0.08),
    Case("softmax2d", nn.Softmax2d, (2, 4, 2, 2), mean_error=0.02, var_error=0.08),
    Case(
        "batch norm2d of the batch",
        lambda: nn.BatchNorm2d(3, track_running_stats=False),
        (4, 3, 3, 3),
        mean_error=0.03,
        var_error=0.05,
    ),
]
"""Rules that are close to sampling, with the tolerance of each."""

SHARED = [
    *AFFINE,
    *NORMALISATION,
    Case(
        "sequential of nothing but linear maps",
        lambda: nn.Sequential(nn.Flatten(), nn.Identity(), nn.Linear(8, 3)),
        (2, 2, 4),
    ),
    Case("identity", nn.Identity, (3, 4)),
    Case("flatten", nn.Flatten, (2, 3, 4)),
    Case("unflatten", lambda: nn.Unflatten(1, (2, 3)), (2, 6)),
    *(
        Case(kind.__name__.lower(), kind, (4, 6))
        for kind in (nn.Tanh, nn.Sigmoid, nn.GELU, nn.SiLU, nn.Mish, nn.Softplus, nn.ELU, nn.SELU, nn.CELU)
    ),
    *(
        Case(kind.__name__.lower(), kind, (4, 6))
        for kind in (nn.LogSigmoid, nn.Softsign, nn.Tanhshrink, nn.Hardswish)
    ),
    Case("avg pool1d", lambda: nn.AvgPool1d(3, 2), (2, 3, 9)),
    Case("avg pool2d", lambda: nn.AvgPool2d(2), (2, 2, 4, 4)),
    Case("avg pool2d padded", lambda: nn.AvgPool2d(3, 2, padding=1), (2, 2, 5, 5)),
    Case(
        "avg pool2d padding not counted",
        lambda: nn.AvgPool2d(3, 2, padding=1, count_include_pad=False),
        (2, 2, 5, 5),
    ),
    Case("avg pool2d ceil", lambda: nn.AvgPool2d(3, 2, padding=1, ceil_mode=True), (2, 2, 6, 6)),
    Case("avg pool2d divisor", lambda: nn.AvgPool2d(2, divisor_override=3), (2, 2, 4, 4)),
    Case("avg pool3d", lambda: nn.AvgPool3d(2), (1, 2, 4, 4, 4)),
    Case("adaptive avg pool1d", lambda: nn.AdaptiveAvgPool1d(4), (2, 2, 10)),
    Case("adaptive avg pool2d", lambda: nn.AdaptiveAvgPool2d((2, None)), (2, 2, 5, 3)),
    Case("adaptive avg pool3d", lambda: nn.AdaptiveAvgPool3d(2), (1, 2, 3, 3, 3)),
    Case("glu", lambda: nn.GLU(1), (3, 6)),
    Case("pixel shuffle", lambda: nn.PixelShuffle(2), (1, 4, 2, 3)),
    Case("pixel unshuffle", lambda: nn.PixelUnshuffle(2), (1, 1, 4, 2)),
    Case("channel shuffle", lambda: nn.ChannelShuffle(2), (2, 4, 2, 2)),
    Case("unfold", lambda: nn.Unfold(2), (1, 2, 3, 3)),
    Case("zero pad2d", lambda: nn.ZeroPad2d((1, 0, 2, 1)), (1, 2, 3, 3)),
    Case("constant pad1d", lambda: nn.ConstantPad1d(2, 3.5), (2, 2, 4)),
    Case("constant pad3d", lambda: nn.ConstantPad3d(1, -0.5), (1, 1, 2, 2, 2)),
    Case("reflection pad1d", lambda: nn.ReflectionPad1d(2), (2, 2, 4)),
    Case("replication pad2d", lambda: nn.ReplicationPad2d(1), (1, 2, 3, 3)),
    Case("circular pad2d", lambda: nn.CircularPad2d(1), (1, 2, 3, 3)),
    Case("upsample nearest", lambda: nn.Upsample(scale_factor=2), (1, 2, 3, 3)),
    Case("upsample linear", lambda: nn.Upsample(7, mode="linear"), (2, 2, 4)),
    Case("upsample bilinear", lambda: nn.Upsample(scale_factor=(2.0, 1.6), mode="bilinear"), (1, 2, 3, 4)),
    Case("upsample bilinear by corners", lambda: nn.UpsamplingBilinear2d(size=(5, 6)), (1, 2, 3, 4)),
    Case("upsample bicubic", lambda: nn.Upsample(size=(5, 6), mode="bicubic"), (1, 1, 3, 4)),
    Case("upsample trilinear", lambda: nn.Upsample(scale_factor=2, mode="trilinear"), (1, 1, 2, 2, 3)),
    Case("dropout in evaluation", lambda: nn.Dropout(0.3), (3, 4)),
    Case("dropout in training", lambda: nn.Dropout(0.3), (3, 4), training=True),
    Case("dropout2d in training", lambda: nn.Dropout2d(0.3), (2, 3, 2, 2), training=True),
    Case("alpha dropout in training", lambda: nn.AlphaDropout(0.2), (3, 4), training=True),
]

PIECEWISE = [
    Case("relu", nn.ReLU, (4, 6)),
    Case("leaky relu", lambda: nn.LeakyReLU(0.2), (4, 6)),
    Case("prelu", nn.PReLU, (4, 6)),
    Case("prelu by channel", lambda: _distinct(nn.PReLU(3)), (2, 3, 2, 2)),
    Case("relu6", nn.ReLU6, (4, 6)),
    Case("hardtanh", lambda: nn.Hardtanh(-0.5, 1.0), (4, 6)),
    Case("hardsigmoid", nn.Hardsigmoid, (4, 6)),
    Case("softshrink", lambda: nn.Softshrink(0.4), (4, 6)),
]

MAXIMA = [
    Case("max pool1d", lambda: nn.MaxPool1d(2), (2, 3, 6)),
    Case("max pool2d of pairs", lambda: nn.MaxPool2d((1, 2)), (2, 2, 3, 4)),
    Case("max pool2d padded", lambda: nn.MaxPool2d((2, 1), 2, padding=(1, 0)), (2, 2, 4, 4)),
    Case("max pool2d dilated", lambda: nn.MaxPool2d((1, 2), 1, dilation=2), (2, 2, 3, 4)),
    Case("max pool2d ceil", lambda: nn.MaxPool2d((1, 2), ceil_mode=True), (2, 2, 3, 5)),
    Case("adaptive max pool2d", lambda: nn.AdaptiveMaxPool2d((2, 1)), (2, 2, 2, 2)),
    Case("max pool3d", lambda: nn.MaxPool3d((1, 1, 2)), (1, 2, 2, 2, 4)),
]
"""Windows of two: the maximum of two normal variables has exact moments."""

ALL = [*SHARED, *APPROXIMATE, *PIECEWISE, *MAXIMA]


def _distinct(module: nn.PReLU) -> nn.PReLU:
    with torch.no_grad():
        module.weight.copy_(torch.linspace(-0.3, 0.6, len(module.weight)))
    return module


def scaled(module: nn.Module) -> nn.Module:
    """A normalisation layer with a different scale and shift for each channel."""
    with torch.no_grad():
        module.weight.copy_(torch.linspace(0.5, 2.0, module.weight.numel()).view_as(module.weight))
        if getattr(module, "bias", None) is not None:
            module.bias.copy_(torch.linspace(-1.0, 1.0, module.bias.numel()).view_as(module.bias))
    return module


def settled(module: nn.Module) -> nn.Module:
    """A normalisation layer with running statistics as after training."""
    module.running_mean.copy_(torch.linspace(-0.5, 1.0, len(module.running_mean)))
    module.running_var.copy_(torch.linspace(0.3, 2.0, len(module.running_var)))
    return scaled(module) if module.weight is not None else module


def ids(cases: list[Case]) -> dict[str, object]:
    """Arguments of `pytest.mark.parametrize` for a list of cases."""
    return {"argnames": "case", "argvalues": cases, "ids": [case.name for case in cases]}

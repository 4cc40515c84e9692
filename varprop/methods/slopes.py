"""The gradient of an output by the weights of a linear layer, from that by the layer's output.

Under `vmap` it is a matrix product for each example, where autograd would take a convolution in groups.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..posterior import Layer


def weight_slope(layer: Layer, x: Tensor, slope: Tensor) -> Tensor:
    """Σ_p g_op x_ip over all positions p, shaped like the layer's weight.

    :param slope: the gradient g by the layer's output.

    >>> layer = nn.Conv1d(2, 3, 2)
    >>> f = layer(x := torch.randn(1, 2, 5))
    >>> (g,) = torch.autograd.grad(f.square().sum(), layer.weight)
    >>> torch.allclose(weight_slope(layer, x, 2 * f), g, atol=1e-5)
    True
    """
    if isinstance(layer, nn.Linear):
        return slope.flatten(0, -2).mT @ x.flatten(0, -2)
    near, far = (slope, x) if layer.transposed else (x, slope)
    patches, far = _patches(layer, near), _grouped(layer, far).flatten(3)
    return torch.einsum("ngop,ngip->goi", far, patches).reshape(layer.weight.shape)


def bias_slope(layer: Layer, slope: Tensor) -> Tensor:
    """Σ_p g_op over all positions p."""
    channel = -1 if isinstance(layer, nn.Linear) else 1
    return slope.movedim(channel, -1).flatten(0, -2).sum(0)


def _grouped(layer: Layer, x: Tensor) -> Tensor:
    return x.unflatten(1, (layer.groups, -1))


def _patches(layer: Layer, x: Tensor) -> Tensor:
    """What each position sees through the kernel, as (n, group, entries of the kernel, positions)."""
    x = _padded(layer, x)
    for axis, (size, stride, dilation) in enumerate(
        zip(layer.kernel_size, layer.stride, layer.dilation, strict=True), 2
    ):
        x = x.unfold(axis, dilation * (size - 1) + 1, stride)[..., ::dilation]
    n = len(layer.kernel_size)
    x = _grouped(layer, x)  # n, group, channel, positions, kernel
    return x.movedim(tuple(range(3 + n, 3 + 2 * n)), tuple(range(3, 3 + n))).flatten(3 + n).flatten(2, 2 + n)


def _padded(layer: Layer, x: Tensor) -> Tensor:
    if layer.transposed:
        return F.pad(x, [p for size in reversed(layer.padding) for p in (size, size)])
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    return F.pad(x, layer._reversed_padding_repeated_twice, mode=mode)

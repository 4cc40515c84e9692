"""The gradients of several outputs by the weights of a linear layer, from those by the layer's output.

They are one matrix product for each example, where autograd under `vmap` would take a convolution in groups.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..posterior import Layer


def weight_slopes(layer: Layer, x: Tensor, slopes: Tensor) -> Tensor:
    """Σ_p g_kop x_ip over all positions p: for each output k, shaped like the layer's weight.

    :param slopes: the gradients g by the layer's output, the outputs k in the first dimension.

    >>> layer = nn.Conv1d(2, 3, 2)
    >>> f = layer(x := torch.randn(1, 2, 5))
    >>> (g,) = torch.autograd.grad(f.square().sum(), layer.weight)
    >>> torch.allclose(weight_slopes(layer, x, 2 * f[None])[0], g, atol=1e-5)
    True
    """
    if isinstance(layer, nn.Linear):
        return torch.einsum("kpo,pi->koi", slopes.flatten(1, -2), x.flatten(0, -2))
    several, together = slopes.shape[:2], slopes.flatten(0, 1)
    if layer.transposed:
        far, patches = _grouped(layer, x).flatten(3), _patches(layer, together).unflatten(0, several)
        found = torch.einsum("ngop,kngip->kgoi", far, patches)
    else:
        far, patches = _grouped(layer, together).flatten(3).unflatten(0, several), _patches(layer, x)
        found = torch.einsum("kngop,ngip->kgoi", far, patches)
    return found.reshape(-1, *layer.weight.shape)


def bias_slopes(layer: Layer, slopes: Tensor) -> Tensor:
    """Σ_p g_kop over all positions p."""
    channel = -1 if isinstance(layer, nn.Linear) else 2
    return slopes.movedim(channel, -1).flatten(1, -2).sum(1)


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

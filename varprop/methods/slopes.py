"""The gradients of an output by the weights of a linear layer, from those by the layer's output.

Tensors hold n examples, one after the other, in their first dimension.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..gaussian import sqrt
from ..posterior import Layer


def weight_slopes(layer: Layer, x: Tensor, slopes: Tensor, n: int = 1) -> Tensor:
    """Σ_p g_op x_ip over the positions p of an example: for each example, shaped like the weight.

    For a convolution, the examples are groups of channels of a larger one.

    :param slopes: the gradients g by the layer's output.

    >>> layer = nn.Conv1d(2, 3, 2)
    >>> f = layer(x := torch.randn(1, 2, 5))
    >>> (g,) = torch.autograd.grad(f.square().sum(), layer.weight)
    >>> torch.allclose(weight_slopes(layer, x, 2 * f)[0], g, atol=1e-5)
    True
    """
    if isinstance(layer, nn.Linear):
        return slopes.reshape(n, -1, slopes.shape[-1]).mT @ x.reshape(n, -1, x.shape[-1])
    x, padding = _padded(layer, x)
    side_by_side = [t.unflatten(0, (n, -1)).transpose(0, 1).flatten(1, 2) for t in (slopes, x)]
    first, second = (x, slopes) if layer.transposed else (slopes, x)
    shape = n * first.shape[1], second.shape[1] // layer.groups, *layer.kernel_size
    options = layer.stride, padding, layer.dilation, layer.transposed, layer.output_padding, n * layer.groups
    only_the_weight = False, True, False
    _, found, _ = torch.ops.aten.convolution_backward(
        *side_by_side, slopes.new_empty(shape), None, *options, only_the_weight
    )
    return found.unflatten(0, (n, -1))


def bias_slopes(layer: Layer, slopes: Tensor, n: int = 1) -> Tensor:
    """Σ_p g_op over the positions p of an example."""
    last = slopes if isinstance(layer, nn.Linear) else slopes.movedim(1, -1)
    return last.reshape(n, -1, last.shape[-1]).sum(1)


@dataclass(frozen=True)
class Apart:
    """Deviations of a layer's inputs, taken apart into features and positions: s_ip ≈ a_i b_p (Eq. 31)."""

    features: Tensor
    """By example, group and feature."""
    positions: Tensor
    """An input of the layer with one channel for each group."""
    rest: Tensor
    """(s_ip - a_i b_p)², shaped like the input."""

    def variances(self, layer: Layer, var: Tensor) -> Tensor:
        """Σ_i a_i² v_oi: the variances of a layer whose inputs are the positions, for each example."""
        groups, inputs = self.features.shape[1:]
        if isinstance(layer, nn.Linear) or not layer.transposed:
            v = var.reshape(groups, len(var) // groups, inputs, -1)
        else:
            v = var.reshape(groups, inputs, var.shape[1], -1).transpose(1, 2)
        return torch.einsum("ngi,goid->ngod", self.features.square(), v).flatten(1)


def taken_apart(layer: Layer, std: Tensor, n: int = 1) -> Apart:
    """Positions are root mean squares over features, features the least squares for these positions.

    >>> apart = taken_apart(nn.Linear(2, 3), torch.tensor([[1.0, 2.0], [3.0, 6.0]]))
    >>> apart.rest.max() < 1e-12
    tensor(True)
    """
    linear = isinstance(layer, nn.Linear)
    if linear:
        grouped = std.reshape(n, 1, 1, -1, std.shape[-1]).mT
    else:
        grouped = std.unflatten(1, (layer.groups, -1)).unflatten(0, (n, -1))
    flat = grouped.flatten(4)  # example, row, group, feature, position
    positions = sqrt(flat.square().mean(3, keepdim=True))
    size = positions.square().sum((1, 4), keepdim=True)
    features = (flat * positions).sum((1, 4), keepdim=True) / torch.where(size > 0, size, 1.0)
    rest = (flat - features * positions).square().view_as(grouped)
    shape = (*std.shape[:-1], 1) if linear else (len(std), layer.groups, *std.shape[2:])
    return Apart(
        features.flatten(3).squeeze(1),
        positions.reshape(shape),
        (rest.mT if linear else rest).reshape(std.shape),
    )


def _padded(layer: Layer, x: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """The input with the padding that a convolution cannot add itself, and the padding that is left to it."""
    if layer.transposed or (layer.padding_mode == "zeros" and not isinstance(layer.padding, str)):
        return x, layer.padding
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    return F.pad(x, layer._reversed_padding_repeated_twice, mode=mode), (0,) * len(layer.kernel_size)

"""The gradients of an output by the weights of a linear layer, from those by the layer's output.

Tensors hold n examples, one after the other, in their first dimension.
"""

from __future__ import annotations

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


def shared_variances(layer: Layer, var: Tensor, std: Tensor, slopes: Tensor, n: int = 1) -> Tensor:
    """Σ_oi v_oi (Σ_p g_op s_ip)² for each example, with deviations s_ip ≈ a_i b_p (Eq. 31).

    The features a and the positions b are root mean squares, so that the sum over positions is the same for
    all features.

    >>> layer, std, g = nn.Linear(2, 3), torch.tensor([[1.0, 2.0], [3.0, 6.0]]), torch.randn(2, 3)
    >>> exact = weight_slopes(layer, std, g).square().sum((1, 2))
    >>> torch.allclose(shared_variances(layer, torch.ones(3, 2), std, g), exact)
    True
    """
    linear = isinstance(layer, nn.Linear)
    if linear:
        groups, squares = 1, std.square().reshape(n, 1, 1, -1, std.shape[-1]).mT
    else:
        groups, squares = layer.groups, _grouped(layer, std.square()).unflatten(0, (n, -1))
    features = squares.flatten(4).mean((1, 4))
    all_features = features.mean(-1).view(n, 1, groups, *(1,) * (squares.dim() - 4))
    positions = sqrt(squares.mean(3) / torch.where(all_features > 0, all_features, 1.0)).flatten(0, 1)
    g = weight_slopes(layer, positions.mT if linear else positions, slopes, n)
    if linear or not layer.transposed:
        v = var.reshape(groups, len(var) // groups, features.shape[-1], -1)
    else:
        v = var.reshape(groups, features.shape[-1], var.shape[1], -1).transpose(1, 2)
    of_features = torch.einsum("ngi,goid->ngod", features, v)
    return torch.linalg.vecdot(g.reshape(n, -1).square(), of_features.reshape(n, -1))


def _grouped(layer: Layer, x: Tensor) -> Tensor:
    return x.unflatten(1, (layer.groups, -1))


def _padded(layer: Layer, x: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """The input with the padding that a convolution cannot add itself, and the padding that is left to it."""
    if layer.transposed or (layer.padding_mode == "zeros" and not isinstance(layer.padding, str)):
        return x, layer.padding
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    return F.pad(x, layer._reversed_padding_repeated_twice, mode=mode), (0,) * len(layer.kernel_size)

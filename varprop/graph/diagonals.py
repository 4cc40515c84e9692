"""Σ_i A_ji B_ji v_i for two linear paths A and B from one source: the covariance of their outputs (Eq. 24).

A path is a product of the layers' mean matrices and of gains. If the two paths together have at most two
layers, the diagonal is one more linear operation. A projection parallel to two convolutions, or an identity
parallel to three, needs more than two factors at each position: then the sum is expanded to first order about
the averages of its factors over positions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..methods.base import Gain, Value
from ..posterior import Layer


@dataclass(frozen=True)
class Path:
    """The mean Jacobian from a source to an operand, D_n M_n … M_1 D_0."""

    layers: Sequence[Layer]
    gains: Sequence[Gain]
    inputs: Sequence[Tensor]
    """The mean of the input of each layer."""


def diagonal(var: Tensor, a: Path, b: Path) -> Tensor | None:
    """Σ_i A_ji B_ji v_i, where a has no more layers than b; None if no formula is cheap."""
    outer, inner = a.gains[-1] * b.gains[-1], a.gains[0] * b.gains[0]
    match len(a.layers), len(b.layers):
        case 0, 0:
            return outer * var
        case 0, _:
            jacobian = _own(b) if len(b.layers) < 3 else _averaged(b)
            return None if jacobian is None else jacobian * b.gains[-1] * inner * var
        case 1, 1:
            common = _common(a.layers[0], b.layers[0], inner * var)
        case 1, _:
            common = _averaged(b, a.layers[0], inner * var)
        case _:
            return None
    return None if common is None else outer * common


def _own(path: Path) -> Tensor | None:
    """The effect of each entry on itself through one or two layers and the gain between them (Eq. 26)."""
    kernels = [_centred(layer) for layer in path.layers]
    if len(kernels) > 2 or any(kernel is None for kernel in kernels):
        return None
    first, *rest = [kernel for kernel in kernels if kernel is not None]
    if not rest:
        return _cropped(first, [1] * (first.dim() - 2)).diagonal().reshape(-1, *(1,) * (first.dim() - 2))
    sizes = [min(pair) for pair in zip(first.shape[2:], rest[0].shape[2:], strict=True)]
    there, back = (
        _cropped(rest[0], sizes),
        _cropped(first, sizes).flip(tuple(range(2, first.dim()))).transpose(0, 1),
    )
    gains = path.gains[1] * torch.ones_like(path.inputs[1])
    if first.dim() == 2:
        return F.linear(gains, there * back)
    return _CONV[first.dim()](gains, there * back, padding=tuple(size // 2 for size in sizes))


def _centred(layer: Layer) -> Tensor | None:
    """The kernel of a layer whose output positions match its input positions; None for other layers."""
    if isinstance(layer, nn.Linear):
        return layer.weight
    centred = _plain(layer) and all(step == 1 for step in layer.stride)
    centred = centred and all(
        size == 2 * pad + 1 for size, pad in zip(layer.kernel_size, _padding(layer), strict=True)
    )
    return layer.weight if centred else None


def _padding(layer: Layer) -> tuple[int, ...]:
    if isinstance(layer.padding, str):
        return tuple([size // 2 if layer.padding == "same" else 0 for size in layer.kernel_size])
    return layer.padding


def _cropped(kernel: Tensor, sizes: Sequence[int]) -> Tensor:
    for axis, size in enumerate(sizes, 2):
        kernel = kernel.narrow(axis, (kernel.shape[axis] - size) // 2, size)
    return kernel


def _common(a: Layer, b: Layer, var: Tensor) -> Tensor | None:
    """Σ_i A_ji B_ji v_i of two parallel layers: the product of their kernels where these overlap (Eq. 27)."""
    if isinstance(a, nn.Linear) and isinstance(b, nn.Linear):
        return F.linear(var, a.weight * b.weight)
    if type(a) is not type(b) or not (_plain(a) and _plain(b)) or a.stride != b.stride:
        return None
    left, right, padding = a.weight, b.weight, []
    for axis, (p, q, k, n) in enumerate(
        zip(_padding(a), _padding(b), a.kernel_size, b.kernel_size, strict=True), 2
    ):
        low, high = max(-p, -q), min(k - p, n - q)
        left, right = left.narrow(axis, low + p, high - low), right.narrow(axis, low + q, high - low)
        padding.append(-low)
    return _CONV[left.dim()](var, left * right, stride=a.stride, padding=tuple(padding))


def _plain(layer: Layer) -> bool:
    """Whether a layer is a convolution, not transposed, grouped or dilated, padded evenly with zeros."""
    if (
        not isinstance(layer, nn.modules.conv._ConvNd)
        or layer.transposed
        or layer.groups != 1
        or layer.padding_mode != "zeros"
    ):
        return False
    even = layer.padding != "same" or all(size % 2 for size in layer.kernel_size)
    return even and all(d == 1 for d in layer.dilation)


_CONV = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}


# --------------------------------------------------------------------------------- first order about averages


def _averaged(path: Path, shortcut: Layer | None = None, var: Tensor | None = None) -> Tensor | None:
    """Σ_i P_ji J_ji v_i, to first order, for a 1×1 projection P and convolutions J = M_n D … M_1 (Eq. 28).

    Without a projection it is J_jj. The sum is linear in the gains D after each layer and in v. One factor at
    a time takes its own values, and the others take their averages over the positions of a data point. So
    matrices are needed for each data point, where the exact sum needs them for each position.
    """
    layers, like = path.layers, path.inputs[0]
    if not all(_plain(layer) and layer.weight.dim() == like.dim() for layer in layers):
        return None
    if shortcut is not None and not (
        _plain(shortcut) and all(n == 1 for n in shortcut.kernel_size) and not any(_padding(shortcut))
    ):
        return None
    stride = (1,) * (like.dim() - 2) if shortcut is None else shortcut.stride
    sizes = [-(-n // step) for n, step in zip(like.shape[2:], stride, strict=True)]
    ways = list(product(*(_ways(layers, step, axis) for axis, step in enumerate(stride))))
    if not ways or not _is_cheap(layers, shortcut, len(ways), math.prod(sizes)):
        return None
    gains = [gain * torch.ones_like(x) for gain, x in zip(path.gains[1:-1], path.inputs[1:], strict=True)]
    projection = None
    if shortcut is not None and var is not None:
        projection = shortcut.weight.flatten(1), _at(var, [Tap(0, step, 0) for step in stride], sizes)
    total = torch.zeros((), dtype=like.dtype, device=like.device)
    for way in ways:
        taps = list(zip(*way, strict=True))
        matrices = [
            layer.weight[(..., *(tap.entry for tap in at))] for layer, at in zip(layers, taps, strict=True)
        ]
        seen = [_at(gain, at, sizes) for gain, at in zip(gains, taps[1:], strict=True)]
        total = total + _first_order(matrices, seen, projection)
    return total.unflatten(-1, sizes)


class Tap(NamedTuple):
    """An entry of a kernel along one axis; it reads at step · p + offset for the output of the path at p."""

    entry: int
    step: int
    offset: int


def _ways(layers: Sequence[Layer], stride: int, axis: int) -> list[tuple[Tap, ...]]:
    """The taps of all layers along one axis that connect the input at stride · p to the output at p."""
    ways: list[tuple[Tap, ...]] = [()]
    for layer in reversed(layers):
        s, pad = layer.stride[axis], _padding(layer)[axis]
        ends = [way[0][1:] if way else (1, 0) for way in ways]
        ways = [
            (Tap(t, s * step, s * offset - pad + t), *way)
            for way, (step, offset) in zip(ways, ends, strict=True)
            for t in range(layer.kernel_size[axis])
        ]
    return [way for way in ways if way[0][1:] == (stride, 0)]


def _is_cheap(layers: Sequence[Layer], shortcut: Layer | None, ways: int, positions: int) -> bool:
    """Whether the matrix products of a data point cost no more than its moments, which take three passes.

    More than nine ways, as through three 3×3 convolutions, would need too many operations, however small.
    """
    inner = layers[1:-1] if shortcut is None else layers[:-1]
    products = (
        2 * ways * layers[-1].out_channels * sum(layer.out_channels * layer.in_channels for layer in inner)
    )
    return ways <= 9 and products <= 3 * positions * sum(layer.weight.numel() for layer in layers)


def _at(t: Tensor, taps: Sequence[Tap], sizes: Sequence[int]) -> Tensor:
    """The entries that the taps read for outputs of these sizes, flattened; zero beyond the border."""
    ends = [
        tap.step * (size - 1) + tap.offset + 1 - n
        for tap, size, n in zip(taps, sizes, t.shape[2:], strict=True)
    ]
    borders = [border for tap, end in zip(taps, ends, strict=True) for border in (end, -tap.offset)]
    t = F.pad(t, borders[::-1]) if any(borders) else t
    every: list[Value] = [slice(None, None, tap.step) for tap in taps]
    return t[(..., *every)].flatten(2)


def _first_order(
    matrices: Sequence[Tensor], gains: Sequence[Tensor], projection: tuple[Tensor, Tensor] | None
) -> Tensor:
    """The diagonal of M_n D … D M_1 diag(v) Pᵀ to first order about the averages of D and v over positions.

    Positions are the last dimension. P and v belong to the projection; without one it is the diagonal of
    M_n D … D M_1. The mean of v over channels keeps its value at each position, and only the ratio of each
    channel to it is averaged.
    """
    means = [gain.mean(-1).unsqueeze(1) for gain in gains]
    before, after = [matrices[0].mT], [matrices[-1]]
    if projection is not None:
        shortcut, var = projection
        size, profile = _profile(var)
        before = [(shortcut * profile.mean(-1).unsqueeze(1)) @ before[0]]
    for matrix, mean in zip(matrices[1:-1], means, strict=False):
        before.append((before[-1] * mean) @ matrix.mT)
    for matrix, mean in zip(matrices[-2:0:-1], means[::-1], strict=False):
        after.insert(0, (after[0] * mean) @ matrix)
    slopes = [a * b for a, b in zip(before, after, strict=True)]
    average = (slopes[0] * means[0]).sum(-1, keepdim=True)
    terms = [slope @ gain for slope, gain in zip(slopes, gains, strict=True)]
    if projection is None:
        return sum(terms) - (len(terms) - 1) * average
    terms.append((shortcut * ((after[0] * means[0]) @ matrices[0])) @ profile)
    return size * (sum(terms) - (len(terms) - 1) * average)


def _profile(var: Tensor) -> tuple[Tensor, Tensor]:
    """The mean over channels at each position, and the ratio of each channel to it."""
    size = var.abs().mean(1, keepdim=True)
    return size, var / torch.where(size > 0, size, 1.0)

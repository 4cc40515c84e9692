"""Normalisation layers: their statistics are those of random activations, so a variance counts as spread."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from .. import delta
from ..gaussian import Gaussian
from ..posterior import Layer
from .base import Rule, activation


def _scaled(module: Layer, x: Gaussian, shape: Sequence[int]) -> Gaussian:
    """The layer's own scale and shift, where it has them."""
    mean, var = x.mean, x.var
    if module.weight is not None:
        scale = module.weight.view(*shape)
        mean, var = mean * scale, var * scale.square()
    bias = getattr(module, "bias", None)
    return Gaussian.of(mean if bias is None else mean + bias.view(*shape), var)


def _by_running_statistics(module: Layer, x: Gaussian, channels: Sequence[int]) -> Gaussian:
    """In evaluation the statistics are constants: an affine map of each channel."""
    scale = torch.rsqrt(module.running_var + module.eps)
    if module.weight is not None:
        scale = scale * module.weight
    return Gaussian.of(module(x.mean), x.var * scale.square().view(*channels))


@torch.no_grad()
def _track(module: Layer, factor: float | Tensor, centre: Tensor, square: Tensor, n: int) -> None:
    """Move the running statistics as torch does: the variance without its bias."""
    for running, value in ((module.running_mean, centre), (module.running_var, square * (n / (n - 1)))):
        running.add_(factor * (value.view_as(running) - running))


def _batch_norm(module: Layer, x: Gaussian) -> Gaussian:
    """Statistics over the batch and all positions (Eq. 32); in evaluation the running ones, and then exact."""
    module._check_input_dim(x.mean)
    channels = (-1, *(1,) * (x.mean.dim() - 2))
    if not module.training and module.running_mean is not None:
        return _by_running_statistics(module, x, channels)
    dims = tuple(d for d in range(x.mean.dim()) if d != 1)
    n = delta.count(x, dims)
    if n == 1:
        raise ValueError(f"{type(module).__name__}: a batch of one value for each channel has no variance to train with; give more.")
    if module.training and module.track_running_stats:
        module.num_batches_tracked.add_(1)
        factor = 1 / module.num_batches_tracked.to(x.mean.dtype) if module.momentum is None else module.momentum
        _track(module, factor, *delta.spread(x.detach(), dims), n)
    return _scaled(module, delta.normalise(x, dims, module.eps), channels)


NORMALISATION: dict[type[nn.Module], Rule] = {
    **dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d), partial(activation, _batch_norm)),
}

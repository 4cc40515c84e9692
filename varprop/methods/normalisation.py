"""Normalisation layers: their statistics are those of random activations, so a variance counts as spread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from .. import moments as delta
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
        raise ValueError(
            f"{type(module).__name__}: a batch of one value for each channel has no variance to train with; give more."
        )
    if module.training and module.track_running_stats:
        module.num_batches_tracked.add_(1)
        factor = (
            1 / module.num_batches_tracked.to(x.mean.dtype) if module.momentum is None else module.momentum
        )
        _track(module, factor, *delta.spread(x.detach(), dims), n)
    return _scaled(module, delta.normalise(x, dims, module.eps), channels)


def _instance_norm(module: Layer, x: Gaussian) -> Gaussian:
    """Statistics over the positions of each channel of each data point (Eq. 32), or running ones, as batch normalisation."""
    module._check_input_dim(x.mean)
    if x.mean.dim() == module._get_no_batch_dim():
        return _instance_norm(module, x.map(lambda t: t.unsqueeze(0))).map(lambda t: t.squeeze(0))
    channels = (-1, *(1,) * (x.mean.dim() - 2))
    if not module.training and module.track_running_stats:
        return _by_running_statistics(module, x, channels)
    dims = tuple(range(2, x.mean.dim()))
    n = delta.count(x, dims)
    if n == 1:
        raise ValueError(
            f"{type(module).__name__}: one value for each channel has no variance; give more positions."
        )
    if module.track_running_stats:
        centre, square = delta.spread(x.detach(), dims)
        _track(module, module.momentum or 0.0, centre.mean(0), square.mean(0), n)
    return _scaled(module, delta.normalise(x, dims, module.eps), channels)


def _group_norm(module: Layer, x: Gaussian) -> Gaussian:
    grouped = x.map(lambda t: t.unflatten(1, (module.num_groups, -1)).flatten(2))
    y = delta.normalise(grouped, (2,), module.eps).map(lambda t: t.view(x.shape))
    return _scaled(module, y, (-1, *(1,) * (x.mean.dim() - 2)))


def _trailing(module: Layer) -> tuple[int, ...]:
    return tuple(range(-len(module.normalized_shape), 0))


def _layer_norm(module: Layer, x: Gaussian) -> Gaussian:
    return _scaled(module, delta.normalise(x, _trailing(module), module.eps), module.normalized_shape)


def _rms_norm(module: Layer, x: Gaussian) -> Gaussian:
    eps = torch.finfo(x.mean.dtype).eps if module.eps is None else module.eps
    return _scaled(module, delta.normalise(x, _trailing(module), eps, centred=False), module.normalized_shape)


def _over_classes(moments: Callable[[Gaussian, int], Gaussian], module: Layer, x: Gaussian) -> Gaussian:
    if module.dim is None:
        raise ValueError(
            f"{type(module).__name__}: say over which dimension, as in {type(module).__name__}(dim=1)."
        )
    return moments(x, module.dim)


def _softmin(x: Gaussian, dim: int) -> Gaussian:
    return delta.softmax(Gaussian.of(-x.mean, x.var), dim)


def _softmax2d(module: Layer, x: Gaussian) -> Gaussian:
    return delta.softmax(x, -3)


NORMALISATION: dict[type[nn.Module], Rule] = {
    **dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d), partial(activation, _batch_norm)),
    **dict.fromkeys(
        (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d), partial(activation, _instance_norm)
    ),
    nn.GroupNorm: partial(activation, _group_norm),
    nn.LayerNorm: partial(activation, _layer_norm),
    nn.RMSNorm: partial(activation, _rms_norm),
    nn.Softmax: partial(activation, partial(_over_classes, delta.softmax)),
    nn.Softmin: partial(activation, partial(_over_classes, _softmin)),
    nn.LogSoftmax: partial(activation, partial(_over_classes, delta.log_softmax)),
    nn.Softmax2d: partial(activation, _softmax2d),
}

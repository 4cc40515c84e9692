"""Normalisation layers, whose statistics include the variance of the random activations; and softmax."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ... import moments
from ...gaussian import Gaussian, sqrt
from ...posterior import Layer
from ..base import Call, Method
from ..facts import Table, on_random


def _channels(x: Gaussian) -> tuple[int, ...]:
    """The shape that broadcasts one number for each channel."""
    return (-1, *(1,) * (x.mean.dim() - 2))


def _scaled(module: Layer, x: Gaussian, shape: Sequence[int]) -> Gaussian:
    """Apply the layer's scale and shift if it has them."""
    mean, var = x.mean, x.var
    if module.weight is not None:
        scale = module.weight.view(*shape)
        mean, var = mean * scale, var * scale.square()
    bias = getattr(module, "bias", None)
    return Gaussian.of(mean if bias is None else mean + bias.view(*shape), var)


def _by_running_statistics(module: Layer, x: Gaussian, channels: Sequence[int]) -> Gaussian:
    """In evaluation mode the statistics are constants, which gives an affine map of each channel."""
    scale = torch.rsqrt(module.running_var + module.eps)
    if module.weight is not None:
        scale = scale * module.weight
    return Gaussian.of(module(x.mean), x.var * scale.square().view(*channels))


@torch.no_grad()
def _track(module: Layer, factor: float | Tensor, centre: Tensor, square: Tensor, n: int) -> None:
    """Update the running statistics as torch does, with the unbiased variance."""
    for running, value in ((module.running_mean, centre), (module.running_var, square * (n / (n - 1)))):
        running.add_(factor * (value.view_as(running) - running))


def _channel_scale(call: Call) -> Tensor | None:
    """The scale of each channel by the running statistics, or in training by those of the batch (Eq. 25)."""
    layer: Layer = call.operation
    x, y = call.x, call.output
    if not isinstance(x, Gaussian):
        return None
    channels = _channels(x)
    scale = x.mean.new_ones(()) if layer.weight is None else layer.weight
    if not layer.training and layer.running_var is not None:
        return (scale * torch.rsqrt(layer.running_var + layer.eps)).view(channels)
    return sqrt(y.var / torch.where(x.var > 0, x.var, 1.0)) * scale.sign().view(channels)


@on_random("exact in evaluation, approximate in training", 17, gain=_channel_scale)
def batch_norm(method: Method, module: Layer, x: Gaussian) -> Gaussian:
    """Statistics over the batch and all positions (Eq. 17); evaluation uses running ones, which is exact."""
    module._check_input_dim(x.mean)
    channels = _channels(x)
    if not module.training and module.running_mean is not None:
        return _by_running_statistics(module, x, channels)
    dims = tuple(d for d in range(x.mean.dim()) if d != 1)
    n = moments.count(x, dims)
    if n == 1:
        raise ValueError(
            f"{type(module).__name__}: one value for each channel has no variance to train with; "
            "use a larger batch."
        )
    statistics = moments.spread(x, dims)
    if module.training and module.track_running_stats:
        module.num_batches_tracked.add_(1)
        factor = (
            1 / module.num_batches_tracked.to(x.mean.dtype) if module.momentum is None else module.momentum
        )
        _track(module, factor, *statistics, n)
    return _scaled(module, moments.normalise(x, dims, module.eps, statistics=statistics), channels)


@on_random("approximate", 17)
def instance_norm(method: Method, module: Layer, x: Gaussian) -> Gaussian:
    """Statistics over the positions of each channel of each data point (Eq. 17), or running statistics."""
    module._check_input_dim(x.mean)
    if x.mean.dim() == module._get_no_batch_dim():
        return _by_instance(module, x.map(lambda t: t.unsqueeze(0))).map(lambda t: t.squeeze(0))
    return _by_instance(module, x)


def _by_instance(module: Layer, x: Gaussian) -> Gaussian:
    channels = _channels(x)
    if not module.training and module.track_running_stats:
        return _by_running_statistics(module, x, channels)
    dims = tuple(range(2, x.mean.dim()))
    n = moments.count(x, dims)
    if n == 1:
        raise ValueError(
            f"{type(module).__name__}: one value for each channel has no variance; give more positions."
        )
    statistics = moments.spread(x, dims)
    if module.track_running_stats:
        centre, square = statistics
        _track(module, module.momentum or 0.0, centre.mean(0), square.mean(0), n)
    return _scaled(module, moments.normalise(x, dims, module.eps, statistics=statistics), channels)


@on_random("approximate", 17)
def group_norm(method: Method, module: Layer, x: Gaussian) -> Gaussian:
    grouped = x.map(lambda t: t.unflatten(1, (module.num_groups, -1)).flatten(2))
    y = moments.normalise(grouped, (2,), module.eps).map(lambda t: t.view(x.shape))
    return _scaled(module, y, _channels(x))


def _trailing(module: Layer) -> tuple[int, ...]:
    return tuple(range(-len(module.normalized_shape), 0))


@on_random("approximate", 17)
def layer_norm(method: Method, module: Layer, x: Gaussian) -> Gaussian:
    return _scaled(module, moments.normalise(x, _trailing(module), module.eps), module.normalized_shape)


@on_random("approximate", 17)
def rms_norm(method: Method, module: Layer, x: Gaussian) -> Gaussian:
    eps = torch.finfo(x.mean.dtype).eps if module.eps is None else module.eps
    return _scaled(
        module, moments.normalise(x, _trailing(module), eps, centred=False), module.normalized_shape
    )


def _over(module: Layer) -> int:
    if module.dim is None:
        kind = type(module).__name__
        raise ValueError(f"{kind}: give the dimension, as in {kind}(dim=1).")
    return int(module.dim)


@on_random("approximate", 19)
def softmax(method: Method, module: Layer, x: Gaussian) -> Gaussian:
    return moments.softmax(x, _over(module))


@on_random("approximate", 19)
def softmin(method: Method, module: Layer, x: Gaussian) -> Gaussian:
    return moments.softmax(x.times(-1.0), _over(module))


@on_random("approximate", 19)
def log_softmax(method: Method, module: Layer, x: Gaussian) -> Gaussian:
    return moments.log_softmax(x, _over(module))


@on_random("approximate", 19)
def softmax_2d(method: Method, module: Layer, x: Gaussian) -> Gaussian:
    return moments.softmax(x, -3)


NORMALISATION: Table = {
    **dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d), batch_norm),
    **dict.fromkeys((nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d), instance_norm),
    nn.GroupNorm: group_norm,
    nn.LayerNorm: layer_norm,
    nn.RMSNorm: rms_norm,
    nn.Softmax: softmax,
    nn.Softmin: softmin,
    nn.LogSoftmax: log_softmax,
    nn.Softmax2d: softmax_2d,
}

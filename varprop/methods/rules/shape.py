"""Layers that move, repeat, pad, interpolate or drop entries."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ... import moments
from ...gaussian import Activation, Gaussian, move
from ...posterior import Layer
from ..base import Call, Method
from ..facts import Table, on_random, rule

MOVES = (
    *(nn.Flatten, nn.Unflatten, nn.PixelShuffle, nn.PixelUnshuffle, nn.ChannelShuffle, nn.Unfold),
    *(nn.ReflectionPad1d, nn.ReflectionPad2d, nn.ReflectionPad3d),
    *(nn.ReplicationPad1d, nn.ReplicationPad2d, nn.ReplicationPad3d),
    *(nn.CircularPad1d, nn.CircularPad2d, nn.CircularPad3d),
)


def _one(call: Call) -> float:
    """The mean slope of an operation that leaves every entry in its place."""
    return 1.0


@rule("exact")
def moved(method: Method, module: nn.Module, x: Activation) -> Activation:
    """A module that only moves or repeats entries; later operations treat the copies as independent."""
    return move(module, x)


@rule("exact", gain=_one)
def identity(method: Method, module: nn.Module, x: Activation) -> Activation:
    return x


@rule("exact", 14, gain=_one)
def dropout(method: Method, module: Layer, x: Activation) -> Activation:
    """In training the variance that dropout causes (Eq. 14); in evaluation mode the identity.

    Dropping whole channels has the same marginals.
    """
    if not module.training or module.p == 0:
        return x
    keep = 1 - module.p
    return moments.mask(x, keep) * (1 / keep if keep else 0.0)


@rule("exact", 14)
def alpha_dropout(method: Method, module: Layer, x: Activation) -> Activation:
    """Dropout to SELU's lower limit, rescaled to keep mean 0 and variance 1 (Klambauer et al. 2017)."""
    if not module.training or module.p == 0:
        return x
    floor, keep = -1.7580993408473766, 1 - module.p
    scale = (keep * (1 + module.p * floor**2)) ** -0.5 if keep else 0.0
    return moments.mask(x, keep, floor) * scale + -scale * floor * module.p


@on_random("exact")
def constant_pad(method: Method, module: Layer, x: Gaussian) -> Gaussian:
    """The border is constant, so it has no variance."""
    return Gaussian.of(module(x.mean), F.pad(x.var, module.padding))


@on_random("exact", 13)
def upsample(method: Method, module: Layer, x: Gaussian) -> Gaussian:
    """y = A x along each axis, Var[y] = A² Var[x] with the entries of A squared (Eq. 13)."""
    if module.mode.startswith("nearest"):
        return x.map(module)
    mean, var = module(x.mean), x.var
    for axis in range(2, var.dim()):
        weights = _interpolation(module, axis - 2, var.shape[axis], mean.shape[axis], var)
        var = (var.movedim(axis, -1) @ weights.square().mT).movedim(-1, axis)
    return Gaussian.of(mean, var)


def _interpolation(module: Layer, axis: int, old: int, new: int, like: Tensor) -> Tensor:
    """The interpolation matrix of one axis: the interpolated columns of an identity matrix."""
    mode = "bicubic" if module.mode == "bicubic" else "bilinear"
    factors = module.scale_factor
    factor = factors[axis] if isinstance(factors, tuple) else factors
    by_size = factor is None or module.recompute_scale_factor
    target = {"size": (new, old)} if by_size else {"scale_factor": (factor, 1.0)}
    columns = torch.eye(old, dtype=like.dtype, device=like.device).view(1, 1, old, old)
    return F.interpolate(columns, mode=mode, align_corners=module.align_corners, **target).view(new, old)


SHAPE: Table = {
    nn.Identity: identity,
    **dict.fromkeys(MOVES, moved),
    **dict.fromkeys((nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d), dropout),
    **dict.fromkeys((nn.AlphaDropout, nn.FeatureAlphaDropout), alpha_dropout),
    **dict.fromkeys((nn.ConstantPad1d, nn.ConstantPad2d, nn.ConstantPad3d), constant_pad),
    **dict.fromkeys((nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d), constant_pad),
    **dict.fromkeys((nn.Upsample, nn.UpsamplingNearest2d, nn.UpsamplingBilinear2d), upsample),
}

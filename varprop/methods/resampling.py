"""Layers that resize: padding with a constant, and interpolation, a fixed linear map along each axis."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..gaussian import Gaussian
from ..posterior import Layer
from .base import Rule, activation


def _constant_pad(module: Layer, x: Gaussian) -> Gaussian:
    """What is padded is certain."""
    return Gaussian.of(module(x.mean), F.pad(x.var, module.padding))


def _upsample(module: Layer, x: Gaussian) -> Gaussian:
    """y = A x along each axis, Var[y] = A² Var[x] with the entries of A squared (Eq. 35)."""
    if module.mode.startswith("nearest"):
        return x.map(module)
    mean, var = module(x.mean), x.var
    for axis in range(2, var.dim()):
        weights = _interpolation(module, axis - 2, var.shape[axis], mean.shape[axis], var)
        var = (var.movedim(axis, -1) @ weights.square().mT).movedim(-1, axis)
    return Gaussian.of(mean, var)


def _interpolation(module: Layer, axis: int, old: int, new: int, like: Tensor) -> Tensor:
    """The matrix of one axis, which is the interpolation of the columns of an identity matrix."""
    mode = "bicubic" if module.mode == "bicubic" else "bilinear"
    factors = module.scale_factor
    factor = factors[axis] if isinstance(factors, tuple) else factors
    target = (
        {"size": (new, old)}
        if factor is None or module.recompute_scale_factor
        else {"scale_factor": (factor, 1.0)}
    )
    columns = torch.eye(old, dtype=like.dtype, device=like.device).view(1, 1, old, old)
    return F.interpolate(columns, mode=mode, align_corners=module.align_corners, **target).view(new, old)


RESAMPLING: dict[type[nn.Module], Rule] = {
    **dict.fromkeys(
        (nn.ConstantPad1d, nn.ConstantPad2d, nn.ConstantPad3d), partial(activation, _constant_pad)
    ),
    **dict.fromkeys((nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d), partial(activation, _constant_pad)),
    **dict.fromkeys(
        (nn.Upsample, nn.UpsamplingNearest2d, nn.UpsamplingBilinear2d), partial(activation, _upsample)
    ),
}

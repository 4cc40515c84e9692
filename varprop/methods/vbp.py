"""Variance Back-Propagation (Haussmann, Hamprecht and Kandemir 2019): the moment table with the Heaviside gate."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from torch.nn import functional as F

from .. import moments as fn
from ..gaussian import Gaussian
from ..posterior import Layer
from .base import Method, Rule, activation
from .maxima import maxima
from .moments import MAX_POOLS, SHARED, bent
from .network import NETWORKS

_MAX_POOL = {1: F.max_pool1d_with_indices, 2: F.max_pool2d_with_indices, 3: F.max_pool3d_with_indices}


def _gate(slope: float, x: Gaussian, pieces: fn.Piecewise) -> Gaussian:
    return fn.gate(x, slope, pieces)


def _winner_pool(n: int, module: Layer, x: Gaussian) -> Gaussian:
    """The largest mean of each window with its own variance (Eq. 7): one search, its indices used for both."""
    options = module.kernel_size, module.stride, module.padding, module.dilation, module.ceil_mode
    mean, winners = _MAX_POOL[n](x.mean, *options)
    var = x.var.flatten(-n).gather(-1, winners.flatten(-n)).view_as(mean)
    return Gaussian.of(mean, var)


def vbp(slope: float = math.inf) -> Method:
    """VBP with gates Bernoulli(sigmoid(slope·E[f])) (Eq. 4). In the limit, `VBP`, a unit passes mean and variance or neither.

    A maximum is taken by the limit of its gate whatever the slope (Eq. 7).

    >>> vp.vbp(slope=100.0)(nn.ReLU(), vp.Gaussian(torch.zeros(1), torch.ones(1))).var
    tensor([0.5000])
    """
    if not slope > 0:
        raise ValueError(f"vbp: slope must be positive, got {slope}.")
    name = "VBP" if math.isinf(slope) else f"VBP(slope={slope:g})"
    pools = {kind: partial(activation, partial(_winner_pool, n)) for kind, n in MAX_POOLS.items()}
    rules: dict[Any, Rule] = {
        **SHARED,
        **NETWORKS,
        **bent(partial(_gate, slope)),
        **pools,
        **maxima(fn.winner, fn.strongest),
    }
    return Method(name, rules, slope=slope, key="vbp")


VBP = vbp()

"""Consistent VBP: the means of VBP, which are the plain network's, with variances that count what its gates leave out.

VBP gives a closed unit no variance, and training without a price on the gates then returns its weights to the prior. Here a
unit's variance is the mean squared deviation of the true activation from the gate's value: a closed unit pays for its weights.
"""

from __future__ import annotations

import math
from functools import partial

from .. import moments as fn
from ..gaussian import Gaussian
from ..posterior import Layer
from .base import Method, activation
from .dvi import clark_pool
from .maxima import maxima
from .moments import MAX_POOLS, SHARED, bent
from .network import NETWORKS


def _anchored_pool(n: int, module: Layer, x: Gaussian) -> Gaussian:
    """The largest mean of each window, with the mean squared deviation of the maximum from it."""
    return fn.anchor(module(x.mean), clark_pool(n, module, x))


def _anchored_larger(a: Gaussian, b: Gaussian) -> Gaussian:
    return fn.anchor(fn.winner(a, b).mean, fn.maximum(a, b))


def _anchored_largest(x: Gaussian, dim: int) -> Gaussian:
    return fn.anchor(x.mean.amax(dim), fn.largest(x, dim))


_POOLS = {kind: partial(activation, partial(_anchored_pool, n)) for kind, n in MAX_POOLS.items()}
_MAXIMA = maxima(_anchored_larger, _anchored_largest)
CVBP = Method(
    "CVBP", {**SHARED, **NETWORKS, **bent(fn.anchored), **_POOLS, **_MAXIMA}, slope=math.inf, key="cvbp"
)

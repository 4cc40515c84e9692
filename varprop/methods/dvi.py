"""Deterministic variational inference (Wu et al. 2019), diagonal form: the moment table with rectified-normal moments."""

from __future__ import annotations

from functools import partial, reduce
from itertools import product

import torch

from .. import moments as fn
from ..gaussian import Gaussian
from ..posterior import Layer
from .base import Method, activation
from .maxima import maxima
from .moments import MAX_POOLS, SHARED, bent, per_dimension
from .network import NETWORKS


def clark_pool(n: int, module: Layer, x: Gaussian) -> Gaussian:
    """The maximum of each window, two entries at a time, each result taken as normal again (Eq. 8)."""
    outputs = module(x.mean).shape[-n:]
    sizes = x.shape[-n:]
    options = (module.kernel_size, module.stride, module.padding, module.dilation)
    kernel, stride, padding, dilation = (per_dimension(a, n) for a in options)
    starts = [
        torch.arange(out, device=x.mean.device) * step - pad
        for out, step, pad in zip(outputs, stride, padding, strict=True)
    ]

    def entry(offset: tuple[int, ...]) -> Gaussian:
        """The windows' entries at one offset; outside the input, a certain value that wins over nothing."""
        inside = torch.ones((), dtype=torch.bool, device=x.mean.device)
        picked = x
        for axis, (start, step, size, o) in enumerate(zip(starts, dilation, sizes, offset, strict=True), -n):
            index = start + o * step
            picked = picked.map(partial(torch.index_select, dim=axis, index=index.clamp(0, size - 1)))
            inside = inside.unsqueeze(-1) & (index >= 0) & (index < size)
        lowest = torch.finfo(x.mean.dtype).min / 4
        return Gaussian.of(torch.where(inside, picked.mean, lowest), torch.where(inside, picked.var, 0.0))

    return reduce(fn.maximum, map(entry, product(*map(range, kernel))))


_POOLS = {kind: partial(activation, partial(clark_pool, n)) for kind, n in MAX_POOLS.items()}
DVI = Method(
    "DVI", {**SHARED, **NETWORKS, **bent(fn.rectify), **_POOLS, **maxima(fn.maximum, fn.largest)}, key="dvi"
)

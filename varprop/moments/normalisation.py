"""Normalisation of vectors by the delta method: Var[y_i] ≈ Σ_j J_ij² v_j with the Jacobian J.

The sum over j has a closed form that costs no more than the normalisation itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from ..gaussian import Gaussian

MANY = 2048
"""From so many entries on, what each adds to the statistics, of order 1/n, is left out of the variance."""


def count(x: Gaussian, dims: Sequence[int]) -> int:
    """The number of entries over `dims`."""
    return math.prod([x.shape[d] for d in dims])


def spread(x: Gaussian, dims: Sequence[int], centred: bool = True) -> tuple[Tensor, Tensor]:
    """Expected mean and expected (biased) variance of the entries over `dims` (Eq. 17).

    The variance follows from the law of total variance. Without centring, the results are zero and the
    expected mean square.

    >>> spread(Gaussian(torch.tensor([1.0, 3.0]), torch.tensor([0.5, 0.5])), (0,))      # 1 + (1 - 1/2) 0.5
    (tensor([2.]), tensor([1.2500]))
    """
    dims = tuple(dims)
    if not centred:
        return x.mean.new_zeros(()), x.second_moment.mean(dims, keepdim=True)
    square, centre = torch.var_mean(x.mean, dims, correction=0, keepdim=True)
    return centre, square + (1 - 1 / count(x, dims)) * x.var.mean(dims, keepdim=True)


def normalise(
    x: Gaussian,
    dims: Sequence[int],
    eps: float = 1e-5,
    centred: bool = True,
    statistics: tuple[Tensor, Tensor] | None = None,
) -> Gaussian:
    """Moments of (x - x̄)/√(s² + eps), with x̄ and s² the mean and variance over `dims` (Eq. 17).

        E = h = (m - m̄)/S,    Var = Σ_j J_ij² v_j,    J = (I - 1 1ᵀ/n - h hᵀ/n)/S,    S² = E[s²] + eps

    S² uses the expected s² instead of s² at the means, so that the moments hold even if the variances are as
    large as the spread of the means. Without centring, x is divided by its root mean square and 1 1ᵀ/n drops
    out.

    :param statistics: the `spread` over `dims`, where it is known.

    >>> normalise(Gaussian(torch.zeros(4), torch.ones(4)), (0,))
    Gaussian(mean=tensor([0., 0., 0., 0.]), var=tensor([1.0000, 1.0000, 1.0000, 1.0000]))
    """
    dims = tuple(dims)
    n = count(x, dims)
    centre, square = statistics or spread(x, dims, centred)
    scale = torch.rsqrt(square + eps)
    h = (x.mean - centre) * scale
    if n >= MANY:
        return Gaussian.of(h, x.var * scale.square())
    hv = h * x.var
    hhv = h * hv

    def average(t: Tensor) -> Tensor:
        return t.mean(dims, keepdim=True)

    # n S² Var = (n - 2) v - 2 h² v + avg(v) + 2 h avg(h v) + h² avg(h² v), term by term
    own = x.var * (n - 2 if centred else n) - 2 * hhv
    shared = average(hhv) * h
    if centred:
        shared = shared + 2 * average(hv)
        own = own + average(x.var)
    return Gaussian.of(h, F.relu(torch.addcmul(own, shared, h) * (scale.square() / n)))

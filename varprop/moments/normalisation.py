"""Normalisation of vectors by the delta method: Var[y_i] ≈ Σ_j J_ij² v_j with the Jacobian J.

The sum over j has a closed form that costs no more than the normalisation itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor
from torch.nn import functional as F

from ..gaussian import Gaussian


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
    n = count(x, dims)
    if not centred:
        return x.mean.new_zeros(()), x.second_moment.mean(dims, keepdim=True)
    centre = x.mean.mean(dims, keepdim=True)
    return centre, ((x.mean - centre).square() + (1 - 1 / n) * x.var).mean(dims, keepdim=True)


def normalise(x: Gaussian, dims: Sequence[int], eps: float = 1e-5, centred: bool = True) -> Gaussian:
    """Moments of (x - x̄)/√(s² + eps), with x̄ and s² the mean and variance over `dims` (Eq. 17).

        E = h = (m - m̄)/S,    Var = Σ_j J_ij² v_j,    J = (I - 1 1ᵀ/n - h hᵀ/n)/S,    S² = E[s²] + eps

    S² uses the expected s² instead of s² at the means, so that the moments hold even if the variances are as
    large as the spread of the means. Without centring, x is divided by its root mean square and 1 1ᵀ/n drops
    out.

    >>> normalise(Gaussian(torch.zeros(4), torch.ones(4)), (0,))
    Gaussian(mean=tensor([0., 0., 0., 0.]), var=tensor([1.0000, 1.0000, 1.0000, 1.0000]))
    """
    dims = tuple(dims)
    n = count(x, dims)
    centre, square = spread(x, dims, centred)
    square = square + eps
    h = (x.mean - centre) * square.rsqrt()
    moved = x.var / square

    def average(t: Tensor) -> Tensor:
        return t.mean(dims, keepdim=True)

    one = float(centred)
    shared = (
        one * average(moved) + 2 * one * h * average(h * moved) + h.square() * average(h.square() * moved)
    )
    return Gaussian.of(h, F.relu(moved * (1 - 2 * (one + h.square()) / n) + shared / n))

"""The probit link: log Φ in both tails, and its expectation for a normal variable."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from ..gaussian import Gaussian, sqrt
from .rectified import rectify

REACH = 8.5
"""Standard deviations on each side of the mean that are integrated over."""
_NODES, _WEIGHTS = ((a + b) / 2 for a, b in zip(np.polynomial.legendre.leggauss(48), (1, 0), strict=True))
_CUBES = tuple((_NODES**3).tolist()), tuple((3 * _NODES**2 * _WEIGHTS).tolist())
"""Gauss-Legendre nodes and weights on [0, 1] for a variable that is a cube, as constants that
`torch.compile` can read."""


class _Saved(Protocol):
    @property
    def saved_tensors(self) -> tuple[Tensor, ...]: ...


def log_ndtr(x: Tensor) -> Tensor:
    """log Φ(x), with its derivative finite however far x lies in the tail, in any floating-point type.

    torch's own derivative overflows at x = -1e15, and its function knows no half precision.

    >>> x = torch.tensor([-1e15, 0.0, 1e15], requires_grad=True)
    >>> torch.autograd.grad(log_ndtr(x).sum(), x)
    (tensor([1.0000e+15, 7.9788e-01, 0.0000e+00]),)
    """
    return _LogNdtr.apply(x.float()).to(x.dtype) if _is_half(x) else _LogNdtr.apply(x)  # type: ignore[no-untyped-call]


def expected_log_ndtr(x: Gaussian) -> Tensor:
    """E log Φ(x), to nine digits for any mean and variance (Eq. 44).

    Quadrature in x misses the bend of log Φ at zero once the variance is large. Here its growth is taken out,

        log Φ(x) = -max(0, -x)²/2 + h(x),    E max(0, -x)² in closed form (Eq. 8),

    and h, which grows as a logarithm, is integrated on each side of zero with nodes that crowd there. The
    derivatives are E[(log Φ)'] and E[(log Φ)'']/2 (Price's theorem), so that they are right for a variance of
    zero, too.

    >>> expected_log_ndtr(Gaussian(torch.zeros(1), torch.tensor([1e6]))).round()           # about -v/4
    tensor([-250004.])
    """
    mean, var = (t.float() if _is_half(t) else t for t in (x.mean, x.var))
    value: Tensor = _Expected.apply(mean, var)[0]  # type: ignore[no-untyped-call]
    return value.to(x.mean.dtype)


def expected_bump(g: Callable[[Tensor], Tensor], x: Gaussian, reach: float = 9.0) -> Tensor:
    """E g(x) for a smooth function that vanishes beyond ±`reach`, however wide or narrow x is."""
    m, s = x.mean.detach(), x.std.detach()
    zero = _place(m, s, 0.0)
    sides = [_side(zero, _place(m, s, end)) for end in (-reach, reach)]
    return sum((weight * g(x.mean + x.std * z)).sum(0) for z, weight in sides)  # type: ignore[return-value]


class _LogNdtr(torch.autograd.Function):
    """log Φ(x) = log(erfcx(-x/√2)/2) - x²/2, with the hazard √(2/π)/erfcx(-x/√2) as its derivative."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        low, high = x.clamp(max=-1), x.clamp(min=-1)
        in_tail = torch.log(torch.special.erfcx(-low / math.sqrt(2)) / 2) - low.square() / 2
        return torch.where(x < -1, in_tail, torch.log1p(-0.5 * torch.erfc(high / math.sqrt(2))))

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: _Saved, to_value: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return to_value * _hazard(x)


class _Expected(torch.autograd.Function):
    """E log Φ(x) and its derivatives by mean and variance."""

    generate_vmap_rule = True

    @staticmethod
    def forward(m: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        s = sqrt(v)
        zero = _place(m, s, 0.0)
        growth = rectify(Gaussian.of(-m, v))
        z, weight = _side(zero, torch.full_like(m, -REACH))
        x = (m + s * z).clamp(max=0.0)
        hazard = _hazard(x)
        value = (weight * torch.log(torch.special.erfcx(-x / math.sqrt(2)) / 2)).sum(
            0
        ) - growth.second_moment / 2
        slope = (weight * (hazard + x)).sum(0) + growth.mean
        bend = (weight * -_curvature(x, hazard)).sum(0)
        # Beyond 38, log Φ is below the smallest double.
        z, weight = _side(zero, _place(m, s, 38.0))
        x = (m + s * z).clamp(min=0.0)
        hazard = _hazard(x)
        value = value + (weight * torch.log1p(-0.5 * torch.erfc(x / math.sqrt(2)))).sum(0)
        slope = slope + (weight * hazard).sum(0)
        bend = bend - (weight * hazard * (hazard + x)).sum(0)
        return value, slope, bend / 2

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(*output[1:])
        ctx.mark_non_differentiable(*output[1:])

    @staticmethod
    def backward(ctx: _Saved, to_value: Tensor, *_: Tensor) -> tuple[Tensor, Tensor]:
        slope, half_bend = ctx.saved_tensors
        return to_value * slope, to_value * half_bend


def _hazard(x: Tensor) -> Tensor:
    """φ(x)/Φ(x)."""
    return math.sqrt(2 / math.pi) / torch.special.erfcx(-x / math.sqrt(2))


def _curvature(x: Tensor, hazard: Tensor) -> Tensor:
    """-(log Φ)''(x) = λ(λ + x) for x ≤ 0 and the hazard λ; far out, where λ and -x cancel, by its series."""
    far = 50.0 if x.dtype == torch.float64 else 12.0
    u = x.clamp(max=-far).reciprocal().square()
    return torch.where(x < -far, 1 - u * (1 - u * (6 - 50 * u)), hazard * (hazard + x.clamp(min=-far)))


def _place(m: Tensor, s: Tensor, value: float) -> Tensor:
    """Where a value of x lies, in standard deviations from the mean, within the reach."""
    known = s > 0
    place = torch.where(known, (value - m) / torch.where(known, s, 1.0), (value - m).sign() * REACH)
    return place.clamp(-REACH, REACH)


def _side(start: Tensor, end: Tensor) -> tuple[Tensor, Tensor]:
    """Standardised nodes between two places, crowding at the start, and their weights times the density."""
    shape = (-1, *(1,) * start.dim())
    cubes, weights = (torch.tensor(a, dtype=start.dtype, device=start.device).view(shape) for a in _CUBES)
    z = start + (end - start) * cubes
    density = torch.exp(-0.5 * z.square()) / math.sqrt(2 * math.pi)
    return z, (end - start).abs() * weights * density


def _is_half(x: Tensor) -> bool:
    return x.dtype in (torch.float16, torch.bfloat16)

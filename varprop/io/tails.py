"""The tails of the normal for ONNX, which has only erf: 1 - erf(x) loses all digits beyond x = 4."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class Tails(TorchFunctionMode):
    """While active, tail functions are traced as operations that ONNX computes precisely."""

    def __torch_function__(
        self,
        function: Callable[..., object],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        name = getattr(function, "__name__", "")
        if name.removesuffix("_") not in _TAILS:
            return function(*args, **(kwargs or {}))
        value = _TAILS[name.removesuffix("_")](*args)
        return args[0].copy_(value) if name.endswith("_") else value


def _erfc(x: Tensor) -> Tensor:
    """erfc(x) = exp(-x²) t exp P(t) for x > 0, and 2 - erfc(-x) below (Eq. 53)."""
    upper = torch.exp(_log_scaled_erfc(x.abs()) - x.square())
    return torch.where(x < 0, 2 - upper, upper)


def _ndtr(x: Tensor) -> Tensor:
    return 0.5 * _erfc(-x / math.sqrt(2))


def _log_ndtr(x: Tensor) -> Tensor:
    """log Φ; for x < 0 the logarithm of the tail is computed directly."""
    log_tail = _log_scaled_erfc(x.abs() / math.sqrt(2)) - x.square() / 2 - math.log(2)
    return torch.where(x < 0, log_tail, _log1p(-torch.exp(log_tail)))


def _log1p(x: Tensor) -> Tensor:
    """log(1 + x) without cancellation: the rounding error of u = 1 + x cancels in x log(u) / (u - 1)."""
    u = 1 + x
    rounded_away = u == 1
    return torch.where(rounded_away, x, x * u.log() / torch.where(rounded_away, 1.0, u - 1))


def _log_scaled_erfc(x: Tensor) -> Tensor:
    """log exp(x²) erfc(x) = log t + P(t) for x ≥ 0, with t = 2/(2 + x) (Eq. 53)."""
    t = 2 / (2 + x)
    u = 2 * t - 1
    value = torch.zeros_like(u)
    for coefficient in reversed(_coefficients()):
        value = value * u + coefficient
    return t.log() + value


@cache
def _coefficients(degree: int = 12) -> tuple[float, ...]:
    """P by interpolation at the Chebyshev points of (-1, 1); its error is at most 7e-9."""
    from scipy.special import erfcx

    def log_ratio(u: np.ndarray) -> np.ndarray:
        t = (1 + u) / 2
        return np.log(erfcx(2 / t - 2) / t)

    interpolated = np.polynomial.Chebyshev.interpolate(log_ratio, degree)
    return tuple(interpolated.convert(kind=np.polynomial.Polynomial).coef.tolist())


_TAILS: Mapping[str, Callable[..., Tensor]] = {
    "erfc": _erfc,
    "special_erfc": _erfc,
    "special_ndtr": _ndtr,
    "special_log_ndtr": _log_ndtr,
    "log1p": _log1p,
    "special_log1p": _log1p,
}
"""By the names of torch's functions and methods; those that work in place have an underscore at the end."""

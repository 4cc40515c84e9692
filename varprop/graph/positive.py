"""Rules for roots, reciprocals, quotients, logarithms, and the variance of entries among themselves."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from .. import moments
from ..gaussian import Activation, Gaussian, as_gaussian
from ..methods.base import Call, Function, Method, Value
from ..methods.facts import Rule, Table, rule
from ..methods.noise import unexplained


def _slope_of_power(exponent: float, call: Call) -> Tensor | None:
    return exponent * moments.log_normal_power(call.x, exponent - 1).mean


def _power(exponent: float, method: Method, function: Function, x: Gaussian) -> Gaussian:
    return moments.log_normal_power(x, exponent)


def _power_rule(exponent: float) -> Rule:
    slope = partial(_slope_of_power, exponent)
    return Rule(partial(_power, exponent), "approximate", 64, gain=slope, noise=unexplained)


def _log(base: float, shift: float, method: Method, function: Function, x: Gaussian) -> Gaussian:
    return moments.log_normal(x.plus(shift)).times(1 / base)


def _slope_of_log(base: float, shift: float, call: Call) -> Tensor | None:
    return moments.log_normal_power(call.x.plus(shift), -1).mean / base


def _log_rule(base: float = 1.0, shift: float = 0.0) -> Rule:
    """The logarithm of x + shift, divided by the natural logarithm of its base."""
    slope = partial(_slope_of_log, base, shift)
    return Rule(partial(_log, base, shift), "approximate", 64, gain=slope, noise=unexplained)


def quotient(a: Activation, b: Gaussian) -> Gaussian:
    """a / b of independent values, with a positive or a negative b (Eq. 64)."""
    sign = torch.where(b.mean < 0, -1.0, 1.0)
    return as_gaussian(moments.product(a, moments.log_normal_power(b.times(sign), -1.0).times(sign)))


def _along(n: int, dim: Value) -> tuple[int, ...]:
    dims = range(n) if dim is None else (dim,) if isinstance(dim, int) else dim
    return tuple(d % n for d in dims)


@rule("exact", 65)
def entry_variance(
    method: Method,
    function: Function,
    x: Gaussian,
    dim: Value = None,
    unbiased: bool = True,
    keepdim: bool = False,
    *,
    correction: float | None = None,
) -> Gaussian:
    """torch.var: the variance of entries along some dimensions (Eq. 65)."""
    if isinstance(dim, bool):  # x.var(unbiased)
        dim, unbiased = None, dim
    dims = _along(len(x.shape), dim)
    found = moments.entry_variance(x, dims, float(unbiased) if correction is None else correction)
    shape = [1 if d in dims else n for d, n in enumerate(x.shape)]
    return found.map(lambda t: t.view(shape)) if keepdim else found


@rule("approximate", 65)
def entry_deviation(
    method: Method, function: Function, x: Gaussian, *args: Value, **options: Value
) -> Gaussian:
    """torch.std: the root of the variance of entries (Eq. 64, 65)."""
    return moments.log_normal_power(entry_variance.apply(method, function, x, *args, **options), 0.5)


def _with_mean(
    of_entries: Rule, method: Method, function: Function, x: Gaussian, *args: Value, **options: Value
) -> Value:
    """torch.var_mean and torch.std_mean."""
    found = of_entries.apply(method, function, x, *args, **options)
    dims = _along(len(x.shape), args[0] if args and not isinstance(args[0], bool) else options.get("dim"))
    keepdim = found.mean.dim() == x.mean.dim()
    n = x.mean.numel() / found.mean.numel()
    return found, Gaussian.of(x.mean.mean(dims, keepdim=keepdim), x.var.mean(dims, keepdim=keepdim) / n)


@rule("approximate", 66)
def log_sum_exp(
    method: Method, function: Function, x: Gaussian, dim: Value, keepdim: bool = False
) -> Gaussian:
    """torch.logsumexp (Eq. 66)."""
    dims = _along(len(x.shape), dim)
    shape = [1 if d in dims else n for d, n in enumerate(x.shape)]
    found = moments.log_sum_exp(x, dims)
    return found.map(lambda t: t.view(shape)) if keepdim else found


POSITIVE: Table = {
    torch.sqrt: _power_rule(0.5),
    torch.rsqrt: _power_rule(-0.5),
    torch.reciprocal: _power_rule(-1.0),
    torch.log: _log_rule(),
    torch.log1p: _log_rule(shift=1.0),
    torch.log2: _log_rule(math.log(2)),
    torch.log10: _log_rule(math.log(10)),
    torch.var: entry_variance,
    torch.std: entry_deviation,
    torch.var_mean: Rule(partial(_with_mean, entry_variance), "exact", 65),
    torch.std_mean: Rule(partial(_with_mean, entry_deviation), "approximate", 65),
    torch.logsumexp: log_sum_exp,
}

"""Rules for sums, products, powers and smooth functions of values between the layers of a network.

Operands are assumed independent, except in a product of a value with itself. `residual.py` corrects sums
afterwards if the network's graph gives the covariance.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from .. import moments
from ..gaussian import Gaussian, as_gaussian, move
from ..methods.base import Call, Function, Gain, Method, Value, missing
from ..methods.facts import rule
from ..methods.noise import of_products, unexplained
from .positive import quotient


def _other(call: Call) -> Value:
    """The deterministic operand of two; None if both are random."""
    a, b = call.args
    if isinstance(a, Gaussian):
        return None if isinstance(b, Gaussian) else b
    return a


def _as_gain(value: Value) -> Gain | None:
    return float(value) if isinstance(value, int | float) else value if isinstance(value, Tensor) else None


def times(x: Value, scale: Value) -> Value:
    return x.times(scale) if isinstance(x, Gaussian) else x * scale


def _terms(sign: float, call: Call) -> Gain | tuple[Gain, Gain] | None:
    """The gain of a sum or difference: that of its random term, or a pair if both terms are random."""
    gains = 1.0, sign * call.options.get("alpha", 1)
    random = [isinstance(a, Gaussian) for a in call.args]
    return gains if all(random) else gains[random.index(True)]


@rule("exact", gain=partial(_terms, 1.0), takes_independent=True)
def add(method: Method, function: Function, a: Value, b: Value, *, alpha: float = 1) -> Gaussian:
    """a + alpha b with independent operands."""
    b = b if alpha == 1 else times(b, alpha)
    return a.plus(b) if isinstance(a, Gaussian) else b.plus(a)


@rule("exact", gain=partial(_terms, -1.0), takes_independent=True)
def subtract(method: Method, function: Function, a: Value, b: Value, *, alpha: float = 1) -> Gaussian:
    return add.apply(method, function, a, times(b, -alpha))


@rule("exact", gain=lambda call: -1.0)
def negate(method: Method, function: Function, x: Gaussian) -> Gaussian:
    return x.times(-1.0)


@rule("exact", 3, gain=lambda call: _as_gain(_other(call)), noise=of_products, takes_independent=True)
def multiply(method: Method, function: Function, a: Value, b: Value) -> Value:
    """a b with independent operands (Eq. 3), or the square of one value (Eq. 4)."""
    if isinstance(a, Gaussian) and isinstance(b, Gaussian):
        return moments.square(a) if a is b else moments.product(a, b)
    return a.times(b) if isinstance(a, Gaussian) else b.times(a)


def _divisor(call: Call) -> Gain | None:
    b = call.args[1]
    return None if isinstance(b, Gaussian) else _as_gain(1 / b)


@rule("exact", gain=_divisor, takes_independent=True)
def divide(method: Method, function: Function, a: Value, b: Value) -> Gaussian:
    """a / b; a random divisor is taken as log-normal and independent (Eq. 64)."""
    return quotient(a, b) if isinstance(b, Gaussian) else a.times(1 / b)


def _slope(call: Call) -> Tensor | None:
    """The mean slope of an elementwise function, by quadrature (Eq. 25)."""
    return moments.smooth_slope(lambda t: call.function(t, *call.args[1:], **call.options), call.x)


@rule("exact", 4, gain=_slope, noise=unexplained)
def power(method: Method, function: Function, x: Gaussian, exponent: Value = 2) -> Gaussian:
    """The square in closed form (Eq. 4), other integer powers by quadrature, also exact (Eq. 16); roots and
    reciprocals of positive values (Eq. 64)."""
    if isinstance(exponent, Gaussian):
        raise missing(method, function, " with a random exponent")
    if isinstance(exponent, Tensor):
        raise missing(method, function, " with a tensor as exponent")
    if exponent != int(exponent) or exponent < 1:
        return moments.log_normal_power(x, exponent)
    return moments.square(x) if exponent == 2 else moments.quadrature(lambda t: t ** int(exponent), x)


@rule("approximate", 16, gain=_slope, noise=unexplained)
def elementwise(method: Method, function: Function, x: Gaussian) -> Gaussian:
    """A smooth function of each entry, by quadrature (Eq. 16)."""
    return moments.quadrature(function, x)


@rule("exact", 1, noise=of_products, takes_independent=True)
def bilinear(method: Method, function: Function, a: Value, b: Value) -> Value:
    """A matrix product; two random matrices are assumed independent (Eq. 1)."""
    return moments.affine(lambda x, w, bias=None: function(x, w), a, b)


@rule("exact", 1, noise=of_products, takes_independent=True)
def affine(
    method: Method,
    function: Function,
    x: Value,
    weight: Value,
    bias: Value = None,
    *args: Value,
    **options: Value,
) -> Value:
    """A linear map or convolution with a given weight (Eq. 1)."""
    return moments.affine(lambda x, w, b=None: function(x, w, b, *args, **options), x, weight, bias)


@rule("exact", 1, takes_independent=True)
def add_product(
    method: Method, function: Function, shift: Value, a: Value, b: Value, *, beta: float = 1, alpha: float = 1
) -> Gaussian:
    """beta shift + alpha a @ b (Eq. 1), as in torch.addmm."""
    product = moments.affine(lambda x, w, bias=None: x @ w, a, b)
    return as_gaussian(product).times(alpha).plus(times(shift, beta))


@rule("exact", 3, takes_independent=True)
def add_entries(
    method: Method, function: Function, shift: Value, a: Value, b: Value, *, value: float = 1
) -> Value:
    """shift + value a b (Eq. 3), as in torch.addcmul."""
    product = as_gaussian(moments.product(a, b)).times(value)
    return product.plus(shift)


@rule("exact", 1, takes_independent=True)
def einsum(method: Method, function: Function, equation: str, *operands: Value) -> Value:
    """A sum of products of one or two operands in which no random entry appears twice (Eq. 1)."""
    if len(operands) > 2:
        raise missing(method, function, " of more than two operands")
    inputs, summed = _indices(equation)
    if any(
        isinstance(x, Gaussian) and summed - set(letters) for x, letters in zip(operands, inputs, strict=True)
    ):
        raise missing(
            method, function, f' "{equation}", which sums over an index that a random operand does not have'
        )
    if len(operands) == 1:
        return move(lambda t: function(equation, t), operands[0])
    return moments.affine(lambda x, w, bias=None: function(equation, x, w), *operands)


def _indices(equation: str) -> tuple[list[str], set[str]]:
    """The indices of each operand of an einsum, with a dot for an ellipsis, and the indices summed over."""
    left, arrow, right = equation.replace(" ", "").replace("...", ".").partition("->")
    kept = set(right) if arrow else {"."} | {c for c in left if left.count(c) == 1}
    return left.split(","), set(left) - kept - {","}

"""Rules for functions and tensor methods: what a network with its own `forward` computes between its layers.

Operands are assumed independent, except in a product of a value with itself. `residual.py` corrects sums
afterwards if the network's graph gives the covariance. Functions that are equivalent to a layer are in
`layer_forms.py`.
"""

from __future__ import annotations

import builtins
import operator
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import moments
from ..gaussian import Activation, Gaussian, as_gaussian, mean_of, move
from ..methods.base import Call, Function, Gain, Method, Rule, Table, Value, missing, rule
from ..methods.noise import of_averages, of_products, unexplained
from ..methods.rules.attention import scaled_dot_product
from .layer_forms import LAYER_FORMS
from .positive import POSITIVE, quotient
from .steps import placed

# ------------------------------------------------------------------------------------------------- arithmetic


def _other(call: Call) -> Value:
    """The deterministic operand of two; None if both are random."""
    a, b = call.args
    return (
        None if isinstance(a, Gaussian) and isinstance(b, Gaussian) else b if isinstance(a, Gaussian) else a
    )


def _as_gain(value: Value) -> Gain | None:
    return float(value) if isinstance(value, int | float) else value if isinstance(value, Tensor) else None


def _times(x: Value, scale: Value) -> Value:
    return x.times(scale) if isinstance(x, Gaussian) else x * scale


def _terms(sign: float, call: Call) -> Gain | tuple[Gain, Gain] | None:
    """The gain of a sum or difference: that of its random term, or a pair if both terms are random."""
    gains = 1.0, sign * call.options.get("alpha", 1)
    random = [isinstance(a, Gaussian) for a in call.args]
    return gains if all(random) else gains[random.index(True)]


@rule("exact", gain=partial(_terms, 1.0), takes_independent=True)
def add(method: Method, function: Function, a: Value, b: Value, *, alpha: float = 1) -> Gaussian:
    """a + alpha b with independent operands."""
    b = b if alpha == 1 else _times(b, alpha)
    return a.plus(b) if isinstance(a, Gaussian) else b.plus(a)


@rule("exact", gain=partial(_terms, -1.0), takes_independent=True)
def subtract(method: Method, function: Function, a: Value, b: Value, *, alpha: float = 1) -> Gaussian:
    return add.apply(method, function, a, _times(b, -alpha))


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
    return as_gaussian(product).times(alpha).plus(_times(shift, beta))


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


# ---------------------------------------------------------------------------------- moving, joining, reducing


@rule("exact")
def moves(method: Method, function: Function, x: Activation, *args: Value, **options: Value) -> Activation:
    """A function that only moves, repeats or sums entries; other random arguments only give a shape."""
    others = [mean_of(a) for a in args]
    return move(lambda t: function(t, *others, **options), x)


@rule("exact", gain=lambda call: 1.0)
def unchanged(method: Method, function: Function, x: Gaussian, *args: Value, **options: Value) -> Gaussian:
    """A function that leaves every entry in its place, such as a copy or a change of type."""
    return x.map(lambda t: function(t, *map(mean_of, args), **options))


@rule("plain")
def metadata(method: Method, function: Function, x: Gaussian, *args: Value, **options: Value) -> Value:
    """A property of a tensor: its shape, type or device, or a constant tensor made from them."""
    return function(x.mean, *args, **options)


@rule("plain")
def attribute(method: Method, function: Function, x: Value, name: str) -> Value:
    if isinstance(x, tuple):
        return getattr(x, name)
    if name == "data":
        return x.detach()
    if name in ("T", "mT"):
        return x.map(lambda t: getattr(t, name))
    if name not in ("shape", "dtype", "device", "ndim"):
        raise missing(method, f"{name}")
    return getattr(x.mean, name)


@rule("exact")
def item(method: Method, function: Function, x: Value, index: Value) -> Value:
    return x.map(lambda t: t[index]) if isinstance(x, Gaussian) else x[index]


@rule("exact")
def parts(
    method: Method, function: Function, x: Gaussian, *args: Value, **options: Value
) -> tuple[Gaussian, ...]:
    means, variances = function(x.mean, *args, **options), function(x.var, *args, **options)
    return tuple([Gaussian.of(m, v) for m, v in zip(means, variances, strict=True)])


@rule("exact")
def joined(method: Method, function: Function, tensors: Value, *args: Value, **options: Value) -> Gaussian:
    """Several values joined into one; deterministic ones have zero variance."""
    variances = [x.var if isinstance(x, Gaussian) else torch.zeros_like(x) for x in tensors]
    mean = function([mean_of(x) for x in tensors], *args, **options)
    return Gaussian.of(mean, function(variances, *args, **options))


def _chosen(method: Method, condition: Value, a: Value, b: Value) -> Gaussian:
    """An elementwise choice between two values by a deterministic condition."""
    if isinstance(condition, Gaussian):
        raise missing(method, torch.where, " with a random condition")
    mean = torch.where(condition, mean_of(a), mean_of(b))
    a_var, b_var = (x.var if isinstance(x, Gaussian) else 0.0 for x in (a, b))
    return Gaussian.of(mean, torch.where(condition, a_var, b_var).expand_as(mean))


@rule("exact")
def where(method: Method, function: Function, condition: Value, input: Value, other: Value) -> Gaussian:
    return _chosen(method, condition, input, other)


@rule("exact")
def kept_where(method: Method, function: Function, x: Value, condition: Value, other: Value) -> Gaussian:
    """x.where(condition, other)."""
    return _chosen(method, condition, x, other)


@rule("exact")
def filled_where(method: Method, function: Function, x: Value, mask: Value, value: Value) -> Gaussian:
    """x.masked_fill(mask, value)."""
    return _chosen(method, mask, value, x)


@rule("exact")
def looked_up(
    method: Method, function: Function, index: Tensor, table: Gaussian, *args: Value, **options: Value
) -> Gaussian:
    """Rows of a random table."""
    if len(args) > 1 or options.get("max_norm") is not None:
        raise missing(method, function, " with max_norm")
    return table.map(lambda t: F.embedding(index, t))


@rule("exact")
def written(method: Method, function: Function, x: Value, index: Value, value: Value) -> Gaussian:
    """x with a value written at an index."""
    x_var, value_var = (
        a.var if isinstance(a, Gaussian) else torch.zeros_like(torch.as_tensor(a)) for a in (x, value)
    )
    return Gaussian.of(function(mean_of(x), index, mean_of(value)), function(x_var, index, value_var))


@rule("exact", takes_independent=True)
def scattered(
    method: Method, function: Function, x: Value, dim: int, index: Tensor, source: Value, *, alpha: float = 1
) -> Gaussian:
    """x with entries of a source added where an index says, as messages arrive at the nodes of a graph."""
    add: Function = getattr(torch, function.__name__.rstrip("_"))  # not in place
    a, b = as_gaussian(x), as_gaussian(_times(source, alpha))
    return Gaussian.of(add(a.mean, dim, index, b.mean), add(a.var, dim, index, b.var))


@rule("exact", 12, noise=of_averages)
def average(method: Method, function: Function, x: Gaussian, *args: Value, **options: Value) -> Gaussian:
    """The mean of independent entries (Eq. 12)."""
    mean = function(x.mean, *args, **options)
    return Gaussian.of(mean, function(x.var, *args, **options) * (mean.numel() / x.mean.numel()))


@rule("exact")
def padded(
    method: Method, function: Function, x: Gaussian, pad: Value, mode: str = "constant", value: Value = None
) -> Gaussian:
    """A constant border has no variance; any other border repeats entries, treated as independent."""
    return Gaussian.of(function(x.mean, pad, mode, value), function(x.var, pad, mode))


# -------------------------------------------------------------------------------------------------- the table


def _rows(rule: Rule, names: str) -> Table:
    """Table entries for functions of torch and torch.nn.functional, or else for tensor methods."""
    rows: Table = {}
    for name in names.split():
        found = [f for f in (getattr(torch, name, None), getattr(F, name, None)) if callable(f)]
        rows.update(dict.fromkeys(found or [name], rule))
    return rows


FUNCTIONS: Table = {
    **LAYER_FORMS,
    **POSITIVE,
    **dict.fromkeys((operator.add, operator.iadd), add),
    **dict.fromkeys((operator.sub, operator.isub), subtract),
    **dict.fromkeys((operator.mul, operator.imul), multiply),
    **dict.fromkeys((operator.truediv, operator.itruediv), divide),
    operator.neg: negate,
    operator.pow: power,
    operator.matmul: bilinear,
    **_rows(add, "add add_"),
    **_rows(subtract, "sub sub_ subtract"),
    **_rows(multiply, "mul mul_ multiply"),
    **_rows(divide, "div div_ divide true_divide"),
    **_rows(negate, "neg negative neg_"),
    **_rows(power, "pow square"),
    **_rows(bilinear, "matmul mm bmm mv"),
    **_rows(affine, "linear conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d"),
    **_rows(elementwise, "exp expm1 sin cos erf atan sinh cosh asinh"),
    **_rows(
        moves, "flatten reshape view view_as reshape_as unflatten ravel permute transpose swapaxes movedim t"
    ),
    **_rows(
        moves, "squeeze unsqueeze expand expand_as repeat repeat_interleave tile flip roll narrow select"
    ),
    **_rows(
        moves, "index_select gather masked_select swapdims moveaxis broadcast_to take_along_dim tril triu"
    ),
    **_rows(
        moves, "diagonal rot90 fliplr flipud adjoint pixel_shuffle pixel_unshuffle channel_shuffle unfold"
    ),
    **_rows(moves, "sum cumsum"),
    "unfold": moves,
    **_rows(unchanged, "clone contiguous detach to type_as float double half bfloat16"),
    **_rows(metadata, "size dim numel is_floating_point new_zeros new_ones new_full new_tensor new_empty"),
    **_rows(metadata, "zeros_like ones_like full_like empty_like rand_like randn_like"),
    **_rows(parts, "chunk split unbind tensor_split"),
    **_rows(joined, "cat concat concatenate stack hstack vstack dstack"),
    **_rows(average, "mean"),
    **_rows(padded, "pad"),
    **_rows(add_product, "addmm addmv baddbmm"),
    **_rows(add_entries, "addcmul"),
    **_rows(einsum, "einsum"),
    placed: written,
    **_rows(where, "where"),
    "where": kept_where,
    **_rows(filled_where, "masked_fill masked_fill_"),
    **_rows(looked_up, "embedding"),
    **_rows(scattered, "scatter_add scatter_add_ index_add index_add_"),
    F.scaled_dot_product_attention: scaled_dot_product,
    builtins.getattr: attribute,
    operator.getitem: item,
}

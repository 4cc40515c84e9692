"""Rules for functions and tensor methods: what a network with its own `forward` does between its layers.

Operands are taken as independent, except in a product of a value with itself; sums are corrected afterwards where the network's graph
shows how (`correlation.py`). Functions with a layer that does the same are in `twins.py`, maxima in `maxima.py`.
"""

from __future__ import annotations

import builtins
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import moments as fn
from ..gaussian import Activation, Gaussian, as_gaussian, mean_of, move
from .attention import scaled_dot_product
from .base import Method, Rule, missing
from .twins import BY_LAYERS

# --------------------------------------------------------------------------------------------------------------------- arithmetic


def add(method: Method, function: Callable[..., Any], a: Any, b: Any, *, alpha: float = 1) -> Gaussian:
    """a + alpha b with independent operands."""
    b = b if alpha == 1 else _times(b, alpha)
    return a.plus(b) if isinstance(a, Gaussian) else b.plus(a)


def _times(x: Any, scale: Any) -> Any:
    return x.times(scale) if isinstance(x, Gaussian) else x * scale


def subtract(method: Method, function: Callable[..., Any], a: Any, b: Any, *, alpha: float = 1) -> Gaussian:
    return add(method, function, a, _times(b, -alpha))


def negate(method: Method, function: Callable[..., Any], x: Gaussian) -> Gaussian:
    return x.times(-1.0)


def multiply(method: Method, function: Callable[..., Any], a: Any, b: Any) -> Any:
    """a b with independent operands (Eq. 3), or the square of one value (Eq. 40)."""
    if isinstance(a, Gaussian) and isinstance(b, Gaussian):
        return fn.square(a) if a is b else fn.product(a, b)
    return a.times(b) if isinstance(a, Gaussian) else b.times(a)


def divide(method: Method, function: Callable[..., Any], a: Any, b: Any) -> Gaussian:
    if isinstance(b, Gaussian):
        raise missing(method, function, " by a random value")
    return a.times(1 / b)


def power(method: Method, function: Callable[..., Any], x: Any, exponent: Any = 2) -> Gaussian:
    """Whole powers: the square in closed form (Eq. 40), others by quadrature, which is exact for them (Eq. 11)."""
    if isinstance(exponent, Gaussian | Tensor) or exponent != int(exponent) or exponent < 1:
        raise missing(method, function, f" with the exponent {exponent}")
    return fn.square(x) if exponent == 2 else fn.quadrature(lambda t: t ** int(exponent), x)


def elementwise(method: Method, function: Callable[..., Any], x: Gaussian) -> Gaussian:
    """A smooth function of each entry by quadrature (Eq. 11)."""
    return fn.quadrature(function, x)


def bilinear(method: Method, function: Callable[..., Any], a: Any, b: Any) -> Any:
    """A matrix product; of two random matrices, as independent ones (Eq. 1)."""
    return fn.affine(lambda x, w, bias=None: function(x, w), a, b)


def affine(
    method: Method,
    function: Callable[..., Any],
    x: Any,
    weight: Any,
    bias: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """A linear map or convolution with its weight given (Eq. 1)."""
    return fn.affine(lambda x, w, b=None: function(x, w, b, *args, **kwargs), x, weight, bias)


def added(
    method: Method,
    function: Callable[..., Any],
    shift: Any,
    a: Any,
    b: Any,
    *,
    beta: float = 1,
    alpha: float = 1,
) -> Gaussian:
    """beta shift + alpha a @ b (Eq. 1), as in torch.addmm."""
    return as_gaussian(fn.affine(lambda x, w, bias=None: x @ w, a, b)).times(alpha).plus(_times(shift, beta))


def einsum(method: Method, function: Callable[..., Any], equation: str, *operands: Any) -> Any:
    """A sum of products that no random entry enters twice, of one or two operands (Eq. 1)."""
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
    return fn.affine(lambda x, w, bias=None: function(equation, x, w), *operands)


def _indices(equation: str) -> tuple[list[str], set[str]]:
    """The indices of each operand of an Einstein sum, with a dot for an ellipsis, and those that are summed over."""
    left, arrow, right = equation.replace(" ", "").replace("...", ".").partition("->")
    kept = set(right) if arrow else {"."} | {c for c in left if left.count(c) == 1}
    return left.split(","), set(left) - kept - {","}


# ------------------------------------------------------------------------------------------------------- moving, joining, reducing


def moves(
    method: Method, function: Callable[..., Any], x: Activation, *args: Any, **kwargs: Any
) -> Activation:
    """A function that only moves, repeats or adds up entries; of other random arguments it reads the shape."""
    others = [mean_of(a) for a in args]
    return move(lambda t: function(t, *others, **kwargs), x)


def about(method: Method, function: Callable[..., Any], x: Gaussian, *args: Any, **kwargs: Any) -> Any:
    """What a tensor tells about its shape or place."""
    return function(x.mean, *args, **kwargs)


def attribute(method: Method, function: Callable[..., Any], x: Any, name: str) -> Any:
    if isinstance(x, tuple):
        return getattr(x, name)
    if name in ("T", "mT"):
        return x.map(lambda t: getattr(t, name))
    if name not in ("shape", "dtype", "device", "ndim"):
        raise missing(method, f"{name}")
    return getattr(x.mean, name)


def item(method: Method, function: Callable[..., Any], x: Any, index: Any) -> Any:
    return x.map(lambda t: t[index]) if isinstance(x, Gaussian) else x[index]


def parts(
    method: Method, function: Callable[..., Any], x: Gaussian, *args: Any, **kwargs: Any
) -> tuple[Gaussian, ...]:
    means, variances = function(x.mean, *args, **kwargs), function(x.var, *args, **kwargs)
    return tuple([Gaussian.of(m, v) for m, v in zip(means, variances, strict=True)])


def joined(method: Method, function: Callable[..., Any], tensors: Any, *args: Any, **kwargs: Any) -> Gaussian:
    """Several values in one; those without variance keep none."""
    variances = [x.var if isinstance(x, Gaussian) else torch.zeros_like(x) for x in tensors]
    return Gaussian.of(
        function([mean_of(x) for x in tensors], *args, **kwargs), function(variances, *args, **kwargs)
    )


def where(method: Method, function: Callable[..., Any], condition: Any, a: Any, b: Any) -> Gaussian:
    """A choice between two values, entry by entry, that is itself certain."""
    if isinstance(condition, Gaussian):
        raise missing(method, torch.where, " with a random condition")
    a_var, b_var = (x.var if isinstance(x, Gaussian) else 0.0 for x in (a, b))
    mean = torch.where(condition, mean_of(a), mean_of(b))
    return Gaussian.of(mean, torch.where(condition, a_var, b_var))


def kept_where(method: Method, function: Callable[..., Any], x: Any, condition: Any, other: Any) -> Gaussian:
    return where(method, function, condition, x, other)


def filled_where(method: Method, function: Callable[..., Any], x: Any, mask: Any, value: Any) -> Gaussian:
    return where(method, function, mask, value, x)


def looked_up(
    method: Method, function: Callable[..., Any], index: Tensor, table: Gaussian, *args: Any, **kwargs: Any
) -> Gaussian:
    """Rows of a random table."""
    if len(args) > 1 or kwargs.get("max_norm") is not None:
        raise missing(method, function, " with max_norm")
    return table.map(lambda t: F.embedding(index, t))


def average(method: Method, function: Callable[..., Any], x: Gaussian, *args: Any, **kwargs: Any) -> Gaussian:
    """The mean of independent entries (Eq. 9)."""
    mean = function(x.mean, *args, **kwargs)
    return Gaussian.of(mean, function(x.var, *args, **kwargs) * (mean.numel() / x.mean.numel()))


def padded(
    method: Method,
    function: Callable[..., Any],
    x: Gaussian,
    pad: Any,
    mode: str = "constant",
    value: Any = None,
) -> Gaussian:
    """A constant border is certain; any other repeats entries, which then count as independent of their originals."""
    return Gaussian.of(function(x.mean, pad, mode, value), function(x.var, pad, mode))


# ----------------------------------------------------------------------------------------------------------------------- the table


def _rows(rule: Rule, names: str) -> dict[Any, Rule]:
    """Rows for functions of torch and torch.nn.functional, and for methods of tensors that have no function."""
    rows: dict[Any, Rule] = {}
    for name in names.split():
        found = [f for f in (getattr(torch, name, None), getattr(F, name, None)) if callable(f)]
        rows.update(dict.fromkeys(found or [name], rule))
    return rows


FUNCTIONS: dict[Any, Rule] = {
    **BY_LAYERS,
    **dict.fromkeys((operator.add, operator.iadd), add),
    **dict.fromkeys((operator.sub, operator.isub), subtract),
    **dict.fromkeys((operator.mul, operator.imul), multiply),
    **dict.fromkeys((operator.truediv, operator.itruediv), divide),
    **dict.fromkeys((operator.neg,), negate),
    **dict.fromkeys((operator.pow,), power),
    **dict.fromkeys((operator.matmul,), bilinear),
    **_rows(add, "add add_"),
    **_rows(subtract, "sub sub_ subtract"),
    **_rows(multiply, "mul mul_ multiply"),
    **_rows(divide, "div div_ divide true_divide"),
    **_rows(negate, "neg negative neg_"),
    **_rows(power, "pow square"),
    **_rows(bilinear, "matmul mm bmm mv"),
    **_rows(affine, "linear conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d"),
    **_rows(elementwise, "exp sin cos erf"),
    **_rows(
        moves,
        "flatten reshape view view_as reshape_as unflatten ravel permute transpose swapaxes movedim t squeeze unsqueeze",
    ),
    **_rows(
        moves,
        "expand expand_as repeat repeat_interleave tile flip roll narrow select index_select gather masked_select",
    ),
    "unfold": moves,
    **_rows(
        moves, "swapdims moveaxis broadcast_to take_along_dim tril triu diagonal rot90 fliplr flipud adjoint"
    ),
    **_rows(
        moves,
        "pixel_shuffle pixel_unshuffle channel_shuffle unfold contiguous clone detach to type_as float double half bfloat16 sum",
    ),
    **_rows(about, "size dim numel is_floating_point new_zeros new_ones new_full new_tensor new_empty"),
    **_rows(about, "zeros_like ones_like full_like empty_like rand_like randn_like"),
    **_rows(parts, "chunk split unbind tensor_split"),
    **_rows(joined, "cat concat concatenate stack hstack vstack dstack"),
    **_rows(average, "mean"),
    **_rows(padded, "pad"),
    **_rows(added, "addmm addmv baddbmm"),
    **_rows(einsum, "einsum"),
    **_rows(where, "where"),
    "where": kept_where,
    **_rows(filled_where, "masked_fill masked_fill_"),
    **_rows(looked_up, "embedding"),
    F.scaled_dot_product_attention: scaled_dot_product,
    builtins.getattr: attribute,
    operator.getitem: item,
}

"""Rules for functions and tensor methods: what a network with its own `forward` does between its layers.

A function with a twin among torch's layers builds the layer and asks the method, so that no moment is written twice. Operands are taken
as independent, except in a product of a value with itself; sums are corrected afterwards where the network's graph shows how
(`correlation.py`).
"""

from __future__ import annotations

import builtins
import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .. import functional as fn
from ..gaussian import Activation, Gaussian, mean_of, move
from .base import Method, Rule, in_torch, missing

# -------------------------------------------------------------------------------------------- functions with a layer as their twin


def twin_of(function: Callable[..., Any] | str, args: Any, kwargs: Any) -> nn.Module | None:
    """The layer that computes a function with these arguments beside its input, where there is one."""
    rule: Any = TWINS.get(function, TWINS.get(in_torch(function)))
    return None if rule is None else twin(*rule.args, *args, **kwargs)


def twin(kind: type[nn.Module], names: str, *args: Any, **kwargs: Any) -> nn.Module:
    """The layer that computes a function with these arguments beside its input."""
    options = {**dict(zip(names.split(), args, strict=False)), **kwargs}
    for name in ("inplace", "_stacklevel"):
        options.pop(name, None)
    if options.get("dtype", ...) is None:
        del options["dtype"]
    training = options.pop("training", True)
    return kind(**options).train(training)


def by_twin(
    kind: type[nn.Module], names: str, method: Method, function: Callable[..., Any], x: Activation, *args: Any, **kwargs: Any
) -> Any:
    """Ask the method about the layer that computes the function."""
    if kwargs.get("return_indices"):
        raise missing(method, function, " with return_indices=True")
    return method(twin(kind, names, *args, **kwargs), x)


def _named(names: str, **kinds: type[nn.Module]) -> dict[Any, Rule]:
    """Rows for functions by their names in torch.nn.functional, torch and, with an underscore behind, in place."""
    rows: dict[Any, Rule] = {}
    for name, kind in kinds.items():
        for module in (F, torch):
            for spelling in (name, f"{name}_"):
                function = getattr(module, spelling, None)
                # Some functions of torch.nn.functional cannot be pickled; they are found by their names in torch.
                if function is not None and "<locals>" not in getattr(function, "__qualname__", ""):
                    rows[function] = partial(by_twin, kind, names)
    return rows


_POOL = "kernel_size stride padding"
TWINS: dict[Any, Rule] = {
    **_named("inplace", relu=nn.ReLU, relu6=nn.ReLU6, hardsigmoid=nn.Hardsigmoid, hardswish=nn.Hardswish, silu=nn.SiLU, mish=nn.Mish),
    **_named(
        "inplace", selu=nn.SELU, tanh=nn.Tanh, sigmoid=nn.Sigmoid, softsign=nn.Softsign, tanhshrink=nn.Tanhshrink, logsigmoid=nn.LogSigmoid
    ),
    **_named("negative_slope inplace", leaky_relu=nn.LeakyReLU),
    **_named("min_val max_val inplace", hardtanh=nn.Hardtanh),
    **_named("lambd", softshrink=nn.Softshrink),
    **_named("approximate", gelu=nn.GELU),
    **_named("beta threshold", softplus=nn.Softplus),
    **_named("alpha inplace", elu=nn.ELU, celu=nn.CELU),
    **_named("dim", softmax=nn.Softmax, log_softmax=nn.LogSoftmax, softmin=nn.Softmin, glu=nn.GLU),
    **_named("p training inplace", dropout=nn.Dropout, dropout1d=nn.Dropout1d, dropout2d=nn.Dropout2d, dropout3d=nn.Dropout3d),
    **_named("p training inplace", alpha_dropout=nn.AlphaDropout, feature_alpha_dropout=nn.FeatureAlphaDropout),
    **_named(f"{_POOL} dilation ceil_mode return_indices", max_pool1d=nn.MaxPool1d, max_pool2d=nn.MaxPool2d, max_pool3d=nn.MaxPool3d),
    **_named(
        f"{_POOL} ceil_mode count_include_pad divisor_override", avg_pool1d=nn.AvgPool1d, avg_pool2d=nn.AvgPool2d, avg_pool3d=nn.AvgPool3d
    ),
    **_named("output_size", adaptive_avg_pool1d=nn.AdaptiveAvgPool1d, adaptive_avg_pool2d=nn.AdaptiveAvgPool2d),
    **_named("output_size", adaptive_avg_pool3d=nn.AdaptiveAvgPool3d),
}


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


def affine(method: Method, function: Callable[..., Any], x: Any, weight: Any, bias: Any = None, *args: Any, **kwargs: Any) -> Any:
    """A linear map or convolution with its weight given (Eq. 1)."""
    return fn.affine(lambda x, w, b=None: function(x, w, b, *args, **kwargs), x, weight, bias)


# ------------------------------------------------------------------------------------------------------- moving, joining, reducing


def moves(method: Method, function: Callable[..., Any], x: Activation, *args: Any, **kwargs: Any) -> Activation:
    """A function that only moves, repeats or adds up entries; of other random arguments it reads the shape."""
    others = [mean_of(a) for a in args]
    return move(lambda t: function(t, *others, **kwargs), x)


def about(method: Method, function: Callable[..., Any], x: Gaussian, *args: Any, **kwargs: Any) -> Any:
    """What a tensor tells about its shape or place."""
    return function(x.mean, *args, **kwargs)


def attribute(method: Method, function: Callable[..., Any], x: Any, name: str) -> Any:
    if name in ("T", "mT"):
        return x.map(lambda t: getattr(t, name))
    if name not in ("shape", "dtype", "device", "ndim"):
        raise missing(method, f"{name}")
    return getattr(x.mean, name)


def item(method: Method, function: Callable[..., Any], x: Any, index: Any) -> Any:
    return x.map(lambda t: t[index]) if isinstance(x, Gaussian) else x[index]


def parts(method: Method, function: Callable[..., Any], x: Gaussian, *args: Any, **kwargs: Any) -> tuple[Gaussian, ...]:
    means, variances = function(x.mean, *args, **kwargs), function(x.var, *args, **kwargs)
    return tuple([Gaussian.of(m, v) for m, v in zip(means, variances, strict=True)])


def joined(method: Method, function: Callable[..., Any], tensors: Any, *args: Any, **kwargs: Any) -> Gaussian:
    """Several values in one; those without variance keep none."""
    variances = [x.var if isinstance(x, Gaussian) else torch.zeros_like(x) for x in tensors]
    return Gaussian.of(function([mean_of(x) for x in tensors], *args, **kwargs), function(variances, *args, **kwargs))


def average(method: Method, function: Callable[..., Any], x: Gaussian, *args: Any, **kwargs: Any) -> Gaussian:
    """The mean of independent entries (Eq. 9)."""
    mean = function(x.mean, *args, **kwargs)
    return Gaussian.of(mean, function(x.var, *args, **kwargs) * (mean.numel() / x.mean.numel()))


def padded(method: Method, function: Callable[..., Any], x: Gaussian, pad: Any, mode: str = "constant", value: Any = None) -> Gaussian:
    """A constant border is certain; any other repeats entries, which then count as independent of their originals."""
    return Gaussian.of(function(x.mean, pad, mode, value), function(x.var, pad, mode))


def interpolated(method: Method, function: Callable[..., Any], x: Activation, *args: Any, antialias: bool = False, **kwargs: Any) -> Any:
    """As `nn.Upsample`, which has no filter."""
    if antialias:
        raise missing(method, function, " with antialias=True")
    return by_twin(nn.Upsample, "size scale_factor mode align_corners recompute_scale_factor", method, function, x, *args, **kwargs)


# ----------------------------------------------------------------------------------------------------------------------- the table


def _rows(rule: Rule, names: str) -> dict[Any, Rule]:
    """Rows for functions of torch and torch.nn.functional, and for methods of tensors that have no function."""
    rows: dict[Any, Rule] = {}
    for name in names.split():
        found = [f for f in (getattr(torch, name, None), getattr(F, name, None)) if callable(f)]
        rows.update(dict.fromkeys(found or [name], rule))
    return rows


FUNCTIONS: dict[Any, Rule] = {
    **TWINS,
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
    **_rows(moves, "flatten reshape view view_as reshape_as unflatten ravel permute transpose swapaxes movedim t squeeze unsqueeze"),
    **_rows(moves, "expand expand_as repeat repeat_interleave tile flip roll narrow select index_select gather masked_select"),
    **_rows(moves, "pixel_shuffle pixel_unshuffle channel_shuffle contiguous clone detach to type_as float double sum"),
    **_rows(
        about, "size dim numel is_floating_point zeros_like ones_like full_like empty_like rand_like randn_like new_zeros new_ones new_full"
    ),
    **_rows(parts, "chunk split unbind tensor_split"),
    **_rows(joined, "cat concat concatenate stack hstack vstack"),
    **_rows(average, "mean"),
    **_rows(padded, "pad"),
    **_rows(interpolated, "interpolate"),
    builtins.getattr: attribute,
    operator.getitem: item,
}

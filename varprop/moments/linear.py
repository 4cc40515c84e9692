"""Linear maps, products, averages and masks of independent random variables: exact means and variances."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from ..cache import of_weight
from ..gaussian import Activation, Gaussian, accumulated, mean_of, second_moment_of

Op = Callable[..., Tensor]
"""op(x, weight) or op(x, weight, bias), such as `F.linear`."""


@dataclass(frozen=True)
class Outer:
    """Variances that factor over outputs and inputs, Var[w_oi] = a_o b_i (Eq. 2)."""

    outputs: Tensor
    inputs: Tensor


@dataclass(frozen=True)
class FactoredWeight:
    """A random weight whose variance is an outer product."""

    mean: Tensor
    var: Outer


Weight = Tensor | Gaussian | FactoredWeight


def affine(op: Op, x: Activation, weight: Weight, bias: Activation | None = None) -> Activation:
    """Moments of op(x, w) + b for an operation linear in x and in w, with x, w and b independent (Eq. 1).

        E = op(E[x], E[w]) + E[b],    Var = op(Var[x], E[w]²) + op(E[x²], Var[w]) + Var[b]

    This takes three linear operations; two if the input or the weight is deterministic. If both are, it takes
    one and the result is a plain tensor.

    >>> x = Gaussian(torch.tensor([[1.0, 2.0]]), torch.tensor([[0.1, 0.1]]))
    >>> w = Gaussian(torch.tensor([[1.0, -1.0]]), torch.tensor([[0.5, 0.5]]))
    >>> affine(nn.functional.linear, x, w).var   # 0.1 + 0.1 + 0.5 (1.1) + 0.5 (4.1)
    tensor([[2.8000]])
    """
    w = weight if isinstance(weight, Tensor) else weight.mean
    mean = op(mean_of(x), w, None if bias is None else mean_of(bias))
    parts = []
    if isinstance(x, Gaussian):
        parts.append(op(x.var, of_weight(torch.square, w)))
    if isinstance(weight, Gaussian):
        parts.append(op(second_moment_of(x), weight.var))
    if isinstance(weight, FactoredWeight):
        parts.append(op(second_moment_of(x), weight.var.inputs) * weight.var.outputs)
    if isinstance(bias, Gaussian):
        parts.append(per_channel(bias.var, w).expand_as(mean))
    # Autocast computes the products in reduced precision, but tails of a normal need the full one.
    parts = [part.to(w.dtype) for part in parts]
    return Gaussian.of(mean, reduce(accumulated, parts)) if parts else mean


def per_channel(t: Tensor, weight: Tensor) -> Tensor:
    """A tensor with one entry for each output of a layer, reshaped to broadcast over the layer's output."""
    return t.view(-1, *(1,) * (weight.dim() - 2))


def product(a: Activation, b: Activation) -> Activation:
    """Moments of a·b for independent a and b: Var = E[a²] Var[b] + Var[a] E[b]² (Eq. 3).

    >>> a = Gaussian(torch.tensor(2.0), torch.tensor(0.5))
    >>> product(a, a).var                     # two independent copies
    tensor(4.2500)
    """
    mean = mean_of(a) * mean_of(b)
    parts = []
    if isinstance(b, Gaussian):
        parts.append(second_moment_of(a) * b.var)
    if isinstance(a, Gaussian):
        parts.append(a.var * mean_of(b).square())
    return Gaussian.of(mean, sum(parts[1:], parts[0])) if parts else mean


def square(x: Gaussian) -> Gaussian:
    """Moments of x² for normal x: E = m² + v, Var = 2 v² + 4 m² v (Eq. 4).

    This is not `product(x, x)`, which takes its operands as independent.

    >>> square(Gaussian(torch.tensor(2.0), torch.tensor(0.5))).var
    tensor(8.5000)
    """
    return Gaussian.of(x.second_moment, 2 * x.var.square() + 4 * x.mean.square() * x.var)


def average(x: Gaussian, pool: Callable[[Tensor], Tensor], size: Tensor | float) -> Gaussian:
    """Averages over windows of `size` independent entries: Var = average of the variances / size (Eq. 12)."""
    return Gaussian.of(pool(x.mean), pool(x.var) / size)


def mask(x: Activation, keep: float, fill: float = 0.0) -> Gaussian:
    """Moments of z·x + (1-z)·fill with z ~ Bernoulli(keep) independent of x: unscaled dropout (Eq. 14)."""
    m = mean_of(x)
    spread = keep * (1 - keep) * (m - fill).square()
    var = keep * x.var + spread if isinstance(x, Gaussian) else spread
    return Gaussian.of(keep * m + (1 - keep) * fill, var)

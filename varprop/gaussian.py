"""A random activation with independent normal entries, represented by its mean and its variance."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


@dataclass(frozen=True, eq=False)
class Gaussian:
    """Independent normal entries with the given mean and variance.

    >>> x = Gaussian(torch.tensor([1.0, 2.0]), torch.tensor([0.25, 1.0]))
    >>> x.std
    tensor([0.5000, 1.0000])
    >>> (2 * x + x).var          # a sum takes its operands as independent
    tensor([1.2500, 5.0000])
    """

    mean: Tensor
    var: Tensor

    def __post_init__(self) -> None:
        for name, value in (("mean", self.mean), ("var", self.var)):
            if not isinstance(value, Tensor):
                raise TypeError(f"Gaussian: {name} must be a torch.Tensor, got {type(value).__name__}.")
        if self.mean.shape != self.var.shape:
            raise ValueError(
                f"Gaussian: mean has shape {tuple(self.mean.shape)} and var {tuple(self.var.shape)}; "
                "give one variance for each mean."
            )
        if not torch.compiler.is_compiling() and not bool((self.var >= 0).all()):
            raise ValueError("Gaussian: var has negative or NaN entries; a variance must be zero or more.")

    @classmethod
    def of(cls, mean: Tensor, var: Tensor) -> Gaussian:
        """Build without checking the values, for rules whose variance is non-negative by construction.

        Reading a value stalls an accelerator and is impossible under `vmap`, so every rule of the library
        builds its result here.
        """
        x = object.__new__(cls)
        object.__setattr__(x, "mean", mean)
        object.__setattr__(x, "var", var)
        return x

    @property
    def std(self) -> Tensor:
        return sqrt(self.var)

    @property
    def second_moment(self) -> Tensor:
        return accumulated(self.mean.square(), self.var)

    @property
    def shape(self) -> torch.Size:
        return self.mean.shape

    def map(self, move: Callable[[Tensor], Tensor]) -> Gaussian:
        """Apply an operation that only moves entries (reshape, index, zero-pad) to mean and variance."""
        return Gaussian.of(move(self.mean), move(self.var))

    def detach(self) -> Gaussian:
        return self.map(Tensor.detach)

    def sample(self, shape: tuple[int, ...] = (), generator: torch.Generator | None = None) -> Tensor:
        """`shape` independent samples by reparametrisation: gradients reach mean and variance."""
        noise = torch.randn(
            (*shape, *self.shape), generator=generator, dtype=self.mean.dtype, device=self.mean.device
        )
        return self.mean + self.std * noise

    def plus(self, other: Gaussian | Tensor | float) -> Gaussian:
        """The sum with a constant or with an independent variable.

        The same as `+`, which `torch.compile` cannot trace when the left operand is a tensor.
        """
        if isinstance(other, Gaussian):
            return Gaussian.of(self.mean + other.mean, self.var + other.var)
        mean = self.mean + other
        return Gaussian.of(mean, self.var.expand_as(mean))

    def times(self, scale: Tensor | float) -> Gaussian:
        """The product with a constant.

        The same as `*`, which `torch.compile` cannot trace when the left operand is a tensor.
        """
        return Gaussian.of(self.mean * scale, self.var * scale**2)

    __add__ = __radd__ = plus
    __mul__ = __rmul__ = times


Activation: TypeAlias = Tensor | Gaussian


def as_gaussian(x: Activation) -> Gaussian:
    """The activation itself or, if it is deterministic, a Gaussian with variance zero."""
    return x if isinstance(x, Gaussian) else Gaussian.of(x, torch.zeros_like(x))


def mean_of(x: Activation) -> Tensor:
    return x.mean if isinstance(x, Gaussian) else x


def second_moment_of(x: Activation) -> Tensor:
    return x.second_moment if isinstance(x, Gaussian) else x.square()


def move(op: Callable[[Tensor], Tensor], x: Activation) -> Activation:
    """Apply an operation that only moves entries to a random or deterministic activation."""
    return x.map(op) if isinstance(x, Gaussian) else op(x)


def accumulated(total: Tensor, t: Tensor) -> Tensor:
    """total + t, in the memory of `total` where that is possible; `total` must be of no further use.

    New memory takes longer than the sum, because the system hands it out page by page.
    """
    if torch.compiler.is_compiling() or torch._C._functorch.maybe_current_level() is not None:
        return total + t
    return total.add_(t)


def sqrt(var: Tensor) -> Tensor:
    """Square root whose gradient at zero is zero instead of infinite."""
    positive = var > 0
    return torch.where(positive, torch.where(positive, var, 1.0).sqrt(), 0.0)


pytree.register_pytree_node(
    Gaussian,
    lambda x: ([x.mean, x.var], None),
    lambda leaves, _: Gaussian.of(*leaves),
    flatten_with_keys_fn=lambda x: (
        [(pytree.GetAttrKey("mean"), x.mean), (pytree.GetAttrKey("var"), x.var)],
        None,
    ),
    serialized_type_name="varprop.Gaussian",
)

"""A method: a table that says, for each type of layer, how an activation passes through it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from ..gaussian import Activation, Gaussian
from ..posterior import posteriors

Rule = Callable[..., Any]


class NoRuleError(TypeError):
    """A method met a module that its table has no rule for."""


@dataclass(frozen=True, eq=False)
class Method:
    """A table {layer type: rule}; a rule takes (method, module, x) and returns the output.

    >>> class Double(nn.Module):
    ...     def forward(self, x): return 2 * x
    >>> method = vp.VBP | {Double: lambda method, module, x: x * 2.0}
    >>> method(nn.Sequential(Double(), nn.ReLU()), vp.Gaussian(torch.ones(1), torch.ones(1))).var
    tensor([4.])
    """

    name: str
    rules: Mapping[type[nn.Module], Rule]
    slope: float | None = None
    """Sharpness of the gates of a method that has them (infinite for the step); None without gates."""
    samples: bool = False
    """Whether a pass draws a sample: predictions then are averages over passes."""

    def __call__(self, module: nn.Module, *x: Any, **options: Any) -> Any:
        return self.rule(module)(self, module, *x, **options)

    def __or__(self, rules: Mapping[type[nn.Module], Rule]) -> Method:
        return replace(self, rules={**self.rules, **rules})

    def rule(self, module: nn.Module) -> Rule:
        """The rule of the module's type or, where it inherits `forward` unchanged, of a base class."""
        kind: Any = type(module)
        for base in kind.__mro__:
            if base in self.rules and (base is nn.Module or base.forward is kind.forward):
                return self.rules[base]
        raise NoRuleError(
            f"{self.name} has no rule for {kind.__module__}.{kind.__name__}; add one with "
            f"`method | {{{kind.__name__}: rule}}`, where rule(method, module, x) returns the output as a Tensor or a Gaussian."
        )


def sequential(method: Method, module: nn.Sequential | nn.ModuleList, x: Activation) -> Activation:
    for child in module:
        x = method(child, x)
    return x


def activation(moments: Callable[..., Gaussian], method: Method, module: nn.Module, x: Activation) -> Activation:
    """A rule from `moments(module, x)`; a certain input needs only the module itself."""
    return moments(module, x) if isinstance(x, Gaussian) else module(x)


def as_it_is(method: Method, module: nn.Module, *x: Any, **options: Any) -> Tensor:
    """Run a module without random weights on a certain input."""
    if any(isinstance(a, Gaussian) for a in x):
        raise NoRuleError(f"{method.name} carries no variance: give {type(module).__name__} a Tensor, or draw one with x.sample().")
    if method.samples and next(posteriors(module), None) is not None:
        kind = type(module).__name__
        raise NoRuleError(
            f"{method.name} has no rule for {kind}, which has random weights inside; add one with `method | {{{kind}: rule}}`."
        )
    return module(*x, **options)

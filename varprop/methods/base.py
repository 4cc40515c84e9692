"""A method: a table that says, for each type of layer and for functions, how an activation passes through it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..gaussian import Activation, Gaussian
from ..posterior import posteriors

Rule = Callable[..., Any]
Key = type[nn.Module] | Callable[..., Any] | str
"""What a rule is for: a type of layer, a torch function, or the name of a method of tensors."""


class NoRuleError(TypeError):
    """A method met an operation that its table has no rule for."""


@dataclass(frozen=True, eq=False)
class Method:
    """A table {layer type or function: rule}; a rule takes (method, module, x) or (method, function, *arguments) and returns the output.

    >>> method = vp.VBP | {torch.cumsum: lambda method, cumsum, x, dim: x.map(lambda t: cumsum(t, dim))}
    >>> class Sums(nn.Module):
    ...     def forward(self, x): return torch.relu(x).cumsum(-1)
    >>> method(Sums(), vp.Gaussian(torch.ones(3), torch.ones(3))).var
    tensor([1., 2., 3.])
    """

    name: str
    rules: Mapping[Any, Rule]
    slope: float | None = None
    """Sharpness of the gates of a method that has them (infinite for the step); None without gates."""
    samples: bool = False
    """Whether a pass draws a sample: predictions then are averages over passes."""
    deterministic: bool = False
    """Whether every weight stands at its mean."""
    key: str | None = None
    """Name in `vp.METHODS` of an unchanged library method (`slope` says the rest); None for any other."""

    def __call__(self, module: nn.Module, *x: Any, **options: Any) -> Any:
        return self.rule(module)(self, module, *x, **options)

    def __or__(self, rules: Mapping[Any, Rule]) -> Method:
        return replace(self, rules={**self.rules, **rules}, key=None if rules else self.key)

    def rule(self, module: nn.Module) -> Rule:
        """The rule of the module's type or, where it inherits `forward` unchanged, of a base class."""
        key = row(self.rules, module)
        if key is None:
            raise missing(self, module)
        return self.rules[key]

    def function_rule(self, function: Callable[..., Any] | str) -> Rule | None:
        """The rule of a function or of a tensor's method by its name, or else that of the function of this name in torch."""
        return self.rules.get(function, self.rules.get(in_torch(function)))


def in_torch(function: Callable[..., Any] | str) -> Any:
    """The function of torch that a tensor's method, or a function of a part of torch such as F.max_pool2d, goes by."""
    if isinstance(function, str):
        return getattr(torch, function, None)
    return (
        getattr(torch, function.__name__, None)
        if str(getattr(function, "__module__", None)).startswith("torch.")
        else None
    )


def row(keys: Any, module: nn.Module) -> type[nn.Module] | None:
    """The type among `keys` that speaks for a module: its own or, where it inherits `forward` unchanged, that of a base class."""
    kind: Any = type(module)
    for base in kind.__mro__:
        if base in keys and (base is nn.Module or base.forward is kind.forward):
            return base
    return None


class Watching(partial[Any]):
    """A rule around another, its last argument, that computes what the other does and looks on."""


def watched(rule: Rule) -> Rule:
    """The rule that computes, without those that look on."""
    while isinstance(rule, Watching):
        rule = rule.args[-1]
    return rule


def missing(method: Method, operation: Any, detail: str = "") -> NoRuleError:
    """The error for an operation without a rule: it names the operation and the line that would add one."""
    if isinstance(operation, nn.Module):
        kind = type(operation)
        name, key, arguments = f"{kind.__module__}.{kind.__name__}", kind.__name__, "module, x"
    elif isinstance(operation, str):
        name, key, arguments = f"Tensor.{operation}", f'"{operation}"', "function, x, ..."
    else:
        name = ".".join(
            filter(
                None, (getattr(operation, "__module__", None), getattr(operation, "__name__", str(operation)))
            )
        )
        key, arguments = name.removeprefix("_"), "function, x, ..."
    return NoRuleError(
        f"{method.name} has no rule for {name}{detail}; add one with "
        f"`method | {{{key}: rule}}`, where rule(method, {arguments}) returns the output as a Tensor or a Gaussian."
    )


def sequential(method: Method, module: nn.Sequential | nn.ModuleList, x: Activation) -> Activation:
    for child in module:
        x = method(child, x)
    return x


def activation(
    moments: Callable[..., Gaussian], method: Method, module: nn.Module, x: Activation
) -> Activation:
    """A rule from `moments(module, x)`; a certain input needs only the module itself."""
    return moments(module, x) if isinstance(x, Gaussian) else module(x)


def as_it_is(method: Method, module: nn.Module, *x: Any, **options: Any) -> Tensor:
    """Run a module without random weights on a certain input."""
    if any(isinstance(a, Gaussian) for a in x):
        raise NoRuleError(
            f"{method.name} carries no variance: give {type(module).__name__} a Tensor, or draw one with x.sample()."
        )
    if method.samples and next(posteriors(module), None) is not None:
        kind = type(module).__name__
        raise NoRuleError(
            f"{method.name} has no rule for {kind}, which has random weights inside; add one with `method | {{{kind}: rule}}`."
        )
    return module(*x, **options)

"""A method is a table of rules: how an activation passes through each type of layer and each torch function."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from ..gaussian import Activation, Gaussian

if TYPE_CHECKING:
    from ..graph.steps import Place
    from .noise import Noise

Value: TypeAlias = Any
"""What a rule takes and returns: a Tensor, a Gaussian, a tuple of them, or whatever else a `forward` computes with."""
Function: TypeAlias = Callable[..., Value]
Operation: TypeAlias = nn.Module | Function | str
"""What a rule is applied to: a layer, a torch function, or a tensor method by its name."""
Key: TypeAlias = type[nn.Module] | Function | str
Gain: TypeAlias = Tensor | float
Watch: TypeAlias = Callable[["Call"], Value]
"""Called after each rule with the call; what it returns takes the place of the output."""


class NoRuleError(TypeError):
    """A method met an operation that its table has no rule for."""


class Kind(NamedTuple):
    """How good a rule is, in a word, and its equation in docs/maths.md where it has one."""

    word: str
    equation: int | None = None

    def __str__(self) -> str:
        return self.word if self.equation is None else f"{self.word} (Eq. {self.equation})"


@dataclass(frozen=True, eq=False)
class Rule:
    """How an activation passes through an operation, and everything the library has to know about it.

    A plain function in a table counts as `Rule(function)`: it computes moments and says nothing about itself.

    >>> def double(method, module, x): return x * 2.0
    >>> rule = vp.Rule(double, kind="exact", gain=lambda call: 2.0)
    """

    apply: Function
    """apply(method, operation, *inputs, **options) -> output. The operation is the layer or the torch function."""
    kind: str = "your own"
    """"exact", "approximate", "sampled", ...: said of the operation alone, with independent inputs."""
    equation: int | None = None
    gain: Callable[[Call], Gain | nn.Module | tuple[Gain, Gain] | None] | None = None
    """E[∂y/∂x] of each entry, so that Cov(y, x) = gain · Var[x] (Eq. 42): an elementwise gain, a layer whose mean matrix it
    is, a pair for the two terms of a sum, or None where it is not known. Residual sums and `vp.correlated` use it."""
    noise: Callable[[Noise, Call], Gaussian] | None = None
    """What the operation adds to the first-order variance of `vp.correlated` (Eq. 50): the output with this noise."""
    knots: Callable[[nn.Module], Sequence[float]] | None = None
    """Where a piecewise-linear unit switches: each knot is a gate of VBP."""
    layer: Callable[..., nn.Module] | None = None
    """For a function, layer(x, *args, **options) is the layer that computes the same; its rule then speaks for this one."""
    takes_independent: bool = False
    """Whether two random operands are taken as independent, so that correlated ones make the rule approximate."""
    container: bool = False
    """Whether a graph shows the module's parts one by one instead of the module."""

    def __reduce__(self) -> Any:
        """By name for a rule made with a decorator, as functions are pickled; else by its fields."""
        home = getattr(self.apply, "rule_of", None)
        if home is not None and getattr(sys.modules[home[0]], home[1], None) is self:
            return _by_name, home
        return Rule, tuple(getattr(self, name) for name in self.__dataclass_fields__)


Table: TypeAlias = dict[Key, Rule]


def _by_name(module: str, name: str) -> Rule:
    __import__(module)
    found: Rule = getattr(sys.modules[module], name)
    return found


def rule(kind: str, equation: int | None = None, **facts: Any) -> Callable[[Function], Rule]:
    """Decorator: the function becomes a Rule with these facts.

    >>> @rule("exact", equation=1)
    ... def passed(method, module, x):
    ...     return x
    >>> passed.kind
    'exact'
    """

    def decorated(apply: Function) -> Rule:
        apply.__dict__["rule_of"] = apply.__module__, apply.__qualname__
        return Rule(apply, kind, equation, **facts)

    return decorated


def on_random(kind: str, equation: int | None = None, **facts: Any) -> Callable[[Function], Rule]:
    """Decorator like `rule`, for a layer without weights: on a deterministic input the layer itself runs."""

    def decorated(apply: Function) -> Rule:
        @wraps(apply)
        def guarded(method: Method, module: nn.Module, x: Activation) -> Activation:
            return apply(method, module, x) if isinstance(x, Gaussian) else module(x)

        return rule(kind, equation, **facts)(guarded)

    return decorated


def as_rule(entry: Rule | Function) -> Rule:
    return entry if isinstance(entry, Rule) else Rule(entry)


@dataclass(frozen=True)
class Call:
    """A rule that was applied: to what, and with which result."""

    method: Method
    rule: Rule
    operation: Operation
    args: tuple[Value, ...]
    options: Mapping[str, Value]
    output: Value
    place: Place | None = None
    """Where in a network's graph; None for a call outside of one."""

    @property
    def x(self) -> Value:
        """The first input."""
        return self.args[0]

    @property
    def module(self) -> nn.Module:
        """The operation, for a rule of layers."""
        assert isinstance(self.operation, nn.Module)
        return self.operation

    def again(self, *args: Value, **options: Value) -> Value:
        """The same rule on other inputs, unwatched."""
        return self.rule.apply(self.method.watching(None), self.operation, *args, **options)


@dataclass(frozen=True, eq=False)
class Method:
    """A table {layer type, torch function or name of a tensor method: rule}.

    A rule takes (method, module, x) or (method, function, *arguments) and returns the output. `|` adds or replaces rules.

    >>> method = vp.VBP | {torch.cumsum: lambda method, cumsum, x, dim: x.map(lambda t: cumsum(t, dim))}
    >>> class Sums(nn.Module):
    ...     def forward(self, x): return torch.relu(x).cumsum(-1)
    >>> method(Sums(), vp.Gaussian(torch.ones(3), torch.ones(3))).var
    tensor([1., 2., 3.])
    """

    name: str
    rules: Mapping[Any, Rule | Function]
    slope: float | None = None
    """Sharpness of the gates of a method that has them (infinite for the step); None without gates."""
    samples: bool = False
    """Whether a pass draws a Monte Carlo sample: predictions then are averages over passes."""
    deterministic: bool = False
    """Whether every weight stays at its mean."""
    scaled: bool = False
    """Whether layers divide their sums by √n, so that the plain network with the same weights computes something else."""
    key: str | None = None
    """The name in `METHODS` of a method as the library has it; None once a rule was added or replaced."""
    watch: Watch | None = field(default=None, repr=False)

    def __call__(self, module: nn.Module, *x: Value, **options: Value) -> Value:
        return self.run(self.rule(module), module, x, options)

    def __or__(self, rules: Mapping[Any, Rule | Function]) -> Method:
        return replace(self, rules={**self.rules, **rules}, key=None if rules else self.key)

    def __deepcopy__(self, memo: object) -> Method:
        return self  # a value

    def watching(self, watch: Watch | None) -> Method:
        """The same method; `watch` sees every rule that it applies."""
        return replace(self, watch=watch)

    def run(
        self,
        rule: Rule,
        operation: Operation,
        args: tuple[Value, ...],
        options: Mapping[str, Value],
        place: Place | None = None,
    ) -> Value:
        """Apply a rule, and show the call to whoever watches."""
        function: Value = operation
        if isinstance(operation, str):
            function = getattr(Tensor if is_random_value(args) else type(args[0]), operation)
        output = rule.apply(self, function, *args, **options)
        if self.watch is None:
            return output
        return self.watch(Call(self, rule, operation, args, options, output, place))

    def rule(self, module: nn.Module) -> Rule:
        """The rule of the module's type or, where it inherits `forward` unchanged, of a base class."""
        key = row(self.rules, module)
        if key is None:
            raise missing(self, module)
        return as_rule(self.rules[key])

    def function_rule(self, function: Function | str) -> Rule | None:
        """The rule of a function, or of a tensor method by its name; else that of the torch function of this name."""
        entry = self.rules.get(function, self.rules.get(in_torch(function)))
        return None if entry is None else as_rule(entry)


def in_torch(function: Function | str) -> Function | None:
    """The function of `torch` that has the name of a tensor method, or of a function such as F.max_pool2d."""
    if isinstance(function, str):
        return getattr(torch, function, None)
    inside = str(getattr(function, "__module__", None)).startswith("torch.")
    return getattr(torch, function.__name__, None) if inside else None


def row(keys: Mapping[Any, object] | frozenset[type], module: nn.Module) -> type[nn.Module] | None:
    """The type among `keys` that speaks for a module: its own, or a base class whose `forward` it inherits."""
    kind: Any = type(module)
    for base in kind.__mro__:
        if base in keys and (base is nn.Module or base.forward is kind.forward):
            return base
    return None


def missing(method: Method, operation: Operation, detail: str = "") -> NoRuleError:
    """The error for an operation without a rule: it names the operation and the line that would add one."""
    if isinstance(operation, nn.Module):
        kind = type(operation)
        name, key, arguments = f"{kind.__module__}.{kind.__name__}", kind.__name__, "module, x"
    elif isinstance(operation, str):
        name, key, arguments = f"Tensor.{operation}", f'"{operation}"', "function, x, ..."
    else:
        parts = getattr(operation, "__module__", None), getattr(operation, "__name__", str(operation))
        name = ".".join(filter(None, parts))
        key, arguments = name.removeprefix("_"), "function, x, ..."
    return NoRuleError(
        f"{method.name} has no rule for {name}{detail}; add one with `method | {{{key}: rule}}`, "
        f"where rule(method, {arguments}) returns the output as a Tensor or a Gaussian."
    )


@rule("one by one", container=True)
def sequential(method: Method, module: nn.Sequential | nn.ModuleList, x: Activation) -> Activation:
    for child in module:
        x = method(child, x)
    return x


def is_random_value(value: Value) -> bool:
    """Whether a value, or anything in a list, tuple or dictionary of values, is a Gaussian."""
    if isinstance(value, dict):
        return is_random_value(tuple(value.values()))
    if isinstance(value, tuple | list):
        return any(is_random_value(item) for item in value)
    return isinstance(value, Gaussian)

"""A method is a table of rules: how activations pass through each type of layer and each torch function."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import Tensor, nn

from ..gaussian import Gaussian
from ..posterior import posteriors
from .facts import Rule, Rules, as_rule
from .keys import in_torch, row
from .misfits import misfit
from .precision import in_single, needs_single

if TYPE_CHECKING:
    from ..graph.steps import Place

Value: TypeAlias = Any
"""What a rule takes and returns: a Tensor, a Gaussian, a tuple of them, or any other value in a `forward`."""
Function: TypeAlias = Callable[..., Value]
Operation: TypeAlias = nn.Module | Function | str
"""What a rule is applied to: a layer, a torch function, or a tensor method by its name."""
Key: TypeAlias = type[nn.Module] | Function | str
Which: TypeAlias = str | int | Function | None
"""Which value of a network's output is meant; None for the output itself."""
Gain: TypeAlias = Tensor | float
Watch: TypeAlias = Callable[["Call"], Value]
"""Called after each rule with the call; its return value replaces the output."""


class NoRuleError(TypeError):
    """The method's table has no rule for an operation of the network."""


@dataclass(frozen=True)
class Call:
    """One application of a rule: to which operation and inputs, and with which output."""

    method: Method
    rule: Rule
    operation: Operation
    args: tuple[Value, ...]
    options: Mapping[str, Value]
    output: Value
    place: Place | None = None
    """The position in a network's graph; None for a call outside a graph."""

    @property
    def x(self) -> Value:
        """The first input."""
        return self.args[0]

    @property
    def module(self) -> nn.Module:
        """The operation of a layer rule."""
        assert isinstance(self.operation, nn.Module)
        return self.operation

    @property
    def function(self) -> Function:
        """The operation as something to call; a tensor method is looked up by its name."""
        return callable_of(self.operation, self.args)

    @property
    def gain(self) -> Gain | nn.Module | tuple[Gain, Gain] | None:
        """The gain that the rule states, or else the rule of the layer that the function is equivalent to."""
        call = self if self.rule.gain is not None else self.as_layer
        if call.rule.gain is None or not is_random_value((call.args, call.output)):
            return None
        gain = call.rule.gain(call)
        return float(gain) if isinstance(gain, int) else gain

    @property
    def as_layer(self) -> Call:
        """The call of the layer that a function is equivalent to, or else the call itself."""
        if self.rule.layer is None:
            return self
        module = self.rule.layer(*self.args, **self.options)
        return replace(self, rule=self.method.rule(module), operation=module, args=self.args[:1], options={})

    def again(self, *args: Value, **options: Value) -> Value:
        """The same rule applied to other inputs, without a watch function."""
        return self.rule.apply(self.method.watching(None), self.function, *args, **options)


@dataclass(frozen=True, eq=False)
class Method:
    """A table {layer type, torch function or name of a tensor method: rule}.

    A rule takes (method, module, x) or (method, function, *arguments) and returns the output.
    `|` adds or replaces rules.

    >>> method = vp.VBP | {torch.cumsum: lambda method, cumsum, x, dim: x.map(lambda t: cumsum(t, dim))}
    >>> class Sums(nn.Module):
    ...     def forward(self, x): return torch.relu(x).cumsum(-1)
    >>> method(Sums(), vp.Gaussian(torch.ones(3), torch.ones(3))).var
    tensor([1., 2., 3.])
    """

    name: str
    rules: Rules
    slope: float | None = None
    """Slope of the gates (infinite for the step function); None for a method without gates."""
    samples: bool = False
    """Whether a pass draws a Monte Carlo sample; predictions are then averages over passes."""
    deterministic: bool = False
    """Whether every weight is fixed at its mean."""
    scaled: bool = False
    """Whether layers divide their sums by √n, so that the plain network with the same weights computes a
    different function."""
    key: str | None = None
    """The name in `METHODS` of an unchanged library method; None once a rule is added or replaced."""
    watch: Watch | None = field(default=None, repr=False)

    def __call__(self, module: nn.Module, *x: Value, **options: Value) -> Value:
        if not self.deterministic and needs_single(module, x):
            return in_single(self, module, *x, **options)
        return self.run(self.rule(module), module, x, options)

    def at(self, module: nn.Module, x: Value) -> Value:
        """The output at x: one input, a tuple of several, or a dictionary of keyword inputs."""
        args, options = arguments(x)
        return self(module, *args, **options)

    def __or__(self, rules: Rules) -> Method:
        if not (
            isinstance(rules, Mapping) and all(isinstance(r, Rule) or callable(r) for r in rules.values())
        ):
            raise TypeError(
                f"{self.name} | rules: give a table {{layer type: rule}} of functions "
                f"rule(method, module, x), got {rules!r}."
            )
        return replace(self, rules={**self.rules, **rules}, key=None if rules else self.key)

    def __deepcopy__(self, memo: object) -> Method:
        return self  # immutable

    def watching(self, watch: Watch | None) -> Method:
        """The same method, calling `watch` after every rule that it applies."""
        return replace(self, watch=watch)

    def run(
        self,
        rule: Rule,
        operation: Operation,
        args: tuple[Value, ...],
        options: Mapping[str, Value],
        place: Place | None = None,
    ) -> Value:
        """Apply a rule, then call the watch function if there is one."""
        try:
            output = rule.apply(self, callable_of(operation, args), *args, **options)
        except NoRuleError:
            raise
        except (RuntimeError, TypeError, AttributeError) as error:
            if isinstance(operation, nn.Module):
                check_network(self.name, operation)
            if reason := misfit(operation, (*args, *options.values()), error):
                raise ValueError(f"{self.name}: {reason}") from error
            raise
        return self.watched(rule, operation, args, options, output, place)

    def watched(
        self,
        rule: Rule,
        operation: Operation,
        args: tuple[Value, ...],
        options: Mapping[str, Value],
        output: Value,
        place: Place | None = None,
    ) -> Value:
        """The output of a rule, or what the watch function makes of it."""
        if self.watch is None:
            return output
        return self.watch(Call(self, rule, operation, args, options, output, place))

    def rule(self, module: nn.Module) -> Rule:
        """The rule for the module's type or, if `forward` is inherited unchanged, for a base class."""
        key = row(self.rules, module)
        if key is None:
            check_network(self.name, module)
            raise missing(self, module)
        return as_rule(self.rules[key])

    def function_rule(self, function: Function | str) -> Rule | None:
        """The rule for a function or tensor method, else for the torch function of the same name."""
        entry = self.rules.get(function, self.rules.get(in_torch(function)))
        return None if entry is None else as_rule(entry)


def callable_of(operation: Operation, args: tuple[Value, ...]) -> Function:
    """A layer or a function as it is; a tensor method by its name."""
    if not isinstance(operation, str):
        return operation
    is_tensor = is_random_value(args) or isinstance(args[0], Tensor)  # the compiler does not know Parameter's
    method: Function = getattr(Tensor if is_tensor else type(args[0]), operation)
    return method


def missing(method: Method, operation: Operation, detail: str = "") -> NoRuleError:
    """The error for an operation without a rule: it names the operation and shows how to add a rule."""
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


def check_network(caller: str, net: object) -> None:
    """Refuse an objective in the place of its network, and arguments in another order."""
    if not isinstance(net, nn.Module):
        raise TypeError(
            f"{caller}: the network comes first, got a {type(net).__name__}; give a torch module."
        )
    if isinstance(getattr(net, "method", None), Method):
        raise TypeError(f"{caller}: a network is needed, got an {type(net).__name__}; give its `net`.")


def check_method(caller: str, method: object) -> None:
    if not isinstance(method, Method):
        raise TypeError(f"{caller}: method must be a Method such as vp.DVI, got a {type(method).__name__}.")


def arguments(x: Value) -> tuple[tuple[Value, ...], dict[str, Value]]:
    """An input as a network takes it: one value, a tuple of several, or a dictionary of keyword inputs."""
    if isinstance(x, dict):
        return (), x
    return (x if isinstance(x, tuple) else (x,)), {}


def chosen(output: Value, which: Which) -> Value:
    """One value of what a network returns: all of it, an item, an attribute, or what a function picks.

    >>> chosen({"logits": 1, "hidden": 2}, "logits"), chosen((1, 2), 1), chosen((1, 2), sum)
    (1, 2, 3)
    """
    if which is None:
        return output
    if callable(which):
        return which(output)
    return getattr(output, which) if isinstance(which, str) and hasattr(output, which) else output[which]


def is_plain(module: nn.Module, *x: Value) -> bool:
    """Whether neither the module nor its input is random."""
    return not is_random_value(x) and next(posteriors(module), None) is None


def is_random_value(value: Value) -> bool:
    """Whether a value, or any item of a list, tuple or dictionary, is a Gaussian."""
    if isinstance(value, dict):
        return is_random_value(tuple(value.values()))
    if isinstance(value, tuple | list):
        return any(is_random_value(item) for item in value)
    return isinstance(value, Gaussian)

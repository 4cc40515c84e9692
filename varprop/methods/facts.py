"""A rule, with the facts that it states about itself."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from torch import nn

from ..gaussian import Activation, Gaussian

if TYPE_CHECKING:
    from .base import Call, Function, Gain, Key, Method, Value
    from .noise import Noise


class Kind(NamedTuple):
    """How accurate a rule is, in a word, and its equation in docs/maths.md if it has one."""

    word: str
    equation: int | None = None

    def __str__(self) -> str:
        return self.word if self.equation is None else f"{self.word} (Eq. {self.equation})"


@dataclass(frozen=True, eq=False)
class Rule:
    """How an activation passes through an operation, with everything the library needs to know about it.

    A plain function in a table is treated as `Rule(function)`: it computes moments and states nothing else.

    >>> def double(method, module, x): return x * 2.0
    >>> rule = vp.Rule(double, kind="exact", gain=lambda call: 2.0)
    """

    apply: Function
    """apply(method, operation, *inputs, **options) -> output, for a layer or a torch function."""
    kind: str = "your own"
    """"exact", "approximate", "sampled", ...: about this operation alone, given independent inputs."""
    equation: int | None = None
    gain: Callable[[Call], Gain | nn.Module | tuple[Gain, Gain] | None] | None = None
    """E[∂y/∂x] of each entry, so that Cov(y, x) = gain · Var[x] (Eq. 25).

    It is an elementwise gain, a layer whose mean matrix is the gain, a pair for the two terms of a sum, or
    None if it is unknown. Residual sums and `vp.correlated` use it."""
    noise: Callable[[Noise, Call], Gaussian] | None = None
    """Returns the output with the noise that the operation adds to the first-order variance of
    `vp.correlated` (Eq. 30)."""
    knots: Callable[[nn.Module], Sequence[float]] | None = None
    """Where a piecewise-linear activation changes slope: each knot is a gate of VBP."""
    layer: Callable[..., nn.Module] | None = None
    """For a function: layer(x, *args, **options) builds the equivalent layer, whose rule then applies."""
    takes_independent: bool = False
    """Whether two random operands are assumed independent; the rule is approximate where they are not."""
    container: bool = False
    """Whether a graph shows the parts of the module instead of the module itself."""

    def __reduce__(self) -> tuple[Callable[..., Rule], tuple[Value, ...]]:
        """Pickle a decorated rule by its name, as functions are pickled, and any other rule by its fields.

        The name of a decorated function is that of its rule, so a changed copy refers to the original.
        """
        facts = {name: getattr(self, name) for name in self.__dataclass_fields__}
        home = getattr(self.apply, "rule_of", None)
        original = None if home is None else getattr(sys.modules[home[0]], home[1], None)
        if home is not None and original is self:
            return _by_name, home
        if isinstance(original, Rule) and original.apply is facts.pop("apply"):
            return _changed, (original, facts)
        return Rule, tuple(getattr(self, name) for name in self.__dataclass_fields__)


Table: TypeAlias = "dict[Key, Rule]"
Rules: TypeAlias = "Mapping[Any, Rule | Function]"
"""A table as users write it: any subset of the keys, and plain functions as rules."""


def _by_name(module: str, name: str) -> Rule:
    __import__(module)
    found: Rule = getattr(sys.modules[module], name)
    return found


def _changed(original: Rule, facts: Mapping[str, Value]) -> Rule:
    return replace(original, **facts)


def rule(kind: str, equation: int | None = None, **facts: Value) -> Callable[[Function], Rule]:
    """Decorator that turns a function into a Rule with these facts.

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


def on_random(kind: str, equation: int | None = None, **facts: Value) -> Callable[[Function], Rule]:
    """Decorator like `rule` for a layer without weights: on a deterministic input the layer itself runs."""

    def decorated(apply: Function) -> Rule:
        @wraps(apply)
        def guarded(method: Method, module: nn.Module, x: Activation) -> Activation:
            return apply(method, module, x) if isinstance(x, Gaussian) else module(x)

        return rule(kind, equation, **facts)(guarded)

    return decorated


def as_rule(entry: Rule | Function) -> Rule:
    return entry if isinstance(entry, Rule) else Rule(entry)

"""Networks with their own `forward`: their graph is walked, and every step asks the method for its rule."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from ..gaussian import Gaussian
from ..posterior import Layer, Posterior, is_random, posteriors
from . import correlation
from .base import Method, NoRuleError, Rule, missing, sequential
from .functions import FUNCTIONS
from .graph import GRAPHS, graph_name, is_torchs_own
from .steps import Step, Values, filled, layer

Visitor = Callable[[Step, Any, Rule | None, Values], None]
"""Called after each step with the step, its operation, the rule that it took (None: it ran as it is) and all values at hand."""


def network(method: Method, module: nn.Module, *inputs: Any, **options: Any) -> Any:
    """The rule for every module without one of its own: its graph, step by step. Where nothing is random it just runs.

    Only the graph is kept from one pass to the next; parameters are read from the module as it is.
    """
    if not holds_gaussian((inputs, options)) and next(posteriors(module), None) is None:
        return module(*inputs, **options)
    if is_torchs_own(module):
        raise missing(method, module)
    return walk(method, module, inputs, options)


def walk(
    method: Method,
    module: nn.Module,
    inputs: tuple[Any, ...],
    options: Mapping[str, Any],
    visit: Visitor | None = None,
) -> Any:
    """The output of a network by its graph."""
    kept_whole = method.rules.get(nn.Sequential) is not sequential
    given = (
        tuple(_given(value) for value in inputs),
        tuple((name, _given(value)) for name, value in options.items()),
    )
    steps: tuple[Step, ...] = getattr(GRAPHS, graph_name(module, tuple(method.rules), kept_whole, *given))
    values: Values = {f"input_{i}": value for i, value in enumerate(inputs)}
    values.update(options)
    out = None
    for step in steps:
        try:
            out, operation, rule = _run(method, module, step, values)
        except NoRuleError as error:
            raise NoRuleError(f"{error}\nIt stands in {_place(module, step)}.") from None
        values[step.name] = out
        if visit is not None:
            visit(step, operation, rule, values)
        for name in step.frees:
            del values[name]
    return out


def _given(value: Any) -> Any:
    """What a graph has to know of an argument: nothing, or a plain value."""
    return (value,) if value is None or isinstance(value, bool | int | float | str) else True


def _place(module: nn.Module, step: Step) -> str:
    return f"`{step.place}` of {type(module).__name__}" if step.place else type(module).__name__


def _run(method: Method, module: nn.Module, step: Step, values: Values) -> tuple[Any, Any, Rule | None]:
    """A step's value, its operation and the rule that it took."""
    args: Any = filled(step.args, values)
    kwargs: Any = filled(step.kwargs, values)
    if step.op == "placeholder":
        return values[step.target], None, None
    if step.op == "get_attr":
        return _attribute(method, module, step.target), None, None
    if step.op == "output":
        return args[0], None, None
    child = layer(module, step)
    if child is not None:
        if getattr(child, "return_indices", False) and holds_gaussian(args):
            raise missing(method, child, " with return_indices=True")
        rule = method.rule(child)
        return rule(method, child, *args, **kwargs), child, rule
    return _function(method, module, step, values, args, kwargs)


def _function(
    method: Method, module: nn.Module, step: Step, values: Values, args: Any, kwargs: Any
) -> tuple[Any, Any, Rule | None]:
    function = step.target
    if not holds_gaussian((args, kwargs)):
        run = getattr(args[0], function) if isinstance(function, str) else function
        return run(*(args[1:] if isinstance(function, str) else args), **kwargs), function, None
    rule = method.function_rule(function)
    if rule is None:
        raise missing(method, function)
    call = getattr(Tensor, function) if isinstance(function, str) else function
    out = rule(method, call, *args, **kwargs)
    if step.fork is not None:
        out = correlation.corrected(method, module, step, values, out)
    return out, function, rule


def holds_gaussian(value: Any) -> bool:
    """Whether a value, or anything in a list, tuple or dictionary of values, is random."""
    if isinstance(value, dict):
        return holds_gaussian(tuple(value.values()))
    if isinstance(value, tuple | list):
        return any(holds_gaussian(item) for item in value)
    return isinstance(value, Gaussian)


def _attribute(method: Method, module: nn.Module, path: str) -> Any:
    """A parameter, a buffer or another attribute that `forward` uses by itself; a random weight comes with its variance."""
    owner_path, _, name = path.rpartition(".")
    owner: Layer = module.get_submodule(owner_path)
    value = getattr(owner, name)
    if not is_random(owner) or name not in ("weight", "bias") or not isinstance(value, Tensor):
        return value
    q: Posterior | None = dict(posteriors(owner)).get(name)
    if q is None:
        return value
    if q.scales is not None:
        raise missing(method, owner, ", whose forward uses a weight with the scales of a horseshoe")
    weight = Gaussian.of(q.mean, q.var.expand_as(q.mean))
    return weight.sample() if method.samples else weight


NETWORKS: dict[Any, Rule] = {**FUNCTIONS, nn.Module: network}
"""What a method needs for networks with their own `forward`, beside its rules for layers."""

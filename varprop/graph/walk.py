"""Walk the graph of a network, applying the method's rule at every step."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from inspect import signature

from torch import Tensor, nn

from ..gaussian import Gaussian
from ..methods.base import (
    Function,
    Method,
    NoRuleError,
    Operation,
    Value,
    callable_of,
    is_plain,
    is_random_value,
    missing,
)
from ..methods.facts import Rule, Table, as_rule, rule
from ..methods.keys import is_foreign, is_torchs_own
from ..posterior import is_random, posteriors
from . import residual
from .functions import FUNCTIONS
from .steps import Place, value_of
from .store import Graph, graph_of, named, no_graph


@rule("by its graph", container=True)
def network(method: Method, module: nn.Module, *inputs: Value, **options: Value) -> Value:
    """The rule for every module without a more specific one: walk its graph, or just run it if nothing is
    random.

    Only the graph is kept between passes; parameters are read from the module at each pass.
    """
    if is_plain(module, inputs, options):
        return module(*inputs, **options)
    if is_torchs_own(module):
        raise missing(method, module)
    return walk(method, module, inputs, options)


@rule("plain")
def plain(method: Method, function: Function, *args: Value, **options: Value) -> Value:
    """A function of deterministic arguments just runs."""
    return function(*args, **options)


def graph_for(
    method: Method, module: nn.Module, inputs: tuple[Value, ...], options: Mapping[str, Value]
) -> Graph:
    """The graph whose steps are the operations that the method has rules for."""
    whole = tuple(
        key
        for key, entry in method.rules.items()
        if (isinstance(key, type) and not as_rule(entry).container) or is_foreign(key)
    )
    return graph_of(module, whole, (inputs, options))


def walk(method: Method, module: nn.Module, inputs: tuple[Value, ...], options: Mapping[str, Value]) -> Value:
    """The output of a network by its graph."""
    values = named(inputs, options)
    graph, out = graph_for(method, module, inputs, options), None
    for step in graph.steps:
        try:
            out = value_of(Place(module, step, values), partial(_attribute, method), partial(_apply, method))
        except NoRuleError as error:
            if step in graph.checks:
                raise no_graph(module, "it decides by a value that is random") from None
            where = f"`{step.place}` of {type(module).__name__}" if step.place else type(module).__name__
            raise type(error)(f"{error}\nIt stands in {where}.") from None
        values[step.name] = out
        for name in step.frees:
            del values[name]
    return out


def _apply(method: Method, place: Place, operation: Operation, args: Value, options: Value) -> Value:
    if isinstance(operation, nn.Module):
        if getattr(operation, "return_indices", False) and is_random_value(args):
            raise missing(method, operation, " with return_indices=True")
        return method.run(method.rule(operation), operation, args, options, place)
    return _function(method, place, args, options)


def _function(method: Method, place: Place, args: Value, options: Value) -> Value:
    function = place.step.target
    if not is_random_value((args, options)):
        return method.run(plain, function, args, options, place)
    found = method.function_rule(function)
    if found is None:
        raise missing(method, function)
    try:
        out = found.apply(method, callable_of(function, args), *args, **options)
    except TypeError as error:
        if isinstance(error, NoRuleError) or _takes(found, method, function, args, options):
            raise
        raise missing(method, function, f" with these arguments ({error})") from error
    if place.step.fork is not None:
        out = residual.corrected(method, found, place, out)
    return method.watched(found, function, args, options, out, place)


def _takes(rule: Rule, method: Method, function: Function | str, args: Value, options: Value) -> bool:
    """Whether a rule has parameters for the arguments of a call."""
    try:
        signature(rule.apply).bind(method, function, *args, **options)
    except TypeError:
        return False
    return True


def _attribute(method: Method, module: nn.Module, path: str) -> Value:
    """A parameter, buffer or other attribute that `forward` reads; a random weight keeps its variance."""
    owner_path, _, name = path.rpartition(".")
    owner = module.get_submodule(owner_path)
    value = getattr(owner, name)
    q = dict(posteriors(owner)).get(name) if isinstance(value, Tensor) and is_random(owner) else None
    if q is None:
        return value
    if q.scales is not None:
        raise missing(method, owner, ", whose forward uses a weight with the scales of a horseshoe")
    weight = Gaussian.of(q.mean, q.var.expand_as(q.mean))
    return weight.sample() if method.samples else weight


NETWORKS: Table = {**FUNCTIONS, nn.Module: network}
"""What a method needs for networks with their own `forward`, in addition to its rules for layers."""

"""A network as a list of steps: its operations in order, their arguments, and where sums fork."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from ..methods.base import Function, Operation, Value, callable_of

Values: TypeAlias = dict[str, Value]


@dataclass(frozen=True)
class Ref:
    """The value of an earlier step."""

    name: str


@dataclass(frozen=True)
class Fork:
    """Where the two operands of a sum fork: their common source, and the steps from it to each operand."""

    source: str
    left: tuple[Step, ...]
    right: tuple[Step, ...]


@dataclass(frozen=True)
class Step:
    """One operation of a network."""

    name: str
    op: str
    """As in torch.fx: placeholder, get_attr, call_module, call_function, call_method or output."""
    target: Value
    args: tuple[Value, ...]
    kwargs: Mapping[str, Value]
    sources: tuple[str, ...]
    """The steps whose values are its arguments."""
    place: str
    """The path of the module that contains it."""
    fork: Fork | None = None
    frees: tuple[str, ...] = ()
    """Values that no later step needs."""
    expected: Value = None
    """What the step gave in a recording that holds only where it gives the same; None for other steps."""


@dataclass(frozen=True)
class Place:
    """Where in a graph a rule is applied: the network, the step, and the values of earlier steps."""

    net: nn.Module
    step: Step
    values: Values


def refs_in(value: Value) -> Iterator[str]:
    """The names of the steps that arguments refer to."""
    match value:
        case Ref():
            yield value.name
        case dict():
            yield from refs_in(tuple(value.values()))
        case slice():
            yield from refs_in((value.start, value.stop, value.step))
        case list() | tuple():
            for item in value:
                yield from refs_in(item)


def tensors_in(value: Value) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def filled(value: Value, values: Values) -> Value:
    """Arguments with every reference replaced by the value of its step."""
    if isinstance(value, Ref):
        return values[value.name]
    if isinstance(value, dict):
        return {name: filled(item, values) for name, item in value.items()}
    if isinstance(value, slice):
        return slice(filled(value.start, values), filled(value.stop, values), filled(value.step, values))
    if isinstance(value, tuple):
        return tuple([filled(item, values) for item in value])
    if isinstance(value, list):
        return [filled(item, values) for item in value]
    return value


def layer(module: nn.Module, step: Step) -> nn.Module | None:
    """The layer that a step calls; None if it calls a function."""
    if isinstance(step.target, nn.Module):
        return step.target
    return module.get_submodule(step.target) if step.op == "call_module" else None


def value_of(
    place: Place,
    read: Callable[[nn.Module, str], Value],
    apply: Callable[[Place, Operation, Value, Value], Value],
) -> Value:
    """The value of a step, by a way to read an attribute and a way to apply an operation."""
    net, step, values = place.net, place.step, place.values
    args, kwargs = filled((step.args, step.kwargs), values)
    match step.op:
        case "placeholder":
            return values[step.target]
        case "get_attr":
            return read(net, step.target)
        case "output":
            is_structure = isinstance(step.target, pytree.TreeSpec)
            return pytree.tree_unflatten(args[0], step.target) if is_structure else args[0]
    return apply(place, layer(net, step) or step.target, args, kwargs)


def replay(net: nn.Module, steps: Iterable[Step], values: Values) -> Iterator[tuple[Step, Value]]:
    """Run steps as plain torch, and yield each with its value."""
    values = dict(values)
    for step in steps:
        out = value_of(Place(net, step, values), _read, _apply)
        yield step, out
        values[step.name] = out
        for name in step.frees:
            values.pop(name, None)


def _read(net: nn.Module, path: str) -> Value:
    owner, _, name = path.rpartition(".")
    return getattr(net.get_submodule(owner), name)


def _apply(place: Place, operation: Operation, args: Value, kwargs: Value) -> Value:
    return callable_of(operation, args)(*args, **kwargs)


def placed(x: Tensor, index: Value, value: Value) -> Tensor:
    """x with a value written at an index, as a function that leaves x as it was."""
    at = torch.arange(x.numel(), device=x.device).view(x.shape)[index]
    values = torch.as_tensor(value, dtype=x.dtype, device=x.device).expand(at.shape)
    return x.flatten().scatter(0, at.flatten(), values.flatten()).view(x.shape)


# --------------------------------------------------------------------------------------------- nodes to steps

map_arg: Function = fx.node.map_arg
_CONVOLUTIONS = [f"conv{up}{n}d" for up in ("", "_transpose") for n in (1, 2, 3)]
IN_PLACE: set[Operation] = {operator.iadd, operator.isub, operator.imul, operator.itruediv}
SUMS: set[Operation] = {
    operator.add,
    operator.iadd,
    operator.sub,
    operator.isub,
    torch.add,
    torch.sub,
    "add",
    "add_",
    "sub",
    "sub_",
}


def steps_of(module: nn.Module, graph: fx.Graph) -> tuple[Step, ...]:
    """The steps of a graph of torch.fx."""
    renamed: dict[fx.Node, str] = {}
    steps = []
    for node in graph.nodes:
        args, kwargs = map_arg((node.args, node.kwargs), lambda a: Ref(renamed[a]))
        args, kwargs = by_place(node.target, tuple(args), dict(kwargs))
        renamed[node] = node.name
        if _in_place(module, node) and node.args and isinstance(node.args[0], fx.Node):
            # Later steps that use the argument get the value written into it.
            renamed[node.args[0]] = node.name
        sources = tuple(dict.fromkeys(refs_in((args, kwargs))))
        steps.append(Step(node.name, node.op, node.target, args, kwargs, sources, node.meta["place"]))
    return linked(steps)


def linked(steps: Iterable[Step]) -> tuple[Step, ...]:
    """Steps that know where the operands of their sums fork, and which values no later step needs."""
    found: dict[str, Step] = {}
    for step in steps:
        is_sum = step.op != "output" and step.target in SUMS
        found[step.name] = replace(step, fork=_fork(found, step)) if is_sum else step
    return _freeing(list(found.values()))


OPERANDS = {
    **dict.fromkeys(("linear", "embedding", "prelu", *_CONVOLUTIONS), ("input", "weight", "bias")),
    "where": (),
}
"""The names that torch gives to the operands of a function, in order, where they are not input and other."""


def by_place(
    target: Value, args: tuple[Value, ...], kwargs: dict[str, Value]
) -> tuple[tuple[Value, ...], dict[str, Value]]:
    """Arguments with operands that are given by torch's names for them, as in torch.add(input=x, other=y), in
    their places."""
    function = target if isinstance(target, str) else getattr(target, "__name__", "")
    for place, name in enumerate(OPERANDS.get(function, ("input", "other"))):
        if len(args) == place and name in kwargs:
            args = (*args, kwargs.pop(name))
    return args, kwargs


def _in_place(module: nn.Module, node: fx.Node) -> bool:
    if node.op == "call_module":
        return bool(getattr(module.get_submodule(str(node.target)), "inplace", False))
    return node.op != "get_attr" and writes(node.target, node.kwargs)


def writes(target: Value, kwargs: Mapping[str, Value]) -> bool:
    """Whether a function or tensor method writes its result into its first argument."""
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    by_name = name.endswith("_") and not name.endswith("__")
    return target in IN_PLACE or kwargs.get("inplace") is True or by_name


def _fork(steps: Mapping[str, Step], sum_: Step) -> Fork | None:
    operands = [a.name for a in sum_.args if isinstance(a, Ref)]
    if len(operands) != 2:
        return None
    constant = _constant(steps)
    left, right = (list(_chain(steps, constant, name)) for name in operands)
    source = next((name for name in left if name in right), None)
    if source is None:
        return None
    return Fork(
        source,
        *(tuple(steps[name] for name in reversed(chain[: chain.index(source)])) for chain in (left, right)),
    )


def _chain(steps: Mapping[str, Step], constant: set[str], name: str) -> Iterator[str]:
    """A step, the step that its value comes from, and so on, as long as there is only one."""
    while True:
        yield name
        sources = [source for source in steps[name].sources if source not in constant]
        if len(sources) != 1:
            return
        name = sources[0]


def _constant(steps: Mapping[str, Step]) -> set[str]:
    """Steps that do not depend on any input of the network."""
    constant: set[str] = set()
    for step in steps.values():
        if step.op != "placeholder" and constant.issuperset(step.sources):
            constant.add(step.name)
    return constant


def _freeing(steps: list[Step]) -> tuple[Step, ...]:
    last: dict[str, int] = {}
    for i, step in enumerate(steps):
        chains = (*step.fork.left, *step.fork.right) if step.fork else ()
        for name in (
            step.name,
            *step.sources,
            *(name for link in chains for name in (link.name, *link.sources)),
        ):
            last[name] = i
    kept = len(steps) - 1
    return tuple(
        replace(step, frees=tuple(name for name, j in last.items() if j == i != kept))
        for i, step in enumerate(steps)
    )

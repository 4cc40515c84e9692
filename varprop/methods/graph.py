"""The graph of a network with its own `forward`: taken with torch.fx and kept as a list of steps, without any parameter."""

from __future__ import annotations

import itertools
import operator
import weakref
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import _disable_current_modes

from .base import NoRuleError, row

Values = dict[str, Any]


@dataclass(frozen=True)
class Ref:
    """The value of an earlier step."""

    name: str


@dataclass(frozen=True)
class Fork:
    """Where the two operands of a sum part: the value both come from, and the steps from there to each, one after another."""

    source: str
    left: tuple[Step, ...]
    right: tuple[Step, ...]


@dataclass(frozen=True)
class Step:
    """One operation of a network."""

    name: str
    op: str
    """As in torch.fx: placeholder, get_attr, call_module, call_function, call_method or output."""
    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    sources: tuple[str, ...]
    """The steps whose values it takes."""
    place: str
    """The path of the module it stands in."""
    fork: Fork | None = None
    frees: tuple[str, ...] = ()
    """Values that no later step needs."""


def _refs(value: Any) -> Iterator[str]:
    match value:
        case Ref():
            yield value.name
        case dict():
            yield from _refs(tuple(value.values()))
        case slice():
            yield from _refs((value.start, value.stop, value.step))
        case list() | tuple():
            for item in value:
                yield from _refs(item)


def filled(value: Any, values: Values) -> Any:
    """Arguments with the values of earlier steps in their places."""
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
    """The layer that a step calls; None where it is a function."""
    if isinstance(step.target, nn.Module):
        return step.target
    return module.get_submodule(step.target) if step.op == "call_module" else None


def is_torchs_own(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.")


# ------------------------------------------------------------------------------------------------------------- one for each network


class _Graphs:
    """Every graph that was taken, as an attribute: `torch.compile` reads attributes of an object as they are, and guards them."""


GRAPHS = _Graphs()
_names: weakref.WeakKeyDictionary[nn.Module, dict[Hashable, str]] = weakref.WeakKeyDictionary()
_numbers = itertools.count()
_PLAIN = (bool, int, float, str, type(None))


def graph_name(module: nn.Module, keys: tuple[Any, ...], kept_whole: bool, inputs: tuple[Any, ...], options: tuple[Any, ...]) -> str:
    """The attribute of `GRAPHS` that holds the module's steps; taken on first use and when the network has changed.

    :param keys: the keys of the method's table; layers that have a row are not looked into.
    :param kept_whole: whether that goes for `nn.Sequential` too.
    :param inputs: for each argument of `forward` True, or a tuple of one plain value, which the graph then has built in.
    :param options: likewise for arguments by name, as pairs.
    """
    containers = (nn.Module,) if kept_whole else (nn.Module, nn.Sequential)
    kinds = frozenset(key for key in keys if isinstance(key, type) and key not in containers)
    known = _names.setdefault(module, {})
    key = kinds, inputs, options, tuple(_structure(module))
    if key not in known:
        name = f"graph_{next(_numbers)}"
        setattr(GRAPHS, name, _take(module, kinds, inputs, options))
        weakref.finalize(module, delattr, GRAPHS, name)
        known[key] = name
    return known[key]


# What `torch.compiler.assume_constant_result` does, which would import the compiler, two seconds of every start.
graph_name._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _structure(module: nn.Module) -> Iterator[Hashable]:
    """All that a graph depends on: the layers, and plain attributes that `forward` may read, `training` among them."""
    for name, part in module.named_modules():
        yield name, type(part)
        if not is_torchs_own(part):
            attributes = vars(part).items()
            yield tuple((key, value) for key, value in attributes if key[0] != "_" and (isinstance(value, _PLAIN) or callable(value)))


class _Tracer(fx.Tracer):
    trace_asserts = True

    def __init__(self, module: nn.Module, kinds: frozenset[type], inputs: Sequence[Any], options: Mapping[str, Any], opaque: set[str]):
        super().__init__()
        self.kinds, self.inputs, self.options, self.opaque = kinds, inputs, options, opaque
        # By identity, since in `functional_call` a parameter is any tensor.
        tensors = itertools.chain(module.named_parameters(), module.named_buffers())
        self.tensor_names = {id(tensor): name for name, tensor in tensors}
        self.places: list[str] = [""]
        self.failed = ""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if module_qualified_name in self.opaque or row(self.kinds, m) is not None:
            return True
        return is_torchs_own(m) and not isinstance(m, nn.Sequential)

    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        try:
            self.places.append(self.path_of_module(m))
        except NameError:  # made inside `forward`
            return self.create_proxy("call_function", m, args, kwargs, name=type(m).__name__.lower())
        try:
            return super().call_module(m, forward, args, kwargs)
        except Exception:
            self.failed = self.failed or self.places[-1]
            raise
        finally:
            self.places.pop()

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        node = super().create_node(*args, **kwargs)
        node.meta["place"] = self.places[-1]
        return node

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        name = self.tensor_names.get(id(attr_val)) if isinstance(attr_val, Tensor) else None
        if name is None:
            return attr_val
        if name not in parameter_proxy_cache:
            parameter_proxy_cache[name] = self.create_proxy("get_attr", name, (), {})
        return parameter_proxy_cache[name]

    def create_arg(self, a: Any) -> Any:
        # torch.fx would store a constant tensor in the user's module.
        if isinstance(a, Tensor) and id(a) not in self.tensor_names and a not in self.tensor_attrs:
            return a
        return super().create_arg(a)

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> tuple[Any, list[Any]]:
        def given(name: str, value: Any) -> Any:
            return self.create_proxy("placeholder", name, (), {}) if value is True else value[0]

        args = [given(f"input_{i}", value) for i, value in enumerate(self.inputs)]
        return partial(root_fn, **{name: given(name, value) for name, value in self.options.items()}), [self.root, *args]


def _take(module: nn.Module, kinds: frozenset[type], inputs: Any, options: Any) -> tuple[Step, ...]:
    opaque: set[str] = set()
    while True:
        tracer = _Tracer(module, kinds, inputs, dict(options), opaque)
        try:
            # What `forward` makes out of nothing, such as torch.arange(5), has to be real, whatever is traced around it.
            with _disable_current_modes():
                return _steps(module, tracer.trace(module))
        except Exception as error:
            if not tracer.failed:
                raise _untraceable(module, error) from error
            # A part that cannot be traced is left whole: it may be plain, and otherwise its own graph tells what is wrong.
            opaque.add(tracer.failed)


def _untraceable(module: nn.Module, error: Exception) -> NoRuleError:
    kind = type(module).__name__
    child = next((name for name, _ in module.named_children()), "layer")
    reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
    return NoRuleError(
        f"torch.fx cannot take the graph of {type(module).__module__}.{kind} ({reason}); write a rule for it that passes its parts through "
        f"the method, as in\n\n    def rule(method, block, x):\n        return method(block.{child}, x)\n\n"
        f"    method = method | {{{kind}: rule}}"
    )


# ------------------------------------------------------------------------------------------------------------------ nodes to steps

map_arg: Any = fx.node.map_arg
IN_PLACE = {operator.iadd, operator.isub, operator.imul, operator.itruediv}
SUMS = {operator.add, operator.iadd, operator.sub, operator.isub, torch.add, torch.sub, "add", "add_", "sub", "sub_"}


def _steps(module: nn.Module, graph: fx.Graph) -> tuple[Step, ...]:
    renamed: dict[fx.Node, str] = {}
    steps: dict[str, Step] = {}
    for node in graph.nodes:
        args, kwargs = map_arg((node.args, node.kwargs), lambda a: Ref(renamed[a]))
        if not args and "input" in kwargs:
            args, kwargs = (kwargs["input"],), {name: value for name, value in kwargs.items() if name != "input"}
        renamed[node] = node.name
        if _in_place(module, node) and node.args and isinstance(node.args[0], fx.Node):
            # Whoever reads the argument later finds what was written into it.
            renamed[node.args[0]] = node.name
        sources = tuple(dict.fromkeys(_refs((args, kwargs))))
        step = Step(node.name, node.op, node.target, tuple(args), dict(kwargs), sources, node.meta["place"])
        steps[step.name] = replace(step, fork=_fork(steps, step)) if node.target in SUMS else step
    return _freeing(list(steps.values()))


def _in_place(module: nn.Module, node: fx.Node) -> bool:
    if node.op == "call_module":
        return bool(getattr(module.get_submodule(str(node.target)), "inplace", False))
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    written = name.endswith("_") and not name.endswith("__")
    return node.op != "get_attr" and (node.target in IN_PLACE or node.kwargs.get("inplace") is True or written)


def _fork(steps: Mapping[str, Step], sum_: Step) -> Fork | None:
    operands = [a.name for a in sum_.args if isinstance(a, Ref)]
    if len(operands) != 2:
        return None
    certain = _certain(steps)
    left, right = (list(_chain(steps, certain, name)) for name in operands)
    source = next((name for name in left if name in right), None)
    if source is None:
        return None
    return Fork(source, *(tuple(steps[name] for name in reversed(chain[: chain.index(source)])) for chain in (left, right)))


def _chain(steps: Mapping[str, Step], certain: set[str], name: str) -> Iterator[str]:
    """A step, the one that it takes its value from, and so on, as long as there is one only."""
    while True:
        yield name
        sources = [source for source in steps[name].sources if source not in certain]
        if len(sources) != 1:
            return
        name = sources[0]


def _certain(steps: Mapping[str, Step]) -> set[str]:
    """Steps that no input of the network reaches."""
    certain: set[str] = set()
    for step in steps.values():
        if step.op != "placeholder" and certain.issuperset(step.sources):
            certain.add(step.name)
    return certain


def _freeing(steps: list[Step]) -> tuple[Step, ...]:
    last: dict[str, int] = {}
    for i, step in enumerate(steps):
        chains = (*step.fork.left, *step.fork.right) if step.fork else ()
        for name in (step.name, *step.sources, *(name for link in chains for name in (link.name, *link.sources))):
            last[name] = i
    kept = len(steps) - 1
    return tuple(replace(step, frees=tuple(name for name, j in last.items() if j == i != kept)) for i, step in enumerate(steps))

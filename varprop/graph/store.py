"""The graphs of networks with their own `forward`, taken on the first pass and then kept.

torch.fx is tried first, because its graph holds for inputs of all shapes. Its graph is compared with the
network itself, and where it fails or differs, the network is recorded.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from ..gaussian import Gaussian, mean_of
from ..methods.base import NoRuleError, Operation, Value
from ..methods.keys import is_foreign, is_torchs_own, row
from .record import record
from .steps import Step, Values, replay, tensors_in
from .trace import trace

Inputs: TypeAlias = tuple[tuple[Value, ...], Mapping[str, Value]]
"""The arguments and keyword arguments of a `forward`."""
Kinds: TypeAlias = tuple[Operation | type, ...]
"""What has a rule and is one step: types of layers, and functions that are not torch's."""
Form: TypeAlias = tuple[tuple[Value, ...], tuple[tuple[str, Value], ...]]
"""What a graph depends on of its inputs: (value,) for a plain one, True for any other."""
Shapes: TypeAlias = tuple[tuple[tuple[int, ...], torch.dtype, torch.device], ...]
"""What a recording depends on, besides."""
RECORDINGS = 32
"""How many recordings of a network are kept, each for inputs of other shapes."""
_PLAIN = (bool, int, float, str, type(None))


class UndecidedError(NoRuleError):
    """`forward` decides by values where there are none, as under vmap."""


@dataclass(frozen=True)
class Graph:
    """The steps of a network, and how they were taken."""

    steps: tuple[Step, ...]
    way: str
    """"traced" by torch.fx, or "recorded"."""
    checks: tuple[Step, ...] = ()
    """The steps that decisions of `forward` by values rest on, in order."""

    @classmethod
    def recorded(cls, steps: tuple[Step, ...]) -> Graph:
        needed: set[str] = set()
        for step in reversed(steps):
            if step.expected is not None or step.name in needed:
                needed.update((step.name, *step.sources))
        return cls(steps, "recorded", tuple(step for step in steps if step.name in needed))


def graph_of(module: nn.Module, kinds: Kinds, inputs: Inputs) -> Graph:
    """The module's graph for these inputs."""
    args, options = pytree.tree_map(mean_of, inputs, is_leaf=lambda x: isinstance(x, Gaussian))
    form = tuple(map(_form, args)), tuple((name, _form(value)) for name, value in options.items())
    if not torch.compiler.is_compiling() and _is_real((*module.parameters(), args, options)):
        return _taken(module, kinds, form, (args, options))
    name = traced_name(module, kinds, form) or recorded_name(module, kinds, form, _shapes((args, options)))
    graph: Graph = getattr(GRAPHS, name)
    if graph.checks and not _holds(module, graph, (args, options)):
        raise UndecidedError(
            str(no_graph(module, "it decides by values, which a compiler and vmap cannot follow"))
        )
    return graph


def named(args: tuple[Value, ...], options: Mapping[str, Value]) -> Values:
    """Inputs by the names of their steps."""
    return {**{f"input_{i}": value for i, value in enumerate(args)}, **options}


def no_graph(module: nn.Module, reason: str) -> NoRuleError:
    kind = type(module).__name__
    child = next((name for name, _ in module.named_children()), "layer")
    return NoRuleError(
        f"cannot take the graph of {type(module).__module__}.{kind}, because {reason}; "
        "write a rule for it that passes its parts through the method, as in\n\n"
        f"    def rule(method, block, x):\n        return method(block.{child}, x)\n\n"
        f"    method = method | {{{kind}: rule}}"
    )


# ---------------------------------------------------------------------------------------------- taking graphs


def _taken(module: nn.Module, kinds: Kinds, form: Form, inputs: Inputs) -> Graph:
    """The graph by real inputs, which show whether it is right."""
    known, key = _known(module), _key(module, kinds, form)
    if key not in known:
        steps = _traced(module, kinds, form)
        right = steps is not None and _agrees(module, steps, inputs)
        known[key] = _kept(module, Graph(steps, "traced")) if steps and right else ""
    if known[key]:
        return getattr(GRAPHS, known[key])
    recorded_key = key, _shapes(inputs)
    if recorded_key in known:
        graph: Graph = getattr(GRAPHS, known[recorded_key])
        if _holds(module, graph, inputs):
            return graph
    known[recorded_key] = _recording(module, kinds, inputs)
    return getattr(GRAPHS, known[recorded_key])


def traced_name(module: nn.Module, kinds: Kinds, form: Form) -> str:
    """The attribute of `GRAPHS` that holds the module's traced graph; an empty name if there is none."""
    known, key = _known(module), _key(module, kinds, form)
    if key not in known:
        steps = _traced(module, kinds, form)
        known[key] = "" if steps is None else _kept(module, Graph(steps, "traced"))
    return known[key]


def recorded_name(module: nn.Module, kinds: Kinds, form: Form, shapes: Shapes) -> str:
    """The attribute of `GRAPHS` that holds the module's recording; without a pass so far, on zeros."""
    known, key = _known(module), (_key(module, kinds, form), shapes)
    if key not in known:
        with _disable_current_modes():
            given = iter([torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in shapes])
            args = tuple(next(given) if value is True else value[0] for value in form[0])
            options = {name: next(given) if value is True else value[0] for name, value in form[1]}
            known[key] = _recording(module, kinds, (args, options))
    return known[key]


# As `torch.compiler.assume_constant_result` does, without importing the compiler, which takes two seconds.
traced_name._dynamo_marked_constant = True  # type: ignore[attr-defined]
recorded_name._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _traced(module: nn.Module, kinds: Kinds, form: Form) -> tuple[Step, ...] | None:
    """The steps by torch.fx, unless it was told not to look into a function that has no rule."""
    steps = trace(module, _is_layer(kinds), form[0], dict(form[1]))
    functions = [step.target for step in steps or () if step.op == "call_function"]
    closed = any(is_foreign(function) and function not in kinds for function in functions)
    return None if closed else steps


def _recording(module: nn.Module, kinds: Kinds, inputs: Inputs) -> str:
    known = _known(module)
    recordings = [key for key, name in known.items() if name and getattr(GRAPHS, name).way == "recorded"]
    for key in recordings[: max(0, len(recordings) - RECORDINGS + 1)]:
        vars(GRAPHS).pop(known.pop(key))
    try:
        with _undisturbed(module):
            steps = record(module, _is_layer(kinds), *inputs)
    except NoRuleError as error:
        raise no_graph(module, str(error)) from None
    if not _agrees(module, steps, inputs):
        raise no_graph(module, "what torch can see of it does not give its output")
    return _kept(module, Graph.recorded(steps))


def _is_layer(kinds: Kinds) -> Callable[[nn.Module], bool]:
    keys = frozenset(kinds)

    def is_layer(module: nn.Module) -> bool:
        own = is_torchs_own(module) and not isinstance(module, nn.Sequential)
        return own or row(keys, module) is not None

    return is_layer


# -------------------------------------------------------------------------------------------- checking graphs


@torch.no_grad()
def _agrees(module: nn.Module, steps: tuple[Step, ...], inputs: Inputs) -> bool:
    """Whether steps compute what the network itself computes."""
    args, options = inputs
    with _undisturbed(module):
        expected = module(*args, **options)
    try:
        with _undisturbed(module):
            *_, (_, found) = replay(module, steps, named(args, options))
    except Exception:
        return False  # a wrong graph may fail in any way
    ours, theirs = tensors_in(found), tensors_in(expected)
    alike = type(found) is type(expected) and len(ours) == len(theirs)
    return alike and all(map(_is_close, ours, theirs))


def _is_close(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    scale = float(a.abs().amax()) if a.is_floating_point() and a.numel() else 0.0
    return torch.allclose(a, b, rtol=1e-3, atol=1e-3 * scale, equal_nan=True)


@contextmanager
def _undisturbed(module: nn.Module) -> Iterator[None]:
    """Run with a fixed random state, and leave that of the user and the statistics of layers as they were."""
    before = [(buffer, buffer.clone()) for buffer in module.buffers()]
    devices = {p.device for p in module.parameters() if p.device.type == "cuda"}
    with torch.random.fork_rng(devices), torch.no_grad():
        torch.manual_seed(0)
        yield
        for buffer, value in before:
            if not torch.equal(buffer, value):
                buffer.copy_(value)


def _holds(module: nn.Module, graph: Graph, inputs: Inputs) -> bool:
    """Whether `forward` decides for these inputs as it did in the recording, as far as that can be seen."""
    batched = torch._C._functorch.is_batchedtensor
    if graph.checks and (torch.compiler.is_compiling() or any(map(batched, tensors_in(inputs)))):
        return False
    return all(_as_recorded(step, out) for step, out in replay(module, graph.checks, named(*inputs)))


def _as_recorded(step: Step, out: Value) -> bool:
    """Whether a decision comes out as it was recorded."""
    if isinstance(step.expected, torch.Size):
        return out.shape == step.expected
    return step.expected is None or out == step.expected


# ---------------------------------------------------------------------------------------------- stored graphs


class _Graphs:
    """Holds every graph as an attribute, because `torch.compile` can read and guard attributes."""


GRAPHS = _Graphs()
_names: weakref.WeakKeyDictionary[nn.Module, dict[Hashable, str]] = weakref.WeakKeyDictionary()
_numbers = itertools.count()


def _known(module: nn.Module) -> dict[Hashable, str]:
    """The names of the module's graphs; an empty name where torch.fx gives none that is right."""
    return _names.setdefault(module, {})


def _kept(module: nn.Module, graph: Graph) -> str:
    name = f"graph_{next(_numbers)}"
    setattr(GRAPHS, name, graph)
    weakref.finalize(module, vars(GRAPHS).pop, name, None)
    return name


def _key(module: nn.Module, kinds: Kinds, form: Form) -> Hashable:
    return frozenset(kinds), form, tuple(_structure(module))


def _structure(module: nn.Module) -> Iterator[Hashable]:
    """All that a graph depends on: layers, and plain attributes that `forward` may read (e.g. `training`)."""
    for name, part in module.named_modules():
        yield name, type(part)
        if not is_torchs_own(part):
            attributes = vars(part).items()
            yield tuple(
                (key, value)
                for key, value in attributes
                if key[0] != "_" and (isinstance(value, _PLAIN) or callable(value))
            )


def _form(value: Value) -> Value:
    return (value,) if isinstance(value, _PLAIN) else True


def _shapes(inputs: Inputs) -> Shapes:
    return tuple((tuple(t.shape), t.dtype, t.device) for t in tensors_in(inputs))


def _is_real(values: Value) -> bool:
    """Whether tensors have values of their own, which those of a tracer or a transform do not have."""
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor
    return not any(wrapped(t) or type(t) not in (Tensor, nn.Parameter) for t in tensors_in(values))

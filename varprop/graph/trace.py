"""The graph of a network with its own `forward`, traced with torch.fx on the first pass and then kept."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Hashable, Iterator, Mapping, Sequence
from functools import wraps

from torch import Tensor, fx, nn
from torch.utils._python_dispatch import _disable_current_modes

from ..methods.base import Function, NoRuleError, Value, row
from .steps import Step, steps_of


def is_torchs_own(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.")


# ---------------------------------------------------------------------------------------------- stored graphs


class _Graphs:
    """Holds every graph as an attribute, because `torch.compile` can read and guard attributes."""


GRAPHS = _Graphs()
_names: weakref.WeakKeyDictionary[nn.Module, dict[Hashable, str]] = weakref.WeakKeyDictionary()
_numbers = itertools.count()
_PLAIN = (bool, int, float, str, type(None))


def graph_name(
    module: nn.Module, kinds: tuple[type, ...], inputs: tuple[Value, ...], options: tuple[Value, ...]
) -> str:
    """The attribute of `GRAPHS` that holds the module's steps, traced on first use and after each change.

    :param kinds: types of layers that have a rule and are not traced into.
    :param inputs: for each argument of `forward` True, or a tuple of one plain value, which becomes a
        constant of the graph.
    :param options: the same for keyword arguments, as pairs.
    """
    known = _names.setdefault(module, {})
    key = frozenset(kinds), inputs, options, tuple(_structure(module))
    if key not in known:
        name = f"graph_{next(_numbers)}"
        setattr(GRAPHS, name, _take(module, frozenset(kinds), inputs, options))
        weakref.finalize(module, delattr, GRAPHS, name)
        known[key] = name
    return known[key]


# As `torch.compiler.assume_constant_result` does, without importing the compiler, which takes two seconds.
graph_name._dynamo_marked_constant = True  # type: ignore[attr-defined]


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


class _Tracer(fx.Tracer):
    trace_asserts = True

    def __init__(
        self,
        module: nn.Module,
        kinds: frozenset[type],
        inputs: Sequence[Value],
        options: Mapping[str, Value],
        opaque: set[str],
    ):
        super().__init__()
        self.kinds, self.inputs, self.options, self.opaque = kinds, inputs, options, opaque
        # By identity, because `functional_call` may replace a parameter by any tensor.
        tensors = itertools.chain(module.named_parameters(), module.named_buffers())
        self.tensor_names = {id(tensor): name for name, tensor in tensors}
        self.places: list[str] = [""]
        self.failed = ""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if module_qualified_name in self.opaque or row(self.kinds, m) is not None:
            return True
        return is_torchs_own(m) and not isinstance(m, nn.Sequential)

    def call_module(
        self, m: nn.Module, forward: Function, args: tuple[Value, ...], kwargs: dict[str, Value]
    ) -> Value:
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

    def create_node(self, *args: Value, **kwargs: Value) -> fx.Node:
        node = super().create_node(*args, **kwargs)
        node.meta["place"] = self.places[-1]
        return node

    def getattr(self, attr: str, attr_val: Value, parameter_proxy_cache: dict[str, Value]) -> Value:
        name = self.tensor_names.get(id(attr_val)) if isinstance(attr_val, Tensor) else None
        if name is None:
            return attr_val
        if name not in parameter_proxy_cache:
            parameter_proxy_cache[name] = self.create_proxy("get_attr", name, (), {})
        return parameter_proxy_cache[name]

    def create_arg(self, a: Value) -> Value:
        # torch.fx would store a constant tensor in the user's module.
        if isinstance(a, Tensor) and id(a) not in self.tensor_names and a not in self.tensor_attrs:
            return a
        return super().create_arg(a)

    def create_args_for_root(
        self, root_fn: Function, is_module: bool, concrete_args: object = None
    ) -> tuple[Function, list[Value]]:
        def given(name: str, value: Value) -> Value:
            return self.create_proxy("placeholder", name, (), {}) if value is True else value[0]

        args = [given(f"input_{i}", value) for i, value in enumerate(self.inputs)]
        options = {name: given(name, value) for name, value in self.options.items()}

        @wraps(root_fn)  # torch.fx of 2.6 asks for annotations, which a partial has not
        def called(*args: Value) -> Value:
            return root_fn(*args, **options)

        return called, [self.root, *args]


def _take(
    module: nn.Module, kinds: frozenset[type], inputs: tuple[Value, ...], options: tuple[Value, ...]
) -> tuple[Step, ...]:
    opaque: set[str] = set()
    while True:
        tracer = _Tracer(module, kinds, inputs, dict(options), opaque)
        try:
            # Constants made in `forward`, such as torch.arange(5), must be real even under an outer tracer.
            with _disable_current_modes():
                return steps_of(module, tracer.trace(module))
        except Exception as error:
            if not tracer.failed:
                raise _untraceable(module, error) from error
            # A part that cannot be traced becomes one step. If it turns out to be random, tracing it alone
            # gives the error.
            opaque.add(tracer.failed)


def _untraceable(module: nn.Module, error: Exception) -> NoRuleError:
    kind = type(module).__name__
    child = next((name for name, _ in module.named_children()), "layer")
    reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
    return NoRuleError(
        f"torch.fx cannot take the graph of {type(module).__module__}.{kind} ({reason}); "
        "write a rule for it that passes its parts through the method, as in\n\n"
        f"    def rule(method, block, x):\n        return method(block.{child}, x)\n\n"
        f"    method = method | {{{kind}: rule}}"
    )

"""The graph of a network with its own `forward`, traced with symbols for its inputs by torch.fx."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import wraps

from torch import Tensor, fx, nn
from torch.utils._python_dispatch import _disable_current_modes

from ..methods.base import Function, Value
from .steps import Step, steps_of


class _Tracer(fx.Tracer):
    trace_asserts = True

    def __init__(
        self,
        module: nn.Module,
        is_layer: Callable[[nn.Module], bool],
        inputs: Sequence[Value],
        options: Mapping[str, Value],
        opaque: set[str],
    ):
        super().__init__()
        self.is_layer, self.inputs, self.options, self.opaque = is_layer, inputs, options, opaque
        # By identity, because `functional_call` may replace a parameter by any tensor.
        tensors = itertools.chain(module.named_parameters(), module.named_buffers())
        self.tensor_names = {id(tensor): name for name, tensor in tensors}
        self.places: list[str] = [""]
        self.failed = ""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return module_qualified_name in self.opaque or self.is_layer(m)

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


def trace(
    module: nn.Module,
    is_layer: Callable[[nn.Module], bool],
    inputs: Sequence[Value],
    options: Mapping[str, Value],
) -> tuple[Step, ...] | None:
    """The steps of the network; None if torch.fx cannot follow its `forward`.

    :param is_layer: whether a module is one step, and not the steps inside it.
    :param inputs: for each argument of `forward` True, or a tuple of one plain value, which becomes a
        constant of the graph.
    :param options: the same for keyword arguments.
    """
    opaque: set[str] = set()
    while True:
        tracer = _Tracer(module, is_layer, inputs, options, opaque)
        try:
            # Constants made in `forward`, such as torch.arange(5), must be real even under an outer tracer.
            with _disable_current_modes():
                return steps_of(module, tracer.trace(module))
        except Exception:
            if not tracer.failed or tracer.failed in opaque:
                return None
            # A part that cannot be traced becomes one step, and is recorded where it turns out to be random.
            opaque.add(tracer.failed)

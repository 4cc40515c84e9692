"""The graph of a network by running it: every layer and torch function that its `forward` calls, in order.

torch.fx follows a `forward` with symbols for its inputs, and gives up where Python looks at a value or a
shape. A recording follows real values, so it takes any `forward`. It holds for inputs of the same shapes and
types. Where `forward` decides by a value, the graph keeps the decision as a step to check.
"""

from __future__ import annotations

import builtins
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from ..methods.base import Function, NoRuleError, Value
from .steps import Ref, Step, by_place, linked, placed, refs_in, tensors_in, writes

READS = {
    "__bool__",
    "__int__",
    "__float__",
    "__index__",
    "__contains__",
    "item",
    "tolist",
    "is_nonzero",
    "equal",
}
"""Functions that tell Python a value, by which `forward` may decide."""
SIZED_BY_VALUES = {"nonzero", "argwhere", "unique", "masked_select", "bincount"}
"""Functions whose output has a shape that depends on values."""
MAKES = {f"{name}_like" for name in ("zeros", "ones", "full", "empty")} | {
    f"new_{name}" for name in ("zeros", "ones", "full", "empty")
}
"""Functions that look only at the shape and type of a tensor."""


@torch.no_grad()
def record(
    net: nn.Module,
    is_layer: Callable[[nn.Module], bool],
    inputs: Sequence[Value],
    options: Mapping[str, Value],
) -> tuple[Step, ...]:
    """The steps of one run of the network.

    :param is_layer: whether a module is one step, and not the steps inside it.
    """
    recorder = _Recorder(net, is_layer)
    copied: Value = pytree.tree_map_only(Tensor, Tensor.clone, (tuple(inputs), dict(options)))
    args, kwargs = copied
    for name, value in (*((f"input_{i}", value) for i, value in enumerate(args)), *kwargs.items()):
        recorder.note("placeholder", name, (), {}, value, name=name)
    with recorder.watching_layers(), recorder, _Unseen(recorder):
        output = net(*args, **kwargs)
    recorder.end(output)
    return linked(recorder.steps)


class _Recorder(TorchFunctionMode):
    """Notes the torch functions and layers that a network calls while it runs."""

    def __init__(self, net: nn.Module, is_layer: Callable[[nn.Module], bool]) -> None:
        super().__init__()
        self.net, self.is_layer = net, is_layer
        self.steps: list[Step] = []
        self.places = [""]
        self.inside = 0
        """How many layers and functions are running; what is called inside them is not noted."""
        self.origins: Value = WeakIdKeyDictionary()
        """The steps that tensors come from, by identity."""
        tensors = (*net.named_parameters(), *net.named_buffers())
        self.attributes = {id(tensor): name for name, tensor in tensors}

    # ---------------------------------------------------------------------------------------------- functions

    def __torch_function__(
        self,
        func: Function,
        types: Value,
        args: Sequence[Value] = (),
        kwargs: Mapping[str, Value] | None = None,
    ) -> Value:
        return self.call(func, tuple(args), kwargs or {})

    def call(self, function: Function, args: tuple[Value, ...], kwargs: Mapping[str, Value]) -> Value:
        """Run a function, and note it if it depends on an input or a parameter."""
        name: str = getattr(function, "__name__", "")
        followed = not self.inside and name not in MAKES and self._is_followed((args, kwargs))
        given = self._given((args, dict(kwargs))) if followed else None
        with self.as_a_whole():
            out = function(*args, **kwargs)
        if given is not None:
            checked = name in READS or (
                isinstance(out, Tensor) and self._is_sized_by_values(name, args, kwargs)
            )
            written = args[0] if name == "__setitem__" else out
            self._note_call(name, _target(function, name), given[0], given[1], written, checked)
        return out

    def _is_sized_by_values(self, name: str, args: tuple[Value, ...], kwargs: Mapping[str, Value]) -> bool:
        """Whether the shape of a function's output depends on an input or a parameter."""
        if name == "__getitem__":
            return any(t.dtype == torch.bool and self._is_followed(t) for t in tensors_in(args[1]))
        if name == "repeat_interleave":
            return self._is_followed((args[1:], kwargs))
        return name in SIZED_BY_VALUES

    def _note_call(
        self,
        name: str,
        target: Function | str,
        args: tuple[Value, ...],
        kwargs: dict[str, Value],
        out: Value,
        checked: bool,
    ) -> None:
        if name in ("numpy", "__array__"):
            raise NoRuleError("it hands values to NumPy")
        if name.startswith("__r") and callable(target):
            args = args[::-1]  # the operators that Python tries with the operands swapped
        elif name == "__get__":
            args = (args[0], target)
            target = builtins.getattr
        op = "call_method" if isinstance(target, str) else "call_function"
        args, kwargs = by_place(target, args, kwargs)
        if args and isinstance(args[0], Tensor) and writes(target, kwargs):
            args = (self.note("call_function", torch.clone, args[:1], {}, None), *args[1:])
        if checked or tensors_in(out):
            value = out.shape if isinstance(out, Tensor) else out
            self.note(op, target, args, kwargs, out, expected=value if checked else None)

    # ------------------------------------------------------------------------------------------------- layers

    @contextmanager
    def as_a_whole(self) -> Iterator[None]:
        self.inside += 1
        try:
            yield
        finally:
            self.inside -= 1

    @contextmanager
    def watching_layers(self) -> Iterator[None]:
        handles = []
        for path, module in self.net.named_modules():
            if module is not self.net:
                hooks = _Hooks(self, path, self.is_layer(module))
                handles.append(module.register_forward_pre_hook(hooks.before, with_kwargs=True))
                handles.append(module.register_forward_hook(hooks.after, with_kwargs=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    # -------------------------------------------------------------------------------------------------- steps

    def note(
        self,
        op: str,
        target: Value,
        args: tuple[Value, ...],
        kwargs: Mapping[str, Value],
        out: Value,
        expected: Value = None,
        name: str | None = None,
    ) -> Ref:
        """Add a step, and remember that the tensors of its output come from it."""
        ref = Ref(name or f"step_{len(self.steps)}")
        sources = tuple(dict.fromkeys(refs_in((args, kwargs))))
        self.steps.append(
            Step(ref.name, op, target, args, kwargs, sources, self.places[-1], expected=expected)
        )
        self._bind(ref, out)
        return ref

    def end(self, output: Value) -> None:
        leaves, structure = pytree.tree_flatten(output)
        kept = [self._given(leaf) if isinstance(leaf, (Tensor, *_PLAIN)) else None for leaf in leaves]
        self.note("output", structure, (kept,), {}, None)

    def _bind(self, ref: Ref, value: Value) -> None:
        if isinstance(value, Tensor):
            self.origins[value] = ref
        elif isinstance(value, tuple | list | dict) and tensors_in(value):
            for key, item in value.items() if isinstance(value, dict) else enumerate(value):
                if tensors_in(item):
                    self.note("call_function", operator.getitem, (ref, key), {}, item)

    def _is_followed(self, value: Value) -> bool:
        return any(t in self.origins or id(t) in self.attributes for t in tensors_in(value))

    def _given(self, value: Value) -> Value:
        """Arguments with the steps that they come from in the place of tensors."""
        if isinstance(value, Tensor):
            if value in self.origins:
                return self.origins[value]
            if id(value) in self.attributes:
                return self.note("get_attr", self.attributes[id(value)], (), {}, value)
            return value.clone()  # a constant, which may be written to later on
        if isinstance(value, tuple | list):
            return type(value)(map(self._given, value)) if type(value) in (tuple, list) else value
        if isinstance(value, dict):
            return {name: self._given(item) for name, item in value.items()}
        if isinstance(value, slice):
            return slice(*map(self._given, (value.start, value.stop, value.step)))
        return value


_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


class _Hooks:
    """What happens before and after a module runs."""

    def __init__(self, recorder: _Recorder, path: str, is_layer: bool) -> None:
        self.recorder, self.path, self.is_layer = recorder, path, is_layer
        self.given: list[Value] = []

    def before(self, module: nn.Module, args: tuple[Value, ...], kwargs: dict[str, Value]) -> None:
        recorder = self.recorder
        if any(isinstance(value, PackedSequence) for value in args):
            raise NoRuleError(
                f"it packs sequences for `{self.path}` (give that layer padded ones, and multiply what lies "
                "beyond their lengths by zero)"
            )
        recorder.places.append(self.path)
        if self.is_layer:
            self.given.append(None if recorder.inside else recorder._given((args, kwargs)))
            recorder.inside += 1

    def after(
        self, module: nn.Module, args: tuple[Value, ...], kwargs: dict[str, Value], output: Value
    ) -> None:
        recorder = self.recorder
        if self.is_layer:
            recorder.inside -= 1
            given = self.given.pop()
            if given is not None:
                recorder.note("call_module", self.path, given[0], given[1], output)
        recorder.places.pop()


class _Unseen(TorchDispatchMode):
    """Notes the operations that no torch function stands for, such as those of a TorchScript function."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recorder = recorder

    def __torch_dispatch__(
        self,
        func: Function,
        types: Value,
        args: tuple[Value, ...] = (),
        kwargs: Mapping[str, Value] | None = None,
    ) -> Value:
        return self.recorder.call(func, args, kwargs or {})


def _target(function: Function, name: str) -> Function | str:
    """A function as rules name it: an operator, a tensor method by its name, or the function itself."""
    if name == "__get__":
        attribute: str = function.__self__.__name__  # type: ignore[attr-defined]
        return attribute
    if name == "__setitem__":
        return placed
    is_method = getattr(Tensor, name, None) is function
    if is_method and name.startswith("__"):
        plain = name.replace("__r", "__", 1) if name.startswith("__r") else name
        found: Function | None = getattr(operator, {"__div__": "__truediv__"}.get(plain, plain), None)
        return found or name
    return name if is_method else function

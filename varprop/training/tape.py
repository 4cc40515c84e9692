"""A computation recorded as tensor operations, to be run again without all that led to them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map_only, tree_unflatten


@dataclass(frozen=True)
class Program:
    """What was recorded: tensors in, tensors out, whatever lists and dictionaries they are given in."""

    operations: Callable[..., Sequence[Tensor]]
    structure: TreeSpec

    def __call__(self, *args: Any) -> Any:
        return tree_unflatten(self.operations(*tree_leaves(args)), self.structure)


class NotRecordableError(Exception):
    """What happens in a computation cannot be repeated as operations on tensors, or is too large for that."""


def record(function: Callable[..., Any], *args: Any, memory: float = math.inf) -> Program:
    """A function of tensors as a program, for arguments of these shapes.

    Mapping over members, module calls and the bookkeeping of gradients happen while it is recorded, and never
    again. `torch.fx.experimental.proxy_tensor.make_fx` does the same and more, in ten times the time.

    :param memory: the bytes that all values together may take; until the end each is kept.
    :raises NotRecordableError: if a number is read from a tensor, if one is sparse, or beyond that memory.

    >>> program = record(torch.func.vmap(lambda a: 2 * a["x"].sum()), {"x": torch.ones(3, 4)})
    >>> program({"x": torch.full((3, 4), 2.0)})
    tensor([16., 16., 16.])
    """
    tape = _Tape(tree_leaves(args), memory)
    with tape:
        result = function(*args)
    tensors, structure = tree_flatten(result)
    tape.graph.output([tape.node(tensor) for tensor in tensors])
    tape.drop_idle_operations()
    return Program(GraphModule(tape.constants, tape.graph), structure)


class _Tape(TorchDispatchMode):
    """Notes every operation below autograd and vmap in a graph."""

    def __init__(self, inputs: Sequence[Tensor], memory: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.memory = memory
        self.graph = Graph()
        self.constants: dict[str, Tensor] = {}
        self.known: dict[int, Node] = {}
        """By the identity of a tensor."""
        self.values: dict[Node, Tensor] = {}
        """All of them, so that no tensor takes the identity of an earlier one."""
        self.changed: set[int] = set()
        """The memory of tensors that were changed in place."""
        for i, tensor in enumerate(inputs):
            self.know(tensor, self.graph.placeholder(f"input{i}"))

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports its compiler for the first operation, which takes seconds

    def know(self, value: object, node: Node) -> None:
        if isinstance(value, Tensor):
            self.memory -= value.numel() * value.element_size()
            if self.memory < 0:
                raise NotRecordableError("the values take too much memory")
            if value.layout is not torch.strided:
                raise NotRecordableError("a tensor is sparse")
            node.meta["layout"] = value.shape, value.stride(), value.dtype
            node.meta["memory"] = _memory(value)
            self.known[id(value)] = node
            self.values[node] = value
        elif isinstance(value, list | tuple):
            for i, part in enumerate(value):
                self.know(part, self.graph.call_function(getitem, (node, i)))

    def node(self, tensor: Tensor) -> Node:
        """Where a tensor comes from; one of unknown origin is a constant."""
        if id(tensor) not in self.known:
            name = f"constant{len(self.constants)}"
            self.constants[name] = tensor
            self.know(tensor, self.graph.get_attr(name))
        return self.known[id(tensor)]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is ATEN._local_scalar_dense.default:
            raise NotRecordableError("a number is read from a tensor")
        result = func(*args, **(kwargs or {}))
        nodes = tree_map_only(Tensor, self.node, (args, kwargs or {}))
        self.know(result, self.graph.call_function(func, *nodes))
        if func._schema.is_mutable:
            self.changed |= {_memory(tensor) for tensor in tree_leaves(result)}
        return result

    def drop_idle_operations(self) -> None:
        """Remove what changes nothing, what is computed twice or from constants, and what is not used.

        Every value stays what it was, bit for bit.
        """
        first: dict[str, Node] = {}
        for node in self.graph.nodes:
            if _changes_nothing(node) and (_is_view(node) or self._is_fixed(node)):
                node.replace_all_uses_with(node.args[0])
            elif _turns_back(node):
                node.replace_all_uses_with(node.args[0].args[0])
            elif self._is_fixed(node):
                known = self._folded(node) if self._is_constant(node) else node
                earlier = first.setdefault(self._content(known), known)
                if earlier is not node:
                    node.replace_all_uses_with(earlier)
        self.graph.eliminate_dead_code()

    def _is_constant(self, node: Node) -> bool:
        """Whether a tensor was made while the function ran, and from numbers alone."""
        if node.op != "call_function" or "layout" not in node.meta:
            return False
        return node.target in MADE or all(other.meta.get("folded") for other in node.all_input_nodes)

    def _folded(self, node: Node) -> Node:
        """A constant in the place of what makes it."""
        with self.graph.inserting_before(node):
            name = f"constant{len(self.constants)}"
            self.constants[name] = self.values[node]
            constant = self.graph.get_attr(name)
        constant.meta.update(node.meta, folded=True)
        return constant

    def _content(self, node: Node) -> str:
        """What nodes of equal value have in common."""
        if node.op == "get_attr":
            constant = self.constants[str(node.target)]
            return f"{constant.dtype}{constant.tolist()}" if constant.numel() < 100 else node.name
        return f"{node.target}{node.args}{node.kwargs}"

    def _is_fixed(self, node: Node) -> bool:
        """Whether a value is the same whenever it is computed, and never changes."""
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            return False
        parts = [node, *node.all_input_nodes]
        return node.op != "placeholder" and not any(part.meta.get("memory") in self.changed for part in parts)


ATEN = torch.ops.aten
MADE = (ATEN.lift_fresh.default, ATEN.ones_like.default, ATEN.zeros_like.default)
"""Make constants: the first is only ever given a tensor of Python's numbers."""
VIEWS = (ATEN.view.default, ATEN._unsafe_view.default, ATEN.expand.default, ATEN.detach.default)


def _is_view(node: Node) -> bool:
    return node.target in VIEWS


def _changes_nothing(node: Node) -> bool:
    """Whether an operation is a reshape to the same shape, a product with 1 or the first power."""
    is_one = node.target in (ATEN.mul.Scalar, ATEN.pow.Tensor_Scalar) and node.args[1] == 1
    if not (is_one or _is_view(node)):
        return False
    before = node.args[0]
    assert isinstance(before, Node)
    return bool(node.meta["layout"] == before.meta["layout"])


def _turns_back(node: Node) -> bool:
    """Whether an operation transposes what was transposed."""
    if node.target not in (ATEN.t.default, ATEN.transpose.int):
        return False
    before = node.args[0]
    assert isinstance(before, Node)
    return bool(before.target is node.target and before.args[1:] == node.args[1:])


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()

"""Whether objectives can be trained as replicas: they may differ only in the values of their tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from types import FunctionType

import numpy as np
import torch
from torch import Tensor, nn

from ..objectives import ELBO


def check_members(members: Sequence[ELBO]) -> None:
    """Refuse members that differ in more than their values: the first one's operations run for all."""
    if not members:
        raise ValueError("replicas.fit: there is no objective to train; give at least one.")
    first = members[0]
    owners: dict[int, int] = {}
    for r, other in enumerate(members):
        for name in ("method", "prior", "n_data", "kl_z_weight", "moments"):
            if not alike(getattr(other, name), getattr(first, name)):
                raise _difference(r, f"in its {name}")
        for part in ("likelihood", "net"):
            if difference := _different_module(getattr(other, part), getattr(first, part)):
                raise _difference(r, f"in its {part} ({difference})")
        for name, tensor in _tensors(other):
            if owners.setdefault(id(tensor), r) != r:
                raise ValueError(
                    f"replicas.fit: members {owners[id(tensor)]} and {r} share the tensor {name!r}; give each"
                    " member its own network and likelihood."
                )


def _difference(member: int, where: str) -> ValueError:
    return ValueError(
        f"replicas.fit: member {member} differs from the first {where}; members may differ only in the values"
        " of their parameters."
    )


def _different_module(module: nn.Module, first: nn.Module) -> str | None:
    """What differs between two modules, other than the values of their tensors; None if nothing does."""
    ours, theirs = (dict(m.named_modules()) for m in (module, first))
    if ours.keys() != theirs.keys():
        return f"{len(ours)} modules instead of {len(theirs)}"
    for name, part in ours.items():
        kind, expected = type(part), type(theirs[name])
        where = f" at {name!r}" if name else ""
        if kind is not expected:
            return f"{kind.__name__} instead of {expected.__name__}{where}"
        if not alike(_settings(part), _settings(theirs[name])):
            return f"other settings of {kind.__name__}{where}"
    ours_described, theirs_described = ({n: _description(t) for n, t in _tensors(m)} for m in (module, first))
    for name in ours_described.keys() | theirs_described.keys():
        if ours_described.get(name) != theirs_described.get(name):
            return f"shape, type, device or requires_grad of {name!r}"
    return None


def _settings(module: nn.Module) -> dict[str, object]:
    return {
        name: value for name, value in vars(module).items() if not name.startswith("_") and name != "training"
    }


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _description(tensor: Tensor) -> tuple[torch.Size, torch.dtype, torch.device, bool]:
    return tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad


def alike(a: object, b: object) -> bool:
    """Whether two values say the same; Python compares functions, partials and most objects by identity.

    >>> alike(vp.vbp(slope=5.0), vp.vbp(slope=5.0)), alike(vp.vbp(slope=5.0), vp.vbp(slope=6.0))
    (True, False)
    """
    return _alike(a, b, set())


def _alike(a: object, b: object, pairs: set[tuple[int, int]]) -> bool:
    """:param pairs: those being compared, which a value that contains itself meets again."""
    if a is b or (id(a), id(b)) in pairs:
        return True
    if type(a) is not type(b):
        return False
    pairs.add((id(a), id(b)))
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return _description(a) == _description(b) and torch.equal(a, b)
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return np.array_equal(a, b)
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(_alike(value, b[key], pairs) for key, value in a.items())
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(_alike(one, other, pairs) for one, other in zip(a, b, strict=True))
    if type(a).__eq__ is not object.__eq__ and bool(a == b):
        return True
    content = _content(a)
    return content is not None and _alike(content, _content(b), pairs)


def _content(a: object) -> object:
    """What a value consists of; None for one that cannot be taken apart."""
    if isinstance(a, FunctionType):
        cells = [getattr(cell, "cell_contents", None) for cell in a.__closure__ or ()]
        return a.__code__, a.__defaults__, a.__kwdefaults__, cells
    if isinstance(a, partial):
        return a.func, a.args, a.keywords
    if is_dataclass(a):
        return {field.name: getattr(a, field.name) for field in fields(a)}
    return getattr(a, "__dict__", None)

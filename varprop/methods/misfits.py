"""What is wrong with an input that a layer or a network does not take, in words."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ..gaussian import mean_of

CASTS = {torch.float32: "float()", torch.float64: "double()", torch.float16: "half()"}


def misfit(layer: object, inputs: Iterable[Any], error: Exception) -> str | None:
    """The sentence for an error that an input's type, width or precision explains; None for any other.

    >>> print(misfit(nn.Linear(3, 1), [torch.ones(4, 2)], RuntimeError("sizes")))
    Linear(in_features=3, out_features=1, bias=True) takes 3 inputs, but x has the shape (4, 2).
    """
    if not isinstance(layer, nn.Module):
        return None
    values = [mean_of(x) for x in inputs]
    arrays = [x for x in values if hasattr(x, "__array__") and not isinstance(x, Tensor)]
    lists = [x for x in values if isinstance(x, list) and not isinstance(error, RuntimeError)]
    if arrays or lists:
        kind = type((arrays + lists)[0]).__name__
        return (
            f"x is of type {kind}, but a network takes tensors; give torch.as_tensor(x, dtype=torch.float32)."
        )
    weight = next((p for p in layer.parameters() if p.is_floating_point()), None)
    tensors = [x for x in values if isinstance(x, Tensor)]
    if weight is None or not tensors or not isinstance(error, RuntimeError):
        return None
    others = [x for x in tensors if x.dtype != weight.dtype]
    if others and "type" in str(error):
        other = next(filter(Tensor.is_floating_point, others), others[0])
        cast = CASTS.get(weight.dtype, f"to({weight.dtype})")
        return f"x is {_name(other)}, the network {_name(weight)}; give x.{cast}."
    x = tensors[0]
    if isinstance(layer, nn.Linear) and x.shape[-1:] != (layer.in_features,):
        return f"{layer} takes {layer.in_features} inputs, but x has the shape {tuple(x.shape)}."
    return None


def _name(t: Tensor) -> str:
    return str(t.dtype).removeprefix("torch.")

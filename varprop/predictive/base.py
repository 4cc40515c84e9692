"""What all predictions share, and the prediction of any likelihood that works elementwise."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..gaussian import Gaussian
from ..moments import log_expectation_exp


class Predictive(ABC):
    """A predictive distribution for each data point of a batch."""

    @abstractmethod
    def log_prob(self, y: Tensor) -> Tensor:
        """The log density or log probability of each data point's target."""


class Elementwise(Protocol):
    """What `LatentPredictive` needs from a likelihood."""

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor: ...


@dataclass(frozen=True, eq=False)
class LatentPredictive(Predictive):
    """The prediction of any elementwise likelihood, averaged over the network's output f by quadrature."""

    f: Gaussian
    likelihood: Elementwise

    def log_prob(self, y: Tensor) -> Tensor:
        check_shape(y, self.f.shape)
        return per_datum(log_expectation_exp(lambda f: self.likelihood.log_prob(f, y), self.f))


def log_probability(p: Tensor) -> Tensor:
    """log p. A probability below the smallest normal number, which may be zero, counts as that number."""
    return torch.log(p.clamp(min=torch.finfo(p.dtype).tiny))


def per_datum(log_prob: Tensor) -> Tensor:
    """Sum over all dimensions but the first."""
    return log_prob.flatten(1).sum(1) if log_prob.dim() > 1 else log_prob


def check_shape(y: Tensor, shape: torch.Size) -> None:
    if not isinstance(y, Tensor):
        raise TypeError(
            f"target is of type {type(y).__name__}, and must be a tensor; give torch.as_tensor(y)."
        )
    if y.shape != shape:
        raise ValueError(
            f"target has shape {tuple(y.shape)}, the prediction needs {tuple(shape)}; "
            "reshape the target (y.unsqueeze(-1) adds an axis)."
        )


def of_class(values: Tensor, y: Tensor) -> Tensor:
    """The value of each data point's class, with the classes in dimension 1."""
    check_classes(y)
    try:
        return values.gather(1, y.unsqueeze(1)).squeeze(1)
    except (RuntimeError, IndexError) as error:
        if "out of bounds" not in str(error):
            raise
        classes = values.shape[1]
        wrong = "a label" if _is_mapped() else _first((y < 0) | (y >= classes), y, "label ")
        raise ValueError(
            f"{wrong} is none of the classes: the network has {classes} outputs, for labels from 0 to "
            f"{classes - 1}."
        ) from error


def check_labels(y: Tensor) -> None:
    """Refuse targets other than 0 and 1, except in functions that cannot decide by values."""
    if torch.compiler.is_compiling() or _is_mapped():
        return
    wrong = (y != 0) & (y != 1)
    if bool(wrong.any()):
        raise ValueError(f"targets must be 0 or 1, got {_first(wrong, y)}; correct or remove the row.")


def _is_mapped() -> bool:
    return torch._C._functorch.maybe_current_level() is not None


def _first(wrong: Tensor, y: Tensor, what: str = "") -> str:
    """The first of the wrong targets, and its row."""
    place = wrong.nonzero()[0].tolist()
    return f"{what}{y[tuple(place)].item():g} in row {place[0]}"


def check_classes(y: Tensor) -> None:
    if y.is_floating_point() or y.is_complex() or y.dtype == torch.bool:
        raise ValueError(f"target has type {y.dtype}, but class indices are integers; use y.long().")

"""What passes compute from the weights alone, kept from one prediction to the next."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakIdKeyDictionary

Of: TypeAlias = Callable[[Tensor], Tensor]


class WeightCache:
    """Variances of weights and squares of their means, computed once for many predictions.

    A pass computes them anew, up to half of its time if a network has many weights and a batch few rows.
    They are kept for passes inside `with`, without gradients, and take twice the memory of the random
    weights. A weight that has changed since, by an optimiser, by `load_state_dict` or by any operation of
    torch, is noticed. Only writes that torch itself does not see, through `.data` or the memory of a NumPy
    array, need a new cache.

    >>> net, x = vp.variational(nn.Linear(3, 1)), torch.ones(1, 3)
    >>> cache = vp.WeightCache()
    >>> with cache, torch.no_grad():
    ...     first = vp.DVI(net, x).var
    ...     _ = net.weight_logvar.add_(1.0)
    ...     second = vp.DVI(net, x).var
    >>> bool(second > first)
    True
    """

    def __init__(self) -> None:
        self._kept: Any = WeakIdKeyDictionary()
        clear = self._kept.clear
        # Fused optimisers do not add to the version of a tensor.
        steps = register_optimizer_step_post_hook(lambda *_: clear())
        weakref.finalize(self, steps.remove)

    def __enter__(self) -> WeightCache:
        _OPEN.set((*_OPEN.get(), self))
        return self

    def __exit__(self, *_: object) -> None:
        _OPEN.set(_OPEN.get()[:-1])

    def value(self, of: Of, weight: nn.Parameter) -> Tensor:
        """of(weight), as it was kept if the weight is the same."""
        state = weight._version, weight.data_ptr(), weight.dtype
        kept = self._kept.setdefault(weight, {})
        if of not in kept or kept[of][0] != state:
            kept[of] = state, of(weight)
        value: Tensor = kept[of][1]
        return value


_OPEN: ContextVar[tuple[WeightCache, ...]] = ContextVar("open weight caches", default=())


def of_weight(of: Of, weight: Tensor) -> Tensor:
    """of(weight), from the cache that is open if there is one."""
    if (torch.is_grad_enabled() and weight.requires_grad) or torch.compiler.is_compiling():
        return of(weight)
    if not isinstance(weight, nn.Parameter) or torch._C._functorch.maybe_current_level() is not None:
        return of(weight)
    caches = _OPEN.get()
    return caches[-1].value(of, weight) if caches and not weight.is_inference() else of(weight)

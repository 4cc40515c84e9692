"""Local reparametrisation (Kingma et al. 2015), the paper's VarOut: pre-activations are sampled, one draw a unit and data point."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn

from ..gaussian import Activation, Gaussian
from .attention import EMBEDDING
from .base import Method, Rule, as_it_is, sequential
from .moments import AFFINE


def _draw(x: Activation) -> Tensor:
    return x.sample() if isinstance(x, Gaussian) else x


def _sampled(moments: Rule, method: Method, module: nn.Module, x: Activation) -> Tensor:
    """A draw from the layer's output given its input (Eq. 19).

    A convolution draws each position by itself: the marginals are right, the correlation of positions through the shared kernel is lost.
    """
    return _draw(moments(method, module, _draw(x)))


def _other(method: Method, module: nn.Module, *x: Any, **options: Any) -> Any:
    return as_it_is(method, module, *(_draw(a) for a in x), **options)


LOCAL_REPARAM = Method(
    "LOCAL_REPARAM",
    {
        nn.Sequential: sequential,
        nn.ModuleList: sequential,
        **{kind: partial(_sampled, rule) for kind, rule in {**AFFINE, **EMBEDDING}.items()},
        nn.Module: _other,
    },
    samples=True,
)

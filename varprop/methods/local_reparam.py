"""Local reparametrisation (Kingma et al. 2015), the paper's VarOut: pre-activations are sampled, one draw a unit and data point."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn

from ..gaussian import Activation, Gaussian
from ..posterior import posteriors
from .base import Method, Rule, as_it_is, sequential
from .embedding import EMBEDDING
from .graph import is_torchs_own
from .moments import AFFINE
from .network import walk


def _draw(x: Activation) -> Tensor:
    return x.sample() if isinstance(x, Gaussian) else x


def _sampled(moments: Rule, method: Method, module: nn.Module, *x: Any) -> Tensor:
    """A draw from the layer's output given its input (Eq. 19).

    A convolution draws each position by itself: the marginals are right, the correlation of positions through the shared kernel is lost.
    """
    return _draw(moments(method, module, *[_draw(a) for a in x]))


def _other(method: Method, module: nn.Module, *x: Any, **options: Any) -> Any:
    """Any other module on a draw of its input: as it is or, where it has random weights inside, by its graph, which draws them."""
    x = tuple([_draw(a) for a in x])
    if is_torchs_own(module) or next(posteriors(module), None) is None:
        return as_it_is(method, module, *x, **options)
    return walk(method, module, x, options)


LOCAL_REPARAM = Method(
    "LOCAL_REPARAM",
    {
        nn.Sequential: sequential,
        nn.ModuleList: sequential,
        **{kind: partial(_sampled, rule) for kind, rule in {**AFFINE, **EMBEDDING}.items()},
        nn.Module: _other,
    },
    samples=True,
    key="local_reparam",
)

"""All methods side by side.

They share the moments of linear layers, smooth activations, averages, normalisation, attention and
recurrence, and differ in what a piecewise-linear activation and a maximum do to a mean and a variance.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

from torch import Tensor, nn

from .. import moments
from ..gaussian import Activation, Gaussian
from ..graph.maxima import anchored_larger, anchored_largest, maxima_by
from ..graph.walk import NETWORKS, walk
from ..posterior import Layer, fan_in, posteriors
from .base import Method, NoRuleError, Value
from .facts import Rule, Table, rule
from .keys import is_torchs_own
from .noise import of_weights
from .rules.activations import ACTIVATIONS, anchored, gated, piecewise_by, rectified
from .rules.attention import ATTENTION
from .rules.embedding import EMBEDDING, embedding, embedding_bag
from .rules.linear import LINEAR, affine
from .rules.normalisation import NORMALISATION
from .rules.pooling import POOLING, anchored_pool, clark_pool, max_pools_by, winner_pool
from .rules.recurrent import RECURRENT
from .rules.shape import SHAPE


@rule("one by one", container=True)
def sequential(method: Method, module: nn.Sequential | nn.ModuleList, x: Activation) -> Activation:
    for child in module:
        x = method(child, x)
    return x


CONTAINERS: Table = {nn.Sequential: sequential, nn.ModuleList: sequential}
LAYERS: Table = LINEAR | EMBEDDING | ACTIVATIONS | POOLING | SHAPE | NORMALISATION | ATTENTION | RECURRENT
MOMENTS: Table = CONTAINERS | LAYERS | NETWORKS
"""Rules for mean and variance that all moment methods share. Start your own method from this table."""

GATED: Table = {
    **piecewise_by(gated),
    **max_pools_by(winner_pool),
    **maxima_by(moments.winner, moments.strongest, ("approximate", 10), ("approximate", 10)),
}
EXACT: Table = {
    **piecewise_by(rectified),
    **max_pools_by(clark_pool),
    **maxima_by(moments.maximum, moments.largest, ("exact", 11), ("approximate", 11)),
}
ANCHORED: Table = {
    **piecewise_by(anchored),
    **max_pools_by(anchored_pool),
    **maxima_by(anchored_larger, anchored_largest, ("approximate", 9), ("approximate", 9)),
}

VBP = Method("VBP", MOMENTS | GATED, slope=math.inf, key="vbp")
"""Variance Back-Propagation (Haussmann, Hamprecht and Kandemir 2019): a ReLU is a step gate of its mean."""

DVI = Method("DVI", MOMENTS | EXACT, key="dvi")
"""Deterministic variational inference (Wu et al. 2019), diagonal: a ReLU gives rectified-normal moments."""

CVBP = Method("CVBP", MOMENTS | ANCHORED, slope=math.inf, key="cvbp")
"""Consistent VBP: VBP's means, which are the plain network's, with variances that include what its gates
leave out.

VBP gives a closed unit no variance, so training without a penalty on the gates returns its weights to the
prior. Here the variance of a closed unit still depends on its weights: it is the mean squared deviation of
the true activation from the gate's value.
"""


def vbp(slope: float = math.inf) -> Method:
    """VBP with gates Bernoulli(sigmoid(slope·E[f])) (Eq. 6).

    In the limit of an infinite slope, `VBP`, a unit passes both mean and variance or neither. A maximum uses
    the limit of its gate for every slope (Eq. 10).

    >>> vp.vbp(slope=100.0)(nn.ReLU(), vp.Gaussian(torch.zeros(1), torch.ones(1))).var
    tensor([0.5000])
    """
    if not slope > 0:
        raise ValueError(f"vbp: slope must be positive, got {slope}.")
    return VBP if math.isinf(slope) else replace(VBP, name=f"VBP(slope={slope:g})", slope=slope)


# ------------------------------------------------------------------------------ probabilistic backpropagation


def scale(layer: Layer) -> float:
    """1/√n, where n is the number of terms that an output of the layer sums, its bias included."""
    return 1 / math.sqrt(fan_in(layer) + (layer.bias is not None))


@rule("exact", 47, noise=of_weights)
def scaled(method: Method, layer: Layer, x: Activation) -> Activation:
    """(W x + b)/√n (Eq. 47): the bias is one more weight, with a constant input of 1."""
    return affine.apply(method, layer, x) * scale(layer)


PBP = Method("PBP", {**DVI.rules, **dict.fromkeys(LINEAR, scaled)}, scaled=True, key="pbp")
"""Forward pass of probabilistic backpropagation (Hernández-Lobato and Adams 2015): DVI with sums over √n."""

VRELU = replace(VBP, name="VRELU", key="vrelu")
"""Forward pass of V-ReLU-Net (Kandemir 2018): its gates follow the means of their sums, as those of VBP do.

`vp.CoordinateAscent` trains it.
"""


# --------------------------------------------------------------------------- sampled and deterministic passes


def _sampled(rule: Rule, method: Method, module: nn.Module, *x: Activation) -> Tensor:
    """A sample of the layer's output given its input (Eq. 15).

    A convolution samples each position separately: the marginals are right, the correlation of positions is
    lost.
    """
    return _sample(rule.apply(method, module, *[_sample(a) for a in x]))


def _sample(x: Activation) -> Tensor:
    return x.sample() if isinstance(x, Gaussian) else x


@rule("sampled", container=True)
def on_sample(method: Method, module: nn.Module, *x: Value, **options: Value) -> Value:
    """Any other module on a sample of its input; one that contains random weights is run by its graph, which
    samples them."""
    x = tuple([_sample(a) for a in x])
    if is_torchs_own(module) or next(posteriors(module), None) is None:
        return at_means.apply(method, module, *x, **options)
    return walk(method, module, x, options)


@rule("plain")
def at_means(method: Method, module: nn.Module, *x: Value, **options: Value) -> Tensor:
    """A module on deterministic inputs, with every weight at its mean."""
    kind = type(module).__name__
    if any(isinstance(a, Gaussian) for a in x):
        raise NoRuleError(
            f"{method.name} carries no variance: give {kind} a Tensor, or a sample such as x.sample()."
        )
    if method.samples and next(posteriors(module), None) is not None:
        raise NoRuleError(
            f"{method.name} has no rule for {kind}, which contains random weights; "
            f"add one with `method | {{{kind}: rule}}`."
        )
    return module(*x, **options)


LOCAL_REPARAM = Method(
    "LOCAL_REPARAM",
    {
        **CONTAINERS,
        **dict.fromkeys(LINEAR, Rule(partial(_sampled, affine), "sampled", 15)),
        nn.Embedding: Rule(partial(_sampled, embedding), "sampled", 15),
        nn.EmbeddingBag: Rule(partial(_sampled, embedding_bag), "sampled", 15),
        nn.Module: on_sample,
    },
    samples=True,
    key="local_reparam",
)
"""Local reparametrisation (Kingma et al. 2015), the paper's VarOut.

Each pre-activation of each data point is sampled once.
"""

DETERMINISTIC = Method("DETERMINISTIC", {nn.Module: at_means}, deterministic=True, key="deterministic")
"""The plain network, with every weight at its mean."""

METHODS = {str(method.key): method for method in (CVBP, VBP, DVI, LOCAL_REPARAM, DETERMINISTIC, PBP, VRELU)}
"""The library's methods by the names used in estimators, the command line and experiments."""

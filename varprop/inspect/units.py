"""The units of a network on data: which gates are closed, and which weights have gone back to the prior."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from .. import moments
from ..gaussian import Gaussian
from ..graph.steps import tensors_in
from ..methods.base import Call, Method, Value
from ..objectives import ELBO, split
from ..posterior import Layer, is_random, posteriors
from ..priors import Prior

BATCH = 1000
"""Rows of a pass."""
NEARLY_ALL = 0.95
"""The share of the rows on which an idle unit is closed."""
AT_PRIOR = 0.5
"""The ratio of posterior to prior variance from which weights count as forgotten."""


@dataclass(frozen=True)
class Units:
    """The state of the units of one layer after training."""

    layer: str
    idle: float
    """Share of the units that are closed on nearly all data, with weight variances as in the prior."""


class Seen:
    """What a pass over the data reveals about the gates, the layers before them, and the network's depth."""

    def __init__(self, elbo: ELBO, method: Method, x: Value) -> None:
        self.gate_kl, self.one_hidden_layer = 0.0, True
        self.closed: dict[nn.Module, Tensor] = {}
        rows = len(tensors_in(x)[0])
        for part in split(x, BATCH):
            self.share, self.linear, self.nonlinear = len(tensors_in(part)[0]) / rows, 0, 0
            self.layer: nn.Module | None = None
            method.watching(self.watch).at(elbo.net, part)
        names = {module: name for name, module in elbo.net.named_modules()}
        self.layers = tuple(
            Units(names[layer], ((share >= NEARLY_ALL) & at_prior(elbo.prior, layer)).double().mean().item())
            for layer, share in self.closed.items()
        )

    def watch(self, call: Call) -> Value:
        if call.rule.container or call.rule.layer is not None:  # the calls inside tell more
            return call.output
        if isinstance(call.operation, nn.Module) and is_random(call.operation):
            self.layer = call.operation
        if call.args and isinstance(call.x, Gaussian):
            self._count(call)
            if call.rule.knots is not None:
                self._note_gates(call.x, call.rule.knots(call.module))
        elif isinstance(call.output, Gaussian):
            self.one_hidden_layer &= isinstance(call.operation, nn.Linear) and len(call.x.shape) == 2
        return call.output

    def _count(self, call: Call) -> None:
        """One elementwise activation, then one linear layer keep the entries independent up to the output."""
        gain = call.gain
        moves = isinstance(call.operation, nn.Flatten) or isinstance(gain, float)
        if isinstance(call.operation, nn.Linear) and len(call.x.shape) == 2:
            self.linear += 1
        elif isinstance(gain, Tensor):
            self.nonlinear += 1
            self.one_hidden_layer &= self.linear == 0
        elif not moves:
            self.one_hidden_layer = False
        self.one_hidden_layer &= self.linear <= 1 and self.nonlinear <= 1

    def _note_gates(self, x: Gaussian, knots: Sequence[float]) -> None:
        tails = sum(moments.tail(x, knot).mean.sum().item() for knot in knots)
        self.gate_kl += self.share * tails / len(x.mean)
        closed = None if self.layer is None else _by_unit(self.layer, (x.mean <= knots[0]).double())
        if self.layer is not None and closed is not None:
            self.closed[self.layer] = self.closed.get(self.layer, 0.0) + self.share * closed.mean(0)


def _by_unit(layer: Layer, t: Tensor) -> Tensor | None:
    """What comes out of a layer, with one column for each of its units or channels.

    None if other operations have mixed them, such as nn.Flatten after a convolution, or if the layer is
    neither linear nor a convolution.
    """
    if isinstance(layer, nn.Linear):
        axis, units, dims = -1, layer.out_features, t.dim()
    elif isinstance(layer, nn.modules.conv._ConvNd):
        axis, units, dims = 1, layer.out_channels, layer.weight.dim()
    else:
        return None
    return t.movedim(axis, -1).flatten(0, -2) if (t.dim(), t.shape[axis]) == (dims, units) else None


@torch.enable_grad()
def at_prior(prior: Prior, layer: nn.Module) -> Tensor:
    """Whether the variances of the weights into each unit are those that the prior alone would give.

    For a normal prior s²/σ² = 1 + 2 dKL/d log s²; for any prior the derivative vanishes if nothing else
    affects the variance.
    """
    q = next(q for _, q in posteriors(layer))
    logvar = q.logvar.detach().expand_as(q.mean).clone().requires_grad_()
    (slope,) = torch.autograd.grad(prior.kl(replace(q, mean=q.mean.detach(), logvar=logvar)), logvar)
    ratio = 1 + 2 * slope
    axis = 1 if getattr(layer, "transposed", False) else 0
    return ratio.movedim(axis, 0).flatten(1).mean(1) >= AT_PRIOR

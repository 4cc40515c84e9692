"""What trained networks predict for images: by their own moments, by drawing from q(w), by a temperature."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.func import functional_call

import varprop as vp
from varprop.predictive import ClassPredictive

from .images import ImageSet


@torch.no_grad()
def scale(net: nn.Sequential, x: Tensor, y: Tensor) -> float:
    """Divide the outputs by the temperature that suits the given images best (Guo et al. 2017); return it."""
    f = torch.cat([net(part) for part in x.split(500)])
    grid = torch.logspace(-1, 1, 401).tolist()
    temperature = min(grid, key=lambda t: nn.functional.cross_entropy(f / t, y).item())
    for parameter in net[-1].parameters():
        parameter.div_(temperature)
    return temperature


def predict(members: Sequence[vp.ELBO], x: Tensor, images: ImageSet, passes: int) -> ClassPredictive:
    """The equal mixture of the members' predictions, for images given as bytes."""
    samples = passes if members[0].method.samples else None
    torch.manual_seed(0)
    parts = []
    for part in x.split(500):
        standardised = images.standardised(part)
        parts.append(vp.predictive.mixture([elbo.predict(standardised, samples) for elbo in members]))
    return cast(ClassPredictive, vp.predictive.concatenate(parts))


@torch.no_grad()
def drawn(members: Sequence[vp.ELBO], x: Tensor, images: ImageSet, draws: int) -> ClassPredictive:
    """The average of networks drawn from the posteriors, the Monte Carlo estimate of what they predict."""
    softmax = vp.likelihoods.Categorical()
    outputs = outputs_drawn(members, x, images, draws)
    return cast(ClassPredictive, vp.predictive.mixture([softmax.predictive(f) for f in outputs]))


@torch.no_grad()
def outputs_drawn(members: Sequence[vp.ELBO], x: Tensor, images: ImageSet, draws: int) -> Iterator[Tensor]:
    """The outputs of networks drawn from the members' posteriors in turn."""
    generator = torch.Generator().manual_seed(0)
    for k in range(draws):
        net = members[k % len(members)].net
        weights = {name: _draw(q.mean, q.std, generator) for name, q in vp.posteriors(net)}
        yield torch.cat(
            [functional_call(net, weights, (images.standardised(part),)) for part in x.split(500)]
        )


def _draw(mean: Tensor, std: Tensor, generator: torch.Generator) -> Tensor:
    return mean + std * torch.randn(mean.shape, generator=generator)

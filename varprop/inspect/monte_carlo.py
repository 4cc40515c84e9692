"""Outputs of a trained network by Monte Carlo: passes of a sampling method, or networks drawn from q(w)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import vmap

from ..gaussian import mean_of
from ..graph.steps import tensors_in
from ..methods.base import Value, arguments, chosen
from ..objectives import ELBO
from ..posterior import draw
from ..substitution import substituted

TOGETHER = 50
"""Networks that run at once."""


def passes(elbo: ELBO, samples: int, seed: int) -> Callable[[Value], Tensor]:
    """Passes of a sampling method."""

    def outputs(x: Value) -> Tensor:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return torch.stack([mean_of(elbo.propagated(x)) for _ in range(samples)])

    return outputs


def networks(elbo: ELBO, samples: int, seed: int) -> Callable[[Value], Tensor]:
    """Plain passes with weights sampled from the posterior, the same samples for every part of the data."""

    parameters = {name: p for name, p in elbo.net.named_parameters() if "logvar" in name}
    no_variance = {name: torch.full_like(p, -torch.inf) for name, p in parameters.items()}

    def run(weights: dict[str, Tensor], x: Value) -> Tensor:
        args, options = arguments(x)
        if elbo.method.scaled:
            # The plain network does not scale its sums; the method does, on weights without variance.
            f = substituted(elbo.net, weights | no_variance, elbo.method, *args, **options)
        else:
            f = substituted(elbo.net, weights, nn.Module.__call__, *args, **options)
        return mean_of(chosen(f, elbo.output))

    # torch cannot map its recurrent layers over weights.
    mapped = not any(isinstance(layer, nn.RNNBase | nn.RNNCellBase) for layer in elbo.net.modules())

    def run_all(weights: dict[str, Tensor], n: int, x: Value) -> Tensor:
        if mapped:
            return vmap(run, in_dims=(0, None))(weights, x)
        return torch.stack([run({name: w[i] for name, w in weights.items()}, x) for i in range(n)])

    def outputs(x: Value) -> Tensor:
        generator = torch.Generator(tensors_in(x)[0].device).manual_seed(seed)
        chunks = (min(TOGETHER, samples - i) for i in range(0, samples, TOGETHER))
        return torch.cat([run_all(draw(elbo.net, n, generator), n, x) for n in chunks])

    return outputs

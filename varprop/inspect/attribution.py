"""Where uncertainty comes from: each layer's share of the output variance, and signal-to-noise ratios."""

from __future__ import annotations

from copy import deepcopy

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..gaussian import Gaussian
from ..graph.steps import tensors_in
from ..horseshoe import Scales
from ..methods import Method
from ..methods.base import Value
from ..objectives import ELBO
from ..posterior import is_random, posteriors


@torch.no_grad()
def variance_shares(elbo: ELBO, x: Tensor) -> dict[str, float]:
    """For each random layer, the output variance if only this layer is random, relative to the full variance.

    The shares need not sum to one, because the variances of several layers multiply.

    >>> net = vp.variational(nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1)))
    >>> elbo = vp.ELBO(net, vp.VBP, vp.likelihoods.Normal(), vp.priors.Normal(), n_data=100)
    >>> list(variance_shares(elbo, torch.randn(16, 2)))
    ['0', '2']
    """
    inputs: Value = (x,), {}
    total = output_variance(elbo.method, elbo.net, inputs)
    layers = _random_layers(elbo.net)
    alone = {name: _deterministic(elbo.net, {*layers} - {name}) for name in layers}
    shares = {name: output_variance(elbo.method, net, inputs) for name, net in alone.items()}
    return {name: var / total for name, var in shares.items()} if total > 0 else {}


@torch.no_grad()
def variance_losses(method: Method, net: nn.Module, *x: Value, **options: Value) -> dict[str, float]:
    """For each random layer, the share of the output variance that is lost if the layer is deterministic.

    >>> net = vp.variational(nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1)))
    >>> list(variance_losses(vp.VBP, net, torch.randn(16, 2)))
    ['0', '2']
    """
    inputs = x, options
    total = output_variance(method, net, inputs)
    left = {
        name: output_variance(method, _deterministic(net, {name}), inputs) for name in _random_layers(net)
    }
    return {name: 1 - var / total for name, var in left.items()} if total > 0 else {}


def _random_layers(net: nn.Module) -> list[str]:
    return [name for name, layer in net.named_modules() if is_random(layer)]


def _deterministic(net: nn.Module, layers: set[str]) -> nn.Module:
    """A copy of the network in which the weights of the named layers have no variance."""
    net = deepcopy(net)
    for name, layer in net.named_modules():
        owner = name.rpartition(".")[0] if isinstance(layer, Scales) else name
        if owner in layers:
            for parameter_name, parameter in layer.named_parameters(recurse=False):
                if "logvar" in parameter_name:
                    parameter.fill_(-torch.inf)
    return net


def output_variance(method: Method, net: nn.Module, inputs: Value, samples: int = 64) -> float:
    """Variance of the output, averaged over data and outputs; by Monte Carlo if the method samples."""
    x, options = inputs
    if method.samples:
        with torch.random.fork_rng([]):
            torch.manual_seed(0)
            drawn = [
                torch.cat([t.flatten() for t in tensors_in(method(net, *x, **options))])
                for _ in range(samples)
            ]
        return float(torch.stack(drawn).var(0).mean())
    leaves = pytree.tree_leaves(method(net, *x, **options), is_leaf=lambda a: isinstance(a, Gaussian))
    variances = [leaf.var.flatten() for leaf in leaves if isinstance(leaf, Gaussian)]
    return float(torch.cat(variances).mean()) if variances else 0.0


@torch.no_grad()
def signal_to_noise(net: nn.Module) -> dict[str, Tensor]:
    """|mean| / standard deviation of every random weight, by the name of the tensor.

    >>> net = vp.variational(nn.Sequential(nn.Linear(2, 1)), logvar=-4.0)
    >>> signal_to_noise(net)["0.weight"].shape
    torch.Size([1, 2])
    """
    return {name: q.mean.abs() * torch.exp(-q.logvar / 2) for name, q in posteriors(net)}


@torch.no_grad()
def units_in_use(net: nn.Module) -> dict[str, tuple[int, int]]:
    """For each random linear layer but the first: how many of the units before it are in use, of how many.

    A unit is in use if one of the weights out of it has a mean beyond its standard deviation. The prior has
    switched off the others.

    >>> net = vp.variational(nn.Sequential(nn.Linear(1, 9), nn.ReLU(), nn.Linear(9, 1)), logvar=-20.0)
    >>> units_in_use(net)
    {'2': (9, 9)}
    """
    layers = {name: layer for name, layer in net.named_modules() if isinstance(layer, nn.Linear)}
    ratios = signal_to_noise(net)
    sure = {name: (ratios[f"{name}.weight"] > 1).any(0) for name in layers if f"{name}.weight" in ratios}
    return {name: (int(used.sum()), len(used)) for name, used in list(sure.items())[1:]}

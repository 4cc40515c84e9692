"""Where uncertainty comes from: each layer's part in the variance of the output, and how sure its weights are."""

from __future__ import annotations

from copy import deepcopy

import torch
from torch import Tensor, nn

from ..gaussian import Activation, Gaussian, mean_of
from ..methods import Method
from ..objectives import ELBO
from ..posterior import is_random, posteriors


@torch.no_grad()
def variance_shares(elbo: ELBO, x: Tensor) -> dict[str, float]:
    """For each random layer, the variance of the output when no other layer is random, over the variance when all are.

    The shares need not sum to one: variances of several layers multiply, and a gate lets them through in part.

    >>> net = vp.variational(nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1)))
    >>> elbo = vp.ELBO(net, vp.VBP, vp.likelihoods.Normal(), vp.priors.Normal(), n_data=100)
    >>> list(variance_shares(elbo, torch.randn(16, 2)))
    ['0', '2']
    """
    total = _variance(elbo.method, elbo.net, x)
    shares = {
        name: _variance(elbo.method, _certain(elbo.net, all_but=name), x) for name in _random_layers(elbo.net)
    }
    return {name: var / total for name, var in shares.items()} if total > 0 else {}


@torch.no_grad()
def variance_losses(method: Method, net: nn.Module, x: Activation) -> dict[str, float]:
    """For each random layer, the part of the output's variance that goes when the layer's weights are certain.

    >>> net = vp.variational(nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1)))
    >>> list(variance_losses(vp.VBP, net, torch.randn(16, 2)))
    ['0', '2']
    """
    total = _variance(method, net, x)
    left = {name: _variance(method, _certain(net, only=name), x) for name in _random_layers(net)}
    return {name: 1 - var / total for name, var in left.items()} if total > 0 else {}


def _random_layers(net: nn.Module) -> list[str]:
    return [name for name, layer in net.named_modules() if is_random(layer)]


def _certain(net: nn.Module, only: str | None = None, all_but: str | None = None) -> nn.Module:
    """A copy of the network in which the weights of one layer, or of all others, have no variance."""
    net = deepcopy(net)
    for name, layer in net.named_modules():
        if is_random(layer) and name != all_but and only in (None, name):
            for parameter_name, parameter in layer.named_parameters():
                if "logvar" in parameter_name:
                    parameter.fill_(-torch.inf)
    return net


def _variance(method: Method, net: nn.Module, x: Activation, samples: int = 64) -> float:
    """Variance of the output, averaged over data and outputs; over passes, where the method draws them."""
    if method.samples:
        with torch.random.fork_rng([]):
            torch.manual_seed(0)
            f = torch.stack([mean_of(method(net, x)) for _ in range(samples)])
        return float(f.var(0).mean())
    output = method(net, x)
    return float(output.var.mean()) if isinstance(output, Gaussian) else 0.0


@torch.no_grad()
def signal_to_noise(net: nn.Module) -> dict[str, Tensor]:
    """|mean| / standard deviation of every random weight, by the name of its tensor.

    >>> net = vp.variational(nn.Sequential(nn.Linear(2, 1)), logvar=-4.0)
    >>> signal_to_noise(net)["0.weight"].shape
    torch.Size([1, 2])
    """
    return {name: q.mean.abs() * torch.exp(-q.logvar / 2) for name, q in posteriors(net)}

"""The variance of a perceptron's outputs with the correlations between all of its weights."""

from __future__ import annotations

from itertools import takewhile

import torch
from torch import Tensor, nn

from .gaussian import Activation, Gaussian, mean_of
from .methods import DVI
from .moments import RELU, slope

RANK = 200


class Laplace(nn.Module):
    """The linearised Laplace approximation around the means of a trained perceptron (Eq. 63).

    A posterior without correlations is as sure between two groups of rows as within them (Foong et al. 2019).
    Here the output is linear in the weights around their means, with the Jacobian J(x), so that the Gaussian
    posterior is known in closed form (MacKay 1992; Immer et al. 2021):

        Var f(x) = J(x) (S⁻² + Σᵢ J(xᵢ)'J(xᵢ) / σᵢ²)⁻¹ J(x)'

    where S are the prior's standard deviations and σᵢ² the noise at a training row. It replaces the variance
    of the first outputs of a network, those that predict numbers; their mean stays.

    >>> net = nn.Sequential(nn.Linear(1, 20), nn.ReLU(), nn.Linear(20, 1))
    >>> x = torch.cat([torch.linspace(-2, -1, 50), torch.linspace(1, 2, 50)]).view(-1, 1)
    >>> laplace = Laplace.fit(net, 8.0, x, torch.full((100, 1), 0.01))
    >>> group, gap = laplace.variance(net, torch.tensor([[1.5], [0.0]]))
    >>> bool(gap > 3 * group)
    True
    """

    scale: Tensor
    """S: a prior standard deviation for each weight and bias."""
    directions: Tensor
    """Unit vectors in the space of scaled weights, (outputs, weights, rank)."""
    shrinkage: Tensor
    """By how much the standard deviation in each direction has shrunk, (outputs, rank)."""

    def __init__(self, outputs: int, weights: int, rank: int) -> None:
        super().__init__()
        self.register_buffer("scale", torch.empty(weights))
        self.register_buffer("directions", torch.empty(outputs, weights, rank))
        self.register_buffer("shrinkage", torch.empty(outputs, rank))

    @classmethod
    @torch.no_grad()
    def fit(
        cls,
        net: nn.Sequential,
        gain: float,
        x: Tensor,
        noise: Tensor,
        weight: Tensor | None = None,
        rank: int = RANK,
    ) -> Laplace:
        """From training rows.

        :param gain: the weights into a unit of n inputs have the prior variance gain/n, biases gain.
        :param noise: the variance of each row's target, (rows, outputs).
        :param weight: how often each row counts.
        :param rank: directions in the space of the weights in which the data narrow the prior, the most
            important ones.
        """
        rows, outputs = noise.shape
        scale = _prior_std(net, gain)
        laplace = cls(outputs, len(scale), min(rows, len(scale), rank)).to(x)
        laplace.scale.copy_(scale)
        precision = 1 / noise if weight is None else weight.unsqueeze(1) / noise
        for k, jacobian in enumerate(_jacobian(net, x, outputs).unbind(1)):
            scaled = jacobian * laplace.scale * precision[:, k : k + 1].sqrt()
            laplace.directions[k], narrowing = _principal(scaled, laplace.shrinkage.shape[1])
            laplace.shrinkage[k] = 1 - (1 + narrowing).rsqrt()
        return laplace

    @torch.no_grad()
    def with_prior(self, factor: float) -> Laplace:
        """What `fit` would have found with so many times the prior's variances."""
        narrowing = (1 - self.shrinkage).pow(-2) - 1
        laplace = Laplace(*self.directions.shape)
        laplace.scale = self.scale * factor**0.5
        laplace.directions = self.directions
        laplace.shrinkage = 1 - (1 + factor * narrowing).rsqrt()
        return laplace

    def variance(self, net: nn.Sequential, x: Tensor) -> Tensor:
        """Of the outputs, (rows, outputs)."""
        a = _jacobian(net, x, len(self.directions)) * self.scale
        along = torch.einsum("nop,opr->nor", a, self.directions) * self.shrinkage
        return (a - torch.einsum("nor,opr->nop", along, self.directions)).square().sum(2)

    def forward(self, net: nn.Sequential, x: Tensor, f: Gaussian) -> Gaussian:
        """The network's output f at x with this variance."""
        outputs = len(self.directions)
        return Gaussian(f.mean, torch.cat([self.variance(net, x), f.var[:, outputs:]], 1))


def _prior_std(net: nn.Sequential, gain: float) -> Tensor:
    parts = []
    for layer in _linears(net):
        std = gain**0.5 * torch.ones_like(layer.bias)
        parts += [(std / layer.in_features**0.5).repeat_interleave(layer.in_features), std]
    return torch.cat(parts)


def _jacobian(net: nn.Sequential, x: Tensor, outputs: int) -> Tensor:
    """Derivatives of the first outputs' means by those of all weights and biases, (rows, outputs, weights).

    The slope of a ReLU's mean is the probability that it is active.
    """
    for layer in takewhile(lambda layer: not isinstance(layer, nn.Linear), net):
        x = layer(x)
    linears, inputs, active = _linears(net), [x], []
    f: Activation = x
    for layer in linears[:-1]:
        before = DVI(layer, f)
        f = DVI(nn.ReLU(), before)
        active.append(slope(before) if isinstance(before, Gaussian) else RELU.slope(before))
        inputs.append(mean_of(f))
    slopes = torch.eye(linears[-1].out_features).to(x)[:outputs].expand(x.shape[0], -1, -1)
    parts: list[Tensor] = []
    for k in reversed(range(len(linears))):
        by_weights = (slopes.unsqueeze(3) * inputs[k].unsqueeze(1).unsqueeze(2)).flatten(2)
        parts = [by_weights, slopes, *parts]
        if k:
            slopes = (slopes @ linears[k].weight) * active[k - 1].unsqueeze(1)
    return torch.cat(parts, 2)


def _linears(net: nn.Sequential) -> list[nn.Linear]:
    return [layer for layer in net if isinstance(layer, nn.Linear)]


def _principal(a: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The right singular vectors of a matrix with the largest singular values, and the squares of these."""
    if len(a) < a.shape[1]:
        squares, left = torch.linalg.eigh(a @ a.mT)
        squares, left = squares[-rank:], left[:, -rank:]
        # Rows that repeat others add no direction, only rounding errors.
        found = squares > len(a) * torch.finfo(a.dtype).eps * squares[-1]
        return a.mT @ left * torch.where(found, squares.rsqrt(), 0.0), torch.where(found, squares, 0.0)
    squares, right = torch.linalg.eigh(a.mT @ a)
    return right[:, -rank:], squares[-rank:].clamp(min=0)

"""Priors over weights. A prior has one method, kl(q), summed over the entries of one weight tensor."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from .posterior import Posterior


class Prior(ABC):
    """A prior over weights: the divergence of a posterior from it, in closed form."""

    @abstractmethod
    def kl(self, q: Posterior) -> Tensor:
        """KL(q || p), summed over the tensor."""


@dataclass(frozen=True)
class Normal(Prior):
    """w ~ N(0, 1/precision) (Eq. 14).

    >>> from varprop.posterior import Posterior
    >>> Normal(precision=10.0).kl(Posterior(torch.tensor([0.3]), torch.tensor([-2.0])))
    tensor(0.4754)
    """

    precision: float = 1.0

    def __post_init__(self) -> None:
        _check_positive("Normal", precision=self.precision)

    def kl(self, q: Posterior) -> Tensor:
        return normal_kl(q, 1 / self.precision)


@dataclass(frozen=True)
class FanIn(Prior):
    """w ~ N(0, gain/n) for weights into units of n inputs, N(0, gain) for biases (Eq. 14). Units are dimension 0 of a weight.

    Under it the outputs of a layer are of the size of its inputs, however wide it is: a weight of no use can return to its prior.

    >>> from varprop.posterior import Posterior
    >>> FanIn(gain=2.0).kl(Posterior(torch.zeros(3, 8), torch.full((3, 8), 0.25).log()))
    tensor(0.)
    """

    gain: float = 2.0

    def __post_init__(self) -> None:
        _check_positive("FanIn", gain=self.gain)

    def kl(self, q: Posterior) -> Tensor:
        inputs = q.mean[0].numel() if q.mean.dim() > 1 else 1
        return normal_kl(q, self.gain / inputs)


@dataclass(frozen=True)
class Centred(Prior):
    """w ~ N(w₀, 1/precision), where w₀ is what `centred(net)` kept, a pretrained network's weights (after Krishnan et al. 2020; Eq. 45).

    >>> net = vp.centred(vp.variational(nn.Linear(2, 1), logvar=0.0))
    >>> ((_, q),) = vp.posteriors(net)
    >>> bool(Centred(precision=1.0).kl(q) < 1e-4)
    True
    """

    precision: float = 1.0

    def __post_init__(self) -> None:
        _check_positive("Centred", precision=self.precision)

    def kl(self, q: Posterior) -> Tensor:
        if q.centre is None:
            raise ValueError(
                "Centred: the posterior has no centre; keep the pretrained weights as it with centred(net)."
            )
        return normal_kl(replace(q, mean=q.mean - q.centre), 1 / self.precision)


@dataclass(frozen=True)
class LogUniform(Prior):
    """p(log|w|) constant, for sparsity: Molchanov et al.'s (2017) fit of the divergence, within 0.0094 nats of it (Eq. 15).

    The prior is improper, so an ELBO with it bounds nothing and has no absolute meaning.
    """

    def kl(self, q: Posterior) -> Tensor:
        log_alpha = (q.logvar - torch.log(q.mean.square() + 1e-8)).clamp(-8, 8)
        return (0.63576 * torch.sigmoid(-1.87320 - 1.48695 * log_alpha) + 0.5 * F.softplus(-log_alpha)).sum()


@dataclass(frozen=True)
class EmpiricalBayes(Prior):
    """w ~ N(0, s) with one s for each weight tensor, always at its best value (Eq. 16).

    :param hyperprior: (a, b) puts s ~ InverseGamma(a, b), as DVI does with (1, 10); its -log p(s) then is part of the divergence.
    """

    hyperprior: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        if self.hyperprior is not None:
            _check_positive("EmpiricalBayes", a=self.hyperprior[0], b=self.hyperprior[1])

    def kl(self, q: Posterior) -> Tensor:
        total = (q.mean.square() + q.var).sum()
        n = q.mean.numel()
        if self.hyperprior is None:
            return 0.5 * (n * torch.log(total / n) - q.logvar.expand_as(q.mean).sum())
        a, b = self.hyperprior
        s = (total + 2 * b) / (n + 2 * a + 2)
        return normal_kl(q, s) - a * math.log(b) + math.lgamma(a) + (a + 1) * torch.log(s) + b / s


@dataclass(frozen=True)
class Horseshoe(Prior):
    """w = w̃ z s with w̃ ~ N(0, 1), z ~ C⁺(0, 1) for each group and s ~ C⁺(0, scale) for the layer (Louizos et al. 2017; Eq. 17).

    It needs the group scales of `variational(net, posterior="horseshoe")`. Random biases, which have none, are N(0, 1).

    :param scale: the smaller, the sparser; 1 for regression, far below 1 for compression.
    """

    scale: float = 1.0

    def __post_init__(self) -> None:
        _check_positive("Horseshoe", scale=self.scale)

    def kl(self, q: Posterior) -> Tensor:
        if q.scales is None:
            if q.mean.dim() > 1:
                raise ValueError(
                    'Horseshoe: the posterior has no group scales; make it with variational(net, posterior="horseshoe").'
                )
            return normal_kl(q, 1.0)
        kl = normal_kl(q, 1.0)
        for mean, logvar, scale in (
            (q.scales.group_mean, q.scales.group_logvar, 1.0),
            (q.scales.layer_mean, q.scales.layer_logvar, self.scale),
        ):
            kl = kl + lognormal_gamma_kl(mean[0], logvar[0], scale**2).sum()
            # b ~ InvGamma(1/2, 1) means 1/b ~ Gamma(1/2, 1), and log(1/b) has the mean of log b with its sign turned.
            kl = kl + lognormal_gamma_kl(-mean[1], logvar[1], 1.0).sum()
        return kl


def normal_kl(q: Posterior, var: Tensor | float) -> Tensor:
    """KL(q || N(0, var)), summed (Eq. 14)."""
    logvar = q.logvar.expand_as(q.mean)
    log_var = torch.log(var) if isinstance(var, Tensor) else math.log(var)
    return 0.5 * ((q.mean.square() + logvar.exp()) / var - logvar - 1 + log_var).sum()


def lognormal_gamma_kl(mean: Tensor, logvar: Tensor, scale: float) -> Tensor:
    """KL(LogNormal(mean, exp(logvar)) || Gamma(1/2, scale)) (Eq. 17)."""
    return (
        0.5 * (math.log(scale) - mean - logvar - math.log(2) - 1) + torch.exp(mean + logvar.exp() / 2) / scale
    )


def _check_positive(prior: str, **values: float) -> None:
    for name, value in values.items():
        if not 0 < value < math.inf:
            raise ValueError(f"{prior}: {name} must be positive and finite, got {value}.")

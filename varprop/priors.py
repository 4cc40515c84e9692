"""Priors over weights. A prior has one method, kl(q), the divergence of one weight tensor's posterior."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from numbers import Real

import torch
from torch import Tensor
from torch.nn import functional as F

from .posterior import Posterior, scale_posteriors


class Prior(ABC):
    """A prior over weights, defined by the divergence of a posterior from it."""

    @abstractmethod
    def kl(self, q: Posterior) -> Tensor:
        """KL(q || p), summed over the entries of the tensor."""

    def total(self, qs: Sequence[Posterior]) -> Tensor:
        """The divergence of several tensors, summed."""
        kls = [self.kl(q) for q in qs]
        return sum(kls[1:], kls[0])


@dataclass(frozen=True)
class Normal(Prior):
    """w ~ N(0, 1/precision) (Eq. 32).

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
    """w ~ N(0, gain/n), where n is the fan-in: how many inputs an output of the layer sums over (Eq. 32).

    With weights from this prior and gain 1, the outputs of a layer are as large as its inputs, however wide
    it is: weights that the data say nothing about can return to their prior. Biases and embeddings: n = 1.

    `posteriors(net)` fills in the fan-in from each layer (see `posterior.fan_in`). A `Posterior` made by hand
    without one counts all dimensions of the tensor but the first, torch's layout for the outputs.

    After `centred(net)` the prior is centred on the weights stored there. Members of an ensemble that are
    anchored to their own draws from the prior differ where the data say nothing (Pearce et al. 2020).

    >>> ((_, q),) = vp.posteriors(vp.variational(nn.ConvTranspose2d(16, 2, 3)))
    >>> q.fan_in
    144.0
    >>> torch.equal(FanIn(gain=2.0).kl(q), Normal(precision=72.0).kl(q))
    True
    """

    gain: float = 2.0

    def __post_init__(self) -> None:
        _check_positive("FanIn", gain=self.gain)

    def kl(self, q: Posterior) -> Tensor:
        n = math.prod(q.mean.shape[1:]) if q.fan_in is None else q.fan_in
        return normal_kl(q if q.centre is None else replace(q, mean=q.mean - q.centre), self.gain / n)


@dataclass(frozen=True)
class Centred(Prior):
    """w ~ N(w₀, 1/precision), where w₀ are the weights that `centred(net)` stored (Eq. 33).

    They are usually those of a pretrained network (after Krishnan et al. 2020).

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
                "Centred: the posterior has no centre; store the pretrained weights with centred(net)."
            )
        return normal_kl(replace(q, mean=q.mean - q.centre), 1 / self.precision)


@dataclass(frozen=True)
class Earlier(Prior):
    """w ~ N(m₀, v₀), the posterior that `remembered(net)` stored: what earlier data have taught.

    Eq. 33 with λ = 1/v₀ for each weight. `vp.update` learns with it. The log-scales of a horseshoe posterior
    are normal too.

    >>> q = vp.posterior.Posterior(torch.tensor([0.5]), torch.tensor([-1.0]))
    >>> Earlier().kl(replace(q, earlier=vp.posterior.Posterior(torch.tensor([0.0]), torch.tensor([0.0]))))
    tensor(0.3089)
    """

    def kl(self, q: Posterior) -> Tensor:
        if q.earlier is None:
            raise ValueError("Earlier: no earlier posterior is stored; store it with remembered(net).")
        kl = normal_kl(replace(q, mean=q.mean - q.earlier.mean), q.earlier.logvar.exp())
        scales = [] if q.scales is None else [scale for _, scale in scale_posteriors(q.scales)]
        return sum((self.kl(scale) for scale in scales), kl)


@dataclass(frozen=True)
class LogUniform(Prior):
    """p(log|w|) constant, which favours sparse weights (Eq. 34).

    The divergence is the fit of Molchanov et al. (2017), within 0.0094 nats of the true one. The prior is
    improper: the divergence is known only up to a constant, so the ELBO is no bound on the evidence.
    """

    def kl(self, q: Posterior) -> Tensor:
        log_alpha = (q.logvar - torch.log(q.mean.square() + 1e-8)).clamp(-8, 8)
        return (0.63576 * torch.sigmoid(-1.87320 - 1.48695 * log_alpha) + 0.5 * F.softplus(-log_alpha)).sum()


@dataclass(frozen=True)
class EmpiricalBayes(Prior):
    """w ~ N(0, s) with one variance s for each weight tensor, always at its optimum (Eq. 35).

    :param hyperprior: (a, b) adds s ~ InverseGamma(a, b), as DVI does with (1, 10). The divergence then
        includes -log p(s).

    >>> from varprop.posterior import Posterior
    >>> q = Posterior(torch.tensor([0.0, 0.5]), torch.tensor([-1.0, -1.0]))
    >>> s = (q.mean.square() + q.var).mean()
    >>> torch.allclose(EmpiricalBayes().kl(q), Normal(1 / s.item()).kl(q))
    True
    """

    hyperprior: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        if self.hyperprior is not None:
            _check_positive("EmpiricalBayes", a=self.hyperprior[0], b=self.hyperprior[1])

    def kl(self, q: Posterior) -> Tensor:
        total = (q.mean.square() + q.var).sum()
        n = q.mean.numel()
        if self.hyperprior is None:
            # normal_kl(q, s) at s = total/n, where the terms total/s and -n cancel.
            return 0.5 * (n * torch.log(total / n) - q.logvar.expand_as(q.mean).sum())
        a, b = self.hyperprior
        s = (total + 2 * b) / (n + 2 * a + 2)
        return normal_kl(q, s) - a * math.log(b) + math.lgamma(a) + (a + 1) * torch.log(s) + b / s


@dataclass(frozen=True)
class Horseshoe(Prior):
    """w = w̃ z s with w̃ ~ N(0, 1), z ~ C⁺(0, 1) for each group and s ~ C⁺(0, scale) for the layer (Eq. 36).

    After Louizos et al. (2017). It needs the group scales of `variational(net, posterior="horseshoe")`.
    Random biases have no scales: their prior is N(0, 1).

    :param scale: smaller values give sparser weights; 1 suits regression, values far below 1 compression.
    """

    scale: float = 1.0

    def __post_init__(self) -> None:
        _check_positive("Horseshoe", scale=self.scale)

    def kl(self, q: Posterior) -> Tensor:
        kl = normal_kl(q, 1.0)
        if q.scales is None:
            if q.mean.dim() > 1:
                raise ValueError(
                    "Horseshoe: the posterior has no group scales; make the network random with "
                    'variational(net, posterior="horseshoe").'
                )
            return kl
        for mean, logvar, scale in (
            (q.scales.group_mean, q.scales.group_logvar, 1.0),
            (q.scales.layer_mean, q.scales.layer_logvar, self.scale),
        ):
            kl = kl + lognormal_gamma_kl(mean[0], logvar[0], scale**2).sum()
            # b ~ InverseGamma(1/2, 1) means 1/b ~ Gamma(1/2, 1), and log(1/b) = -log b.
            kl = kl + lognormal_gamma_kl(-mean[1], logvar[1], 1.0).sum()
        return kl


@dataclass(frozen=True)
class Tempered(Prior):
    """A prior whose divergence counts in part: weight × KL(q || p), as if data had been seen 1/weight times.

    With the whole divergence classes are often underconfident, and deep networks underfit (Wenzel et al.
    2020). With a weight other than 1 the ELBO is no bound on the evidence.

    >>> q = vp.posterior.Posterior(torch.tensor([0.3]), torch.tensor([-2.0]))
    >>> Tempered(Normal(precision=10.0), weight=0.1).kl(q)
    tensor(0.0475)
    """

    prior: Prior
    weight: float = 0.1

    def __post_init__(self) -> None:
        if not isinstance(self.prior, Prior):
            raise TypeError(
                f"Tempered: prior must be a prior, got {self.prior!r}; pass priors.FanIn(4.0), say."
            )
        _check_positive("Tempered", weight=self.weight)

    def kl(self, q: Posterior) -> Tensor:
        return self.weight * self.prior.kl(q)


def normal_kl(q: Posterior, var: Tensor | float) -> Tensor:
    """KL(q || N(0, var)), summed over the entries (Eq. 32)."""
    logvar = q.logvar.expand_as(q.mean)
    if isinstance(var, Tensor):
        return 0.5 * ((q.mean.square() + logvar.exp()) / var - logvar - 1 + torch.log(var)).sum()
    # A norm has the cheapest gradient of all sums of squares: one pass over the weights.
    sums = torch.linalg.vector_norm(q.mean).square() + torch.sub(logvar.exp(), logvar, alpha=var).sum()
    return 0.5 / var * sums + 0.5 * q.mean.numel() * (math.log(var) - 1)


def lognormal_gamma_kl(mean: Tensor, logvar: Tensor, scale: float) -> Tensor:
    """KL(LogNormal(mean, exp(logvar)) || Gamma(1/2, scale)) (Eq. 36)."""
    log_terms = 0.5 * (math.log(scale) - mean - logvar - math.log(2) - 1)
    return log_terms + torch.exp(mean + logvar.exp() / 2) / scale


def _check_positive(prior: str, **values: float) -> None:
    for name, value in values.items():
        if not (isinstance(value, Real | Tensor) and 0 < value < math.inf):
            raise ValueError(f"{prior}: {name} must be positive and finite, got {value!r}.")

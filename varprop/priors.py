"""Priors over weights. A prior has one method, kl(q), the divergence of one weight tensor's posterior."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

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


class Isotropic(Prior):
    """A normal prior with one variance for all weights of a tensor."""

    @abstractmethod
    def deviation(self, q: Posterior) -> tuple[Tensor, float]:
        """The means of the weights less those of the prior, and the prior's variance."""

    def kl(self, q: Posterior) -> Tensor:
        return _isotropic_kl([q.logvar], [self.deviation(q)])

    def total(self, qs: Sequence[Posterior]) -> Tensor:
        if type(self).kl is not Isotropic.kl:  # a subclass has its own
            return super().total(qs)
        # One step for all tensors: in a small network the number of operations is what takes the time.
        return _isotropic_kl([q.logvar for q in qs], [self.deviation(q) for q in qs])


@dataclass(frozen=True)
class Normal(Isotropic):
    """w ~ N(0, 1/precision) (Eq. 32).

    >>> from varprop.posterior import Posterior
    >>> Normal(precision=10.0).kl(Posterior(torch.tensor([0.3]), torch.tensor([-2.0])))
    tensor(0.4754)
    """

    precision: float = 1.0

    def __post_init__(self) -> None:
        _check_positive("Normal", precision=self.precision)

    def deviation(self, q: Posterior) -> tuple[Tensor, float]:
        return q.mean, 1 / self.precision


@dataclass(frozen=True)
class FanIn(Isotropic):
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

    def deviation(self, q: Posterior) -> tuple[Tensor, float]:
        n = math.prod(q.mean.shape[1:]) if q.fan_in is None else q.fan_in
        return q.mean if q.centre is None else q.mean - q.centre, self.gain / n


@dataclass(frozen=True)
class Centred(Isotropic):
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

    def deviation(self, q: Posterior) -> tuple[Tensor, float]:
        if q.centre is None:
            raise ValueError(
                "Centred: the posterior has no centre; store the pretrained weights with centred(net)."
            )
        return q.mean - q.centre, 1 / self.precision


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

    def total(self, qs: Sequence[Posterior]) -> Tensor:
        return self.weight * self.prior.total(qs)


def normal_kl(q: Posterior, var: Tensor | float) -> Tensor:
    """KL(q || N(0, var)), summed over the entries (Eq. 32)."""
    if not isinstance(var, Tensor):
        return _isotropic_kl([q.logvar], [(q.mean, var)])
    logvar = q.logvar.expand_as(q.mean)
    return 0.5 * ((q.mean.square() + logvar.exp()) / var - logvar - 1 + torch.log(var)).sum()


def _isotropic_kl(logvars: Sequence[Tensor], deviations: Sequence[tuple[Tensor, float]]) -> Tensor:
    """Σ KL(q || N(0, var)) over tensors with these log-variances, and with these means and variances."""
    means = [mean for mean, _ in deviations]
    spread = [logvar.expand_as(mean) for logvar, mean in zip(logvars, means, strict=True)]
    variances = tuple(var for _, var in deviations)
    kl: Tensor = _IsotropicKL.apply(variances, *means, *spread)  # type: ignore[no-untyped-call]
    return kl


class _IsotropicKL(torch.autograd.Function):
    """Eq. 32 of several tensors, with its derivatives, m/var and (exp(logvar)/var - 1)/2."""

    generate_vmap_rule = True

    @staticmethod
    def forward(variances: Sequence[float], *tensors: Tensor) -> Tensor:
        kls = []
        for mean, logvar, var in _split(tensors, variances):
            sums = torch.addcmul(logvar.exp().sub_(logvar, alpha=var), mean, mean).sum()
            kls.append(sums.mul_(0.5 / var).add_(0.5 * mean.numel() * (math.log(var) - 1)))
        return sum(kls[1:], kls[0])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.variances, *tensors = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, to_kl: Tensor) -> tuple[Tensor | None, ...]:
        half, to_means, to_logvars = 0.5 * to_kl, [], []
        for mean, logvar, var in _split(ctx.saved_tensors, ctx.variances):
            to_means.append(mean * (to_kl / var))
            to_logvars.append((logvar - math.log(var)).expm1_() * half)
        return None, *to_means, *to_logvars


def _split(tensors: Sequence[Tensor], variances: Sequence[float]) -> Iterator[tuple[Tensor, Tensor, float]]:
    """Means, which come first, log-variances and variances of the prior."""
    n = len(variances)
    return zip(tensors[:n], tensors[n:], variances, strict=True)


def lognormal_gamma_kl(mean: Tensor, logvar: Tensor, scale: float) -> Tensor:
    """KL(LogNormal(mean, exp(logvar)) || Gamma(1/2, scale)) (Eq. 36)."""
    log_terms = 0.5 * (math.log(scale) - mean - logvar - math.log(2) - 1)
    return log_terms + torch.exp(mean + logvar.exp() / 2) / scale


def _check_positive(prior: str, **values: float) -> None:
    for name, value in values.items():
        if not 0 < value < math.inf:
            raise ValueError(f"{prior}: {name} must be positive and finite, got {value}.")

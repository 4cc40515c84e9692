"""Training objectives and their predictions: the evidence lower bound, and the log marginal of filtering."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Integral, Real
from operator import itemgetter
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from . import moments
from .gaussian import Activation, Gaussian
from .graph.steps import tensors_in
from .jacobian import correlated
from .laplace import Laplace
from .likelihoods import Likelihood, check_target
from .methods.base import Call, Method, Value, Which, arguments, check_network, chosen
from .methods.precision import in_single, is_float16
from .posterior import posteriors
from .predictive import NormalPredictive, Predictive, concatenate, mixture, per_datum
from .priors import Prior

Moments: TypeAlias = Literal["independent", "correlated"]


@dataclass(frozen=True)
class Gate:
    """A gate in a pass: the pre-activation and the knots of its activation."""

    x: Gaussian
    knots: Sequence[float]


@dataclass(frozen=True)
class Terms:
    """The parts of an ELBO on one batch."""

    data_fit: Tensor
    """E log p(y | f), averaged over the batch."""
    kl: Tensor
    """KL(q || p) of the weights, summed; it counts once for the whole data set."""
    f: Activation
    gates: Sequence[Gate]
    slope: float
    weight: Tensor | None = None
    """How often each data point counts."""

    @property
    def kl_z(self) -> Tensor:
        """Expected KL divergence of the gates by the paper's closed form (Eq. 45), averaged over the batch.

        It is proportional to the slope, so for the step function it is given per unit of slope.
        """
        return self._kl_z(
            partial(moments.gate_kl, slope=1.0 if math.isinf(self.slope) else self.slope, exact=False)
        )

    @property
    def kl_z_exact(self) -> Tensor:
        """The same by quadrature; for the step function the closed form is exact."""
        return self.kl_z if math.isinf(self.slope) else self._kl_z(partial(moments.gate_kl, slope=self.slope))

    def _kl_z(self, divergence: Callable[[Gaussian], Tensor]) -> Tensor:
        # Each knot is a binary gate; the others change its divergence only by exp(-slope × their distance).
        kls = [divergence(gate.x + -knot) for gate in self.gates for knot in gate.knots]
        if self.weight is not None:
            kls = [per_datum(kl) * self.weight for kl in kls]
        return sum((kl.sum() for kl in kls), torch.zeros_like(self.data_fit)) / self.f.shape[0]


EXAMPLES = {"method": "vp.DVI", "likelihood": "vp.likelihoods.Normal()", "prior": "vp.priors.FanIn(4.0)"}


def _check_parts(**parts: tuple[object, type]) -> None:
    """Refuse a name, or a class that nobody has called."""
    for name, (part, kind) in parts.items():
        if not isinstance(part, kind):
            raise TypeError(f"ELBO: {name} must be a {kind.__name__} such as {EXAMPLES[name]}, got {part!r}.")


def split(x: Value, rows: int) -> list[Value]:
    """An input in parts of so many rows; an input without rows is one part.

    >>> [part["b"].shape for part in split({"a": torch.ones(3, 2), "b": torch.ones(3, 1)}, 2)]
    [torch.Size([2, 1]), torch.Size([1, 1])]
    """
    n = tensors_in(x)[0].shape[0]
    parts = [itemgetter(slice(i, i + rows)) for i in range(0, max(n, 1), rows)]
    return [pytree.tree_map_only(Tensor, part, x) for part in parts]


class ELBO(nn.Module):
    """Negative evidence lower bound per data point, without sampling (Eq. 46):

        -E log p(y | f) + KL(q || p) / n_data  [+ kl_z_weight × expected KL of the gates]

    :param n_data: size of the whole training set. The divergence counts once for all of it, so there is no
        default.
    :param kl_z_weight: weight of the gates' divergence. The paper drops it (0), which leaves a loophole, see
        `docs/trust.md`.
    :param output: which value is meant if the network returns several: an item, an attribute, or a function
        that picks it.
    :param moments: "independent", those of a pass of the method, or "correlated", those of `vp.correlated`:
        the variance of a deep network is then true in training as well, at a backward pass for each output.

    An input x is a tensor, a tuple of several inputs, or a dictionary of keyword inputs.

    `seen` is how many data points the posterior has learned: none at first, `n_data` after `fit`, and with
    each `update` more.

    >>> net = vp.variational(nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1)))
    >>> elbo = vp.ELBO(net, vp.VBP, vp.likelihoods.Normal(), vp.priors.Normal(precision=10.0), n_data=100)
    >>> loss = elbo(torch.randn(16, 2), torch.randn(16, 1))
    >>> loss.backward()
    """

    def __init__(
        self,
        net: nn.Module,
        method: Method,
        likelihood: Likelihood,
        prior: Prior,
        *,
        n_data: float,
        kl_z_weight: float = 0.0,
        output: Which = None,
        moments: Moments = "independent",
    ) -> None:
        super().__init__()
        check_network("ELBO", net)
        _check_parts(method=(method, Method), likelihood=(likelihood, Likelihood), prior=(prior, Prior))
        if not (isinstance(n_data, float | Real) and n_data > 0):
            raise ValueError(
                f"ELBO: n_data is the size of the training set and must be positive, got {n_data!r}."
            )
        if not (kl_z_weight >= 0 and math.isfinite(kl_z_weight)):
            raise ValueError(f"ELBO: kl_z_weight must be zero or more, got {kl_z_weight}.")
        if moments not in get_args(Moments):
            raise ValueError(f"ELBO: moments must be {' or '.join(get_args(Moments))}, got {moments!r}.")
        if moments == "correlated" and (method.samples or method.deterministic or kl_z_weight):
            raise ValueError(
                "ELBO: correlated moments need a method with moments, such as vp.DVI, and kl_z_weight=0."
            )
        if not method.deterministic and next(posteriors(net), None) is None:
            raise ValueError("ELBO: the network has no random weights; call variational(net) first.")
        self.net = net
        self.method = method
        self.likelihood = likelihood
        self.prior = prior
        self.n_data = n_data
        self.seen = 0.0
        self.kl_z_weight = kl_z_weight
        self.output = output
        self.moments = moments
        self.covariance: Laplace | None = None
        """Where predictions know the correlations between weights; training and `audit` never use it."""

    def forward(self, x: Value, y: Tensor) -> Tensor:
        return self.loss(self.terms(x, y))

    def loss(self, terms: Terms, kl_weight: float = 1.0) -> Tensor:
        loss = kl_weight / self.n_data * terms.kl - terms.data_fit
        return loss + self.kl_z_weight * terms.kl_z if self.kl_z_weight else loss

    def terms(self, x: Value, y: Tensor, weight: Tensor | None = None) -> Terms:
        """Data fit, divergence of the weights and, computed on request, divergence of the gates.

        :param weight: how often each data point counts.
        """
        gates: list[Gate] = []
        has_gates = self.method.slope is not None and self.moments == "independent"
        method = self.method.watching(partial(_note_gates, gates)) if has_gates else self.method
        f = self.propagated(x, method)
        check_target(self.likelihood, f, y)
        log_prob = (
            self.likelihood.expected_log_prob(f, y)
            if isinstance(f, Gaussian)
            else self.likelihood.log_prob(f, y)
        )
        log_prob = per_datum(log_prob) if weight is None else per_datum(log_prob) * weight
        return Terms(log_prob.mean(), self.kl(), f, gates, self.method.slope or math.inf, weight)

    def propagated(
        self, x: Value, method: Method | None = None, moments: Moments | None = None
    ) -> Activation:
        """The network's output by the objective's method and moments, or by others."""
        method = method or self.method
        if (moments or self.moments) == "correlated":
            args, options = arguments(x)
            return correlated(self.net, *args, method=method, output=self.output, **options)
        return chosen(method.at(self.net, x), self.output)

    def kl(self) -> Tensor:
        """KL(q || p) of all random weights, summed."""
        return in_single(self._kl, self.net) if is_float16(self.net) else self._kl(self.net)

    def _kl(self, net: nn.Module) -> Tensor:
        qs = [q.random for _, q in posteriors(net)]
        return self.prior.total(qs) if qs else next(net.parameters()).new_zeros(())

    def latent(self, x: Value) -> Activation:
        """The network's output at x."""
        f = self.propagated(x)
        return f if self.covariance is None else self.covariance(self.net, x, f)

    @torch.no_grad()
    def predict(self, x: Value, samples: int | None = None, batch_size: int | None = None) -> Predictive:
        """The predictive distribution at x.

        :param samples: number of passes of a sampling method; other methods need one pass and take no
            `samples`.
        :param batch_size: rows that pass through the network at once; all by default.
        """
        if batch_size is not None:
            if not (isinstance(batch_size, Integral) and batch_size > 0):
                raise ValueError(
                    f"predict: batch_size must be positive and a whole number, got {batch_size!r}."
                )
            return concatenate([self.predict(part, samples) for part in split(x, batch_size)])
        if not self.method.samples:
            if samples is not None:
                raise ValueError(f"predict: {self.method.name} draws no samples; leave `samples` out.")
            return self.likelihood.predictive(self.latent(x))
        if samples is None:
            raise ValueError(
                f"predict: {self.method.name} predicts by sampling; "
                "give the number of passes, as in predict(x, samples=100)."
            )
        return mixture([self.likelihood.predictive(self.propagated(x)) for _ in range(samples)])


def check_objective(caller: str, elbo: object) -> None:
    """Refuse a network in the place of its objective."""
    if not isinstance(elbo, ELBO):
        raise TypeError(
            f"{caller}: an ELBO is needed, got a {type(elbo).__name__}; make one with "
            "vp.ELBO(net, vp.DVI, likelihood, prior, n_data=...)."
        )


class LogMarginal(nn.Module):
    """log Z, the log density of a batch with the weights integrated out, given the noise variance (Eq. 48):

        log Z = log N(y | E[f], Var[f] + noise)

    Assumed-density filtering uses it instead of a bound. The output f is approximated as normal.

    >>> net = vp.variational(nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1)), biases=True)
    >>> log_z = vp.LogMarginal(net, vp.PBP)(torch.randn(16, 2), torch.randn(16, 1), noise=torch.tensor(0.1))
    """

    def __init__(self, net: nn.Module, method: Method) -> None:
        super().__init__()
        self.net = net
        self.method = method

    def forward(self, x: Activation, y: Tensor, noise: Tensor) -> Tensor:
        """log Z of the batch for each variance in `noise`; all of them share one pass of the network."""
        f = self.method(self.net, x)
        log_z = [self._predictive(f, var).log_prob(y).sum() for var in noise.flatten().unbind()]
        return torch.stack(log_z).view_as(noise)

    @torch.no_grad()
    def predict(self, x: Activation, noise: Tensor) -> NormalPredictive:
        return self._predictive(self.method(self.net, x), noise)

    def _predictive(self, f: Activation, noise: Tensor) -> NormalPredictive:
        if not isinstance(f, Gaussian):
            raise ValueError(
                f"LogMarginal: {self.method.name} gives an output without variance; "
                "make the weights random with variational(net)."
            )
        return NormalPredictive(f.mean, f.var, noise.expand_as(f.mean))


def _note_gates(gates: list[Gate], call: Call) -> Value:
    """Record the gates of a pass."""
    if call.rule.knots is not None and isinstance(call.x, Gaussian):
        gates.append(Gate(call.x, call.rule.knots(call.module)))
    return call.output

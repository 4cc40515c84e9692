"""Is the trained posterior the one that predicts? A method's moments against exact moments and Monte Carlo.

VBP gives no variance to a unit whose mean is negative, whatever the variances of its weights. Trained without
a penalty on this, it reports good predictions from weights with which no ReLU network could predict well
(`docs/trust.md`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import vmap

from .. import moments
from ..gaussian import Activation, Gaussian, mean_of
from ..graph.steps import tensors_in
from ..methods.base import Call, Method, Value, arguments, chosen
from ..methods.tables import DVI, EXACT
from ..objectives import ELBO, split
from ..posterior import Layer, draw, is_random, posteriors
from ..predictive import ClassPredictive, LabelPredictive, Predictive, Regression, concatenate, mixture
from ..priors import Prior
from ..substitution import substituted
from .metrics import log_likelihood, rmse

BATCH = 1000
NEARLY_ALL = 0.95
AT_PRIOR = 0.5


@dataclass(frozen=True)
class Scores:
    """How well one set of moments predicts."""

    log_likelihood: float
    std: float
    """Mean predicted standard deviation: of the target in regression, else of the network's output."""
    rmse: float | None = None
    error: float | None = None
    """Share of wrong classes or labels."""


@dataclass(frozen=True)
class Units:
    """The state of the units of one layer after training."""

    layer: str
    idle: float
    """Share of the units that are closed on nearly all data, with weight variances as in the prior."""


@dataclass(frozen=True)
class Audit:
    """Predictions by the method's own moments, by exact moments and by Monte Carlo; prints as a table."""

    own: Scores
    exact: Scores
    """By exact moments for one hidden layer; for other networks by `correlated`, the best closed form."""
    sampled: Scores | None
    """By Monte Carlo samples of the weights; None if `exact` is exact."""
    gate_kl: float
    """KL divergence of the gates for each data point, per unit of slope (Eq. 45)."""
    layers: tuple[Units, ...]
    tolerance: float
    exact_activations: bool = False
    """Whether the method's own activations are exact, so that any gap comes from correlations."""

    @property
    def gap(self) -> float:
        """Log-likelihood claimed by the method in excess of its posterior's, in nats per data point."""
        return self.own.log_likelihood - (self.sampled or self.exact).log_likelihood

    @property
    def consistent(self) -> bool:
        return abs(self.gap) <= self.tolerance

    @property
    def verdict(self) -> str:
        judge = "the Monte Carlo samples" if self.sampled else "the exact moments"
        distance = f"{abs(self.gap):.3f} nats per data point apart (tolerance {self.tolerance:g})"
        apart = f"own moments and {judge} are {distance}"
        if self.consistent:
            return f"Consistent: {apart}."
        if self.exact_activations:
            advice = "Correlations matter in this network: predict with vp.correlated(net, x)."
        else:
            advice = "Neither sample weights from this posterior nor prune by it; train with vp.DVI."
        return f"NOT consistent: {apart}. {advice}"

    def __str__(self) -> str:
        shown = {"own moments": self.own, "exact moments": self.exact, "Monte Carlo": self.sampled}
        names = [
            name for name in ("log_likelihood", "rmse", "error", "std") if getattr(self.own, name) is not None
        ]
        lines = ["".join([" " * 16, *(f"{name.replace('_', '-'):>16}" for name in names)])]
        for row, scores in shown.items():
            if scores is not None:
                lines.append("".join([f"{row:16}", *(f"{getattr(scores, name):16.4f}" for name in names)]))
        lines.append(f"divergence of the gates: {self.gate_kl:.3g} nats per data point, per unit of slope")
        lines += [
            f"layer {units.layer}: {units.idle:.0%} of its units are closed with variances at the prior"
            for units in self.layers
        ]
        return "\n".join([*lines, self.verdict])


@torch.no_grad()
def audit(
    elbo: ELBO, x: Value, y: Tensor, *, samples: int = 1000, tolerance: float = 0.02, seed: int = 0
) -> Audit:
    """Compare what a trained network predicts with what the same posterior predicts by exact moments.

    With one hidden layer of linear units the exact moments of the activations give those of the output. In
    any other network activations are correlated, and Monte Carlo samples of the weights decide.

    :param x: inputs, as the objective takes them.
    :param samples: number of Monte Carlo samples, if they are needed.
    :param tolerance: difference in log-likelihood, in nats per data point, up to which the two count as
        equal.

    >>> net = vp.variational(nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1)))
    >>> elbo = vp.ELBO(net, vp.DVI, vp.likelihoods.Normal(), vp.priors.Normal(), n_data=100)
    >>> vp.audit(elbo, torch.randn(16, 2), torch.randn(16, 1)).consistent
    True
    """
    rows = len(tensors_in(x)[0])
    if not rows == len(y) > 0:
        raise ValueError(
            "audit: needs at least one input and a target for each input, "
            f"got {rows} inputs and {len(y)} targets."
        )
    if next(posteriors(elbo.net), None) is None:
        raise ValueError(
            "audit: the network has no random weights, and so no posterior; call variational(net) first."
        )
    training = elbo.training
    elbo.eval()
    try:
        method = elbo.method
        exact = DVI if method.samples or method.deterministic else method | EXACT
        seen = _Seen(elbo, exact if method.samples else method, x)
        deep = not seen.one_hidden_layer
        own = (
            _sampled(elbo, _passes(elbo, samples, seed), x)
            if method.samples
            else _in_one_pass(elbo, elbo.propagated, x)
        )
        judge = _sampled(elbo, _networks(elbo, samples, seed), x) if deep else None
        true = partial(elbo.propagated, method=exact, moments="correlated" if deep else "independent")
        best = _in_one_pass(elbo, true, x)
    finally:
        elbo.train(training)
    sampled = None if judge is None else _scores(judge, y)
    exact_activations = method.slope is None and not method.deterministic
    return Audit(
        _scores(own, y), _scores(best, y), sampled, seen.gate_kl, seen.layers, tolerance, exact_activations
    )


# ------------------------------------------------------------------------------------------------ predictions

Predicted = tuple[Predictive, Tensor]
"""A prediction and the standard deviation of the network's output."""


def _in_one_pass(elbo: ELBO, output: Callable[[Value], Activation], x: Value) -> Predicted:
    outputs = [output(part) for part in split(x, BATCH)]
    return _joined(
        (elbo.likelihood.predictive(f), f.std if isinstance(f, Gaussian) else torch.zeros_like(f))
        for f in outputs
    )


def _sampled(elbo: ELBO, outputs: Callable[[Value], Tensor], x: Value) -> Predicted:
    """In regression by the moments of the samples, as a method gives them; else by average probabilities."""

    def predicted(f: Tensor) -> Predicted:
        moments = Gaussian.of(f.mean(0), f.var(0))
        p = elbo.likelihood.predictive(moments)
        return p if isinstance(p, Regression) else mixture(
            [elbo.likelihood.predictive(one) for one in f]
        ), moments.std

    return _joined(predicted(outputs(part)) for part in split(x, BATCH // 4))


def _passes(elbo: ELBO, samples: int, seed: int) -> Callable[[Value], Tensor]:
    """Passes of a sampling method."""

    def outputs(x: Value) -> Tensor:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return torch.stack([mean_of(elbo.propagated(x)) for _ in range(samples)])

    return outputs


def _networks(elbo: ELBO, samples: int, seed: int) -> Callable[[Value], Tensor]:
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
        chunks = (min(50, samples - i) for i in range(0, samples, 50))
        return torch.cat([run_all(draw(elbo.net, n, generator), n, x) for n in chunks])

    return outputs


def _joined(parts: Iterator[Predicted]) -> Predicted:
    predictives, stds = zip(*parts, strict=True)
    return concatenate(predictives), torch.cat(stds)


def _scores(predicted: Predicted, y: Tensor) -> Scores:
    p, std = predicted
    fit = log_likelihood(p, y).item()
    match p:
        case Regression():
            return Scores(fit, p.std.mean().item(), rmse=rmse(p, y).item())
        case ClassPredictive():
            return Scores(fit, std.mean().item(), error=(p.probs.argmax(1) != y).double().mean().item())
        case LabelPredictive():
            return Scores(fit, std.mean().item(), error=((p.probs > 0.5) != (y > 0)).double().mean().item())
    return Scores(fit, std.mean().item())


# -------------------------------------------------------------------------------------------- watching a pass


class _Seen:
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
            Units(names[layer], ((share >= NEARLY_ALL) & _at_prior(elbo.prior, layer)).double().mean().item())
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
        self.gate_kl += (
            self.share * sum(moments.tail(x, knot).mean.sum().item() for knot in knots) / len(x.mean)
        )
        closed = None if self.layer is None else _by_unit(self.layer, (x.mean <= knots[0]).double())
        if self.layer is not None and closed is not None:
            shut = self.share * closed.mean(0)
            self.closed[self.layer] = self.closed.get(self.layer, torch.zeros_like(shut)) + shut


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
def _at_prior(prior: Prior, layer: nn.Module) -> Tensor:
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

"""Is the trained posterior the one that predicts? A method's moments against exact moments and Monte Carlo.

VBP gives no variance to a unit whose mean is negative, whatever the variances of its weights. Trained without
a penalty on this, it reports good predictions from weights with which no ReLU network could predict well
(`docs/trust.md`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ..gaussian import Activation, Gaussian
from ..graph.steps import tensors_in
from ..methods.base import Value
from ..methods.tables import DVI, EXACT
from ..objectives import ELBO, check_objective, split
from ..posterior import posteriors
from ..predictive import ClassPredictive, LabelPredictive, Predictive, Regression, concatenate, mixture
from .metrics import log_likelihood, rmse
from .monte_carlo import networks, passes
from .units import BATCH, Seen, Units


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
    check_objective("audit", elbo)
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
        seen = Seen(elbo, exact if method.samples else method, x)
        deep = not seen.one_hidden_layer
        own = (
            _sampled(elbo, passes(elbo, samples, seed), x)
            if method.samples
            else _in_one_pass(elbo, elbo.propagated, x)
        )
        judge = _sampled(elbo, networks(elbo, samples, seed), x) if deep else None
        true = partial(elbo.propagated, method=exact, moments="correlated" if deep else "independent")
        best = _in_one_pass(elbo, true, x)
    finally:
        elbo.train(training)
    return Audit(
        own=_scores(own, y),
        exact=_scores(best, y),
        sampled=None if judge is None else _scores(judge, y),
        gate_kl=seen.gate_kl,
        layers=seen.layers,
        tolerance=tolerance,
        exact_activations=method.slope is None and not method.deterministic,
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

    def predicted(samples: Tensor) -> Predicted:
        f = Gaussian.of(samples.mean(0), samples.var(0))
        p = elbo.likelihood.predictive(f)
        if not isinstance(p, Regression):
            p = mixture([elbo.likelihood.predictive(sample) for sample in samples])
        return p, f.std

    return _joined(predicted(outputs(part)) for part in split(x, BATCH // 4))


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

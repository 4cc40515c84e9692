"""Is the posterior that was trained the one that predicts? A method's own moments against exact ones and against drawn networks.

VBP gives no variance to a unit whose mean is negative, whatever its weights' variances are. Trained without a price on that, it
reports good predictions from weights that no ReLU network could predict with (`docs/consistency.md`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from .. import moments as fn
from ..correlated import correlated
from ..gaussian import Activation, Gaussian, mean_of
from ..methods.base import Method, Rule, Watching
from ..methods.deterministic import DETERMINISTIC
from ..methods.dvi import DVI
from ..methods.maxima import MAXIMA
from ..methods.moments import MAX_POOLS, PIECEWISE, piecewise
from ..methods.pbp import PBP
from ..objectives import ELBO
from ..posterior import draw, is_random, posteriors
from ..predictive import ClassPredictive, LabelPredictive, Predictive, Regression, concatenate, mixture
from ..priors import Prior
from .metrics import log_likelihood, rmse

BATCH = 1000
NEARLY_ALL = 0.95
AT_PRIOR = 0.5


@dataclass(frozen=True)
class Scores:
    """How well one set of moments predicts."""

    log_likelihood: float
    std: float
    """Mean predicted standard deviation: of the target for numbers, of the network's output for anything else."""
    rmse: float | None = None
    error: float | None = None
    """Share of wrong classes or labels."""


@dataclass(frozen=True)
class Units:
    """What became of the units of one layer."""

    layer: str
    idle: float
    """Share of the units that are closed on nearly all data while their weights' variances are those of the prior."""


@dataclass(frozen=True)
class Audit:
    """A posterior's predictions by the method's own moments, by exact ones, and by networks drawn from it; prints as a table."""

    own: Scores
    exact: Scores
    """By the exact moments of each activation: right for one hidden layer; for more by `correlated`, the best closed form."""
    sampled: Scores | None
    """By networks drawn from the posterior; None where `exact` needs no judge."""
    gate_kl: float
    """Divergence of the gates for each data point, per unit of slope (Eq. 12)."""
    layers: tuple[Units, ...]
    tolerance: float

    @property
    def gap(self) -> float:
        """Log-likelihood that the method claims beyond what its posterior has, in nats a data point; negative where it claims less."""
        return self.own.log_likelihood - (self.sampled or self.exact).log_likelihood

    @property
    def consistent(self) -> bool:
        return abs(self.gap) <= self.tolerance

    @property
    def verdict(self) -> str:
        judge = "the drawn networks" if self.sampled else "the exact moments"
        apart = f"own moments and {judge} are {abs(self.gap):.3f} nats a data point apart (tolerance {self.tolerance:g})"
        if self.consistent:
            return f"Consistent: {apart}."
        return f"NOT consistent: {apart}. Neither draw weights from this posterior nor prune by it; train with vp.DVI."

    def __str__(self) -> str:
        shown = {"own moments": self.own, "exact moments": self.exact, "drawn networks": self.sampled}
        names = [
            name for name in ("log_likelihood", "rmse", "error", "std") if getattr(self.own, name) is not None
        ]
        lines = ["".join([" " * 16, *(f"{name.replace('_', '-'):>16}" for name in names)])]
        for row, scores in shown.items():
            if scores is not None:
                lines.append("".join([f"{row:16}", *(f"{getattr(scores, name):16.4f}" for name in names)]))
        lines.append(f"divergence of the gates: {self.gate_kl:.3g} nats a data point, per unit of slope")
        lines += [
            f"layer {units.layer}: {units.idle:.0%} of its units are closed with variances at the prior"
            for units in self.layers
        ]
        return "\n".join([*lines, self.verdict])


@torch.no_grad()
def audit(
    elbo: ELBO, x: Tensor, y: Tensor, *, samples: int = 1000, tolerance: float = 0.02, seed: int = 0
) -> Audit:
    """Compare what a trained network predicts with what the same posterior predicts by exact moments.

    With one hidden layer and certain inputs the exact moments of the activations give those of the output. In deeper networks they do
    not quite, and networks drawn from the posterior are the judge.

    :param samples: how many networks to draw, where they are needed.
    :param tolerance: difference in log-likelihood, in nats a data point, up to which the two count as one.

    >>> net = vp.variational(nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1)))
    >>> elbo = vp.ELBO(net, vp.DVI, vp.likelihoods.Normal(), vp.priors.Normal(), n_data=100)
    >>> vp.audit(elbo, torch.randn(16, 2), torch.randn(16, 1)).consistent
    True
    """
    if not len(x) == len(y) > 0:
        raise ValueError(
            f"audit: needs a target for each input and at least one, got {len(x)} inputs and {len(y)} targets."
        )
    if next(posteriors(elbo.net), None) is None:
        raise ValueError(
            "audit: the network has no random weights, and so no posterior; make them with variational(net)."
        )
    training = elbo.training
    elbo.eval()
    try:
        exact = _exact(elbo.method)
        gates = _Gates(elbo, exact if elbo.method.samples else elbo.method, x)
        own = (
            _drawn(elbo, _passes(elbo, samples, seed), x)
            if elbo.method.samples
            else _in_one_pass(elbo, elbo.method, x)
        )
        deep = gates.depth > 1 and elbo.method is not PBP
        judge = _drawn(elbo, _networks(elbo, samples, seed), x) if deep else None
        best = _in_one_pass(elbo, partial(correlated, method=exact) if deep else exact, x)
    finally:
        elbo.train(training)
    return Audit(
        _scores(own, y),
        _scores(best, y),
        _scores(judge, y) if judge else None,
        gates.kl,
        gates.layers,
        tolerance,
    )


def _exact(method: Method) -> Method:
    """The method with the exact moments of each activation; one without moments takes all of DVI's rules."""
    if method.samples or method is DETERMINISTIC:
        return DVI
    return method | {kind: DVI.rules[kind] for kind in (*PIECEWISE, *MAX_POOLS, *MAXIMA)}


# ------------------------------------------------------------------------------------------------------------ predictions

Predicted = tuple[Predictive, Tensor]
"""A prediction, and the standard deviation of the network's output."""


def _in_one_pass(elbo: ELBO, method: Callable[..., Activation], x: Tensor) -> Predicted:
    outputs = [method(elbo.net, part) for part in x.split(BATCH)]
    return _joined(
        (elbo.likelihood.predictive(f), f.std if isinstance(f, Gaussian) else torch.zeros_like(f))
        for f in outputs
    )


def _drawn(elbo: ELBO, outputs: Callable[[Tensor], Tensor], x: Tensor) -> Predicted:
    """Numbers by the moments of the draws, as a method would give them; classes by the average of their probabilities."""

    def predicted(f: Tensor) -> Predicted:
        moments = Gaussian.of(f.mean(0), f.var(0))
        p = elbo.likelihood.predictive(moments)
        return p if isinstance(p, Regression) else mixture(
            [elbo.likelihood.predictive(one) for one in f]
        ), moments.std

    return _joined(predicted(outputs(part)) for part in x.split(BATCH // 4))


def _passes(elbo: ELBO, samples: int, seed: int) -> Callable[[Tensor], Tensor]:
    """Passes of a method that samples."""

    def outputs(x: Tensor) -> Tensor:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return torch.stack([mean_of(elbo.method(elbo.net, x)) for _ in range(samples)])

    return outputs


def _networks(elbo: ELBO, samples: int, seed: int) -> Callable[[Tensor], Tensor]:
    """Plain networks drawn from the posterior, the same ones for every part of the data."""

    def run(weights: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(elbo.net, weights, (x,))

    def outputs(x: Tensor) -> Tensor:
        generator = torch.Generator(x.device).manual_seed(seed)
        chunks = (min(50, samples - i) for i in range(0, samples, 50))
        return torch.cat([vmap(run, in_dims=(0, None))(draw(elbo.net, n, generator), x) for n in chunks])

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


# ------------------------------------------------------------------------------------------------------------------ gates


class _Gates:
    """What a pass over the data shows of the gates and of the layers before them."""

    def __init__(self, elbo: ELBO, method: Method, x: Tensor) -> None:
        self.kl, self.depth = 0.0, 0
        closed, names = dict[nn.Module, Tensor](), {module: name for name, module in elbo.net.named_modules()}
        for part in x.split(BATCH):
            notes: list[tuple[nn.Module, Gaussian]] = []
            _noting(method, notes)(elbo.net, part)
            self.depth = sum(isinstance(module, (*PIECEWISE, *MAX_POOLS)) for module, _ in notes)
            layer: nn.Module | None = None
            for module, seen in notes:
                if is_random(module):
                    layer = module
                elif isinstance(module, PIECEWISE):
                    knots = piecewise(module).knots
                    self.kl += sum(fn.tail(seen, knot).mean.sum().item() for knot in knots) / len(x)
                    if layer is not None:
                        shut = _by_unit(layer, (seen.mean <= knots[0]).double()).mean(0) * len(part) / len(x)
                        closed[layer] = closed.get(layer, torch.zeros_like(shut)) + shut
        self.layers = tuple(
            Units(names[layer], ((share >= NEARLY_ALL) & _at_prior(elbo.prior, layer)).double().mean().item())
            for layer, share in closed.items()
        )


def _noting(method: Method, notes: list[tuple[nn.Module, Gaussian]]) -> Method:
    """The same method, which notes what comes out of each layer with random weights and what goes into everything else."""

    def noted(rule: Rule, method: Method, module: nn.Module, x: Any, *others: Any, **options: Any) -> Any:
        out = rule(method, module, x, *others, **options)
        seen = out if is_random(module) else x
        if isinstance(seen, Gaussian):
            notes.append((module, seen))
        return out

    kinds = [
        kind
        for kind in method.rules
        if isinstance(kind, type) and kind not in (nn.Module, nn.Sequential, nn.ModuleList)
    ]
    return method | {kind: Watching(noted, method.rules[kind]) for kind in kinds}


def _by_unit(layer: nn.Module, t: Tensor) -> Tensor:
    """A tensor of the layer's outputs with one column for each unit or channel."""
    return (t if isinstance(layer, nn.Linear) else t.movedim(1, -1)).flatten(0, -2)


@torch.enable_grad()
def _at_prior(prior: Prior, layer: nn.Module) -> Tensor:
    """Whether the variances of the weights into each unit are those that the prior alone would give.

    For a normal prior s²/σ² = 1 + 2 dKL/d log s²; whatever the prior, the derivative vanishes where nothing else holds the variance.
    """
    q = next(q for _, q in posteriors(layer))
    logvar = q.logvar.detach().expand_as(q.mean).clone().requires_grad_()
    (slope,) = torch.autograd.grad(prior.kl(replace(q, mean=q.mean.detach(), logvar=logvar)), logvar)
    ratio = 1 + 2 * slope
    axis = 1 if getattr(layer, "transposed", False) else 0
    return ratio.movedim(axis, 0).flatten(1).mean(1) >= AT_PRIOR

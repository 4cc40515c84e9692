"""From a pretrained network to a calibrated one: fit the variances and leave the means, or take over a posterior made elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from ..gaussian import mean_of
from ..likelihoods import Likelihood
from ..likelihoods import Normal as NormalLikelihood
from ..methods import VBP, Method
from ..objectives import ELBO
from ..posterior import RANDOM_LAYERS, Net, centred, posteriors, variational, widen
from ..priors import Centred, Normal, Prior
from . import loop as training
from .batches import Data, batches, size

if TYPE_CHECKING:
    from lightning_fabric import Fabric


def calibrate(
    net: nn.Module,
    data: Data,
    likelihood: Likelihood,
    *,
    method: Method = VBP,
    prior: Prior | None = None,
    means: Literal["frozen", "free"] = "frozen",
    validation: Data | None = None,
    epochs: int = 10,
    lr: float | None = None,
    batch_size: int = 128,
    **options: Any,
) -> ELBO:
    """A trained network with uncertainty: only variances and noise are fitted, so that under VBP the means stay as they are.

    With ReLU units, VBP's mean is that of the plain network bit for bit; with others of linear pieces, up to rounding.
    The variances are first fitted to the data by the ELBO, then all multiplied with one factor, the one with the largest predictive
    log-likelihood, because with the means fixed the ELBO's only reason for a variance is the prior (Eq. 47).

    :param net: the trained network; its weights become random, in place, unless they are.
    :param data: rows that the network was not trained on, as for temperature scaling: on those it was, it is too sure of itself. A
        thousand do.
    :param prior: over the weights; by default normal with precision 100. With free means, `Centred` on the pretrained weights.
    :param means: "free" trains everything, from the pretrained start.
    :param validation: rows to choose the factor and the noise by, where `data` are those the network was trained on; else the data.
    :param lr: 0.1 for variances alone, 0.001 with free means.
    :param options: further options of `fit`.

    >>> x = torch.randn(200, 2)
    >>> net = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 1))      # trained, let us say
    >>> before = net(x)
    >>> elbo = vp.calibrate(net, (x, x[:, :1].abs()), vp.likelihoods.Normal())
    >>> torch.equal(elbo.predict(x).mean, before)
    True
    """
    if means not in ("frozen", "free"):
        raise ValueError(f'calibrate: means must be "frozen" or "free", got {means!r}.')
    n_data = size(data)
    if n_data is None:
        raise ValueError(
            "calibrate: the data does not say how many rows it has; give tensors, or a Dataset with a length."
        )
    if options.get("fabric") is None:
        from lightning_fabric import Fabric  # takes seconds to import

        options["fabric"] = Fabric(devices=1)
    if next(posteriors(net), None) is None:
        variational(net)
    free = means == "free"
    prior = prior or (Centred() if free else Normal(100.0))
    if isinstance(prior, Centred):
        centred(net)
    parts = net, method, likelihood, prior
    with nullcontext() if free else _only_variances(net):
        objective = (ELBO if free else _Still)(*parts, n_data=n_data)
        training.fit(
            objective,
            data,
            epochs=epochs,
            lr=lr or (0.001 if free else 0.1),
            batch_size=batch_size,
            **options,
        )
    elbo = ELBO(*parts, n_data=n_data).eval()
    _scale(
        elbo,
        batches(data if validation is None else validation, 4 * batch_size, options["fabric"], shuffle=False),
        options["fabric"],
    )
    return elbo


class _Still(ELBO):
    """An objective whose network stays as in evaluation: nothing is dropped, and no statistics of batches are learned."""

    def train(self, mode: bool = True) -> _Still:
        return super().train(False)


@contextmanager
def _only_variances(net: nn.Module) -> Iterator[None]:
    """Only log-variances have gradients."""
    before = {p: p.requires_grad for p in net.parameters()}
    try:
        for name, p in net.named_parameters():
            p.requires_grad_("logvar" in name)
        yield
    finally:
        for p, requires_grad in before.items():
            p.requires_grad_(requires_grad)


def _scale(elbo: ELBO, loader: Any, fabric: Fabric) -> None:
    """Multiply all variances with the factor of the largest predictive log-likelihood, by steps that halve (Eq. 47)."""
    scores: dict[float, float] = {}

    def score(shift: float) -> float:
        if shift not in scores:
            widen(elbo.net, shift)
            _fit_noise(elbo, loader)
            scores[shift] = training.validate(elbo, loader, fabric)
            widen(elbo.net, -shift)
        return scores[shift]

    best, step = 0.0, 8.0
    while step > 0.1:
        best = max((best - step, best, best + step), key=score)
        step /= 2
    widen(elbo.net, best)
    _fit_noise(elbo, loader)


@torch.no_grad()
def _fit_noise(elbo: ELBO, loader: Any) -> None:
    """Noise as what the weights' variance leaves of the squared errors, E(y - m)² - E[v], at least a hundredth of them (Eq. 47)."""
    likelihood = elbo.likelihood
    if not isinstance(likelihood, NormalLikelihood):
        return
    errors: Any = 0.0
    spread: Any = 0.0
    total: Any = 0.0
    for x, y, *weights in loader:
        f, weight = elbo.method(elbo.net, x), weights[0] if weights else None
        rows = len(y) if weight is None else weight.sum()
        square = likelihood.statistic(mean_of(f), y, weight)
        errors, spread, total = (
            errors + rows * square,
            spread + rows * (likelihood.statistic(f, y, weight) - square),
            total + rows,
        )
    likelihood.update(torch.maximum(errors - spread, errors / 100) / total)


def import_posterior(net: Net, means: Mapping[str, Tensor], variances: Mapping[str, Tensor]) -> Net:
    """Give a plain network the means and the variances of a diagonal normal posterior that was made elsewhere, in place.

    :param means: for each parameter of the network, by its name.
    :param variances: for each weight, or weight and bias, that is to be random; layers without one stay certain.

    >>> net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1))
    >>> means = dict(net.named_parameters())
    >>> variances = {name: torch.full_like(mean, 0.01) for name, mean in means.items()}
    >>> [name for name, q in vp.posteriors(vp.import_posterior(net, means, variances))]
    ['0.weight', '0.bias', '2.weight', '2.bias']
    """
    if next(posteriors(net), None) is not None:
        raise ValueError("import_posterior: the network has random weights already; give a plain one.")
    parameters = dict(net.named_parameters())
    layers = {name: layer for name, layer in net.named_modules() if isinstance(layer, RANDOM_LAYERS)}
    possible = {_join(name, part) for name in layers for part in ("weight", "bias")} & parameters.keys()
    _check_names("means", missing=parameters.keys() - means.keys(), unknown=means.keys() - parameters.keys())
    lonely = {_join(name, "weight") for name in layers if _join(name, "bias") in variances} - variances.keys()
    _check_names("variances", missing=lonely, unknown=variances.keys() - possible)
    for kind, values in (("mean", means), ("variance", variances)):
        for name, value in values.items():
            if value.shape != parameters[name].shape:
                shape = tuple(parameters[name].shape)
                raise ValueError(
                    f"import_posterior: the {kind} of {name!r} has shape {tuple(value.shape)}, its parameter {shape}."
                )
    for name, var in variances.items():
        if not bool((var >= 0).all()):
            raise ValueError(
                f"import_posterior: the variance of {name!r} has negative or NaN entries; a variance is zero or more."
            )
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(means[name])
        for name, layer in layers.items():
            if _join(name, "weight") in variances:
                variational(layer, biases=_join(name, "bias") in variances)
        for name, var in variances.items():
            # Zero has no logarithm; the smallest number is as good.
            net.get_parameter(f"{name}_logvar").copy_(var.clamp(min=torch.finfo(var.dtype).tiny).log())
    return net


def _join(layer: str, parameter: str) -> str:
    return f"{layer}.{parameter}" if layer else parameter


def _check_names(what: str, missing: Set[str], unknown: Set[str]) -> None:
    if unknown:
        whose = (
            "a weight or bias of a linear or convolution layer"
            if what == "variances"
            else "a parameter of the network"
        )
        raise ValueError(
            f"import_posterior: {what} has {', '.join(map(repr, sorted(unknown)))}, which is not {whose}; leave it out."
        )
    if missing:
        raise ValueError(
            f"import_posterior: {what} has no {', '.join(map(repr, sorted(missing)))}; give one of the parameter's shape."
        )

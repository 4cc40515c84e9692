"""Calibrated uncertainty for a pretrained network: fit its variances, or import a posterior."""

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
from ..methods.base import check_network
from ..objectives import ELBO
from ..posterior import Net, centred, posteriors, scale_variances
from ..priors import Centred, Normal, Prior
from ..randomisation import RANDOM_LAYERS, variational
from .batches import Data, check_data, size
from .epochs import summed
from .loop import fit
from .processes import one_device
from .shares import Batches, batches
from .trainer import validate

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
    fabric: Fabric | None = None,
    **options: Any,
) -> ELBO:
    """Add uncertainty to a trained network: fit variances and noise, and leave its weights as the means.

    With VBP the predicted means then are the outputs of the plain network: bit for bit with ReLU units, up to
    rounding with other piecewise-linear ones. The variances are first fitted by the ELBO. Because with frozen
    means only the prior keeps them from vanishing, all of them are then multiplied by the one factor that
    maximises the predictive log-likelihood (Eq. 52).

    :param net: the trained network; unless it is variational already, it becomes so in place.
    :param data: rows that the network was not trained on, as for temperature scaling: on its training rows it
        is overconfident. A thousand rows are enough.
    :param prior: over the weights; by default normal with precision 100, and with free means `Centred` on the
        pretrained weights.
    :param means: "frozen" fits variances only; "free" trains everything, starting from the pretrained
        weights.
    :param validation: rows to choose the factor and the noise on, if the network was trained on `data`; by
        default `data`.
    :param lr: by default 0.1 with frozen means, 0.001 with free ones.
    :param options: further options of `fit`.

    >>> x = torch.randn(200, 2)
    >>> net = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 1))      # trained, let us say
    >>> before = net(x)
    >>> elbo = vp.calibrate(net, (x, x[:, :1].abs()), vp.likelihoods.Normal())
    >>> torch.equal(elbo.predict(x).mean, before)
    True
    """
    check_network("calibrate", net)
    if means not in ("frozen", "free"):
        raise ValueError(f'calibrate: means must be "frozen" or "free", got {means!r}.')
    held_out = data if validation is None else validation
    for name, rows in (("data", data), ("validation", held_out)):
        check_data("calibrate", name, rows)
    n_data = size(data)
    if n_data is None:
        raise ValueError("calibrate: the data has no length; give tensors, or a Dataset with a length.")
    fabric = one_device() if fabric is None else fabric
    if next(posteriors(net), None) is None:
        variational(net)
    free = means == "free"
    prior = prior or (Centred() if free else Normal(100.0))
    if isinstance(prior, Centred):
        centred(net)
    parts = net, method, likelihood, prior
    lr = lr or (0.001 if free else 0.1)
    with nullcontext() if free else _frozen_means(net):
        objective = (ELBO if free else _EvaluationMode)(*parts, n_data=n_data)
        fit(objective, data, epochs=epochs, lr=lr, batch_size=batch_size, fabric=fabric, **options)
    elbo = ELBO(*parts, n_data=n_data).eval()
    _choose_factor(elbo, batches(held_out, 4 * batch_size, fabric, shuffle=False), fabric)
    elbo.seen = n_data
    return elbo


class _EvaluationMode(ELBO):
    """An objective that stays in evaluation mode: no dropout, and no running statistics that move."""

    def train(self, mode: bool = True) -> _EvaluationMode:
        return super().train(False)


@contextmanager
def _frozen_means(net: nn.Module) -> Iterator[None]:
    """Only log-variances have gradients."""
    before = {p: p.requires_grad for p in net.parameters()}
    try:
        for name, p in net.named_parameters():
            p.requires_grad_("logvar" in name)
        yield
    finally:
        for p, requires_grad in before.items():
            p.requires_grad_(requires_grad)


def _choose_factor(elbo: ELBO, loader: Batches, fabric: Fabric) -> None:
    """Multiply all variances by the factor with the largest predictive log-likelihood, by halving steps.

    The noise is fitted again for each factor (Eq. 52).
    """
    scores: dict[float, float] = {}

    def score(log_factor: float) -> float:
        if log_factor not in scores:
            scale_variances(elbo.net, log_factor)
            _fit_noise(elbo, loader, fabric)
            scores[log_factor] = validate(elbo, loader, fabric)
            scale_variances(elbo.net, -log_factor)
        return scores[log_factor]

    best, step = 0.0, 8.0
    while step > 0.1:
        best = max((best - step, best, best + step), key=score)
        step /= 2
    scale_variances(elbo.net, best)
    _fit_noise(elbo, loader, fabric)


@torch.no_grad()
def _fit_noise(elbo: ELBO, loader: Batches, fabric: Fabric) -> None:
    """Set the noise to the squared error that the weights do not explain, E(y - m)² - E[v] (Eq. 52).

    It is kept at a hundredth of the squared error or more.
    """
    likelihood = elbo.likelihood
    if not isinstance(likelihood, NormalLikelihood):
        return
    sums = likelihood.precision.new_zeros(3, likelihood.precision.numel())
    for (x, y, *weights), own, _ in loader:
        if not own:
            continue
        f, weight = elbo.method(elbo.net, x), weights[0] if weights else None
        rows = len(y) if weight is None else weight.sum()
        square = likelihood.statistic(mean_of(f), y, weight)
        both = likelihood.statistic(f, y, weight)
        sums = sums + rows * torch.stack([square, both - square, torch.ones_like(square)])
    error, explained, total = summed(fabric, sums)
    likelihood.update(torch.maximum(error - explained, error / 100) / total)


def import_posterior(net: Net, means: Mapping[str, Tensor], variances: Mapping[str, Tensor]) -> Net:
    """Give a plain network, in place, the means and variances of a diagonal normal posterior made elsewhere.

    :param means: for each parameter of the network, by its name.
    :param variances: for each weight, or weight and bias, that is to be random; other layers stay
        deterministic.

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
    _check_names(parameters, set(layers), means, variances)
    _check_values(parameters, means, variances)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(means[name])
        for name, layer in layers.items():
            if _join(name, "weight") in variances:
                variational(layer, biases=_join(name, "bias") in variances)
        for name, var in variances.items():
            # Zero has no logarithm; the smallest positive number stands for it.
            net.get_parameter(f"{name}_logvar").copy_(var.clamp(min=torch.finfo(var.dtype).tiny).log())
    return net


def _join(layer: str, parameter: str) -> str:
    return f"{layer}.{parameter}" if layer else parameter


def _check_names(
    parameters: Mapping[str, Tensor],
    layers: Set[str],
    means: Mapping[str, Tensor],
    variances: Mapping[str, Tensor],
) -> None:
    possible = {_join(name, part) for name in layers for part in ("weight", "bias")} & parameters.keys()
    # A bias can be random only where the weight is.
    needed = {_join(name, "weight") for name in layers if _join(name, "bias") in variances}
    for what, values, known, required, kind in (
        ("means", means, parameters.keys(), parameters.keys(), "a parameter of the network"),
        ("variances", variances, possible, needed, "a weight or bias of a linear or convolution layer"),
    ):
        if unknown := values.keys() - known:
            names = ", ".join(map(repr, sorted(unknown)))
            raise ValueError(f"import_posterior: {what} has {names}, which is not {kind}; leave it out.")
        if missing := required - values.keys():
            names = ", ".join(map(repr, sorted(missing)))
            raise ValueError(f"import_posterior: {what} has no {names}; give one of the parameter's shape.")


def _check_values(
    parameters: Mapping[str, Tensor], means: Mapping[str, Tensor], variances: Mapping[str, Tensor]
) -> None:
    for kind, values in (("mean", means), ("variance", variances)):
        for name, value in values.items():
            got, wanted = tuple(value.shape), tuple(parameters[name].shape)
            if got != wanted:
                raise ValueError(
                    f"import_posterior: the {kind} of {name!r} has shape {got}, its parameter {wanted}."
                )
    for name, var in variances.items():
        if not bool((var >= 0).all()):
            raise ValueError(f"import_posterior: the variance of {name!r} has negative or NaN entries.")

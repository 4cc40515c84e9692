"""q(w): the random weights of a network, kept as log-variances beside torch's own weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from .functional import FactoredWeight, Outer, Weight, per_channel
from .gaussian import Activation, Gaussian

RANDOM_LAYERS = (
    nn.Linear,
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)
Form = Literal["full", "factored", "horseshoe"]
Net = TypeVar("Net", bound=nn.Module)
Layer: TypeAlias = Any  # an nn.Module with torch's weight and bias; modules type their attributes as Tensor | Module


class Scales(nn.Module):
    """Log-normal scales of a horseshoe posterior: one for each group of a layer's weights and one for the layer (Eq. 18).

    A half-Cauchy scale is √(a b) with a gamma and b inverse-gamma; each of a and b has its own log-normal, row 0 and row 1.
    """

    def __init__(self, groups: int, logvar: float = -9.0, **place: Any) -> None:
        super().__init__()
        self.group_mean = nn.Parameter(torch.zeros(2, groups, **place))
        self.group_logvar = nn.Parameter(torch.full((2, groups), logvar, **place))
        self.layer_mean = nn.Parameter(torch.zeros(2, 1, **place))
        self.layer_logvar = nn.Parameter(torch.full((2, 1), logvar, **place))

    @property
    def group(self) -> Gaussian:
        return _root_of_product(self.group_mean, self.group_logvar)

    @property
    def layer(self) -> Gaussian:
        return _root_of_product(self.layer_mean, self.layer_logvar)


def _root_of_product(log_mean: Tensor, log_logvar: Tensor) -> Gaussian:
    m, v = log_mean.sum(0) / 2, log_logvar.exp().sum(0) / 4
    mean = torch.exp(m + v / 2)
    return Gaussian.of(mean, mean.square() * torch.expm1(v))


@dataclass(frozen=True)
class Posterior:
    """q of one weight tensor: independent normals, times the scales of a horseshoe where there are any."""

    mean: Tensor
    logvar: Tensor
    scales: Scales | None = None
    centre: Tensor | None = None
    """Where the mean was when `centred` was called."""

    @property
    def var(self) -> Tensor:
        return self.logvar.exp()


def variational(
    net: Net,
    logvar: float = -9.0,
    where: Callable[[str, nn.Module], bool] | None = None,
    posterior: Form = "full",
    *,
    init: Literal["he"] | None = None,
    biases: bool = False,
) -> Net:
    """Make the weights of a network random, in place: `weight_logvar` beside each `weight`, which becomes the posterior mean.

    Linear, convolution and transposed convolution layers are taken, or those of them for which `where(name, module)` holds.
    A layer that already is random stays as it is.

    :param logvar: log-variances are drawn from N(logvar, 0.001²), as in the paper.
    :param posterior: "full", a variance for each weight; "factored", variances Var[w_oi] = a_o b_i, which make a pass cheaper (grouped
        convolutions stay full); "horseshoe", full with log-normal group scales, for `priors.Horseshoe`.
    :param init: "he" draws the means anew as in the paper and zeroes the biases; by default they stay as they are.
    :param biases: make biases random too.

    >>> net = vp.variational(nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 1)))
    >>> [name for name, _ in vp.posteriors(net)]
    ['0.weight', '2.weight']
    """
    if posterior not in ("full", "factored", "horseshoe"):
        raise ValueError(f'variational: posterior must be "full", "factored" or "horseshoe", got {posterior!r}.')
    if init not in (None, "he"):
        raise ValueError(f'variational: init must be None or "he", got {init!r}.')
    chosen: list[tuple[str, Layer]] = [
        (name, layer) for name, layer in net.named_modules() if isinstance(layer, RANDOM_LAYERS) and (where is None or where(name, layer))
    ]
    if not chosen:
        raise ValueError("variational: no layer was chosen; the network has no Linear or convolution layer for which `where` holds.")
    for name, layer in chosen:
        if is_lazy(layer.weight):
            raise ValueError(f"variational: layer {name!r} has no shape yet; run the network once on a batch, then call variational.")
        if not is_random(layer):
            _randomise(layer, logvar, posterior, init, biases)
    return net


def _randomise(layer: Layer, logvar: float, posterior: Form, init: str | None, biases: bool) -> None:
    def parameter(name: str, shape: torch.Size | tuple[int, ...], centre: float) -> None:
        layer.register_parameter(name, nn.Parameter(layer.weight.new_empty(shape).normal_(centre, 1e-3)))

    weight: Tensor = layer.weight
    if init == "he":
        with torch.no_grad():
            weight.normal_(0.0, math.sqrt(2 / fan_in(layer)))
            if layer.bias is not None:
                layer.bias.zero_()
    if posterior == "factored" and getattr(layer, "groups", 1) == 1:
        axis = _output_axis(layer)
        parameter("weight_logvar_out", tuple(n if i == axis else 1 for i, n in enumerate(weight.shape)), logvar / 2)
        parameter("weight_logvar_in", tuple(1 if i == axis else n for i, n in enumerate(weight.shape)), logvar / 2)
    else:
        parameter("weight_logvar", weight.shape, logvar)
    if posterior == "horseshoe":
        groups = weight.shape[1] if isinstance(layer, nn.Linear) else layer.out_channels
        layer.scales = Scales(int(groups), logvar, dtype=weight.dtype, device=weight.device)
    if biases and layer.bias is not None:
        parameter("bias_logvar", layer.bias.shape, logvar)


def _output_axis(layer: nn.Module) -> int:
    return 1 if isinstance(layer, nn.modules.conv._ConvTransposeNd) else 0


def fan_in(layer: Layer) -> float:
    """How many inputs an output sums over: for a transposed convolution, those a stride leaves."""
    weight: Tensor = layer.weight
    if isinstance(layer, nn.modules.conv._ConvTransposeNd):
        return weight[:, 0].numel() / layer.groups / math.prod(layer.stride)
    return weight[0].numel()


def is_random(layer: nn.Module) -> bool:
    """Whether the layer itself holds random weights."""
    return hasattr(layer, "weight_logvar") or hasattr(layer, "weight_logvar_out")


def posteriors(net: nn.Module) -> Iterator[tuple[str, Posterior]]:
    """Every random tensor of the network, by the name of its mean."""
    layer: Layer
    for prefix, layer in net.named_modules():
        if not is_random(layer):
            continue
        prefix = f"{prefix}." if prefix else ""
        full = hasattr(layer, "weight_logvar")
        logvar = layer.weight_logvar if full else layer.weight_logvar_out + layer.weight_logvar_in
        yield f"{prefix}weight", Posterior(layer.weight, logvar, getattr(layer, "scales", None), getattr(layer, "weight_centre", None))
        if hasattr(layer, "bias_logvar"):
            yield f"{prefix}bias", Posterior(layer.bias, layer.bias_logvar, centre=getattr(layer, "bias_centre", None))


def centred(net: Net) -> Net:
    """Keep the present means of all random weights, beside them, as the centre of `priors.Centred`; in place.

    >>> net = vp.centred(vp.variational(nn.Linear(2, 1)))
    >>> torch.equal(net.weight, net.weight_centre)
    True
    """
    for name, q in list(posteriors(net)):
        owner, _, mean = name.rpartition(".")
        net.get_submodule(owner).register_buffer(f"{mean}_centre", q.mean.detach().clone())
    return net


def widen(net: nn.Module, by: float) -> None:
    """Add to the log-variance of every random weight, in place."""
    layer: Layer
    with torch.no_grad():
        for layer in net.modules():
            for name in ("weight_logvar", "weight_logvar_out", "bias_logvar"):
                if hasattr(layer, name):
                    getattr(layer, name).add_(by)


def random_weight(layer: Layer) -> Weight:
    """The layer's weight as the rules take it: a plain tensor, or one with a variance."""
    weight: Tensor = layer.weight
    if hasattr(layer, "weight_logvar"):
        return Gaussian.of(weight, layer.weight_logvar.exp())
    if hasattr(layer, "weight_logvar_out"):
        inputs, outputs = layer.weight_logvar_in.exp(), layer.weight_logvar_out.exp()
        return FactoredWeight(weight, Outer(per_channel(outputs.flatten(), weight), inputs))
    return weight


def random_bias(layer: Layer) -> Activation | None:
    bias: Tensor | None = layer.bias
    if bias is not None and hasattr(layer, "bias_logvar"):
        return Gaussian.of(bias, layer.bias_logvar.exp())
    return bias

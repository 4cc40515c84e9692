"""q(w): the random weights of a network, kept as log-variances beside torch's own weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from .gaussian import Activation, Gaussian
from .moments import FactoredWeight, Outer, Weight, per_channel

RANDOM_LAYERS = (
    nn.Linear,
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
    nn.Embedding,
    nn.EmbeddingBag,
    nn.MultiheadAttention,
    nn.RNNBase,
    nn.RNNCellBase,
)
_SCALED = RANDOM_LAYERS[:7]
Form = Literal["full", "factored", "horseshoe"]
Net = TypeVar("Net", bound=nn.Module)
Layer: TypeAlias = (
    Any  # an nn.Module with torch's weight and bias; modules type their attributes as Tensor | Module
)


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
    padding: int | None = None
    """The row of an embedding that stands for no entry: it is certain."""

    @property
    def var(self) -> Tensor:
        return self._but_padding(self.logvar.exp())

    @property
    def std(self) -> Tensor:
        return self._but_padding(torch.exp(self.logvar / 2))

    @property
    def random(self) -> Posterior:
        """What a prior weighs: all but the row of padding.

        >>> ((_, q),) = vp.posteriors(vp.variational(nn.Embedding(5, 3, padding_idx=0)))
        >>> q.mean.shape, q.random.mean.shape
        (torch.Size([5, 3]), torch.Size([4, 3]))
        """
        if self.padding is None:
            return self

        def others(t: Tensor) -> Tensor:
            return torch.cat((t[: self.padding], t[self.padding + 1 :]))  # type: ignore[operator]

        centre = None if self.centre is None else others(self.centre)
        return replace(self, mean=others(self.mean), logvar=others(self.logvar), centre=centre, padding=None)

    def _but_padding(self, t: Tensor) -> Tensor:
        if self.padding is None:
            return t
        rows = torch.arange(len(t), device=t.device)
        return t.masked_fill((rows == self.padding).unsqueeze(-1), 0.0)


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

    Linear, convolution, embedding, attention and recurrent layers are taken, or those of them for which `where(name, module)` holds.
    Attention and recurrent layers have several weights, and `in_proj_weight_logvar`, `weight_hh_l0_logvar` and so on beside them.
    A layer that already is random stays as it is.

    :param logvar: log-variances are drawn from N(logvar, 0.001²), as in the paper.
    :param posterior: "full", a variance for each weight; "factored", variances Var[w_oi] = a_o b_i, which make a pass cheaper (linear
        layers and convolutions without groups; others stay full); "horseshoe", full with log-normal group scales, for `priors.Horseshoe`
        (linear layers and convolutions).
    :param init: "he" draws the means of linear layers and convolutions anew as in the paper and zeroes their biases; by default, and in
        all other layers, they stay as they are.
    :param biases: make biases random too.

    >>> net = vp.variational(nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 1)))
    >>> [name for name, _ in vp.posteriors(net)]
    ['0.weight', '2.weight']
    """
    if posterior not in ("full", "factored", "horseshoe"):
        raise ValueError(
            f'variational: posterior must be "full", "factored" or "horseshoe", got {posterior!r}.'
        )
    if init not in (None, "he"):
        raise ValueError(f'variational: init must be None or "he", got {init!r}.')
    chosen: list[tuple[str, Layer]] = [
        (name, layer)
        for name, layer in net.named_modules()
        if isinstance(layer, RANDOM_LAYERS) and (where is None or where(name, layer))
    ]
    if not chosen:
        raise ValueError(
            "variational: no layer was chosen; the network has no layer with weights for which `where` holds."
        )
    for name, layer in chosen:
        if posterior == "horseshoe" and not isinstance(layer, _SCALED):
            kind = type(layer).__name__
            raise ValueError(
                f"variational: layer {name!r}, {kind}, has no horseshoe posterior; leave it out with where=."
            )
        if any(is_lazy(p) for p in layer.parameters(recurse=False)):
            raise ValueError(
                f"variational: layer {name!r} has no shape yet; run the network once on a batch, then call variational."
            )
        if not is_random(layer):
            _randomise(layer, logvar, posterior, init, biases)
    return net


def _randomise(layer: Layer, logvar: float, posterior: Form, init: str | None, biases: bool) -> None:
    def parameter(name: str, shape: torch.Size | tuple[int, ...], centre: float, like: Tensor) -> None:
        layer.register_parameter(name, nn.Parameter(like.new_empty(shape).normal_(centre, 1e-3)))

    weights, offsets = _tensors(layer)
    if isinstance(layer, _SCALED):
        _initialise(layer, init)
        weight: Tensor = layer.weight
        if posterior == "factored" and getattr(layer, "groups", 1) == 1:
            axis = _output_axis(layer)
            parameter(
                "weight_logvar_out",
                tuple(n if i == axis else 1 for i, n in enumerate(weight.shape)),
                logvar / 2,
                weight,
            )
            parameter(
                "weight_logvar_in",
                tuple(1 if i == axis else n for i, n in enumerate(weight.shape)),
                logvar / 2,
                weight,
            )
            weights = ()
        if posterior == "horseshoe":
            groups = weight.shape[1] if isinstance(layer, nn.Linear) else layer.out_channels
            layer.scales = Scales(int(groups), logvar, dtype=weight.dtype, device=weight.device)
    for name in (*weights, *(offsets if biases else ())):
        tensor = getattr(layer, name)
        if tensor is not None:
            parameter(f"{name}_logvar", tensor.shape, logvar, tensor)


def _initialise(layer: Layer, init: str | None) -> None:
    if init == "he":
        with torch.no_grad():
            layer.weight.normal_(0.0, math.sqrt(2 / fan_in(layer)))
            if layer.bias is not None:
                layer.bias.zero_()


def _tensors(layer: Layer) -> tuple[Sequence[str], Sequence[str]]:
    """The names of a layer's own weights and biases."""
    if isinstance(layer, nn.MultiheadAttention):
        return ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"), ("in_proj_bias",)
    if isinstance(layer, nn.RNNBase | nn.RNNCellBase):
        names = list(layer._parameters)
        return [name for name in names if name.startswith("weight")], [
            name for name in names if name.startswith("bias")
        ]
    return ("weight",), ("bias",) if hasattr(layer, "bias") else ()


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
    return next(_random_names(layer), None) is not None


def _random_names(layer: Layer) -> Iterator[str]:
    if not isinstance(layer, Scales):
        for name in layer._parameters:
            if name == "weight_logvar_out":
                yield "weight"
            elif name.endswith("_logvar") and hasattr(layer, mean := name.removesuffix("_logvar")):
                yield mean


def posteriors(net: nn.Module) -> Iterator[tuple[str, Posterior]]:
    """Every random tensor of the network, by the name of its mean."""
    layer: Layer
    for prefix, layer in net.named_modules():
        for name in _random_names(layer):
            full = hasattr(layer, f"{name}_logvar")
            logvar = (
                getattr(layer, f"{name}_logvar") if full else layer.weight_logvar_out + layer.weight_logvar_in
            )
            scales = getattr(layer, "scales", None) if name == "weight" else None
            yield (
                f"{prefix}.{name}" if prefix else name,
                Posterior(
                    getattr(layer, name),
                    logvar,
                    scales,
                    getattr(layer, f"{name}_centre", None),
                    getattr(layer, "padding_idx", None),
                ),
            )


def random_tensor(layer: Layer, name: str) -> Activation | None:
    """A layer's tensor of this name as the rules take it: plain, or with a variance; None where the layer has none."""
    tensor: Tensor | None = getattr(layer, name, None)
    if tensor is not None and hasattr(layer, f"{name}_logvar"):
        return Gaussian.of(tensor, getattr(layer, f"{name}_logvar").exp())
    return tensor


def draw(net: nn.Module, n: int, generator: torch.Generator | None = None) -> dict[str, Tensor]:
    """n draws of every random tensor, stacked in front, by name: with `torch.func.functional_call`, n plain networks.

    >>> net = vp.variational(nn.Sequential(nn.Linear(3, 2)))
    >>> vp.posterior.draw(net, 5)["0.weight"].shape
    torch.Size([5, 2, 3])
    """

    def normal(mean: Tensor, std: Tensor) -> Tensor:
        noise = torch.randn((n, *mean.shape), generator=generator, dtype=mean.dtype, device=mean.device)
        return mean + std * noise

    def root(mean: Tensor, logvar: Tensor) -> Tensor:
        return torch.exp(normal(mean, torch.exp(logvar / 2)).sum(1) / 2)

    weights = {}
    for name, q in posteriors(net):
        weights[name] = normal(q.mean, q.std)
        if q.scales is not None:
            group, whole = (
                root(q.scales.group_mean, q.scales.group_logvar),
                root(q.scales.layer_mean, q.scales.layer_logvar),
            )
            group = _along_weight(net.get_submodule(name.rpartition(".")[0]), group)
            missing = (1,) * (weights[name].dim() - group.dim())
            weights[name] = (
                weights[name] * group.view(*group.shape, *missing) * whole.view(n, *(1,) * q.mean.dim())
            )
    return weights


def _along_weight(layer: Layer, group: Tensor) -> Tensor:
    """A scale for each group, in front of which are draws, along the axes of the layer's weight."""
    if isinstance(layer, nn.Linear):
        return group[:, None, :]
    if (
        layer.transposed
    ):  # weights are (in, out/groups, ...), and the inputs of a group feed that group's outputs
        return group.view(len(group), layer.groups, -1).repeat_interleave(
            layer.in_channels // layer.groups, 1
        )
    return group


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


def scale_variances(net: nn.Module, log_factor: float) -> None:
    """Multiply the variance of every random weight by exp(log_factor), in place."""
    with torch.no_grad():
        for layer in net.modules():
            for name, logvar in layer.named_parameters(recurse=False):
                if name.endswith(("_logvar", "_logvar_out")) and not isinstance(layer, Scales):
                    logvar.add_(log_factor)


def random_weight(layer: Layer) -> Weight:
    """The layer's weight as the rules take it, which may have factored variances."""
    weight: Any = random_tensor(layer, "weight")
    if hasattr(layer, "weight_logvar_out"):
        inputs, outputs = layer.weight_logvar_in.exp(), layer.weight_logvar_out.exp()
        return FactoredWeight(weight, Outer(per_channel(outputs.flatten(), weight), inputs))
    return weight


def random_bias(layer: Layer) -> Activation | None:
    return random_tensor(layer, "bias")

"""q(w): the random weights of a network, stored as log-variances beside torch's own weights."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvTransposeNd

from .cache import of_weight
from .gaussian import Activation, Gaussian
from .horseshoe import Scales
from .moments import FactoredWeight, Outer, Weight, per_channel

Net = TypeVar("Net", bound=nn.Module)
Layer: TypeAlias = Any
"""A module with torch's weight and bias; `nn.Module` types every attribute as Tensor | Module."""


# -------------------- the posterior of one tensor


@dataclass(frozen=True)
class Posterior:
    """The posterior of one weight tensor: independent normals, with horseshoe scales if there are any."""

    mean: Tensor
    logvar: Tensor
    scales: Scales | None = None
    centre: Tensor | None = None
    """The means at the time `centred` was called, for `priors.Centred`."""
    earlier: Posterior | None = None
    """The posterior at the time `remembered` was called, for `priors.Earlier`."""
    padding: int | None = None
    """The row of an embedding that stands for padding; it is deterministic."""
    fan_in: float | None = None
    """How many inputs an output of the layer sums over (see `fan_in`), for `priors.FanIn`."""

    @property
    def var(self) -> Tensor:
        return self._without_padding(of_weight(torch.exp, self.logvar))

    @property
    def std(self) -> Tensor:
        return self._without_padding(torch.exp(self.logvar / 2))

    @property
    def random(self) -> Posterior:
        """The part that has a prior: everything except the padding row of an embedding.

        >>> ((_, q),) = vp.posteriors(vp.variational(nn.Embedding(5, 3, padding_idx=0)))
        >>> q.mean.shape, q.random.mean.shape
        (torch.Size([5, 3]), torch.Size([4, 3]))
        """
        row = self.padding
        if row is None:
            return self

        def others(t: Tensor) -> Tensor:
            return torch.cat((t[:row], t[row + 1 :]))

        centre = None if self.centre is None else others(self.centre)
        earlier = None if self.earlier is None else replace(self.earlier, padding=row).random
        return replace(
            self,
            mean=others(self.mean),
            logvar=others(self.logvar),
            centre=centre,
            earlier=earlier,
            padding=None,
        )

    def _without_padding(self, t: Tensor) -> Tensor:
        if self.padding is None:
            return t
        rows = torch.arange(len(t), device=t.device)
        return t.masked_fill((rows == self.padding).unsqueeze(-1), 0.0)


# -------------------- reading random weights


def posteriors(net: nn.Module) -> Iterator[tuple[str, Posterior]]:
    """Every random tensor of the network once, with the name of its mean."""
    layer: Layer
    seen: set[int] = set()
    for prefix, layer in net.named_modules():
        for name in _random_names(layer):
            mean: Tensor = getattr(layer, name)
            if id(mean) in seen:
                continue
            seen.add(id(mean))
            logvar: Tensor | None = getattr(layer, f"{name}_logvar", None)
            q = Posterior(
                mean,
                layer.weight_logvar_out + layer.weight_logvar_in if logvar is None else logvar,
                scales=layer._modules.get("scales") if name == "weight" else None,
                centre=layer._buffers.get(f"{name}_centre"),
                earlier=_earlier(layer, name),
                padding=getattr(layer, "padding_idx", None),
                fan_in=fan_in(layer, mean),
            )
            yield f"{prefix}.{name}" if prefix else name, q


def scale_posteriors(scales: Scales) -> Iterator[tuple[str, Posterior]]:
    """The normal posteriors of a layer's log-scales, with the names of their means."""
    for kind in ("group", "layer"):
        name = f"{kind}_mean"
        mean, logvar = getattr(scales, name), getattr(scales, f"{kind}_logvar")
        yield name, Posterior(mean, logvar, earlier=_earlier(scales, name))


def deterministic_parameters(net: nn.Module) -> Iterator[nn.Parameter]:
    """The parameters without a posterior, such as most biases.

    >>> net = vp.variational(nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 1)))
    >>> [len(p) for p in vp.posterior.deterministic_parameters(net)]
    [2, 1]
    """
    for layer in net.modules():
        random = set(_random_names(layer))
        for name, parameter in layer.named_parameters(recurse=False):
            is_logvar = name.endswith(("_logvar", "_logvar_out", "_logvar_in"))
            if not (name in random or is_logvar or isinstance(layer, Scales)):
                yield parameter


def _earlier(layer: nn.Module, name: str) -> Posterior | None:
    mean, logvar = (layer._buffers.get(f"{name}_{what}") for what in ("earlier", "earlier_logvar"))
    return None if mean is None or logvar is None else Posterior(mean, logvar)


def is_random(layer: nn.Module) -> bool:
    """Whether the layer itself has random weights; submodules do not count."""
    return next(_random_names(layer), None) is not None


def _random_names(layer: nn.Module) -> Iterator[str]:
    """The names of the layer's own random tensors."""
    if not isinstance(layer, Scales):
        for name in layer._parameters:
            if name == "weight_logvar_out":
                yield "weight"
            elif name.endswith("_logvar") and hasattr(layer, mean := name.removesuffix("_logvar")):
                yield mean


def fan_in(layer: Layer, tensor: Tensor | None = None) -> float:
    """How many inputs an output sums over, for one of a layer's tensors; by default for its `weight`.

    - Linear, attention and recurrent weights: the number of columns.
    - Convolution: in_channels/groups × kernel size.
    - Transposed convolution: in_channels/groups × kernel size / stride. With a stride, an output position
      sees only every stride-th entry of the kernel, so this is the average number over positions.
    - Embedding and EmbeddingBag: 1, because a row is looked up and not summed.
    - Bias: 1.
    - Any other tensor: the product of all dimensions but the first, which torch uses for the outputs.

    >>> fan_in(nn.Linear(5, 3)), fan_in(nn.ConvTranspose2d(16, 2, 3)), fan_in(nn.Embedding(100, 8))
    (5, 144.0, 1)
    """
    shape = (layer.weight if tensor is None else tensor).shape
    if isinstance(layer, nn.Embedding | nn.EmbeddingBag):
        return 1
    if isinstance(layer, _ConvTransposeNd) and len(shape) > 1:
        return layer.in_channels // layer.groups * math.prod(shape[2:]) / math.prod(layer.stride)
    return math.prod(shape[1:])


def random_tensor(layer: Layer, name: str) -> Activation | None:
    """The layer's tensor of this name, with its variance if it is random; None if there is no such tensor."""
    tensor: Tensor | None = getattr(layer, name, None)
    logvar = layer._parameters.get(f"{name}_logvar")
    return tensor if tensor is None or logvar is None else Gaussian.of(tensor, of_weight(torch.exp, logvar))


def random_weight(layer: Layer) -> Weight:
    """The layer's weight with its variance, full or factored, if it is random."""
    if "weight_logvar_out" in layer._parameters:
        inputs, outputs = layer.weight_logvar_in.exp(), layer.weight_logvar_out.exp()
        return FactoredWeight(layer.weight, Outer(per_channel(outputs.flatten(), layer.weight), inputs))
    weight = random_tensor(layer, "weight")
    assert weight is not None
    return weight


def random_bias(layer: Layer) -> Activation | None:
    """The layer's bias, with its variance if it is random; None if the layer has no bias."""
    return random_tensor(layer, "bias")


# -------------------- sampling and changing posteriors


def draw(net: nn.Module, n: int, generator: torch.Generator | None = None) -> dict[str, Tensor]:
    """n Monte Carlo samples of every random tensor, stacked in front, by name.

    With `substituted` and `vmap` they run as n plain networks.

    >>> net = vp.variational(nn.Sequential(nn.Linear(3, 2)))
    >>> vp.posterior.draw(net, 5)["0.weight"].shape
    torch.Size([5, 2, 3])
    """
    weights = {}
    for name, q in posteriors(net):
        noise = torch.randn((n, *q.mean.shape), generator=generator, dtype=q.mean.dtype, device=q.mean.device)
        weights[name] = q.mean + q.std * noise
        if q.scales is not None:
            layer: Layer = net.get_submodule(name.rpartition(".")[0])
            weights[name] = q.scales.multiply(layer, weights[name], generator)
    return weights


def centred(net: Net) -> Net:
    """Store the present means of all random weights as the centre of `priors.Centred`, in place.

    >>> net = vp.centred(vp.variational(nn.Linear(2, 1)))
    >>> torch.equal(net.weight, net.weight_centre)
    True
    """
    for name, q in list(posteriors(net)):
        owner, _, mean = name.rpartition(".")
        net.get_submodule(owner).register_buffer(f"{mean}_centre", q.mean.detach().clone())
    return net


def remembered(net: Net) -> Net:
    """Store the present posterior of all random weights as the prior of `priors.Earlier`, in place.

    >>> net = vp.remembered(vp.variational(nn.Linear(2, 1)))
    >>> vp.ELBO(net, vp.VBP, vp.likelihoods.Normal(), vp.priors.Earlier(), n_data=1).kl()
    tensor(0., grad_fn=<MulBackward0>)
    """
    for owner, q in list(posteriors(net)):
        prefix, _, name = owner.rpartition(".")
        layer = net.get_submodule(prefix)
        _remember(layer, name, q)
        if q.scales is not None:
            for name, scale in scale_posteriors(q.scales):
                _remember(q.scales, name, scale)
    return net


def _remember(layer: nn.Module, name: str, q: Posterior) -> None:
    for suffix, value in (("earlier", q.mean), ("earlier_logvar", q.logvar)):
        layer.register_buffer(f"{name}_{suffix}", value.detach().clone())


@torch.no_grad()
def scale_variances(net: nn.Module, log_factor: float) -> None:
    """Multiply the variance of every random weight by exp(log_factor), in place."""
    for layer in net.modules():
        if not isinstance(layer, Scales):
            for name, logvar in layer.named_parameters(recurse=False):
                if name.endswith(("_logvar", "_logvar_out")):
                    logvar.add_(log_factor)

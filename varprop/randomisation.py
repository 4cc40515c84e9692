"""Making weights random: `variational` gives the layers of a plain network log-variances."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.parameter import is_lazy

from .horseshoe import Scales
from .posterior import Layer, Net, fan_in, is_random

_AFFINE = (nn.Linear, _ConvNd)
_RECURRENT = (nn.RNNBase, nn.RNNCellBase)
RANDOM_LAYERS = (*_AFFINE, nn.Embedding, nn.EmbeddingBag, nn.MultiheadAttention, *_RECURRENT)
"""The layers whose weights `variational` can make random."""

Form = Literal["full", "factored", "horseshoe"]


def variational(
    net: Net,
    logvar: float = -9.0,
    where: Callable[[str, nn.Module], bool] | None = None,
    posterior: Form = "full",
    *,
    init: Literal["he"] | None = None,
    biases: bool = False,
) -> Net:
    """Make the weights of a network random, in place.

    Each `weight` becomes a posterior mean, and a new parameter `weight_logvar` holds the log-variances.
    Linear, convolution, embedding, attention and recurrent layers are made random, and others whose `weight`
    is a matrix, or those of them for which `where(name, module)` is true. Attention and recurrent layers have
    several weights, each with its own log-variances (`in_proj_weight_logvar`, `weight_hh_l0_logvar`). Layers
    that share a weight share its posterior. Layers already random are skipped.

    :param logvar: log-variances are initialised from N(logvar, 0.001²), as in the paper.
    :param posterior: "full" has one variance for each weight. "factored" has variances Var[w_oi] = a_o b_i,
        which make a pass cheaper; layers other than linear layers and convolutions without groups stay full.
        "horseshoe" adds log-normal group scales for `priors.Horseshoe`, in linear layers and convolutions.
    :param init: "he" initialises the means of linear layers and convolutions anew and sets their biases to
        zero, as in the paper. By default all means keep their values.
    :param biases: make biases random too.

    >>> net = vp.variational(nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 1)))
    >>> [name for name, _ in vp.posteriors(net)]
    ['0.weight', '2.weight']
    """
    if not isinstance(net, nn.Module):
        raise TypeError(f"variational: net must be an nn.Module, got {net!r}.")
    if not (where is None or callable(where)):
        raise TypeError(
            f"variational: where must be a function of a layer's name and the layer, got {where!r}."
        )
    if not (isinstance(logvar, float | Real) and math.isfinite(logvar)):
        raise ValueError(f"variational: logvar must be a finite number, got {logvar!r}.")
    if posterior not in get_args(Form):
        raise ValueError(
            f'variational: posterior must be "full", "factored" or "horseshoe", got {posterior!r}.'
        )
    if init not in (None, "he"):
        raise ValueError(f'variational: init must be None or "he", got {init!r}.')
    chosen = [
        (name, layer)
        for name, layer in net.named_modules()
        if _has_weights(layer) and (where is None or where(name, layer))
    ]
    if not chosen:
        raise ValueError(
            "variational: no layer was chosen; the network has no layer of a supported type for which "
            "`where` is true."
        )
    first: dict[int, Layer] = {}
    for name, layer in chosen:
        _check_layer(name, layer, posterior)
        other = first.setdefault(id(getattr(layer, "weight", layer)), layer)
        if other is not layer:
            _share(name, layer, other, posterior)
        elif not is_random(layer):
            _randomise(layer, logvar, posterior, init, biases)
    return net


def _has_weights(layer: nn.Module) -> bool:
    """Whether a layer has weights to make random; one that is not torch's has if its `weight` is a matrix."""
    if type(layer).__module__.startswith("torch.") or isinstance(layer, RANDOM_LAYERS):
        return isinstance(layer, RANDOM_LAYERS)
    weight = layer._parameters.get("weight")
    return weight is not None and not is_lazy(weight) and weight.dim() > 1


def _share(name: str, layer: Layer, other: Layer, posterior: Form) -> None:
    """Layers that share a weight share its posterior."""
    if posterior != "full":
        raise ValueError(
            f'variational: layer {name!r} and another share their weight, which only posterior="full" can; '
            "leave one of them out with where=."
        )
    layer.weight_logvar = other.weight_logvar


def _check_layer(name: str, layer: nn.Module, posterior: Form) -> None:
    if posterior == "horseshoe" and not isinstance(layer, _AFFINE):
        raise ValueError(
            f"variational: layer {name!r}, {type(layer).__name__}, has no horseshoe posterior; "
            "leave it out with where=."
        )
    if any(is_lazy(p) for p in layer.parameters(recurse=False)):
        raise ValueError(
            f"variational: layer {name!r} has no shape yet; run the network on a batch before variational."
        )


def _randomise(layer: Layer, logvar: float, posterior: Form, init: str | None, biases: bool) -> None:
    def add(name: str, like: Tensor, shape: Sequence[int], centre: float) -> None:
        value = like.new_empty(shape)
        # To fill a tensor without content, torch would load its compiler, which takes two seconds.
        layer.register_parameter(name, nn.Parameter(value if value.is_meta else value.normal_(centre, 1e-3)))

    names = [*_weight_names(layer), *(_bias_names(layer) if biases else ())]
    if isinstance(layer, _AFFINE):
        weight: Tensor = layer.weight
        if init == "he":
            _initialise(layer)
        if posterior == "factored" and getattr(layer, "groups", 1) == 1:
            outputs = 1 if isinstance(layer, _ConvTransposeNd) else 0
            sizes = list(enumerate(weight.shape))
            add("weight_logvar_out", weight, [n if d == outputs else 1 for d, n in sizes], logvar / 2)
            add("weight_logvar_in", weight, [1 if d == outputs else n for d, n in sizes], logvar / 2)
            names.remove("weight")
        if posterior == "horseshoe":
            groups = layer.in_features if isinstance(layer, nn.Linear) else layer.out_channels
            layer.scales = Scales(groups, logvar, weight.dtype, weight.device)
    for name in names:
        mean: Tensor | None = getattr(layer, name)
        if mean is not None:
            add(f"{name}_logvar", mean, mean.shape, logvar)


@torch.no_grad()
def _initialise(layer: Layer) -> None:
    layer.weight.normal_(0.0, math.sqrt(2 / fan_in(layer)))
    if layer.bias is not None:
        layer.bias.zero_()


def _weight_names(layer: nn.Module) -> Sequence[str]:
    if isinstance(layer, nn.MultiheadAttention):
        return "in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"
    if isinstance(layer, _RECURRENT):
        return [name for name in layer._parameters if name.startswith("weight")]
    return ("weight",)


def _bias_names(layer: nn.Module) -> Sequence[str]:
    if isinstance(layer, nn.MultiheadAttention):
        return ("in_proj_bias",)
    if isinstance(layer, _RECURRENT):
        return [name for name in layer._parameters if name.startswith("bias")]
    return ("bias",) if hasattr(layer, "bias") else ()

"""Layers with weights: linear maps and convolutions, exact for independent inputs (Eq. 1)."""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn
from torch.nn import functional as F

from ... import moments
from ...gaussian import Activation, as_gaussian, move
from ...posterior import Layer, random_bias, random_weight
from ..base import Call, Method
from ..facts import Table, rule
from ..noise import of_weights


def operation(layer: Layer) -> moments.Op:
    """The linear operation of a layer, as a function of input, weight and bias."""
    if isinstance(layer, nn.Linear):
        return F.linear
    options = {"stride": layer.stride, "groups": layer.groups, "dilation": layer.dilation}
    if layer.transposed:
        up = {3: F.conv_transpose1d, 4: F.conv_transpose2d, 5: F.conv_transpose3d}[layer.weight.dim()]
        return partial(_call, up, padding=layer.padding, output_padding=layer.output_padding, **options)
    op = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}[layer.weight.dim()]
    return partial(_call, op, padding=layer.padding if layer.padding_mode == "zeros" else 0, **options)


def _call(op: moments.Op, x: Tensor, weight: Tensor, bias: Tensor | None = None, **options: object) -> Tensor:
    return op(x, weight, bias, **options)


def _pad(layer: Layer, x: Activation) -> Activation:
    """Padding other than with zeros repeats entries; the copies are treated as independent."""
    if getattr(layer, "padding_mode", "zeros") == "zeros":
        return x
    return move(partial(F.pad, pad=layer._reversed_padding_repeated_twice, mode=layer.padding_mode), x)


def _own_matrix(call: Call) -> nn.Module | None:
    """The Jacobian is the layer's mean matrix, unless a horseshoe prior scales it."""
    return None if hasattr(call.module, "scales") else call.module


@rule("exact", 1, gain=_own_matrix, noise=of_weights)
def affine(method: Method, layer: Layer, x: Activation) -> Activation:
    """E = op(E[x], E[w]) + E[b],  Var = op(Var[x], E[w]²) + op(E[x²], Var[w]) + Var[b] (Eq. 1)."""
    x, op = _pad(layer, x), operation(layer)
    weight, bias = random_weight(layer), random_bias(layer)
    if "scales" not in layer._modules:
        return moments.affine(op, x, weight, bias)
    return _scaled_affine(op, layer, x, weight, bias)


def _scaled_affine(
    op: moments.Op, layer: Layer, x: Activation, weight: moments.Weight, bias: Activation | None
) -> Activation:
    """A horseshoe scales the inputs of a linear layer or a convolution's filters, and the output (Eq. 37)."""
    per_channel = partial(moments.per_channel, weight=layer.weight)
    group, whole = layer.scales.group, layer.scales.layer
    if isinstance(layer, nn.Linear):
        out = moments.affine(op, moments.product(x, group), weight)
    else:
        out = moments.product(moments.affine(op, x, weight), move(per_channel, group))
    scaled = moments.product(out, move(per_channel, whole))
    return scaled if bias is None else as_gaussian(scaled).plus(move(per_channel, bias))


LINEAR: Table = dict.fromkeys(
    (
        nn.Linear,
        nn.Conv1d,
        nn.Conv2d,
        nn.Conv3d,
        nn.ConvTranspose1d,
        nn.ConvTranspose2d,
        nn.ConvTranspose3d,
    ),
    affine,
)

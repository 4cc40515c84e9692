"""Numbers and layers in words, for a reader."""

from __future__ import annotations

import numpy as np
import pandas as pd
from torch import Tensor, nn


def plain(value: float, digits: int = 4) -> str:
    """A number with so many digits, all of those before the point, and no exponent where it can be helped.

    >>> plain(31234.5678), plain(0.123456), plain(-0.00001234), plain(2.0)
    ('31,235', '0.1235', '-0.00001234', '2')
    """
    value = float(value)
    if not np.isfinite(value) or not (value == 0 or 1e-7 < abs(value) < 1e15):
        return f"{value:.{digits}g}"
    if abs(value) >= 10 ** (digits - 1):
        return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.0f}"
    return np.format_float_positional(value, digits, unique=False, fractional=False, trim="-")


def as_text(value: object) -> str:
    """A value of the data for a reader; nothing where it is missing."""
    if isinstance(value, float | np.floating):
        return "" if np.isnan(value) else plain(float(value))
    return "" if value is None or value is pd.NA else str(value)


def layer_in_words(layer: nn.Module) -> str:
    """The type of a layer and the shape of its weights, from inputs to outputs.

    >>> layer_in_words(nn.Linear(13, 50)), layer_in_words(nn.Conv2d(1, 8, 3)), layer_in_words(nn.ReLU())
    ('Linear 13 → 50', 'Conv2d 1 → 8, 3×3', 'ReLU')
    """
    kind, weight = type(layer).__name__, getattr(layer, "weight", None)
    if isinstance(layer, nn.Linear):
        return f"{kind} {layer.in_features} → {layer.out_features}"
    if isinstance(layer, nn.modules.conv._ConvNd):
        return f"{kind} {layer.in_channels} → {layer.out_channels}, {'×'.join(map(str, layer.kernel_size))}"
    return f"{kind} {'×'.join(map(str, weight.shape))}" if isinstance(weight, Tensor) else kind


def tensor_in_words(net: nn.Module, name: str) -> str:
    """A layer by its name and shape, or one of its tensors.

    >>> net = nn.Sequential(nn.Linear(13, 50), nn.ReLU())
    >>> tensor_in_words(net, "0"), tensor_in_words(net, "0.weight"), tensor_in_words(net, "0.bias")
    ('0: Linear 13 → 50', '0: Linear 13 → 50', '0: Linear 13 → 50, bias')
    """
    layers = dict(net.named_modules())
    path, tensor = (name, "weight") if name in layers else name.rpartition(".")[::2]
    words = layer_in_words(layers[path]) + ("" if tensor == "weight" else f", {tensor}")
    return f"{path}: {words}" if path else words

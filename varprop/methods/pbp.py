"""Probabilistic backpropagation (Hernández-Lobato and Adams 2015), its pass: DVI's table with every sum scaled to unit size."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

from torch import nn

from ..gaussian import Activation
from ..posterior import Layer, fan_in
from .base import Method, Rule
from .dvi import DVI
from .moments import AFFINE


def scale(layer: Layer) -> float:
    """1/√n, where n counts what an output of the layer sums over, its bias included."""
    return 1 / math.sqrt(fan_in(layer) + (layer.bias is not None))


def _scaled(rule: Rule, method: Method, layer: nn.Module, x: Activation) -> Activation:
    """(W x + b)/√n (Eq. 26): a bias is one more weight, on an input that is always 1."""
    return rule(method, layer, x) * scale(layer)


PBP = replace(DVI | {kind: partial(_scaled, rule) for kind, rule in AFFINE.items()}, name="PBP", key="pbp")

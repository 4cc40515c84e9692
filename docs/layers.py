"""The page of supported layers, read off the method tables: rows are types of layer, columns methods, cells what a rule is.

A rule that this file cannot name stops the build, so that a new row of a table has to be described here before it appears.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

import varprop as vp
from varprop import functional as fn
from varprop.methods import attention, base, dvi, local_reparam, moments, normalisation, pbp, recurrent, resampling
from varprop.methods.vbp import _gate, _winner_pool


class Kind(NamedTuple):
    """What a rule is: a word of the legend, and its equation where it has one."""

    word: str
    equation: int | None = None

    def __str__(self) -> str:
        return self.word if self.equation is None else f"{self.word}, {{eq}}`eq-{self.equation}`"


# A rule is a chain of partials; the first of these functions that the chain holds says what it is.
KINDS: dict[Callable[..., Any], Kind] = {
    local_reparam._sampled: Kind("sampled", 19),
    local_reparam._other: Kind("sampled"),
    pbp._scaled: Kind("exact", 26),
    base.sequential: Kind("one by one"),
    base.as_it_is: Kind("plain"),
    moments.affine: Kind("exact", 1),
    moments.moved: Kind("exact"),
    moments.dropout: Kind("exact", 10),
    moments.alpha_dropout: Kind("exact", 10),
    moments._average: Kind("exact", 9),
    moments._adaptive_average: Kind("exact", 9),
    moments._gated_linear: Kind("approximate", 11),
    attention.embedding: Kind("exact"),
    attention._multihead: Kind("approximate", 37),
    attention._encoder_layer: Kind("part by part"),
    attention._encoder: Kind("one by one"),
    recurrent._layers: Kind("approximate", 38),
    recurrent._cell: Kind("approximate", 38),
    normalisation._batch_norm: Kind("exact in evaluation, approximate in training", 32),
    normalisation._instance_norm: Kind("approximate", 32),
    normalisation._group_norm: Kind("approximate", 32),
    normalisation._layer_norm: Kind("approximate", 32),
    normalisation._rms_norm: Kind("approximate", 32),
    normalisation._over_classes: Kind("approximate", 34),
    normalisation._softmax2d: Kind("approximate", 34),
    resampling._constant_pad: Kind("exact"),
    resampling._upsample: Kind("exact", 35),
    moments._smooth: Kind("approximate", 11),
    _gate: Kind("approximate", 4),
    _winner_pool: Kind("approximate", 7),
    fn.rectify: Kind("exact", 6),
    dvi._clark_pool: Kind("approximate", 8),
}

TITLES = {
    "Containers": (nn.Sequential, nn.ModuleList),
    "Layers with weights": (*moments.AFFINE, *attention.EMBEDDING),
    "Attention and recurrence": (*attention.ATTENTION, *recurrent.RECURRENT),
    "Normalisation": tuple(normalisation.NORMALISATION),
    "Piecewise-linear activations": moments.PIECEWISE,
    "Smooth activations": (*moments.SMOOTH, nn.GLU),
    "Maxima": tuple(moments.MAX_POOLS),
}
REST = "Averages, noise and moves"


def functions(rule: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """Every function in a chain of partials."""
    if isinstance(rule, partial):
        for part in (rule.func, *rule.args):
            if callable(part):
                yield from functions(part)
    else:
        yield rule


def kind(rule: Callable[..., Any]) -> Kind:
    held = set(functions(rule))
    for function, known in KINDS.items():
        if function in held:
            return known
    names = ", ".join(sorted(f.__qualname__ for f in held))
    raise KeyError(f"docs/layers.py: no kind is given for the rule made of {names}; add its function to KINDS.")


def layer_types() -> list[type[nn.Module]]:
    """Every type that some table names, but the catch-all nn.Module, in the order of the tables."""
    types = dict.fromkeys(layer for method in vp.METHODS.values() for layer in method.rules)
    return [layer for layer in types if layer is not nn.Module]


def cell(method: vp.Method, layer: type[nn.Module]) -> str:
    """What the method does with a layer of this type: by its own row, or by the row for every module."""
    rule = method.rules.get(layer, method.rules.get(nn.Module))
    return "none" if rule is None else str(kind(rule))


def measured() -> dict[str, str]:
    """For each layer by its name, DVI's error of the mean and ratio of variances in its first case in experiments/accuracy.py."""
    path = Path(__file__).parents[1] / "experiments" / "results" / "accuracy" / "layers.json"
    cells: dict[str, str] = {}
    for row in json.loads(path.read_text())["rows"]:
        dvi = row["dvi"]
        cells.setdefault(row["type"], f"{dvi['mean_error']:.2f}, {dvi['var_ratio']:.2f} ({row['front']})")
    return cells


def table(layers: list[type[nn.Module]]) -> str:
    methods, numbers = list(vp.METHODS.values()), measured()
    lines = ["| layer | " + " | ".join(f"`{method.name}`" for method in methods) + " | measured |", "|---" * (len(methods) + 2) + "|"]
    for layer in layers:
        words = " | ".join(cell(method, layer) for method in methods)
        lines.append(f"| `{layer.__name__}` | {words} | {numbers.get(layer.__name__, '')} |")
    return "\n".join(lines)


def page() -> str:
    """All tables, under their titles."""
    left = layer_types()
    parts = []
    for title, members in TITLES.items():
        parts.append(f"## {title}\n\n{table([layer for layer in left if layer in members])}")
        left = [layer for layer in left if layer not in members]
    return "\n\n".join([*parts, f"## {REST}\n\n{table(left)}"]) + "\n"

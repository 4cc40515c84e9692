"""The tables of supported layers, made from the methods: a row for each type of layer, a column for each
method.

A library rule that does not state its kind stops the build.
"""

from __future__ import annotations

import json
from pathlib import Path

from torch import nn

import varprop as vp
from varprop.methods.base import Function
from varprop.methods.facts import Kind, Rule, as_rule
from varprop.methods.rules import activations, attention, embedding, linear, normalisation, pooling, recurrent

TITLES = {
    "Containers": (nn.Sequential, nn.ModuleList),
    "Layers with weights": (*linear.LINEAR, *embedding.EMBEDDING),
    "Attention and recurrence": (*attention.ATTENTION, *recurrent.RECURRENT),
    "Normalisation": tuple(normalisation.NORMALISATION),
    "Piecewise-linear activations": activations.PIECEWISE,
    "Smooth activations": (*activations.SMOOTH, nn.GLU),
    "Maxima": pooling.MAX_POOLS,
}
REST = "Averages, noise and moves"
FUNCTIONS = """## Functions and tensor methods

What a `forward` may compute between layers in VBP, CVBP, DVI and PBP; other methods run functions unchanged.
The functions are those of `torch`, `torch.nn.functional` and `operator`, and the tensor methods of the same
name. Operands are assumed independent; {doc}`networks` describes which sums are corrected for correlation.
"""


def kind(entry: Rule | Function) -> Kind:
    rule = as_rule(entry)
    if rule.kind == Rule.kind:
        name = getattr(rule.apply, "__qualname__", rule.apply)
        raise KeyError(
            f"the rule {name} does not state its kind; give it one, as in Rule(apply, kind='exact')."
        )
    return Kind(rule.kind, rule.equation)


def written(known: Kind) -> str:
    return known.word if known.equation is None else f"{known.word}, {{eq}}`eq-{known.equation}`"


def layer_types() -> list[type[nn.Module]]:
    """Every layer type in any table except the catch-all nn.Module, in the order of the tables."""
    keys = dict.fromkeys(key for method in vp.METHODS.values() for key in method.rules)
    return [key for key in keys if isinstance(key, type) and key is not nn.Module]


def functions() -> dict[str, list[str]]:
    """The functions in VBP's table, grouped by the kind of their rule."""
    names: dict[str, list[str]] = {}
    for key, rule in vp.VBP.rules.items():
        if not isinstance(key, type):
            names.setdefault(written(kind(rule)), []).append(key if isinstance(key, str) else key.__name__)
    return {word: sorted(set(group)) for word, group in names.items()}


def cell(method: vp.Method, layer: type[nn.Module]) -> str:
    """The kind of the method's rule for this type of layer, or else of its rule for any module."""
    rule = method.rules.get(layer, method.rules.get(nn.Module))
    return "none" if rule is None else written(kind(rule))


def measured() -> dict[str, str]:
    """For each layer name, DVI's error of the mean and ratio of variances in experiments/accuracy.py."""
    path = Path(__file__).parents[1] / "experiments" / "results" / "accuracy" / "layers.json"
    cells: dict[str, str] = {}
    for row in json.loads(path.read_text())["rows"]:
        dvi = row["dvi"]
        cells.setdefault(row["type"], f"{dvi['mean_error']:.2f}, {dvi['var_ratio']:.2f} ({row['front']})")
    return cells


def table(layers: list[type[nn.Module]]) -> str:
    methods, numbers = list(vp.METHODS.values()), measured()
    lines = [
        "| layer | " + " | ".join(f"`{method.name}`" for method in methods) + " | measured |",
        "|---" * (len(methods) + 2) + "|",
    ]
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
    lines = [
        "| rule | functions |",
        "|---|---|",
        *(f"| {word} | {', '.join(f'`{n}`' for n in names)} |" for word, names in functions().items()),
    ]
    return "\n\n".join([*parts, f"## {REST}\n\n{table(left)}", FUNCTIONS.strip(), "\n".join(lines)]) + "\n"

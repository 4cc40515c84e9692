"""What each rule is: exact, approximate or something else, and its equation. The summary of a network and the docs read it here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

from .. import moments as fn
from . import (
    attention,
    base,
    cvbp,
    dvi,
    embedding,
    functions,
    local_reparam,
    moments,
    network,
    normalisation,
    pbp,
    recurrent,
    resampling,
    twins,
)
from .vbp import _gate, _winner_pool


class Kind(NamedTuple):
    """A word, and the rule's equation in docs/maths.md where it has one."""

    word: str
    equation: int | None = None

    def __str__(self) -> str:
        return self.word if self.equation is None else f"{self.word} (Eq. {self.equation})"


SQUARE = Kind("exact", 40)
INDEPENDENT = Kind("independent")
PLAIN = Kind("plain")
OWN = Kind("your own")

# A rule is a chain of partials; the first of these functions that the chain holds says what it is.
KINDS: dict[Callable[..., Any], Kind] = {
    local_reparam._sampled: Kind("sampled", 19),
    local_reparam._other: Kind("sampled"),
    pbp._scaled: Kind("exact", 26),
    base.sequential: Kind("one by one"),
    base.as_it_is: Kind("plain"),
    network.network: Kind("by its graph"),
    moments.affine: Kind("exact", 1),
    moments.moved: Kind("exact"),
    moments.dropout: Kind("exact", 10),
    moments.alpha_dropout: Kind("exact", 10),
    moments._average: Kind("exact", 9),
    moments._adaptive_average: Kind("exact", 9),
    moments.adaptive_max: Kind("as its layer"),
    moments._smooth: Kind("approximate", 11),
    moments._gated_linear: Kind("approximate", 11),
    embedding.embedding: Kind("exact"),
    embedding.embedding_bag: Kind("exact", 52),
    attention._multihead: Kind("approximate", 37),
    attention._encoder_layer: Kind("part by part"),
    attention._encoder: Kind("one by one"),
    **dict.fromkeys((recurrent._layers, recurrent._cell), Kind("approximate", 38)),
    normalisation._batch_norm: Kind("exact in evaluation, approximate in training", 32),
    **dict.fromkeys((normalisation._instance_norm, normalisation._group_norm), Kind("approximate", 32)),
    **dict.fromkeys((normalisation._layer_norm, normalisation._rms_norm), Kind("approximate", 32)),
    **dict.fromkeys((normalisation._over_classes, normalisation._softmax2d), Kind("approximate", 34)),
    resampling._constant_pad: Kind("exact"),
    resampling._upsample: Kind("exact", 35),
    _gate: Kind("approximate", 4),
    _winner_pool: Kind("approximate", 7),
    **dict.fromkeys((fn.anchored, cvbp._anchored_pool), Kind("approximate", 48)),
    fn.rectify: Kind("exact", 6),
    dvi.clark_pool: Kind("approximate", 8),
    **dict.fromkeys((fn.winner, fn.strongest), Kind("approximate", 7)),
    fn.maximum: Kind("exact", 8),
    fn.largest: Kind("approximate", 8),
    **dict.fromkeys((cvbp._anchored_larger, cvbp._anchored_largest), Kind("approximate", 48)),
    **dict.fromkeys(
        (twins.by_twin, twins.interpolated, twins.prelu, twins.by_statistics), Kind("as its layer")
    ),
    **dict.fromkeys(
        (twins.layer_norm, twins.rms_norm, twins.group_norm, twins.unit_length), Kind("as its layer")
    ),
    **dict.fromkeys((functions.add, functions.subtract, functions.negate, functions.divide), Kind("exact")),
    functions.multiply: Kind("exact", 3),
    functions.power: SQUARE,
    functions.elementwise: Kind("approximate", 11),
    **dict.fromkeys(
        (functions.bilinear, functions.affine, functions.added, functions.einsum), Kind("exact", 1)
    ),
    attention.scaled_dot_product: Kind("approximate", 37),
    functions.average: Kind("exact", 9),
    **dict.fromkeys(
        (functions.moves, functions.item, functions.parts, functions.joined, functions.padded), Kind("exact")
    ),
    **dict.fromkeys(
        (functions.where, functions.kept_where, functions.filled_where, functions.looked_up), Kind("exact")
    ),
    **dict.fromkeys((functions.about, functions.attribute), Kind("plain")),
}


def parts_of(rule: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """Every function in a chain of partials."""
    if isinstance(rule, partial):
        for part in (rule.func, *rule.args):
            if callable(part):
                yield from parts_of(part)
    else:
        yield rule


def kind(rule: Callable[..., Any]) -> Kind | None:
    """What a rule is; None for a rule that this table does not know."""
    held = set(parts_of(rule))
    return next((known for function, known in KINDS.items() if function in held), None)

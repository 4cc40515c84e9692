"""The rule of each torch function and tensor method: what a network computes between its layers."""

from __future__ import annotations

import builtins
import operator

import torch
from torch.nn import functional as F

from ..methods.facts import Rule, Table
from ..methods.rules.attention import scaled_dot_product
from . import arithmetic, entries
from .layer_forms import LAYER_FORMS
from .normalisation import NORMALISING
from .positive import POSITIVE
from .steps import placed


def _rows(rule: Rule, names: str) -> Table:
    """Table entries for functions of torch and torch.nn.functional, or else for tensor methods."""
    rows: Table = {}
    for name in names.split():
        found = [f for f in (getattr(torch, name, None), getattr(F, name, None)) if callable(f)]
        rows.update(dict.fromkeys(found or [name], rule))
    return rows


RESHAPING = (
    "flatten reshape view view_as reshape_as unflatten ravel permute transpose swapaxes movedim t squeeze "
    "unsqueeze swapdims moveaxis unfold pixel_shuffle pixel_unshuffle channel_shuffle"
)
REPEATING = "expand expand_as broadcast_to repeat repeat_interleave tile"
SELECTING = "narrow select index_select gather masked_select take_along_dim tril triu diagonal"
TURNING = "flip roll rot90 fliplr flipud adjoint"

FUNCTIONS: Table = {
    **LAYER_FORMS,
    **NORMALISING,
    **POSITIVE,
    **dict.fromkeys((operator.add, operator.iadd), arithmetic.add),
    **dict.fromkeys((operator.sub, operator.isub), arithmetic.subtract),
    **dict.fromkeys((operator.mul, operator.imul), arithmetic.multiply),
    **dict.fromkeys((operator.truediv, operator.itruediv), arithmetic.divide),
    operator.neg: arithmetic.negate,
    operator.pow: arithmetic.power,
    operator.matmul: arithmetic.bilinear,
    **_rows(arithmetic.add, "add add_"),
    **_rows(arithmetic.subtract, "sub sub_ subtract"),
    **_rows(arithmetic.multiply, "mul mul_ multiply"),
    **_rows(arithmetic.divide, "div div_ divide true_divide"),
    **_rows(arithmetic.negate, "neg negative neg_"),
    **_rows(arithmetic.power, "pow square"),
    **_rows(arithmetic.bilinear, "matmul mm bmm mv"),
    **_rows(
        arithmetic.affine, "linear conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d"
    ),
    **_rows(arithmetic.elementwise, "exp expm1 sin cos erf atan sinh cosh asinh"),
    **_rows(entries.moves, f"{RESHAPING} {REPEATING} {SELECTING} {TURNING} sum cumsum"),
    "unfold": entries.moves,
    **_rows(entries.unchanged, "clone contiguous detach to type_as float double half bfloat16"),
    **_rows(
        entries.metadata, "size dim numel is_floating_point new_zeros new_ones new_full new_tensor new_empty"
    ),
    **_rows(entries.metadata, "zeros_like ones_like full_like empty_like rand_like randn_like"),
    **_rows(entries.parts, "chunk split unbind tensor_split"),
    **_rows(entries.joined, "cat concat concatenate stack hstack vstack dstack"),
    **_rows(entries.average, "mean"),
    **_rows(entries.padded, "pad"),
    **_rows(arithmetic.add_product, "addmm addmv baddbmm"),
    **_rows(arithmetic.add_entries, "addcmul"),
    **_rows(arithmetic.einsum, "einsum"),
    placed: entries.written,
    **_rows(entries.where, "where"),
    "where": entries.kept_where,
    **_rows(entries.filled_where, "masked_fill masked_fill_"),
    **_rows(entries.looked_up, "embedding"),
    **_rows(entries.scattered, "scatter_add scatter_add_ index_add index_add_"),
    F.scaled_dot_product_attention: scaled_dot_product,
    builtins.getattr: entries.attribute,
    operator.getitem: entries.item,
}

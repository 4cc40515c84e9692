"""Attention and transformer encoders. The correlation of positions, which share weights, is ignored."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ... import moments
from ...gaussian import Activation, Gaussian, as_gaussian, mean_of, move
from ...posterior import Layer, random_tensor
from ..base import Function, Method, NoRuleError, Value, is_plain
from ..facts import Table, rule

# -------------------------------------------------------------------------------------------------- attention


@rule("approximate", 21)
def multihead(
    method: Method,
    module: Layer,
    query: Activation,
    key: Activation,
    value: Activation,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Activation, Activation | None]:
    """Queries, keys and values by Eq. 1, scores by Eq. 20, and the weighted values by Eq. 21."""
    if is_plain(module, query, key, value):
        options = {"average_attn_weights": average_attn_weights, "is_causal": is_causal}
        plain: tuple[Tensor, Tensor | None] = module(
            query, key, value, key_padding_mask, need_weights, attn_mask, **options
        )
        return plain
    if module.bias_k is not None or module.add_zero_attn:
        raise NoRuleError(
            f"{method.name} has no rule for MultiheadAttention with add_bias_kv or add_zero_attn; "
            "build it without them."
        )
    unbatched = mean_of(query).dim() == 2
    query, key, value = (_batch_first(module, x, unbatched) for x in (query, key, value))
    weights_in, biases_in = _projections(module)
    queries, keys = (
        _by_head(module, moments.affine(F.linear, x, w, b))
        for x, w, b in zip((query, key), weights_in, biases_in, strict=False)
    )
    scores = _masked(_scores(queries, keys), key_padding_mask, attn_mask)
    # Projecting the values after weighting them computes the same, and accounts for all positions sharing the
    # projection.
    seen, weights = moments.attend(
        scores, move(lambda t: t.unsqueeze(1), value), module.dropout if module.training else 0.0
    )
    heads = _by_row(module, seen, weights_in[2], biases_in[2])
    out = method(module.out_proj, heads.map(lambda t: t.transpose(1, 2).flatten(2)))
    if need_weights and average_attn_weights:
        # The heads see the same input through different weights.
        weights = Gaussian.of(weights.mean.mean(1), weights.var.mean(1) / module.num_heads)
    if unbatched:
        out, weights = move(lambda t: t.squeeze(0), out), weights.map(lambda t: t.squeeze(0))
    elif not module.batch_first:
        out = move(lambda t: t.transpose(0, 1), out)
    return out, weights if need_weights else None


def _projections(module: Layer) -> tuple[list[Activation], list[Activation | None]]:
    """The weights and biases of query, key and value."""
    if module._qkv_same_embed_dim:
        weights = _chunks(random_tensor(module, "in_proj_weight"))
    else:
        weights = [random_tensor(module, f"{part}_proj_weight") for part in "qkv"]
    return weights, _chunks(random_tensor(module, "in_proj_bias"))


def _chunks(x: Activation | None) -> list[Value]:
    if isinstance(x, Gaussian):
        return [Gaussian.of(m, v) for m, v in zip(x.mean.chunk(3), x.var.chunk(3), strict=True)]
    return [None] * 3 if x is None else list(x.chunk(3))


def _batch_first(module: Layer, x: Activation, unbatched: bool) -> Activation:
    return move(lambda t: t.unsqueeze(0) if unbatched else t if module.batch_first else t.transpose(0, 1), x)


def _by_head(module: Layer, x: Activation) -> Activation:
    """(batch, heads, positions, features of a head) from (batch, positions, features)."""
    return move(lambda t: t.unflatten(-1, (module.num_heads, -1)).transpose(1, 2), x)


def _by_row(module: Layer, x: Gaussian, weight: Activation, bias: Activation | None) -> Gaussian:
    """The input of each head through that head's rows of a projection (Eq. 1)."""
    out = as_gaussian(moments.affine(_dot, x, move(lambda t: t.unflatten(0, (module.num_heads, -1)), weight)))
    return out if bias is None else out + as_gaussian(move(lambda t: t.view(module.num_heads, 1, -1), bias))


def _scores(q: Activation, k: Activation, scale: float | None = None) -> Gaussian:
    """Products of queries and keys, assumed independent, over the square root of their size (Eq. 20)."""
    return as_gaussian(moments.affine(_dot, q, k)) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)


def _dot(q: Tensor, k: Tensor, bias: None = None) -> Tensor:
    return q @ k.mT


def _masked(scores: Gaussian, padding: Tensor | None, mask: Tensor | None) -> Gaussian:
    """Scores with masks as in torch: a boolean mask hides positions, any other mask is added."""
    batch, heads = scores.shape[:2]
    if mask is not None:
        scores = _hidden(scores, mask if mask.dim() == 2 else mask.view(batch, heads, *mask.shape[-2:]))
    return scores if padding is None else _hidden(scores, padding.view(batch, 1, 1, -1))


def _hidden(scores: Gaussian, mask: Tensor) -> Gaussian:
    """Scores with one mask, which hides positions or is added."""
    hidden = mask if mask.dtype == torch.bool else mask == -math.inf
    mean = scores.mean if mask.dtype == torch.bool else scores.mean + mask.masked_fill(hidden, 0.0)
    # A finite number below every score keeps the gradients finite.
    return Gaussian.of(
        mean.masked_fill(hidden, torch.finfo(mean.dtype).min / 4), scores.var.masked_fill(hidden, 0.0)
    )


@rule("approximate", 21)
def scaled_dot_product(
    method: Method,
    function: Function,
    query: Activation,
    key: Activation,
    value: Activation,
    attn_mask: Activation | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Gaussian:
    """Attention as a function: scores by Eq. 20, weighted values by Eq. 21.

    Unlike that of the layer, its boolean mask marks the visible positions.
    """
    if enable_gqa:
        heads = query.shape[-3] // key.shape[-3]
        key, value = (move(lambda t: t.repeat_interleave(heads, -3), x) for x in (key, value))
    scores = _scores(query, key, scale)
    if isinstance(attn_mask, Gaussian):  # a learned bias
        scores, attn_mask = Gaussian.of(scores.mean, scores.var + attn_mask.var), attn_mask.mean
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.mean.device).tril()
    if attn_mask is not None:
        scores = _hidden(scores, ~attn_mask if attn_mask.dtype == torch.bool else attn_mask)
    return moments.attend(scores, value, dropout_p)[0]


# ----------------------------------------------------------------------------------------------- transformers


@rule("part by part")
def encoder_layer(
    method: Method,
    module: Layer,
    src: Activation,
    src_mask: Tensor | None = None,
    src_key_padding_mask: Tensor | None = None,
    is_causal: bool = False,
) -> Activation:
    """A transformer encoder layer from its parts; both terms of each residual sum are assumed independent."""
    if is_plain(module, src):
        return module(src, src_mask, src_key_padding_mask, is_causal)

    def attention(x: Activation) -> Activation:
        out, _ = method(module.self_attn, x, x, x, src_key_padding_mask, False, src_mask, is_causal=is_causal)
        return method(module.dropout1, out)

    def feed_forward(x: Activation) -> Activation:
        for part in (
            module.linear1,
            _activation(method, module),
            module.dropout,
            module.linear2,
            module.dropout2,
        ):
            x = method(part, x)
        return x

    if module.norm_first:
        x = as_gaussian(src) + as_gaussian(attention(method(module.norm1, src)))
        return x + as_gaussian(feed_forward(method(module.norm2, x)))
    x = method(module.norm1, as_gaussian(src) + as_gaussian(attention(src)))
    return method(module.norm2, x + as_gaussian(feed_forward(x)))


def _activation(method: Method, module: Layer) -> nn.Module:
    known = {F.relu: nn.ReLU(), F.gelu: nn.GELU()}
    given = module.activation
    if not isinstance(given, nn.Module) and given not in known:
        raise NoRuleError(
            f"{method.name} has no rule for TransformerEncoderLayer with activation {given}; "
            "give it as a module of torch.nn."
        )
    return known.get(given, given)


@rule("one by one")
def encoder(
    method: Method,
    module: Layer,
    src: Activation,
    mask: Tensor | None = None,
    src_key_padding_mask: Tensor | None = None,
    is_causal: bool | None = None,
) -> Activation:
    for layer in module.layers:
        src = method(layer, src, mask, src_key_padding_mask)
    return src if module.norm is None else method(module.norm, src)


ATTENTION: Table = {
    nn.MultiheadAttention: multihead,
    nn.TransformerEncoderLayer: encoder_layer,
    nn.TransformerEncoder: encoder,
}

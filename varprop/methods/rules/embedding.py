"""Embeddings: rows of a random table, singly or in bags. Two reads of one row are treated as independent."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...gaussian import Activation, Gaussian
from ...posterior import Layer
from ..base import Method, missing
from ..facts import Table, rule


@rule("exact")
def embedding(method: Method, layer: Layer, index: Tensor) -> Activation:
    """The rows of a random table; the row of `padding_idx` is deterministic."""
    mean = layer(index)
    if not hasattr(layer, "weight_logvar"):
        return mean
    var = F.embedding(index, layer.weight_logvar).exp()
    if layer.padding_idx is not None:
        var = var.masked_fill((index == layer.padding_idx).unsqueeze(-1), 0.0)
    return Gaussian.of(mean, var)


@rule("exact", 5)
def embedding_bag(
    method: Method,
    layer: Layer,
    index: Tensor,
    offsets: Tensor | None = None,
    per_sample_weights: Tensor | None = None,
) -> Activation:
    """Sums or means of the rows in a bag; the weights of a repeated row are added, then squared (Eq. 5)."""
    if not hasattr(layer, "weight_logvar"):
        return layer(index, offsets, per_sample_weights)
    if layer.mode == "max" or layer.max_norm is not None:
        raise missing(method, layer, ' with mode="max"' if layer.mode == "max" else " with max_norm")
    rows, (bag, bags) = index.flatten(), _bags(layer, index, offsets)
    weight = (
        torch.ones_like(rows, dtype=layer.weight.dtype)
        if per_sample_weights is None
        else per_sample_weights.flatten()
    )
    if layer.padding_idx is not None:
        weight = weight.masked_fill(rows == layer.padding_idx, 0.0)
    if layer.mode == "mean":
        weight = weight / _sums(bag, bags, weight).clamp(min=1)[bag]
    together = weight * _of_equals(bag * layer.num_embeddings + rows, weight)
    mean, var = F.embedding(rows, layer.weight), F.embedding(rows, layer.weight_logvar).exp()
    return Gaussian.of(*(_sums(bag, bags, t * w.unsqueeze(-1)) for t, w in ((mean, weight), (var, together))))


def _bags(layer: Layer, index: Tensor, offsets: Tensor | None) -> tuple[Tensor, int]:
    """The bag of each entry, and the number of bags."""
    if offsets is None:
        return torch.arange(len(index), device=index.device).repeat_interleave(index.shape[1]), len(index)
    entries = torch.arange(len(index), device=index.device, dtype=offsets.dtype)
    return torch.searchsorted(offsets, entries, right=True) - 1, len(offsets) - bool(
        layer.include_last_offset
    )


def _sums(group: Tensor, groups: int, values: Tensor) -> Tensor:
    return values.new_zeros(groups, *values.shape[1:]).index_add(0, group, values)


def _of_equals(keys: Tensor, values: Tensor) -> Tensor:
    """For each key, the sum of the values of all equal keys."""
    order = keys.argsort()
    sorted_keys = keys[order]
    group = F.pad((sorted_keys[1:] != sorted_keys[:-1]).cumsum(0), (1, 0))
    return _sums(group, len(keys), values[order])[group][order.argsort()]


EMBEDDING: Table = {nn.Embedding: embedding, nn.EmbeddingBag: embedding_bag}

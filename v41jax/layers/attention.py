"""Attention over the sliding window and the selected compressed entries.

Queries, window rows, the ring write, and the grouped output projection. What is selected is the indexer's business,
what is compressed the compressor's; the product over keys is the operation `sparse_attention`.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.grouped_linear import grouped_linear
from pallas_kernels.quantized_rows import QuantizedRows, normalized_rows, summed_rows
from pallas_kernels.rotation import rotate
from pallas_kernels.sparse_attention import sparse_attention
from pallas_kernels.window_key_write import window_key_write
from pallas_kernels.window_key_write.xla import store
from v41jax.config import TextConfig
from v41jax.layers.linear import LinearWeight, linear, linear_parts
from v41jax.layers.norm import rms_norm
from v41jax.layers.rope import RopeTable
from v41jax.layers.rows import Requests, Rows
from v41jax.layers.stacks import OfRun, stack_and_layer, weight_of
from v41jax.precision import Precision

Array = jax.Array


class AttentionWeights(NamedTuple):
    """Attention weights every layer has.

    Attributes:
      sink: [H] float32, a raw logit. On a mesh `H` and `G` are this chip's.
      q_norm: [rq].
      kv_norm: [d].
      wq_a: [rq, D].
      wq_b: [H d, rq], output index head * d + dim.
      wkv: [d, D].
      wo_a: [G, ro, H d / G] widened (the input of this product is never quantized).
      wo_b: [D, G ro].
    """

    sink: Array | OfRun
    q_norm: Array | OfRun
    kv_norm: Array | OfRun
    wq_a: LinearWeight
    wq_b: LinearWeight
    wkv: LinearWeight
    wo_a: Array | OfRun
    wo_b: LinearWeight


class Selection(NamedTuple):
    """What an index source chose.

    Attributes:
      entries: [N, K] int32 entry ids, ascending, -1 padded.
      counts: [N] int32.
    """

    entries: Array
    counts: Array


class KeyMemory(NamedTuple):
    """The keys a layer reads.

    Attributes:
      selection: of the layer's index source; `entries` [N, 0] in window-only layers.
      main: [pages, rows, row] compressed rows of the layer's owner.
      window: [layers * slots, ring, row] rings of all layers.
      ring_offset: first ring of this layer, int32 scalar.
    """

    selection: Selection
    main: Array
    window: Array
    ring_offset: Array


def query_latent(
    inputs: QuantizedRows, weights: AttentionWeights, text: TextConfig, precision: Precision, kernels: str
) -> QuantizedRows:
    """The shared query latent `qr`: [N, D] input -> [N, rq]."""
    weight, layer = stack_and_layer(weights.q_norm)
    [product] = linear_parts(inputs, [weights.wq_a], kernels)
    return normalized_rows(
        product,
        weight,
        layer=layer,
        epsilon=text.rms_norm_eps,
        quantize=precision.activation_quantization,
        dtype=inputs.quantized.dtype,
        implementation=kernels,
    )


def window_latents(inputs: QuantizedRows | Array, weights: AttentionWeights, kernels: str) -> Array:
    """Window keys before norm and rotation: [N, D] input, after its Q8 -> [N, d] activation dtype."""
    return linear(inputs, weights.wkv, kernels)


def window_rows(
    inputs: QuantizedRows | Array, weights: AttentionWeights, angles: RopeTable, text: TextConfig, kernels: str
) -> Array:
    """Window keys before their Q8: [N, D] input, after its Q8 -> [N, d] activation dtype, rotated."""
    latents = window_latents(inputs, weights, kernels)
    return rotate(rms_norm(latents, weight_of(weights.kv_norm), text.rms_norm_eps), *angles)


def write_ring(window: Array, kv: Array, rows: Rows, slots: Array, ring_offset: Array, *, window_format: str) -> Array:
    """Writes window rows to their rings; rows with `ring_rows` False write nothing.

    Args:
      window: [layers * slots, ring, row].
      kv: [N, d] activation dtype, rotated and not yet quantized.
      rows: of the batch.
      slots: [R] int32.
      ring_offset: first ring of the layer, int32 scalar.
      window_format: "float", "bf16" or "fp8".
    """
    return store(window, kv, rows.ring_rows, rows.batch_ids, rows.positions, slots, ring_offset, window_format)


def write_window_keys(
    window: Array,
    latents: Array,
    weights: AttentionWeights,
    angles: RopeTable,
    rows: Rows,
    slots: Array,
    ring_offset: Array | int,
    *,
    text: TextConfig,
    window_format: str,
    kernels: str,
) -> Array:
    """`write_ring` of the keys that `window_rows` makes, from their latents in one operation: where every row is read
    from its ring, as in decode and by drafts.

    Args:
      window: [layers * slots, ring, row].
      latents: [N, d], what `window_latents` returns.
      weights: of the layer.
      angles: of the rows.
      rows: of the batch.
      slots: [R] int32.
      ring_offset: first ring of the layer, int32 scalar.
      text: configuration.
      window_format: "float", "bf16" or "fp8".
      kernels: implementation of the operation.
    """
    norm, layer = stack_and_layer(weights.kv_norm)
    return window_key_write(
        latents,
        norm,
        angles.cos,
        angles.sin,
        rows.ring_rows,
        rows.batch_ids,
        rows.positions,
        slots,
        ring_offset,
        window,
        epsilon=text.rms_norm_eps,
        window_format=window_format,
        layer=layer,
        implementation=kernels,
    )


def attend(
    latent: QuantizedRows,
    kv: Array,
    weights: AttentionWeights,
    rows: Rows,
    requests: Requests,
    memory: KeyMemory,
    *,
    ratio: int,
    text: TextConfig,
    precision: Precision,
    main_format: str,
    window_format: str,
    kernels: str,
) -> Array:
    """Queries, attention and output projection (model specification, "Attention").

    Args:
      latent: [N, rq], `qr`.
      kv: [M, d] activation dtype, this forward's window rows as their consumers see them (after Q8).
      weights: of the layer.
      rows: of the N query rows; `in_forward_row` indexes `kv`.
      requests: of the batch.
      memory: what the layer reads.
      ratio: of the layer; selects the RoPE table.
      text: configuration.
      precision: rounding choices.
      main_format: "float", "bf16" or "fp4".
      window_format: "float", "bf16" or "fp8".
      kernels: implementation of the operations.

    Returns:
      [N, D] activation dtype; on a mesh this chip's part of a sum over `model`.
    """
    angles = rows.angles(ratio)
    sink, layer = stack_and_layer(weights.sink)
    query = linear(latent, weights.wq_b, kernels)
    output = sparse_attention(
        query.reshape(query.shape[0], -1, text.head_dim),
        sink,
        memory.selection.entries,
        memory.selection.counts,
        memory.main,
        requests.block_tables,
        rows.batch_ids,
        requests.slots,
        memory.window,
        kv,
        rows.positions,
        rows.window_floor,
        rows.in_forward_from,
        rows.in_forward_row,
        angles.cos,
        angles.sin,
        window=text.sliding_window,
        scale=text.head_dim**-0.5,
        main_format=main_format,
        window_format=window_format,
        ring_offset=memory.ring_offset,
        layer=layer,
        rotate_query=True,
        implementation=kernels,
    )
    return project_output(output, weights, precision, kernels)


def project_output(heads: Array, weights: AttentionWeights, precision: Precision, kernels: str) -> Array:
    """Grouped low-rank output projection: [N, H, d] -> [N, D], activation dtype."""
    weight, layer = stack_and_layer(weights.wo_a)
    grouped = heads.reshape(heads.shape[0], weight.shape[-3], -1)
    # A widened weight of a comparison has no kernel, and is no reason to refuse the others.
    supported = grouped.dtype == jnp.bfloat16 and weight.dtype == jnp.bfloat16
    parts = grouped_linear(grouped, weight, layer=layer, implementation=kernels if supported else "xla")
    quantize = precision.activation_quantization
    rows = summed_rows(parts, quantize=quantize, dtype=heads.dtype, implementation=kernels)
    return linear(rows, weights.wo_b, kernels)

"""Compressed entries: pooling of token groups, their index keys, and the writes to pages and tails.

One batched call covers every group that closes in the forward; which rows close a group is the plan's business.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.rotation import rotate
from pallas_kernels.rounding import round_to
from pallas_kernels.stored_rows import store_rows
from scheduler.batch import CompressionPlan
from v41jax.config import TextConfig
from v41jax.layers.linear import product
from v41jax.layers.norm import rms_norm
from v41jax.layers.rope import RopeTable, at_positions
from v41jax.layers.rows import Requests
from v41jax.quantization import (
    fake_q4n,
    pack_nibbles,
    quantize_index_key_fp8,
    quantize_q4m,
    quantize_q4n,
)

Array = jax.Array


class CompressorWeights(NamedTuple):
    """Weights of a FULL layer's compressor and index keys; inputs are never quantized.

    Attributes:
      wkv: [d, D].
      wgate: [d, D]; None at ratio 1.
      norm: [d].
      wk: [I, d], index key projection of the un-rotated latent.
      k_norm: [I].
    """

    wkv: Array
    wgate: Array | None
    norm: Array
    wk: Array
    k_norm: Array


class OwnerMemory(NamedTuple):
    """The pool arrays of one owner, and those of all tails, which are written in place.

    Attributes:
      main: [pages, rows, row].
      index_values: [pages, rows, ...].
      index_scales: [pages, rows] float32, [pages, rows, I / 32] uint8, or None.
      tail_kv: [ratio-2 owners, slots, ring_c, d] float32.
      tail_score: same.
      tail: the owner's place in them; None at ratio 1.
    """

    main: Array
    index_values: Array
    index_scales: Array | None
    tail_kv: Array
    tail_score: Array
    tail: int | None


def compress(
    normalized: Array,
    weights: CompressorWeights,
    memory: OwnerMemory,
    plan: CompressionPlan,
    requests: Requests,
    table: RopeTable,
    *,
    ratio: int,
    text: TextConfig,
    main_format: str,
    index_format: str,
) -> OwnerMemory:
    """Pools every closing group of the batch and publishes its compressed row and index key.

    Args:
      normalized: [N, D] activation dtype, the attention sublayer's normalized input of every row of the batch.
      weights: of the layer.
      memory: of the layer's owner; tails are read before they are written.
      plan: of this ratio.
      requests: of the batch.
      table: RoPE table of layers of ratio > 0.
      ratio: 1 or 2.
      text: configuration.
      main_format: "float", "bf16" or "fp4".
      index_format: "float", "fp8" or "fp4".

    Returns:
      The memory with new rows; see model specification, "Compressor" and "Indexer".
    """
    latent, memory = _latents(normalized, weights, memory, plan, requests, ratio, text)
    # A group is rotated at the position of its first token.
    angles = at_positions(table, plan.positions // ratio * ratio)
    key = round_to(product(latent, weights.wk), latent.dtype)
    key = rotate(rms_norm(key, weights.k_norm, text.rms_norm_eps), *angles)
    main_row = encode_main(rotate(latent, *angles), main_format)
    values, scales = encode_index_key(key, index_format)

    pages, rows_per_page = memory.main.shape[:2]
    entry = jnp.maximum(plan.positions, 0) // ratio
    real = plan.requests >= 0
    columns = requests.block_tables.shape[1]
    page = requests.block_tables[jnp.maximum(plan.requests, 0), jnp.minimum(entry // rows_per_page, columns - 1)]
    page = jnp.where(real, page, pages)
    offset = entry % rows_per_page

    def put(plane: Array, value: Array) -> Array:
        return store_rows(plane, (page, offset), value)

    return memory._replace(
        main=put(memory.main, main_row),
        index_values=put(memory.index_values, values),
        index_scales=None if memory.index_scales is None else put(memory.index_scales, scales),
    )


def _latents(
    normalized: Array,
    weights: CompressorWeights,
    memory: OwnerMemory,
    plan: CompressionPlan,
    requests: Requests,
    ratio: int,
    text: TextConfig,
) -> tuple[Array, OwnerMemory]:
    """Un-rotated latents [C, d] of the closing groups, and the memory with its tails written.

    No kernel: two products and elementwise work (kernel chapter, "Compressor pooling"), in three of the release's forty
    layers. On an H200 all of `compress` takes 108.6 us for 4,096 rows of a prompt, 56 % of its bound, and 27 us for one
    row of decode, 9 % of that of its 10.5 MB of weights: 1 % of a step (docs/performance.md, commit 0de6e72).
    """
    count = normalized.shape[0]
    dtype = normalized.dtype
    closing = jnp.minimum(plan.closing_rows, count - 1)
    if ratio == 1:
        pooled = round_to(product(normalized[closing], weights.wkv), dtype)
        return rms_norm(pooled, weights.norm, text.rms_norm_eps), memory

    kv = product(normalized, weights.wkv)
    score = product(normalized, weights.wgate)
    own = memory.tail
    _, slots, ring_c, _ = memory.tail_kv.shape
    slot = requests.slots[jnp.maximum(plan.requests, 0)]
    member_kv, member_score = [], []
    for member in range(ratio):
        back = ratio - 1 - member
        row = jnp.maximum(closing - back, 0)
        tail = jnp.maximum(plan.positions - back, 0) % ring_c
        stored = (member < plan.from_tail)[:, None]
        member_kv.append(jnp.where(stored, memory.tail_kv[own, slot, tail], kv[row]))
        member_score.append(jnp.where(stored, memory.tail_score[own, slot, tail], score[row]))
    shares = jax.nn.softmax(jnp.stack(member_score), axis=0)
    pooled = round_to(jnp.sum(shares * jnp.stack(member_kv), axis=0), dtype)

    tail_rows = jnp.minimum(plan.tail_rows, count - 1)
    tail_slot = requests.slots[jnp.maximum(plan.tail_requests, 0)]
    tail_slot = jnp.where(plan.tail_requests >= 0, tail_slot, slots)
    place = jnp.maximum(plan.tail_positions, 0) % ring_c
    memory = memory._replace(
        tail_kv=memory.tail_kv.at[own, tail_slot, place].set(kv[tail_rows], mode="drop"),
        tail_score=memory.tail_score.at[own, tail_slot, place].set(score[tail_rows], mode="drop"),
    )
    return rms_norm(pooled, weights.norm, text.rms_norm_eps), memory


def encode_main(latent: Array, main_format: str) -> Array:
    """Stored form of rotated latents [C, d]: fake Q4n values, packed rows `[C, d / 2 + d / 16]`, or as they are."""
    if main_format == "fp4":
        codes, scales = quantize_q4n(latent)
        return jnp.concatenate([pack_nibbles(codes), scales], axis=-1)
    return fake_q4n(latent) if main_format == "bf16" else latent


def encode_index_key(key: Array, index_format: str) -> tuple[Array, Array | None]:
    """Stored form of rotated index keys [C, I]: values and scales of the plane."""
    if index_format == "fp4":
        codes, scales = quantize_q4m(key)
        return pack_nibbles(codes), scales
    if index_format == "fp8":
        return quantize_index_key_fp8(key)
    return key, None

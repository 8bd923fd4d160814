"""The indexer: which compressed entries each query reads, and which candidate blocks later sources may score.

Queries and head weights here; scores and the total order of selection are operations.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.candidate_scores import candidate_scores
from pallas_kernels.index_scores import index_scores
from pallas_kernels.quantized_rows import QuantizedRows
from pallas_kernels.rotation import rotate
from pallas_kernels.rounding import round_to
from pallas_kernels.select_candidates import select_candidates
from pallas_kernels.select_topk import select_topk
from v41jax.config import CandidateRole, TextConfig
from v41jax.layers.attention import Selection
from v41jax.layers.linear import LinearWeight, linear, product
from v41jax.layers.rows import Requests, Rows
from v41jax.precision import Precision

Array = jax.Array

SCORE_TILE_BYTES = 256 * 2**20
"""Scores of one tile of query rows; longer prefills are walked a tile at a time."""


class IndexerWeights(NamedTuple):
    """Weights of an index source.

    Attributes:
      wq_b: [Hi I, rq], output index head * I + dim.
      weights_proj: [Hi, D].
    """

    wq_b: LinearWeight
    weights_proj: Array


def index_queries(
    normalized: Array,
    latent: QuantizedRows | Array,
    weights: IndexerWeights,
    rows: Rows,
    ratio: int,
    text: TextConfig,
    kernels: str,
) -> tuple[Array, Array]:
    """Index queries and head weights (model specification, "Indexer").

    Args:
      normalized: [N, D] activation dtype, input of the attention sublayer.
      latent: [N, rq], `qr` after its Q8.
      weights: of the source.
      rows: of the N rows.
      ratio: of the layer.
      text: configuration.
      kernels: implementation of the linear.

    Returns:
      queries [N, Hi, I] activation dtype, rotated and not quantized (the scorer quantizes them to its own grid), and
      head weights [N, Hi] float32, rounded to the activation dtype and scaled by `I^-0.5 Hi^-0.5`.
    """
    dtype = normalized.dtype
    query = linear(latent, weights.wq_b, kernels)
    query = query.reshape(query.shape[0], text.index_n_heads, text.index_head_dim)
    scale = text.index_head_dim**-0.5 * text.index_n_heads**-0.5
    head_weights = round_to(product(normalized, weights.weights_proj), dtype)
    head_weights = round_to(head_weights.astype(jnp.float32) * scale, dtype)
    return rotate(query, *rows.angles(ratio)), head_weights.astype(jnp.float32)


def select(
    query: Array,
    head_weights: Array,
    rows: Rows,
    requests: Requests,
    index_values: Array,
    index_scales: Array | None,
    candidates: Array | None,
    *,
    ratio: int,
    role: CandidateRole,
    text: TextConfig,
    precision: Precision,
    index_format: str,
    kernels: str,
) -> tuple[Selection, Array | None]:
    """Scores the visible entries and picks the best (model specification, "Two-level candidates").

    Args:
      query: [N, Hi, I] activation dtype, not quantized.
      head_weights: [N, Hi] float32.
      rows: of the N rows.
      requests: of the batch.
      index_values: [pages, rows, ...] keys of the layer's owner.
      index_scales: their scales, or None.
      candidates: [N, Nb] block ids from the candidate source; read by `CONSUMES` only.
      ratio: of the layer.
      role: whether candidates are published, consumed or neither.
      text: configuration.
      precision: rounding choices.
      index_format: "float", "fp8" or "fp4".
      kernels: implementation of the operations.

    Returns:
      The selection, and the candidates for later sources: new ones from `PUBLISHES`, the given ones otherwise.
    """
    shared = {
        "index_format": index_format,
        "quantize_query": precision.activation_quantization,
        "score_dtype": precision.index_score_dtype,
        "implementation": kernels,
    }
    consumes = role is CandidateRole.CONSUMES

    def one_tile(tile: tuple[Array, ...]) -> tuple[Array, ...]:
        query, head_weights, visible, batch_ids, given = tile
        operands = (query, head_weights, visible, batch_ids, requests.block_tables, index_values, index_scales)
        if consumes:
            block = text.candidate_block_size
            scores = candidate_scores(*operands, given, block_size=block, **shared)
            entries, counts = select_topk(
                scores, visible, text.index_topk, candidates=given, block_size=block, implementation=kernels
            )
            return entries, counts, given
        scores = index_scores(*operands, **shared)
        entries, counts = select_topk(scores, visible, text.index_topk, implementation=kernels)
        if role is CandidateRole.PUBLISHES:
            given = select_candidates(
                scores, visible, text.candidate_topk_blocks, text.candidate_block_size, implementation=kernels
            )
        return entries, counts, given

    count = query.shape[0]
    given = candidates if consumes else jnp.zeros((count, 0), jnp.int32)
    width = (
        given.shape[1] * text.candidate_block_size
        if consumes
        else requests.block_tables.shape[1] * index_values.shape[1]
    )
    inputs = (query, head_weights, rows.visible(ratio), rows.batch_ids, given)
    entries, counts, published = _in_tiles(one_tile, inputs, max(1, SCORE_TILE_BYTES // (4 * max(width, 1))))
    return Selection(entries, counts), published if role is CandidateRole.PUBLISHES else candidates


def _in_tiles(function, inputs: tuple[Array, ...], tile: int) -> tuple[Array, ...]:
    """Applies a row-wise function to tiles of at most `tile` rows, one after the other.

    Rows are divided evenly, so that the tile is the same for any row count that needs the same number of tiles.
    """
    count = inputs[0].shape[0]
    if count <= tile:
        return function(inputs)
    tiles = math.ceil(count / tile)
    rows = math.ceil(count / tiles)

    def split(x: Array) -> Array:
        x = jnp.pad(x, [(0, tiles * rows - count)] + [(0, 0)] * (x.ndim - 1))
        return x.reshape(tiles, rows, *x.shape[1:])

    outputs = jax.lax.map(function, tuple(split(x) for x in inputs))
    return tuple(y.reshape(tiles * rows, *y.shape[2:])[:count] for y in outputs)

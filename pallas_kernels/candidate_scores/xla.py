"""The definition of `candidate_scores` in plain jnp; its contract is in the package's docstring."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels.index_plane import decoded_keys, quantized_query, score_rows

Array = jax.Array

GATHER_ELEMENTS = 2**26
"""Elements of decoded keys that one step may hold."""


def candidate_scores(
    query: Array,
    head_weights: Array,
    visible: Array,
    batch_ids: Array,
    block_tables: Array,
    values: Array,
    scales: Array | None,
    candidates: Array,
    *,
    block_size: int,
    index_format: str,
    quantize_query: bool,
    score_dtype: DTypeLike,
) -> Array:
    """See the package's docstring."""
    rows, blocks = candidates.shape
    width = blocks * block_size
    if rows == 0 or width == 0 or block_tables.size == 0:
        return jnp.full((rows, width), -jnp.inf, jnp.float32)
    operand, weights, query_scale = quantized_query(
        query,
        head_weights.astype(jnp.float32),
        index_format=index_format,
        quantize_query=quantize_query,
        fold=jnp.dtype(score_dtype) == jnp.float32,
    )
    visible = jnp.where(batch_ids >= 0, visible, 0)
    rows_in_page = values.shape[1]

    def one(row: tuple) -> Array:
        operand, weights, query_scale, bound, request, blocks_of_row = row
        entries, seen = candidate_entries(blocks_of_row, bound, block_size)
        pages = block_tables[jnp.maximum(request, 0), entries // rows_in_page]
        offsets = entries % rows_in_page
        keys, key_scale = decoded_keys(
            values[pages, offsets], None if scales is None else scales[pages, offsets], index_format
        )
        query_scale = None if query_scale is None else query_scale[None]
        scores = score_rows(operand[None], weights[None], query_scale, keys, key_scale, score_dtype)[0]
        return jnp.where(seen, scores, -jnp.inf)

    group = max(1, GATHER_ELEMENTS // (width * query.shape[-1]))
    return lax.map(one, (operand, weights, query_scale, visible, batch_ids, candidates), batch_size=min(group, rows))


def candidate_entries(candidates: Array, visible: Array, block_size: int) -> tuple[Array, Array]:
    """Entry id of every candidate column and whether it is seen.

    Args:
      candidates: [..., Nb] int32, -1 for an empty place.
      visible: [...] int32.

    Returns:
      entries [..., Nb * block_size] int32, 0 where not seen; seen, bool of the same shape.
    """
    entries = candidates[..., None] * block_size + jnp.arange(block_size)
    seen = (candidates[..., None] >= 0) & (entries < visible[..., None, None])
    shape = (*candidates.shape[:-1], candidates.shape[-1] * block_size)
    return jnp.where(seen, entries, 0).reshape(shape), seen.reshape(shape)

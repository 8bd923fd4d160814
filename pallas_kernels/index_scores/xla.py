"""The definition of `index_scores` in plain jnp; its contract is in the package's docstring.

Two shapes of work with the same arithmetic. Few rows a request (decode, verify): each row gathers its own pages. Many
rows a request (prefill): a tile of rows walks the pages of the requests it holds, a chunk at a time and only up to the
tile's largest bound, so that no array grows with rows times context except the result.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels.index_plane import decoded_keys, quantized_query, score_rows

Array = jax.Array

ROWS_PER_REQUEST = 8
"""Up to this many rows a request on average, rows gather their own pages."""
GATHER_ELEMENTS = 2**26
"""Elements of decoded keys that one step of the per-row form may hold."""
TILE_ROWS = 128
TILE_ELEMENTS = 2**25
"""Elements of the result that one tile of rows may hold."""
CHUNK_KEYS = 1024


def index_scores(
    query: Array,
    head_weights: Array,
    visible: Array,
    batch_ids: Array,
    block_tables: Array,
    values: Array,
    scales: Array | None,
    *,
    index_format: str,
    quantize_query: bool,
    score_dtype: DTypeLike,
) -> Array:
    """See the package's docstring."""
    rows = query.shape[0]
    requests, columns = block_tables.shape
    if rows == 0 or requests == 0 or columns == 0:
        return jnp.full((rows, columns * values.shape[1]), -jnp.inf, jnp.float32)
    operand, weights, query_scale = quantized_query(
        query,
        head_weights.astype(jnp.float32),
        index_format=index_format,
        quantize_query=quantize_query,
        fold=jnp.dtype(score_dtype) == jnp.float32,
    )
    visible = jnp.where(batch_ids >= 0, visible, 0)
    per_row = (operand, weights, query_scale, visible, batch_ids)
    form = _rows_gather if rows <= ROWS_PER_REQUEST * requests else _tiles_walk
    return form(per_row, block_tables, values, scales, index_format, score_dtype)


def _gather(values: Array, scales: Array | None, pages: Array, index_format: str) -> tuple[Array, Array | None]:
    """Decoded keys [len(pages) * rows, I] of some pages, and their row scale."""
    keys, key_scale = decoded_keys(values[pages], None if scales is None else scales[pages], index_format)
    return keys.reshape(-1, keys.shape[-1]), None if key_scale is None else key_scale.reshape(-1)


def _rows_gather(
    per_row: tuple, block_tables: Array, values: Array, scales: Array | None, index_format: str, score_dtype: DTypeLike
) -> Array:
    keys_per_row = block_tables.shape[1] * values.shape[1]

    def one(row: tuple) -> Array:
        operand, weights, query_scale, bound, request = row
        keys, key_scale = _gather(values, scales, block_tables[jnp.maximum(request, 0)], index_format)
        query_scale = None if query_scale is None else query_scale[None]
        scores = score_rows(operand[None], weights[None], query_scale, keys, key_scale, score_dtype)[0]
        return jnp.where(jnp.arange(keys_per_row) < bound, scores, -jnp.inf)

    group = max(1, GATHER_ELEMENTS // (keys_per_row * per_row[0].shape[-1]))
    return lax.map(one, per_row, batch_size=min(group, per_row[0].shape[0]))


def _tiles_walk(
    per_row: tuple, block_tables: Array, values: Array, scales: Array | None, index_format: str, score_dtype: DTypeLike
) -> Array:
    rows_in_page = values.shape[1]
    columns = block_tables.shape[1]
    chunk_pages = min(columns, max(1, CHUNK_KEYS // rows_in_page))
    chunk = chunk_pages * rows_in_page
    chunks = -(-columns // chunk_pages)
    tables = jnp.pad(block_tables, ((0, 0), (0, chunks * chunk_pages - columns)))
    rows = per_row[0].shape[0]
    tile = min(rows, max(8, min(TILE_ROWS, TILE_ELEMENTS // (chunks * chunk))))
    tiles = -(-rows // tile)

    def pad(x: Array | None, value: int) -> Array | None:
        if x is None:
            return None
        padding = [(0, tiles * tile - rows)] + [(0, 0)] * (x.ndim - 1)
        return jnp.pad(x, padding, constant_values=value).reshape(tiles, tile, *x.shape[1:])

    operand, weights, query_scale, visible, batch_ids = per_row

    def one(part: tuple) -> Array:
        operand, weights, query_scale, visible, batch_ids = part
        live = visible > 0
        first = jnp.min(jnp.where(live, batch_ids, block_tables.shape[0]))
        last = jnp.max(jnp.where(live, batch_ids, -1))

        def request_step(request: Array, scores: Array) -> Array:
            bound = jnp.where(batch_ids == request, visible, 0)

            def chunk_step(index: Array, scores: Array) -> Array:
                pages = lax.dynamic_slice(tables, (request, index * chunk_pages), (1, chunk_pages))[0]
                keys, key_scale = _gather(values, scales, pages, index_format)
                new = score_rows(operand, weights, query_scale, keys, key_scale, score_dtype)
                start = index * chunk
                old = lax.dynamic_slice(scores, (0, start), (tile, chunk))
                seen = start + jnp.arange(chunk) < bound[:, None]
                return lax.dynamic_update_slice(scores, jnp.where(seen, new, old), (0, start))

            return lax.fori_loop(0, -(-jnp.max(bound) // chunk), chunk_step, scores)

        start = jnp.full((tile, chunks * chunk), -jnp.inf, jnp.float32)
        return lax.fori_loop(first, last + 1, request_step, start)

    parts = (pad(operand, 0), pad(weights, 0), pad(query_scale, 0), pad(visible, 0), pad(batch_ids, -1))
    scores = lax.map(one, parts)
    return scores.reshape(tiles * tile, chunks * chunk)[:rows, : columns * rows_in_page]

"""The definition of sparse attention in plain jnp: gather a bounded tile of query rows' keys, then one softmax."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.arithmetic import decode_main_row, decode_window_row
from pallas_kernels.rotation import rotate
from pallas_kernels.rounding import round_to
from pallas_kernels.stored_rows import load_rows

Array = jax.Array

QUERY_TILE = 32
"""Query rows whose keys are gathered at once (runtime chapter, "Packed pools")."""

SCORE_FLOOR = -1e30
"""Where the running maximum starts: finite, so that a row without keys does not subtract infinities."""


def sparse_attention(
    query: Array,
    sink: Array,
    selected: Array,
    selected_counts: Array,
    main: Array | None,
    block_tables: Array,
    batch_ids: Array,
    slots: Array,
    ring: Array,
    in_forward: Array,
    positions: Array,
    window_floor: Array,
    in_forward_from: Array,
    in_forward_row: Array,
    cos: Array,
    sin: Array,
    *,
    window: int,
    scale: float,
    main_format: str,
    window_format: str,
) -> Array:
    """See `pallas_kernels.sparse_attention`."""
    dtype = query.dtype
    rows = query.shape[0]

    def attend(tile: tuple[Array, ...]) -> Array:
        query, selected, counts, batch_ids, positions, floor, from_position, own_row, cos, sin = tile
        request = jnp.maximum(batch_ids, 0)
        live = batch_ids >= 0
        keys, valid = _window_rows(
            request,
            slots,
            ring,
            in_forward,
            positions,
            floor,
            from_position,
            own_row,
            window,
            window_format,
            query.shape[2],
            dtype,
        )
        if selected.shape[1]:
            chosen = _selected_rows(request, selected, main, block_tables, main_format, query.shape[2], dtype)
            taken = jnp.arange(selected.shape[1]) < counts[:, None]
            keys, valid = jnp.concatenate([keys, chosen], 1), jnp.concatenate([valid, taken], 1)
        valid &= live[:, None]
        keys = jnp.where(valid[..., None], keys, 0)
        out = _softmax_product(query, keys, valid, sink, scale)
        return jnp.where(live[:, None, None], rotate(out, cos, -sin), 0)

    operands = (
        query,
        selected,
        selected_counts,
        batch_ids,
        positions,
        window_floor,
        in_forward_from,
        in_forward_row,
        cos,
        sin,
    )
    if rows <= QUERY_TILE:
        return attend(operands)
    tiles = -(-rows // QUERY_TILE)
    spare = tiles * QUERY_TILE - rows

    def split(x: Array, fill: int) -> Array:
        padded = jnp.pad(x, [(0, spare)] + [(0, 0)] * (x.ndim - 1), constant_values=fill)
        return padded.reshape(tiles, QUERY_TILE, *x.shape[1:])

    # A padding row of the last tile is a dead row: batch id -1.
    result = lax.map(attend, tuple(split(x, -1 if x is batch_ids else 0) for x in operands))
    return result.reshape(tiles * QUERY_TILE, *query.shape[1:])[:rows]


def _softmax_product(query: Array, keys: Array, valid: Array, sink: Array, scale: float) -> Array:
    """[n, H, d] from keys [n, L, d] masked by valid [n, L]; the quotient is rounded to the activation dtype."""
    exact = lax.Precision.HIGHEST if query.dtype == jnp.float32 else lax.Precision.DEFAULT
    dot = functools.partial(jnp.einsum, precision=exact, preferred_element_type=jnp.float32)
    scores = dot("nhd,nld->nhl", query, keys) * jnp.float32(scale)
    scores = jnp.where(valid[:, None, :], scores, -jnp.inf)
    peak = jnp.maximum(jnp.max(scores, axis=-1, keepdims=True), SCORE_FLOOR)
    weights = jnp.exp(scores - peak)
    # The sink is not part of the maximum; if its exponential overflows, the quotient is the right limit, zero.
    total = jnp.sum(weights, axis=-1, keepdims=True) + jnp.exp(sink.astype(jnp.float32)[None, :, None] - peak)
    return round_to(dot("nhl,nld->nhd", round_to(weights, query.dtype), keys) / total, query.dtype)


def _selected_rows(
    request: Array, selected: Array, main: Array, block_tables: Array, main_format: str, width: int, dtype: jnp.dtype
) -> Array:
    """Selected compressed rows [n, K, d] of the activation dtype; entries past the count are some legal row."""
    pages, per_page, _ = main.shape
    entries = jnp.clip(selected, 0, block_tables.shape[1] * per_page - 1)
    page = jnp.clip(block_tables[request[:, None], entries // per_page], 0, pages - 1)
    rows = load_rows(main, (page, entries % per_page))
    return (decode_main_row(rows[..., : width // 2 + width // 16]) if main_format == "fp4" else rows).astype(dtype)


def _window_rows(
    request: Array,
    slots: Array,
    ring: Array,
    in_forward: Array,
    positions: Array,
    floor: Array,
    from_position: Array,
    own_row: Array,
    window: int,
    window_format: str,
    width: int,
    dtype: jnp.dtype,
) -> tuple[Array, Array]:
    """Window rows [n, W, d] of the activation dtype, oldest first, and which of them exist, [n, W] bool."""
    back = jnp.arange(window - 1, -1, -1, dtype=jnp.int32)
    wanted = positions[:, None] - back
    valid = wanted >= jnp.maximum(floor, 0)[:, None]
    rows = load_rows(ring, (slots[request][:, None], jnp.maximum(wanted, 0) % ring.shape[1]))
    rows = (decode_window_row(rows[..., : width + width // 32]) if window_format == "fp8" else rows).astype(dtype)
    if in_forward.shape[0]:
        index = jnp.clip(own_row[:, None] - back, 0, in_forward.shape[0] - 1)
        fresh = wanted >= from_position[:, None]
        rows = jnp.where(fresh[..., None], in_forward[index].astype(dtype), rows)
    return rows, valid

"""The index scorer for GPUs: one program scores a few rows against a few tiles of keys, read in place.

Keys are the left operand of the matrix product and heads its columns, so that the tensor cores see 64 or more rows
even for one query. Both operands are float16: E4M3 codes fit exactly, and E2M1 codes times a power of two do while a
row's group scales lie within 2^24 of its largest, below which a group changes no float32 sum. FP8 products are not
used: Hopper adds them with 14 bits. The positive row scale is applied after the sum over heads.

A program walks the requests its rows belong to, so that rows need not come in groups of one request; rows in batch
order make that walk one or two steps long.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from pallas_kernels import backend
from pallas_kernels.index_plane import float16_query, relative_scales

Array = jax.Array

LARGEST_OFFSET = 2**31
"""Elements past which the lowering's 32-bit element offsets are negative; it turns to 64 bits at 2^32 bytes."""


@dataclasses.dataclass(frozen=True)
class Config:
    """How the work is cut.

    Attributes:
      rows: query rows of one program.
      keys: keys of one tile, at least 16.
      tiles: key tiles of one program.
      num_warps, num_stages: of one program.
    """

    rows: int
    keys: int
    tiles: int
    num_warps: int
    num_stages: int


def config_for(rows: int, requests: int) -> Config:
    """The configuration for a batch of `rows` over `requests`; depends on shapes only, never on contents."""
    if rows <= 2 * requests:
        return Config(rows=1, keys=128, tiles=2, num_warps=4, num_stages=2)
    return Config(rows=4, keys=64, tiles=16, num_warps=4, num_stages=2)


def unsupported(
    query: Array, values: Array, index_format: str, quantize_query: bool, score_dtype: DTypeLike
) -> str | None:
    """Why the kernel cannot run on these shapes, or None."""
    heads, width = query.shape[1:]
    if index_format not in ("fp8", "fp4"):
        return f"it reads fp8 and fp4 planes, not {index_format}"
    if not quantize_query:
        return "it needs the query on the plane's grid"
    if jnp.dtype(score_dtype) != jnp.float32:
        return f"its scores are float32, not {jnp.dtype(score_dtype).name}"
    if heads < 16 or heads & (heads - 1) or width < 64 or width & (width - 1):
        return f"{heads} heads of width {width} are not powers of two of at least 16 and 64"
    return None


def packed_view(values: Array) -> Array:
    """The plane's bytes as the kernel's elements: 16-bit where byte offsets would leave the lowering's 32 bits."""
    if LARGEST_OFFSET <= values.size <= 2 * LARGEST_OFFSET:
        pairs = values.reshape(*values.shape[:2], values.shape[2] // 2, 2)
        return lax.bitcast_convert_type(pairs, jnp.uint16)
    return values


def split_of(values: Array, index_format: str) -> int:
    """Codes in one element of `packed_view`."""
    return values.dtype.itemsize * (2 if index_format == "fp4" else 1)


def split_query(operand: Array, split: int) -> Array:
    """[N, Hi, I] to [N, split, Hi, I / split]: dimension `split * i + s` goes to part `s`, place `i`."""
    rows, heads, width = operand.shape
    return operand.reshape(rows, heads, width // split, split).transpose(0, 3, 1, 2)


def decoded_parts(elements: Array, split: int, group_scale: Array | None) -> list[Array]:
    """Stored elements [keys, n] to `split` float16 parts [keys, n].

    Args:
      elements: uint8 or uint16.
      split: codes in one element.
      group_scale: float32 [keys, groups] of E2M1 codes, relative to the row; None for E4M3.
    """
    keys, count = elements.shape
    parts = []
    for place in range(split):
        if group_scale is None:
            byte = elements if split == 1 else ((elements >> (8 * place)) & 255).astype(jnp.uint8)
            parts.append(lax.bitcast_convert_type(byte, jnp.float8_e4m3fn).astype(jnp.float16))
            continue
        nibble = (elements >> (4 * place)).astype(jnp.uint16)
        # Exponent and mantissa in the places of a float16 give the value times 2^-14, the subnormal code included.
        code = lax.bitcast_convert_type(((nibble & 7) << 9) | ((nibble & 8) << 12), jnp.float16)
        groups = group_scale.shape[1]
        factor = (group_scale * 2.0**14).astype(jnp.float16)[:, :, None]
        scaled = code.reshape(keys, groups, count // groups) * factor
        parts.append(scaled.reshape(keys, count))
    return parts


def index_scores(
    query: Array,
    head_weights: Array,
    visible: Array,
    batch_ids: Array,
    block_tables: Array,
    values: Array,
    scales: Array,
    *,
    index_format: str,
    config: Config | None = None,
    interpret: bool = False,
) -> Array:
    """See the package's docstring; `unsupported` has been asked."""
    rows = query.shape[0]
    requests, columns = block_tables.shape
    rows_in_page = values.shape[1]
    context = columns * rows_in_page
    if rows == 0 or requests == 0 or columns == 0:
        return jnp.full((rows, context), -jnp.inf, jnp.float32)
    config = config or config_for(rows, requests)
    operand, weights = float16_query(query, head_weights, index_format)
    elements = packed_view(values)
    split = split_of(elements, index_format)
    operand = split_query(operand, split)
    padding = -rows % config.rows

    def pad(x: Array, value: int) -> Array:
        return jnp.pad(x, [(0, padding)] + [(0, 0)] * (x.ndim - 1), constant_values=value)

    tile_keys = config.keys * config.tiles
    groups = (rows + padding) // config.rows
    kernel = _kernel(config, context, rows, rows_in_page, split, index_format)
    return backend.triton_call(
        kernel,
        jax.ShapeDtypeStruct((rows, context), jnp.float32),
        grid=(-(-context // tile_keys), groups),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        interpret=interpret,
        name=f"index_scores_{index_format}",
    )(
        pad(operand, 0),
        pad(weights, 0),
        pad(jnp.where(batch_ids >= 0, visible, 0), 0),
        pad(batch_ids, -1),
        block_tables,
        elements,
        scales,
    )


def _kernel(config: Config, context: int, rows: int, rows_in_page: int, split: int, index_format: str):
    plgpu = backend.triton()
    one_page = rows_in_page % config.keys == 0

    def load_tile(values_ref, scales_ref, tables_ref, request, start):
        """Decoded parts of keys `start ..` of a request, and their row scale [keys]."""
        if one_page:
            page = tables_ref[request, start // rows_in_page]
            place = (page, pl.ds(start % rows_in_page, config.keys))
        else:
            entries = start + jnp.arange(config.keys, dtype=jnp.int32)
            column = jnp.minimum(entries // rows_in_page, tables_ref.shape[1] - 1)
            place = (tables_ref[request, column], entries % rows_in_page)
        elements = values_ref[(*place, slice(None))]
        if index_format == "fp8":
            return decoded_parts(elements, split, None), scales_ref[place]
        group_scale, row_scale = relative_scales(scales_ref[(*place, slice(None))])
        return decoded_parts(elements, split, group_scale), row_scale

    def kernel(query_ref, weights_ref, visible_ref, batch_ref, tables_ref, values_ref, scales_ref, scores_ref):
        first_row = pl.program_id(1) * config.rows
        first_key = pl.program_id(0) * (config.keys * config.tiles)
        tiles = jnp.minimum(config.tiles, pl.cdiv(context - first_key, config.keys))
        rows_here = range(config.rows)
        bounds = [visible_ref[first_row + i] for i in rows_here]
        owners = [batch_ref[first_row + i] for i in rows_here]
        queries = [[query_ref[first_row + i, s] for s in range(split)] for i in rows_here]
        weights = [weights_ref[first_row + i] for i in rows_here]

        def store(i, tile, scores, wanted):
            start = first_key + tile * config.keys
            mask = (start + jnp.arange(config.keys) < context) & wanted & (first_row + i < rows)
            plgpu.store(scores_ref.at[first_row + i, pl.ds(start, config.keys)], scores, mask=mask)

        def each_tile(start, stop, step):
            def body(tile, carry):
                step(tile)
                return carry

            lax.fori_loop(start, stop, body, None)

        def leave(tile, wanted):
            empty = jnp.full((config.keys,), -jnp.inf, jnp.float32)
            for i in rows_here:
                store(i, tile, empty, wanted(i))

        def score(tile, request):
            start = first_key + tile * config.keys
            keys, row_scale = load_tile(values_ref, scales_ref, tables_ref, request, start)
            for i in rows_here:
                dots = [jnp.dot(k, q.T, preferred_element_type=jnp.float32) for k, q in zip(keys, queries[i])]
                terms = jnp.maximum(sum(dots[1:], dots[0]), 0) * weights[i][None, :]
                scores = jnp.sum(terms, axis=1) * row_scale
                seen = start + jnp.arange(config.keys) < bounds[i]
                store(i, tile, jnp.where(seen, scores, -jnp.inf), owners[i] == request)

        def request_step(request, carry):
            bound = jnp.int32(0)
            for i in rows_here:
                bound = jnp.maximum(bound, jnp.where(owners[i] == request, bounds[i], 0))
            seen = jnp.clip(pl.cdiv(bound - first_key, config.keys), 0, tiles)
            each_tile(0, seen, lambda tile: score(tile, request))
            each_tile(seen, tiles, lambda tile: leave(tile, lambda i: owners[i] == request))
            return carry

        first, last = jnp.int32(2**31 - 1), jnp.int32(-1)
        for owner in owners:
            first = jnp.minimum(first, jnp.where(owner >= 0, owner, 2**31 - 1))
            last = jnp.maximum(last, owner)
        lax.fori_loop(first, last + 1, request_step, None)
        padded = functools.reduce(jnp.minimum, owners) < 0
        each_tile(0, jnp.where(padded, tiles, 0), lambda tile: leave(tile, lambda i: owners[i] < 0))

    return kernel

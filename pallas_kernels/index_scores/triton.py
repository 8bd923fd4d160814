"""The index scorer for GPUs: one program scores a few rows against a few tiles of keys, read in place.

Keys are the left operand of the matrix product and the heads of one or more rows its columns, so that the tensor cores
see 64 or more rows even for one query, and 256 columns for eight: a product of 32 columns does not fill them. Operands
are float16. FP8 products are not used: Hopper adds them with 14 bits. The positive row scale is applied after the sum
over heads.

A program walks the requests its rows belong to, so that rows need not come in groups of one request; rows in batch
order make that walk one or two steps long.

Where a request has many rows, its keys are decoded into memory once instead of by every program: a tile of keys is
then one asynchronous copy, and FP4 keys are one product of 128 dims and not eight of 16.
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
from pallas_kernels.index_plane import float16_query
from pallas_kernels.triton_index_keys import (
    decoded_fp4,
    decoded_fp8,
    decoded_rows,
    packed_view,
    split_of,
    split_query,
    stacked_query,
)
from pallas_kernels.triton_widening import packed_instructions

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Config:
    """How the work is cut.

    Attributes:
      rows: query rows of one program.
      together: most rows of one matrix product, a power of two.
      keys: keys of one tile, at least 16.
      tiles: key tiles of one program.
      num_warps, num_stages: of one program.
      decoded: keys are decoded into memory first, once, instead of by every program.
    """

    rows: int
    together: int
    keys: int
    tiles: int
    num_warps: int
    num_stages: int
    decoded: bool = False

    def stacks(self) -> list[tuple[int, int]]:
        """First row and size of every product: as many of `together` rows as fit, then smaller powers of two."""
        stacks, first, size = [], 0, self.together
        while first < self.rows:
            while size > self.rows - first:
                size //= 2
            stacks.append((first, size))
            first += size
        return stacks


LEAST_DECODED = 64
"""Rows a request from which on its keys are decoded first: at most as many bytes as the scores, and a small part of the
work."""
LONG_WORK = 2**25
"""Scores from which on programs of twice as many tiles still fill the device."""
SMALL_WORK = 2**17
"""Scores per key tile of a program: programs are short while there are too few of them to fill the device."""


def config_for(rows: int, requests: int, context: int) -> Config:
    """The configuration for a batch of `rows` over `requests`; depends on shapes only, never on contents."""
    each = max(1, rows // max(1, requests))
    if each == 1:
        tiles = min(8, 1 << max(0, (rows * context // SMALL_WORK).bit_length() - 1))
        return Config(rows=1, together=1, keys=128, tiles=tiles, num_warps=4, num_stages=3)
    if each < 8:
        return Config(rows=each, together=2, keys=64, tiles=8, num_warps=4, num_stages=2)
    if each < LEAST_DECODED:
        return Config(rows=8, together=4, keys=64, tiles=16, num_warps=4, num_stages=2)
    tiles = 64 if rows * context >= LONG_WORK else 32
    return Config(rows=8, together=4, keys=64, tiles=tiles, num_warps=4, num_stages=3, decoded=True)


def unsupported(query: Array, index_format: str, quantize_query: bool, score_dtype: DTypeLike) -> str | None:
    """Why the kernel cannot run on these shapes, or None."""
    heads, width = query.shape[1:]
    if index_format not in ("fp8", "fp4"):
        return f"it reads fp8 and fp4 planes, not {index_format}"
    if not quantize_query:
        return "it needs the query on the plane's grid"
    if jnp.dtype(score_dtype) != jnp.float32:
        return f"its scores are float32, not {jnp.dtype(score_dtype).name}"
    least = 128 if index_format == "fp4" else 64
    if heads < 16 or heads & (heads - 1) or width < least or width & (width - 1):
        return f"{heads} heads of width {width} are not powers of two of at least 16 and {least}"
    return None


@backend.traced_once
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
    rows, heads = query.shape[:2]
    requests, columns = block_tables.shape
    rows_in_page = values.shape[1]
    context = columns * rows_in_page
    if rows == 0 or requests == 0 or columns == 0:
        return jnp.full((rows, context), -jnp.inf, jnp.float32)
    config = config or config_for(rows, requests, context)
    padding = -rows % config.rows

    def pad(x: Array, value: int) -> Array:
        return jnp.pad(x, [(0, padding)] + [(0, 0)] * (x.ndim - 1), constant_values=value)

    operand, weights = float16_query(query, head_weights, index_format)
    if config.decoded:
        values, scales = (plane.at[block_tables].get(mode="clip") for plane in (values, scales))
        elements, scales = decoded_rows(values, scales, index_format)
        elements, scales, split = elements.reshape(requests, context, -1), scales.reshape(requests, context), 1
        # Whole tiles: what lies past the end is read and not stored.
        beyond = (0, -context % config.keys)
        elements, scales = jnp.pad(elements, ((0, 0), beyond, (0, 0))), jnp.pad(scales, ((0, 0), beyond))
    else:
        elements = packed_view(values, index_format)
        split = split_of(elements, index_format)
    tile_keys = config.keys * config.tiles
    groups = (rows + padding) // config.rows
    kernel = _kernel(config, context, rows, heads, rows_in_page, split, index_format)
    return backend.triton_call(
        kernel,
        jax.ShapeDtypeStruct((rows, context), jnp.float32),
        grid=(-(-context // tile_keys), groups),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        interpret=interpret,
        name=f"index_scores_{index_format}",
    )(
        (split_query if config.together == 1 else stacked_query)(pad(operand, 0), split),
        pad(weights, 0) if config.together == 1 else pad(weights, 0).reshape(-1),
        pad(jnp.where(batch_ids >= 0, visible, 0), 0),
        pad(batch_ids, -1),
        block_tables,
        elements,
        scales,
    )


def _kernel(config: Config, context: int, rows: int, heads: int, rows_in_page: int, split: int, index_format: str):
    plgpu = backend.triton()
    one_page = rows_in_page % config.keys == 0
    cuda = packed_instructions()
    # Rows on their own stay scalars: this is the form whose decode times are the best measured.
    single = config.together == 1

    def largest(x):
        return x if single else jnp.max(x)

    def smallest(x):
        return x if single else jnp.min(x)

    def load_tile(values_ref, scales_ref, tables_ref, request, start):
        """Decoded parts of keys `start ..` of a request, and their row scale [keys]."""
        if config.decoded:
            place = (request, pl.ds(start, config.keys))
            return [values_ref[(*place, slice(None))]], scales_ref[place]
        if one_page:
            page = tables_ref[request, start // rows_in_page]
            place = (page, pl.ds(start % rows_in_page, config.keys))
        else:
            entries = start + jnp.arange(config.keys, dtype=jnp.int32)
            column = jnp.minimum(entries // rows_in_page, tables_ref.shape[1] - 1)
            place = (tables_ref[request, column], entries % rows_in_page)
        elements = values_ref[(*place, slice(None))]
        if index_format == "fp8":
            return decoded_fp8(elements), scales_ref[place]
        return decoded_fp4(elements, scales_ref[(*place, slice(None))], cuda)

    def kernel(query_ref, weights_ref, visible_ref, batch_ref, tables_ref, values_ref, scales_ref, scores_ref):
        first_row = pl.program_id(1) * config.rows
        first_key = pl.program_id(0) * (config.keys * config.tiles)
        tiles = jnp.minimum(config.tiles, pl.cdiv(context - first_key, config.keys))
        stacks = [(first_row + first, size) for first, size in config.stacks()]
        rows_of = [row if single else pl.ds(row, size) for row, size in stacks]
        bounds = [visible_ref[place] for place in rows_of]
        owners = [batch_ref[place] for place in rows_of]
        if single:
            queries = [[query_ref[row, s] for s in range(split)] for row in rows_of]
            weights = [weights_ref[row] for row in rows_of]
        else:
            columns = [pl.ds(row * heads, size * heads) for row, size in stacks]
            queries = [[query_ref[s, place, :] for s in range(split)] for place in columns]
            weights = [weights_ref[place] for place in columns]

        def store(stack, tile, scores, wanted):
            row, size = stacks[stack]
            start = first_key + tile * config.keys
            inside = start + jnp.arange(config.keys) < context
            if single:
                mask = inside & wanted & (row < rows)
                plgpu.store(scores_ref.at[row, pl.ds(start, config.keys)], scores, mask=mask)
                return
            mask = inside[None, :] & (wanted & (row + jnp.arange(size) < rows))[:, None]
            plgpu.store(scores_ref.at[pl.ds(row, size), pl.ds(start, config.keys)], scores, mask=mask)

        def each_tile(start, stop, step):
            def body(tile, carry):
                step(tile)
                return carry

            lax.fori_loop(start, stop, body, None)

        def leave(tile, wanted):
            for stack, (_, size) in enumerate(stacks):
                empty = jnp.full((config.keys,) if single else (size, config.keys), -jnp.inf, jnp.float32)
                store(stack, tile, empty, wanted(owners[stack]))

        def score(tile, request):
            start = first_key + tile * config.keys
            keys, row_scale = load_tile(values_ref, scales_ref, tables_ref, request, start)
            for stack, (_, size) in enumerate(stacks):
                dots = [jnp.dot(k, q.T, preferred_element_type=jnp.float32) for k, q in zip(keys, queries[stack])]
                terms = jnp.maximum(sum(dots[1:], dots[0]), 0) * weights[stack][None, :]
                if single:
                    scores = jnp.sum(terms, axis=1) * row_scale
                    seen = start + jnp.arange(config.keys) < bounds[stack]
                    store(stack, tile, jnp.where(seen, scores, -jnp.inf), owners[stack] == request)
                    continue
                scores = jnp.sum(terms.reshape(config.keys, size, heads), axis=2) * row_scale[:, None]
                seen = (start + jnp.arange(config.keys))[:, None] < bounds[stack][None, :]
                store(stack, tile, jnp.where(seen, scores, -jnp.inf).T, owners[stack] == request)

        def request_step(request, carry):
            mine = [largest(jnp.where(owner == request, b, 0)) for owner, b in zip(owners, bounds)]
            bound = functools.reduce(jnp.maximum, mine, jnp.int32(0))
            seen = jnp.clip(pl.cdiv(bound - first_key, config.keys), 0, tiles)
            each_tile(0, seen, lambda tile: score(tile, request))
            each_tile(seen, tiles, lambda tile: leave(tile, lambda owner: owner == request))
            return carry

        first, last = jnp.int32(2**31 - 1), jnp.int32(-1)
        for owner in owners:
            first = jnp.minimum(first, smallest(jnp.where(owner >= 0, owner, 2**31 - 1)))
            last = jnp.maximum(last, largest(owner))
        lax.fori_loop(first, last + 1, request_step, None)
        padded = functools.reduce(jnp.minimum, [smallest(owner) for owner in owners]) < 0
        each_tile(0, jnp.where(padded, tiles, 0), lambda tile: leave(tile, lambda owner: owner < 0))

    return kernel

"""Candidate-restricted scoring for GPUs: the arithmetic of the index scorer on gathered rows.

A block of 8 rows is 1,024 contiguous bytes of an fp8 plane, so that nothing outside the candidates is fetched.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import backend
from pallas_kernels.index_plane import float16_query
from pallas_kernels.triton_index_keys import decoded_fp4, decoded_fp8, packed_view, split_of, split_query
from pallas_kernels.triton_widening import packed_instructions

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Config:
    """How the work is cut.

    Attributes:
      keys: columns of one tile, a power of two of at least 16.
      tiles: tiles of one program.
      num_warps, num_stages: of one program.
    """

    keys: int
    tiles: int
    num_warps: int
    num_stages: int


def config_for(rows: int) -> Config:
    """The configuration for a batch of `rows`: short programs while there are few of them."""
    return Config(keys=64, tiles=1 if rows < 16 else 4, num_warps=4, num_stages=2)


@backend.traced_once
def candidate_scores(
    query: Array,
    head_weights: Array,
    visible: Array,
    batch_ids: Array,
    block_tables: Array,
    values: Array,
    scales: Array,
    candidates: Array,
    *,
    block_size: int,
    index_format: str,
    config: Config | None = None,
    interpret: bool = False,
) -> Array:
    """See the package's docstring; `index_scores.triton.unsupported` has been asked."""
    rows, blocks = candidates.shape
    width = blocks * block_size
    if rows == 0 or width == 0 or block_tables.size == 0:
        return jnp.full((rows, width), -jnp.inf, jnp.float32)
    config = config or config_for(rows)
    operand, weights = float16_query(query, head_weights, index_format)
    elements = packed_view(values, index_format)
    split = split_of(elements, index_format)
    rows_in_page = values.shape[1]
    plgpu = backend.triton()
    cuda = packed_instructions()

    def kernel(query_ref, weights_ref, visible_ref, batch_ref, tables_ref, values_ref, scales_ref, list_ref, out_ref):
        row = pl.program_id(1)
        first = pl.program_id(0) * (config.keys * config.tiles)
        request = jnp.maximum(batch_ref[row], 0)
        bound = jnp.where(batch_ref[row] >= 0, visible_ref[row], 0)
        queries = [query_ref[row, s] for s in range(split)]
        head_weights = weights_ref[row]

        def step(tile, carry):
            start = first + tile * config.keys
            columns = start + jnp.arange(config.keys, dtype=jnp.int32)
            block = list_ref[row, jnp.minimum(columns // block_size, blocks - 1)]
            entries = block * block_size + columns % block_size
            seen = (columns < width) & (block >= 0) & (entries < bound)
            entries = jnp.where(seen, entries, 0)
            pages = tables_ref[request, entries // rows_in_page]
            offsets = entries % rows_in_page

            def write(scores):
                plgpu.store(out_ref.at[row, pl.ds(start, config.keys)], scores, mask=columns < width)

            live = jnp.max(seen.astype(jnp.int32)) > 0

            @pl.when(live)
            def _():
                stored = values_ref[pages, offsets, :]
                if index_format == "fp8":
                    keys, row_scale = decoded_fp8(stored), scales_ref[pages, offsets]
                else:
                    keys, row_scale = decoded_fp4(stored, scales_ref[pages, offsets, :], cuda)
                dots = [jnp.dot(k, q.T, preferred_element_type=jnp.float32) for k, q in zip(keys, queries)]
                terms = jnp.maximum(sum(dots[1:], dots[0]), 0) * head_weights[None, :]
                write(jnp.where(seen, jnp.sum(terms, axis=1) * row_scale, -jnp.inf))

            @pl.when(jnp.logical_not(live))
            def _():
                write(jnp.full((config.keys,), -jnp.inf, jnp.float32))

            return carry

        tiles = jnp.minimum(config.tiles, pl.cdiv(width - first, config.keys))
        lax.fori_loop(0, tiles, step, None)

    return backend.triton_call(
        kernel,
        jax.ShapeDtypeStruct((rows, width), jnp.float32),
        grid=(pl.cdiv(width, config.keys * config.tiles), rows),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        interpret=interpret,
        name=f"candidate_scores_{index_format}",
    )(split_query(operand, split), weights, visible, batch_ids, block_tables, elements, scales, candidates)

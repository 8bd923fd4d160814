"""Candidate-restricted scoring for TPUs: lines that hold a candidate are fetched, then blocks move to their columns.

A line of 128 keys is the least that a matrix unit or a copy handles well, so a row's candidates cost up to 16 times
their bytes and never more than the whole context. Scores of a line stay in VMEM; every candidate block is then one
rotation of lanes away from its columns.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from pallas_kernels import backend, tpu_index_keys
from pallas_kernels.index_plane import quantized_query
from pallas_kernels.index_scores import tpu as scores_tpu
from pallas_kernels.tpu_index_keys import LINE

Array = jax.Array

ROWS = 8
"""Query rows that share a block of the result."""
MOST_LINES = 16_384
"""Lines of a context whose scores VMEM holds."""
GROUP, DEPTH = 4, 4


def unsupported(
    query: Array,
    values: Array,
    scales: Array | None,
    block_tables: Array,
    block_size: int,
    index_format: str,
    quantize_query: bool,
    score_dtype: DTypeLike,
) -> str | None:
    """Why the kernel cannot run on these shapes, or None."""
    problem = scores_tpu.unsupported(query, values, scales, index_format, quantize_query, score_dtype)
    if problem is None and (block_size & (block_size - 1) or block_size > LINE):
        problem = f"blocks of {block_size} entries are not a power of two of at most {LINE}"
    if problem is None and block_tables.shape[1] > MOST_LINES:
        problem = f"a table of {block_tables.shape[1]} pages is longer than {MOST_LINES}"
    return problem


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
    interpret: Any = False,
) -> Array:
    """See the package's docstring; `unsupported` has been asked."""
    count, heads, width = query.shape
    blocks = candidates.shape[1]
    columns = blocks * block_size
    if count == 0 or columns == 0 or block_tables.size == 0:
        return jnp.full((count, columns), -jnp.inf, jnp.float32)
    plane = tpu_index_keys.plane_of(width, values, scales, index_format, interpret)
    per_line = plane.pages_per_line
    operand, weights, _ = quantized_query(
        query, head_weights, index_format=index_format, quantize_query=True, fold=True
    )
    operand = tpu_index_keys.operand_order(operand, index_format)
    tables = jnp.pad(block_tables, ((0, 0), (0, -block_tables.shape[1] % per_line)))
    lines_in_context = tables.shape[1] // per_line
    blocks_of_line = LINE // block_size
    padding = -count % ROWS

    def pad(x: Array, value: int) -> Array:
        return jnp.pad(x, [(0, padding)] + [(0, 0)] * (x.ndim - 1), constant_values=value)

    candidates = jnp.pad(candidates, ((0, padding), (0, -blocks % blocks_of_line)), constant_values=-1)
    bounds = pad(jnp.where(batch_ids >= 0, visible, 0), 0)
    line = candidates // blocks_of_line
    live = (candidates >= 0) & (candidates * block_size < bounds[:, None])
    line = jnp.where(live, line, -1)
    new = live & (line != jnp.pad(line, ((0, 0), (1, 0)), constant_values=-1)[:, :-1])
    lines = jnp.sort(jnp.where(new, line, lines_in_context), axis=1)
    counts = jnp.sum(new, axis=1, dtype=jnp.int32)
    owners = pad(jnp.maximum(batch_ids, 0), 0)
    pltpu = backend.tpu()
    total = count + padding

    def of_row(step: int):
        return lambda block, row, *_: (jnp.minimum(block * ROWS + row + step, total - 1), 0, 0)

    def of_request(step: int):
        return lambda block, row, owner, *_: (owner[jnp.minimum(block * ROWS + row + step, total - 1)], 0, 0)

    def scalars(length: int, index) -> pl.BlockSpec:
        return pl.BlockSpec((1, 1, length), index, memory_space=pltpu.SMEM)

    places = candidates.shape[1]
    out = backend.tpu_call(
        _kernel(plane, blocks_of_line, total),
        jax.ShapeDtypeStruct((total, places * block_size), jnp.float32),
        grid=(total // ROWS, ROWS),
        num_scalar_prefetch=3,
        in_specs=[
            *[scalars(tables.shape[1], of_request(step)) for step in (0, 1)],
            *[scalars(places, of_row(step)) for step in (0, 1)],
            scalars(places, of_row(0)),
            pl.BlockSpec((1, heads, width), of_row(0)),
            pl.BlockSpec((1, heads, LINE), of_row(0)),
            pl.BlockSpec(memory_space=pltpu.HBM),
            pl.BlockSpec(memory_space=pltpu.HBM),
        ],
        out_specs=pl.BlockSpec((ROWS, places * block_size), lambda block, row, *_: (block, 0)),
        scratch_shapes=[
            *plane.buffers(GROUP, DEPTH),
            pltpu.SMEM((1,), jnp.int32),
            pltpu.VMEM((lines_in_context, LINE), jnp.float32),
        ],
        vmem_limit_bytes=32 * 2**20,
        interpret=interpret,
        name=f"candidate_scores_{index_format}",
    )(
        owners,
        bounds,
        counts,
        *[tables[:, None, :]] * 2,
        *[lines[:, None, :]] * 2,
        candidates[:, None, :],
        pad(operand, 0),
        jnp.broadcast_to(pad(weights, 0)[:, :, None], (total, heads, LINE)),
        plane.values,
        plane.scales,
    )
    return out[:count, :columns]


def _kernel(plane: tpu_index_keys.Plane, blocks_of_line: int, total: int):
    per_line, block_size = plane.pages_per_line, LINE // blocks_of_line

    def kernel(
        owners_ref,
        bounds_ref,
        counts_ref,
        table_ref,
        next_table_ref,
        lines_ref,
        next_lines_ref,
        candidates_ref,
        query_ref,
        weights_ref,
        values_ref,
        scales_ref,
        out_ref,
        values_buffer,
        scales_buffer,
        semaphores,
        consumed_ref,
        scores_ref,
    ):
        row_in_block = pl.program_id(1)
        row = pl.program_id(0) * ROWS + row_in_block
        bound = bounds_ref[row]
        lane = lax.broadcasted_iota(jnp.int32, (1, LINE), 1)
        sublane = lax.broadcasted_iota(jnp.int32, (ROWS, LINE), 0)

        def lines(count, lines_ref, table_ref):
            return tpu_index_keys.Lines(
                count, lambda position, part: table_ref[0, 0, lines_ref[0, 0, position] * per_line + part]
            )

        def consume(group, slot):
            for line in range(GROUP):
                position = group * GROUP + line

                @pl.when(position < counts_ref[row])
                def _(line=line, position=position):
                    keys, scale = tpu_index_keys.decoded_line(
                        plane.index_format, values_buffer.at[slot, line], scales_buffer.at[slot, line]
                    )
                    dots = tpu_index_keys.products(query_ref[0], keys, plane.index_format)
                    scores = jnp.sum(jnp.maximum(dots, 0) * weights_ref[0], axis=0, keepdims=True)
                    scores = scores if scale is None else scores * scale
                    place = lines_ref[0, 0, position]
                    scores_ref[pl.ds(place, 1), :] = jnp.where(place * LINE + lane < bound, scores, -jnp.inf)

        next_row = jnp.minimum(row + 1, total - 1)
        tpu_index_keys.stream(
            plane,
            GROUP,
            DEPTH,
            (values_ref, scales_ref),
            (values_buffer, scales_buffer, semaphores),
            consumed_ref,
            lines(counts_ref[row], lines_ref, table_ref),
            lines(jnp.where(row + 1 < total, counts_ref[next_row], 0), next_lines_ref, next_table_ref),
            row == 0,
            consume,
        )

        def compact(index, carry):
            out = jnp.full((1, LINE), -jnp.inf, jnp.float32)
            for place in range(blocks_of_line):
                candidate = candidates_ref[0, 0, index * blocks_of_line + place]
                seen = (candidate >= 0) & (candidate * block_size < bound)
                block = jnp.where(seen, candidate, 0)
                source = lax.rem(block, blocks_of_line)
                shift = lax.rem((place - source + blocks_of_line) * block_size, LINE)
                scores = scores_ref[pl.ds(lax.div(block, blocks_of_line), 1), :]
                mine = (lane >= place * block_size) & (lane < (place + 1) * block_size) & seen
                out = jnp.where(mine, backend.tpu().roll(scores, shift, 1), out)
            # A row of a tile cannot be stored at a dynamic lane: the whole tile is, the other rows as they were.
            lanes = pl.ds(pl.multiple_of(index * LINE, LINE), LINE)
            out_ref[:, lanes] = jnp.where(sublane == row_in_block, out, out_ref[:, lanes])
            return carry

        lax.fori_loop(0, candidates_ref.shape[2] // blocks_of_line, compact, 0)

    return kernel

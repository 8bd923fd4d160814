"""The index scorer for TPUs: pages stream through a ring of buffers, each decoded once for a block of query rows.

The grid walks chunks of keys and, inside, pairs of a row block and a request that has rows in it; how many pairs there
are is a traced number, so that one program serves decode, verify and prefill and rows in any order. Consecutive pairs
of a block share its output block, which each of them fills for its own rows. The ring runs on across steps: while a
step computes its last pages, the first pages of the next one are on their way, found through the next step's part of
the block table.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from pallas_kernels import backend, tpu_index_keys
from pallas_kernels.index_plane import quantized_query
from pallas_kernels.tpu_index_keys import LINE

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Config:
    """How the work is cut.

    Attributes:
      rows: query rows of a block, a multiple of 8 of at most 256.
      together: rows of one matrix product, a divisor of `rows` of which `rows` holds at most 31.
      lines: lines of 128 keys in a chunk, a multiple of `group`.
      group: lines fetched together.
      depth: groups in the ring.
    """

    rows: int
    together: int
    lines: int
    group: int
    depth: int


def config_for(rows: int, requests: int) -> Config:
    """The configuration for a batch; depends on shapes only."""
    if rows <= 2 * requests:
        return Config(rows=8, together=1, lines=128, group=4, depth=4)
    if rows < 16 * requests:
        return Config(rows=8, together=8, lines=128, group=4, depth=4)
    return Config(rows=32, together=8, lines=32, group=4, depth=4)


def unsupported(
    query: Array, values: Array, scales: Array | None, index_format: str, quantize_query: bool, score_dtype: DTypeLike
) -> str | None:
    """Why the kernel cannot run on these shapes, or None."""
    if not quantize_query:
        return "it needs the query on the plane's grid"
    if jnp.dtype(score_dtype) != jnp.float32:
        return f"its scores are float32, not {jnp.dtype(score_dtype).name}"
    heads, width = query.shape[1:]
    if heads % 8:
        return f"{heads} heads are not a multiple of 8"
    return tpu_index_keys.unsupported_plane(width, values, scales, index_format)


def pairs_of(batch_ids: Array, visible: Array, rows: int, together: int) -> tuple[Array, tuple[Array, ...]]:
    """Pairs of a block of `rows` rows and a request with rows in it, by block and first row; every block has one.

    Args:
      batch_ids, visible: [blocks * rows] int32.

    Returns:
      how many pairs [1]; and for each pair, [blocks * rows] int32: its block, its request, the largest bound of its
      rows (0 where none is live), and a bit for every group of `together` rows that holds one of them.
    """
    blocks = batch_ids.shape[0] // rows
    owner, bound = batch_ids.reshape(blocks, rows), visible.reshape(blocks, rows)
    same = (owner[:, :, None] == owner[:, None, :]) & (owner >= 0)[:, None, :]
    earlier = jnp.tril(jnp.ones((rows, rows), bool), -1)
    first = (owner >= 0) & ~jnp.any(same & earlier, axis=2)
    first = first.at[:, 0].set(True)
    seen = jnp.max(jnp.where(same, bound[:, None, :], 0), axis=2)
    bits = 1 << (jnp.arange(rows, dtype=jnp.int32) // together)
    # A sum over one row of every group: a bit counts once.
    groups = jnp.any(same.reshape(blocks, rows, rows // together, together), axis=3)
    stacks = jnp.sum(jnp.where(groups, bits[::together], 0), axis=2)
    (place,) = jnp.nonzero(first.reshape(-1), size=blocks * rows, fill_value=0)
    block = (place // rows).astype(jnp.int32)
    parts = [x.reshape(-1)[place].astype(jnp.int32) for x in (jnp.maximum(owner, 0), seen, stacks)]
    return jnp.sum(first, dtype=jnp.int32)[None], (block, *parts)


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
    interpret: Any = False,
) -> Array:
    """See the package's docstring; `unsupported` has been asked."""
    count, heads, width = query.shape
    requests, columns = block_tables.shape
    plane = tpu_index_keys.plane_of(width, values, scales, index_format, interpret)
    context = columns * plane.rows
    if count == 0 or requests == 0 or columns == 0:
        return jnp.full((count, context), -jnp.inf, jnp.float32)
    config = config or config_for(count, requests)
    padding = -count % config.rows
    pages_in_chunk = config.lines * plane.pages_per_line
    chunks = pl.cdiv(columns, pages_in_chunk)
    tables = jnp.pad(block_tables, ((0, 0), (0, chunks * pages_in_chunk - columns)))
    operand, weights, _ = quantized_query(
        query, head_weights, index_format=index_format, quantize_query=True, fold=True
    )
    operand = tpu_index_keys.operand_order(operand, index_format)

    def pad(x: Array, value: int) -> Array:
        return jnp.pad(x, [(0, padding)] + [(0, 0)] * (x.ndim - 1), constant_values=value)

    visible = pad(jnp.where(batch_ids >= 0, visible, 0), 0)
    batch_ids = pad(batch_ids, -1)
    pairs, lists = pairs_of(batch_ids, visible, config.rows, config.together)

    def row_block(height: int):
        return lambda chunk, pair, total, block, *_: (block[pair], 0)

    def table(step: int):
        def index(chunk, pair, total, block, request, *_):
            beyond = pair + step >= total[0]
            chosen = request[jnp.where(beyond, 0, pair + step)]
            return chosen * chunks + jnp.minimum(chunk + beyond.astype(jnp.int32), chunks - 1), 0, 0

        return index

    def wide(x: Array) -> Array:
        return jnp.broadcast_to(x[:, None], (x.shape[0], LINE))

    pltpu = backend.tpu()
    stacked = config.rows * heads
    table_spec = [pl.BlockSpec((1, 1, pages_in_chunk), table(step), memory_space=pltpu.SMEM) for step in (0, 1)]
    return backend.tpu_call(
        _kernel(config, plane, heads, chunks),
        jax.ShapeDtypeStruct((count, context), jnp.float32),
        grid=(chunks, pairs[0]),
        num_scalar_prefetch=5,
        in_specs=[
            *table_spec,
            pl.BlockSpec((stacked, width), row_block(stacked)),
            pl.BlockSpec((stacked, LINE), row_block(stacked)),
            pl.BlockSpec((config.rows, LINE), row_block(config.rows)),
            pl.BlockSpec((config.rows, LINE), row_block(config.rows)),
            pl.BlockSpec(memory_space=pltpu.HBM),
            pl.BlockSpec(memory_space=pltpu.HBM),
        ],
        out_specs=pl.BlockSpec(
            (config.rows, config.lines * LINE), lambda chunk, pair, total, block, *_: (block[pair], chunk)
        ),
        scratch_shapes=[*plane.buffers(config.group, config.depth), pltpu.SMEM((1,), jnp.int32)],
        interpret=interpret,
        name=f"index_scores_{index_format}",
    )(
        pairs,
        *lists,
        *[tables.reshape(requests * chunks, 1, pages_in_chunk)] * 2,
        pad(operand, 0).reshape(-1, width),
        wide(pad(weights, 0).reshape(-1)),
        wide(batch_ids),
        wide(visible),
        plane.values,
        plane.scales,
    )


def _kernel(config: Config, plane: tpu_index_keys.Plane, heads: int, chunks: int):
    per_line = plane.pages_per_line

    def kernel(
        total_ref,
        block_ref,
        request_ref,
        seen_ref,
        stacks_ref,
        table_ref,
        next_table_ref,
        query_ref,
        weights_ref,
        owners_ref,
        bounds_ref,
        values_ref,
        scales_ref,
        scores_ref,
        values_buffer,
        scales_buffer,
        semaphores,
        consumed_ref,
    ):
        chunk, pair = pl.program_id(0), pl.program_id(1)

        def lines(chunk, pair, table):
            """The lines of a step that its rows see, from the chunk's first."""
            left = pl.cdiv(seen_ref[pair], plane.rows) - chunk * config.lines * per_line
            pages = jnp.clip(left, 0, config.lines * per_line)
            # Past the last page seen there may be none: the last one again.
            return tpu_index_keys.Lines(
                pl.cdiv(pages, per_line),
                lambda position, part: table[0, 0, jnp.minimum(position * per_line + part, pages - 1)],
            )

        wraps = pair + 1 >= total_ref[0]
        next_chunk = chunk + wraps.astype(jnp.int32)
        following = lines(next_chunk, jnp.where(wraps, 0, pair + 1), next_table_ref)
        following = dataclasses.replace(following, count=jnp.where(next_chunk < chunks, following.count, 0))

        @pl.when((pair == 0) | (block_ref[jnp.maximum(pair - 1, 0)] != block_ref[pair]))
        def _():
            scores_ref[...] = jnp.full(scores_ref.shape, -jnp.inf, jnp.float32)

        request, stacks = request_ref[pair], stacks_ref[pair]

        def score(group, slot, line):
            place = group * config.group + line
            keys, scale = tpu_index_keys.decoded_line(
                plane.index_format, values_buffer.at[slot, line], scales_buffer.at[slot, line]
            )
            lanes = pl.ds(pl.multiple_of(place * LINE, LINE), LINE)
            first_key = (chunk * config.lines + place) * LINE
            for stack in range(config.rows // config.together):

                @pl.when((stacks >> stack) & 1 == 1)
                def _(stack=stack):
                    rows = pl.ds(stack * config.together, config.together)
                    wide = pl.ds(stack * config.together * heads, config.together * heads)
                    dots = tpu_index_keys.products(query_ref[wide, :], keys, plane.index_format)
                    terms = jnp.maximum(dots, 0) * weights_ref[wide, :]
                    scores = jnp.sum(terms.reshape(config.together, heads, LINE), axis=1)
                    scores = scores if scale is None else scores * scale
                    entries = first_key + lax.broadcasted_iota(jnp.int32, scores.shape, 1)
                    mine = (owners_ref[rows, :] == request) & (entries < bounds_ref[rows, :])
                    scores_ref[rows, lanes] = jnp.where(mine, scores, scores_ref[rows, lanes])

        def consume(group, slot):
            for line in range(config.group):
                score(group, slot, line)

        tpu_index_keys.stream(
            plane,
            config.group,
            config.depth,
            (values_ref, scales_ref),
            (values_buffer, scales_buffer, semaphores),
            consumed_ref,
            lines(chunk, pair, table_ref),
            following,
            (chunk == 0) & (pair == 0),
            consume,
        )

    return kernel

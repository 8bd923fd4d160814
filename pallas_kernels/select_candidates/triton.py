"""Candidate selection for GPUs: block maxima with the newest block pinned, then the levels of `select_topk`.

Source: kernel chapter, "Top-k 512, candidate blocks, restricted scoring".
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import backend
from pallas_kernels.order_keys import LARGEST, LOWEST, PINNED, order_key
from pallas_kernels.select_topk.triton import (
    MOST_CAPACITY,
    Config,
    config_for,
    level_reader,
    level_sizes,
    load_row,
    pick_down,
    too_many_levels,
)

Array = jax.Array

FEW_ROWS = 512
"""Rows up to which the search starts below the pinned block: with more its registers cost more than its steps."""


def unsupported(rows: int, width: int, num_blocks: int, block_size: int) -> str | None:
    """Why the kernel cannot run on these shapes, or None."""
    if block_size & (block_size - 1):
        return f"blocks of {block_size} entries are not a power of two"
    blocks = pl.cdiv(width, block_size)
    config = config_for(rows, blocks, num_blocks)
    if config.capacity > MOST_CAPACITY:
        return f"{num_blocks} blocks need {config.capacity} keys in one program, more than {MOST_CAPACITY}"
    ratio = config.capacity // pl.next_power_of_2(num_blocks)
    return too_many_levels(blocks, ratio, config.capacity, max(1, config.chunk // block_size))


@backend.traced_once
def select_candidates(
    scores: Array,
    visible: Array,
    num_blocks: int,
    block_size: int,
    *,
    config: Config | None = None,
    interpret: bool = False,
) -> Array:
    """See the package's docstring; `unsupported` has been asked."""
    rows, width = scores.shape
    if rows == 0 or width == 0:
        return jnp.full((rows, num_blocks), -1, jnp.int32)
    blocks = pl.cdiv(width, block_size)
    config = config or config_for(rows, blocks, num_blocks)
    ratio = config.capacity // pl.next_power_of_2(num_blocks)
    chunk_blocks = max(1, config.chunk // block_size)
    chunks = pl.cdiv(blocks, chunk_blocks)
    upper = level_sizes(blocks, ratio, config.capacity, chunk_blocks)
    sizes = [chunks * chunk_blocks, *upper]
    ratios = [block_size, *[ratio for _ in upper]]
    plgpu = backend.triton()

    def kernel(scores_ref, visible_ref, *outputs):
        chunk, row = pl.program_id(0), pl.program_id(1)
        columns = chunk * (chunk_blocks * block_size) + jnp.arange(chunk_blocks * block_size, dtype=jnp.int32)
        bound = jnp.minimum(visible_ref[row], width)

        def write(keys, pin):
            for output, members in zip(outputs, ratios):
                keys = jnp.max(keys.reshape(keys.shape[0] // members, members), axis=1)
                if pin and output is outputs[0]:
                    block = chunk * chunk_blocks + jnp.arange(chunk_blocks, dtype=jnp.int32)
                    keys = jnp.where(block == (bound - 1) // block_size, PINNED, jnp.minimum(keys, LARGEST))
                plgpu.store(output.at[row, pl.ds(chunk * keys.shape[0], keys.shape[0])], keys)

        live = chunk * (chunk_blocks * block_size) < bound

        @pl.when(live)
        def _():
            loaded = load_row(scores_ref, row, columns, width, chunk_blocks * block_size)
            write(order_key(loaded, columns < bound), True)

        @pl.when(jnp.logical_not(live))
        def _():
            write(jnp.full((chunk_blocks * block_size,), LOWEST, jnp.int32), False)

    levels = backend.triton_call(
        kernel,
        [jax.ShapeDtypeStruct((rows, size), jnp.int32) for size in sizes],
        grid=(chunks, rows),
        num_warps=config.level_warps,
        num_stages=1,
        interpret=interpret,
        name="block_maxima",
    )(scores, visible)
    chosen, _ = pick_down(
        (levels[0],),
        level_reader,
        lambda row, columns, wanted, ref: columns,
        sizes[0],
        levels[1:],
        ratio,
        num_blocks,
        config,
        interpret,
        "select_candidates",
        pinned=rows <= FEW_ROWS,
    )
    return chosen

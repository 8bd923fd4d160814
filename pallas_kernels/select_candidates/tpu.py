"""Candidate selection for TPUs: block maxima on the first lane of every block, then the selection of `select_topk`.

Source: kernel chapter, "Top-k 512, candidate blocks, restricted scoring".
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import backend
from pallas_kernels.order_keys import LARGEST, LOWEST, PINNED, order_key
from pallas_kernels.select_topk import tpu

Array = jax.Array


def unsupported(width: int, num_blocks: int, block_size: int) -> str | None:
    """Why the kernel cannot run on these shapes, or None."""
    if block_size & (block_size - 1) or block_size > tpu.LANES:
        return f"blocks of {block_size} entries are not a power of two of at most {tpu.LANES}"
    return tpu.unsupported(width, num_blocks)


def select_candidates(scores: Array, visible: Array, num_blocks: int, block_size: int, interpret: Any = False) -> Array:
    """See the package's docstring; `unsupported` has been asked."""
    # A shift: floor division brings in the sign.
    shift = block_size.bit_length() - 1

    def keys(scores: Array, columns: Array, bound: Array, entries: Array | None) -> Array:
        del entries
        key = order_key(scores, columns < bound)
        distance = 1
        while distance < block_size:
            key = jnp.maximum(key, backend.tpu().roll(key, tpu.LANES - distance, 1))
            distance *= 2
        newest = (bound > 0) & ((columns >> shift) == ((bound - 1) >> shift))
        key = jnp.where(newest, PINNED, jnp.minimum(key, LARGEST))
        return jnp.where((columns & (block_size - 1)) == 0, key, LOWEST)

    chosen, _ = tpu.select_rows(
        scores, visible, num_blocks, keys, None, lambda column: column >> shift, interpret, "select_candidates"
    )
    return chosen

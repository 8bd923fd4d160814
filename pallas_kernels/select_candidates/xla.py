"""The definition of `select_candidates` in plain jnp; its contract is in the package's docstring."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.select_topk.xla import best_columns, ordered

Array = jax.Array

LARGEST_FLOAT = float(np.finfo(np.float32).max)


def select_candidates(scores: Array, visible: Array, num_blocks: int, block_size: int) -> Array:
    """See the package's docstring."""
    rows, width = scores.shape
    if width == 0:
        return jnp.full((rows, num_blocks), -1, jnp.int32)
    kept = ordered(scores, jnp.arange(width) < visible[:, None])
    kept = jnp.pad(kept, ((0, 0), (0, -width % block_size)), constant_values=-jnp.inf)
    # No score may tie with the pinned block, an infinite one included.
    best = jnp.minimum(jnp.max(kept.reshape(rows, -1, block_size), axis=2), LARGEST_FLOAT)
    blocks = best.shape[1]
    newest = jnp.where(visible > 0, (visible - 1) // block_size, -1)
    best = jnp.where(jnp.arange(blocks) == newest[:, None], jnp.inf, best)
    chosen, _ = best_columns(best, num_blocks)
    return jnp.where(chosen < blocks, chosen, -1).astype(jnp.int32)

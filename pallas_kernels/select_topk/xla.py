"""The definition of `select_topk` in plain jnp; its contract is in the package's docstring."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.candidate_scores.xla import candidate_entries

Array = jax.Array


def ordered(scores: Array, seen: Array) -> Array:
    """Scores that compare as the total order asks: NaN and what is not seen become -inf, -0.0 becomes +0.0."""
    scores = scores.astype(jnp.float32)
    # A select, because the compiler deletes an addition of 0.0; by bits, because a subnormal may compare as zero.
    scores = jnp.where(lax.bitcast_convert_type(scores, jnp.int32) == -(2**31), 0.0, scores)
    return jnp.where(seen & (scores > -jnp.inf), scores, -jnp.inf)


def best_columns(scores: Array, k: int) -> tuple[Array, Array]:
    """Columns of the `k` best of `ordered` scores [N, M], ascending, padded with M; and their counts [N]."""
    width = scores.shape[1]
    # lax.top_k is stable: of equal scores the smaller column comes first.
    best, columns = lax.top_k(scores, min(k, width))
    columns = jnp.sort(jnp.where(best > -jnp.inf, columns, width), axis=1)
    columns = jnp.pad(columns, ((0, 0), (0, k - columns.shape[1])), constant_values=width)
    return columns, jnp.sum(columns < width, axis=1, dtype=jnp.int32)


def select_topk(
    scores: Array, visible: Array, k: int, *, candidates: Array | None, block_size: int | None
) -> tuple[Array, Array]:
    """See the package's docstring."""
    rows, width = scores.shape
    if candidates is None:
        entries, seen = jnp.broadcast_to(jnp.arange(width), (rows, width)), jnp.arange(width) < visible[:, None]
    else:
        assert block_size is not None
        entries, seen = candidate_entries(candidates, visible, block_size)
    if width == 0:
        return jnp.full((rows, k), -1, jnp.int32), jnp.zeros((rows,), jnp.int32)
    columns, counts = best_columns(ordered(scores, seen), k)
    picked = jnp.take_along_axis(entries, jnp.minimum(columns, width - 1), axis=1)
    return jnp.where(columns < width, picked, -1).astype(jnp.int32), counts

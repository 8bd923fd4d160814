"""Selections as masks over all entries: the same sets as the runtime's lists, by counting instead of sorting.

How many are kept is an array, so that training can start with everything and narrow without another compilation.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

Array = jax.Array


def best_mask(scores: Array, count: Array | int) -> Array:
    """The `count` best of the last axis: higher score first, then the smaller index; never -inf.

    The smallest score that is kept is found bit by bit, most significant first.

    Args:
      scores: [..., M] float32 without NaN.
      count: int32 scalar, at least 1.

    Returns:
      [..., M] bool.
    """
    bits = jax.lax.bitcast_convert_type(jnp.where(scores == 0, 0.0, scores), jnp.int32)
    ordered = jnp.where(bits < 0, bits ^ jnp.int32(0x7FFFFFFF), bits)
    ordered = jax.lax.bitcast_convert_type(ordered, jnp.uint32) ^ jnp.uint32(0x80000000)

    def narrow(step: Array, threshold: Array) -> Array:
        raised = threshold | (jnp.uint32(1) << (jnp.uint32(31) - step.astype(jnp.uint32)))
        enough = jnp.sum(ordered >= raised, axis=-1, keepdims=True, dtype=jnp.int32) >= count
        return jnp.where(enough, raised, threshold)

    threshold = jax.lax.fori_loop(0, 32, narrow, jnp.zeros((*scores.shape[:-1], 1), jnp.uint32))
    above = ordered > threshold
    tied = ordered == threshold
    left = count - jnp.sum(above, axis=-1, keepdims=True, dtype=jnp.int32)
    early = jnp.cumsum(tied, axis=-1, dtype=jnp.int32) <= left
    return (above | (tied & early)) & (scores > -jnp.inf)


def candidate_mask(scores: Array, visible: Array, blocks: Array | int, block_size: int) -> Array:
    """Entries in the `blocks` best blocks, the newest visible block always among them.

    Args:
      scores: [..., M] float32, -inf where not visible.
      visible: [...] int32.
      blocks: int32 scalar.
      block_size: entries of a block.

    Returns:
      [..., M] bool (model specification, "Two-level candidates").
    """
    entries = scores.shape[-1]
    count = -(-entries // block_size)
    padding = [(0, 0)] * (scores.ndim - 1) + [(0, count * block_size - entries)]
    padded = jnp.pad(scores, padding, constant_values=-jnp.inf)
    best = jnp.max(padded.reshape(*scores.shape[:-1], count, block_size), axis=-1)
    newest = jnp.arange(count) == ((visible - 1) // block_size)[..., None]
    best = jnp.where(newest & (visible > 0)[..., None], jnp.inf, best)
    return jnp.repeat(best_mask(best, blocks), block_size, axis=-1)[..., :entries]

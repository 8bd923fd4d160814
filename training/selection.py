"""Selections as masks over all entries: the same sets as the runtime's lists, by counting instead of sorting.

How many are kept is an array, so that training can start with everything and narrow without another compilation.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

Array = jax.Array


def best_mask(scores: Array, count: Array | int) -> Array:
    """The `count` best of the last axis: higher score first, then the smaller index; never -inf.

    The smallest score that is kept is found two bits at a time, most significant first, and among equal ones the last
    entry in the same way.

    Args:
      scores: [..., M] float32 without NaN.
      count: int32 scalar, at least 1.

    Returns:
      [..., M] bool.
    """
    bits = jax.lax.bitcast_convert_type(jnp.where(scores == 0, 0.0, scores), jnp.int32)
    ordered = jnp.where(bits < 0, bits ^ jnp.int32(0x7FFFFFFF), bits)
    ordered = jax.lax.bitcast_convert_type(ordered, jnp.uint32) ^ jnp.uint32(0x80000000)

    def enough(threshold: Array) -> Array:
        return jnp.sum(ordered >= threshold, axis=-1, keepdims=True, dtype=jnp.int32) >= count

    rows = (*scores.shape[:-1], 1)
    threshold = _largest(32, enough, jnp.zeros(rows, jnp.uint32))
    above = ordered > threshold
    tied = ordered == threshold
    left = count - jnp.sum(above, axis=-1, keepdims=True, dtype=jnp.int32)
    place = jnp.arange(scores.shape[-1], dtype=jnp.uint32)

    def fits(end: Array) -> Array:
        return jnp.sum(tied & (place < end), axis=-1, keepdims=True, dtype=jnp.int32) <= left

    early = place < _largest(scores.shape[-1].bit_length(), fits, jnp.zeros(rows, jnp.uint32))
    return (above | (tied & early)) & (scores > -jnp.inf)


def _largest(bits: int, holds: Callable[[Array], Array], zero: Array) -> Array:
    """The largest number below `2**bits`, rounded up to an even count of bits, for which `holds` is still true.

    Two bits a pass over the data: three questions are answered while it is read once.

    Args:
      bits: of the result.
      holds: true up to some number, the result, and false above it; true at zero.
      zero: uint32 zeros in the shape of the result.
    """
    digits = -(-bits // 2)

    def narrow(step: Array, value: Array) -> Array:
        shift = jnp.uint32(2) * (jnp.uint32(digits - 1) - step.astype(jnp.uint32))
        digit = sum(holds(value | (jnp.uint32(digit) << shift)).astype(jnp.uint32) for digit in (1, 2, 3))
        return value | (digit << shift)

    return jax.lax.fori_loop(0, digits, narrow, zero)


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

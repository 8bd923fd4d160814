"""int32 keys that order as float32 scores do, and the bisection between them; shared by every selection kernel."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

Array = jax.Array

LOWEST = -(2**31)
"""Key of what is never selected; every selectable score has a larger one."""
INFINITY = 0x7F800000
MINUS_INFINITY = LOWEST + 0x7FFFFF
"""Keys of the infinities; those of NaN lie outside."""
PINNED = 2**31 - 2
"""Key of a block that is kept whatever its scores; one more must still be an int32."""
LARGEST = 0x7F7FFFFF
"""Key of the largest finite float32: no score, an infinite one included, ties with a pinned block."""
VALUE_STEPS = 16
"""Bisections between float values before those between keys, which always end."""


def order_key(scores: Array, seen: Array) -> Array:
    """float32 scores to int32 keys of the same order; -0.0 equals +0.0; NaN, -inf and what is not seen are `LOWEST`.

    By bits, because a comparison may take subnormal numbers for zeros.
    """
    bits = lax.bitcast_convert_type(scores, jnp.int32)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    key = jnp.where(key == -1, 0, key)
    return jnp.where(seen & (key > MINUS_INFINITY) & (key <= INFINITY), key, LOWEST)


def _value(key: Array) -> Array:
    return lax.bitcast_convert_type(key ^ ((key >> 31) & 0x7FFFFFFF), jnp.float32)


def next_pivot(step: Array, low: Array, high: Array) -> Array:
    """A key between `low` and `high`, both excluded: half-way between their values at first, then between the keys."""
    middle_key = (low & high) + ((low ^ high) >> 1)
    middle_value = order_key(0.5 * _value(low) + 0.5 * _value(high), True)
    return jnp.clip(jnp.where(step < VALUE_STEPS, middle_value, middle_key), low + 1, high - 1)

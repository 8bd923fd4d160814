"""Reads and writes of single rows of a large array, without touching the rest of it.

XLA's CPU backend has no bfloat16 scatter: it widens the whole operand to float32 and narrows it again, a copy of the
pool in every layer. Rows of two-byte floats therefore move as 16-bit integers. On accelerators the casts are free.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

Array = jax.Array


def store_rows(array: Array, index: tuple[Array | slice, ...], rows: Array) -> Array:
    """`array.at[index].set(rows, mode="drop")`; rows are rounded to the array's dtype.

    Args:
      array: any dtype.
      index: of the leading axes; a masked destination is a positive out-of-range entry.
      rows: what to write.
    """
    rows = jnp.asarray(rows).astype(array.dtype)
    if array.dtype == jnp.bfloat16:
        return _as_bfloat16(_bits(array).at[index].set(_bits(rows), mode="drop"))
    return array.at[index].set(rows, mode="drop")


def load_rows(array: Array, index: tuple[Array | slice, ...]) -> Array:
    """`array[index]`; out-of-range entries give some row of the array."""
    if array.dtype == jnp.bfloat16:
        return _as_bfloat16(_bits(array).at[index].get(mode="clip"))
    return array.at[index].get(mode="clip")


def _bits(array: Array) -> Array:
    return lax.bitcast_convert_type(array, jnp.uint16)


def _as_bfloat16(bits: Array) -> Array:
    return lax.bitcast_convert_type(bits, jnp.bfloat16)

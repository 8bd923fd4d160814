"""Reads and writes of single rows of a large array, without touching the rest of it.

XLA's CPU backend has no bfloat16 scatter: it widens the whole operand to float32 and narrows it again, a copy of the
pool in every layer. On a CPU the pools of bfloat16 rows are therefore uint16 arrays that hold the bits, and rows are
converted here, where they enter and leave. uint8 rows are packed and pass as they are.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import backend

Array = jax.Array

LANES = 128


def whole_lanes(width: int) -> int:
    """`width` elements padded to whole vector lanes of a TPU.

    An array whose rows are that wide lies in memory row after row. Of narrower rows the compiler spreads another axis
    over the lanes to save the padding, and a kernel that fetches rows would get a copy of the array.
    """
    return -(-width // LANES) * LANES


def pad_to_lanes(array: Array) -> Array:
    """[..., row] with the last axis padded to `whole_lanes`; zeros, which no operation reads."""
    return jnp.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, whole_lanes(array.shape[-1]) - array.shape[-1])])


def store_rows(array: Array, index: tuple[Array | slice, ...], rows: Array) -> Array:
    """`array.at[index].set(rows, mode="drop")`; floating rows are rounded to what the array stores.

    Args:
      array: any dtype; uint16 stores the bits of bfloat16.
      index: of the leading axes; a masked destination is a positive out-of-range entry.
      rows: what to write.
    """
    if array.dtype == jnp.uint16 and rows.dtype != jnp.uint16:
        rows = lax.bitcast_convert_type(rows.astype(jnp.bfloat16), jnp.uint16)
    return array.at[index].set(rows.astype(array.dtype), mode="drop")


def ordered_after(index: Array, value: Array) -> Array:
    """`index` unchanged, as something the compiler must compute after `value`.

    A write at it into an array that `value` was read from then happens in place. Without the dependency XLA cannot
    tell that the reads come first and copies the whole array; an optimization barrier is gone by the time it decides.

    Args:
      index: [..] int32.
      value: any float array.
    """
    bits = lax.bitcast_convert_type(value.reshape(-1)[0].astype(jnp.float32), jnp.int32)
    # At most 32 bits are set, so this adds zero, which no simplification knows.
    return index + (lax.population_count(bits) >> 6)


def load_rows(array: Array, index: tuple[Array | slice, ...]) -> Array:
    """`array[index]`, bfloat16 where uint16 stores its bits; out-of-range entries give some row of the array."""
    # A CPU and a GPU read the bits inside the gather. A TPU would write a copy of the whole array first.
    if array.dtype == jnp.bfloat16 and backend.current_target().route != "tpu":
        bits = lax.bitcast_convert_type(array, jnp.uint16)
        return lax.bitcast_convert_type(bits.at[index].get(mode="clip"), jnp.bfloat16)
    rows = array.at[index].get(mode="clip")
    return lax.bitcast_convert_type(rows, jnp.bfloat16) if array.dtype == jnp.uint16 else rows

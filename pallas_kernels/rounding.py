"""Rounding to the activation dtype that a compiler may not remove."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

Array = jax.Array


def round_to(x: Array, dtype: DTypeLike) -> Array:
    """`x` rounded to `dtype`, ties to even, as a value every consumer sees.

    A plain cast to bfloat16 is not a rounding point: XLA drops a narrowing that is widened again in the same program
    ("excess precision"), on every backend. `reduce_precision` is kept. Every rounding point of the model
    specification goes through here.

    Args:
      x: any float dtype.
      dtype: bfloat16 or float32.
    """
    if jnp.dtype(dtype) == jnp.bfloat16 and x.dtype != jnp.bfloat16:
        x = lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
    return x.astype(dtype)

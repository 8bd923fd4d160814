"""Rotary position embedding of the trailing dimensions of a vector, in plain jnp."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.rounding import round_to

Array = jax.Array


def rotate(x: Array, cos: Array, sin: Array) -> Array:
    """Rotates adjacent pairs of the trailing `dr` dimensions (model specification, "RoPE"); by -sin it is undone.

    Args:
      x: [N, ..., K] activation dtype, K >= dr.
      cos, sin: [N, dr / 2] float32, of the position of each row.

    Returns:
      Same shape and dtype; float32 inside, one rounding.
    """
    half, width = cos.shape[-1], x.shape[-1]
    middle = (1,) * (x.ndim - 2)
    cos, sin = (part.reshape(-1, *middle, half) for part in (cos, sin))
    pairs = x[..., width - 2 * half :].astype(jnp.float32).reshape(*x.shape[:-1], half, 2)
    even, odd = pairs[..., 0], pairs[..., 1]
    rotated = jnp.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1)
    rotated = round_to(rotated.reshape(*x.shape[:-1], 2 * half), x.dtype)
    return jnp.concatenate([x[..., : width - 2 * half], rotated], axis=-1)

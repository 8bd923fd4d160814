"""RMS normalization with one rounding, at the end."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.rounding import round_to

Array = jax.Array


def rms_norm(x: Array, weight: Array, epsilon: float) -> Array:
    """Normalizes the last axis (model specification, "RMSNorm").

    Args:
      x: [..., K] activation dtype.
      weight: [K], any float dtype, multiplied in float32.
      epsilon: added to the mean square (`rms_norm_eps`, 1e-20 in the release).

    Returns:
      [..., K] in the dtype of `x`; everything before the last cast is float32.
    """
    value = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(value), axis=-1, keepdims=True) + epsilon)
    return round_to(weight.astype(jnp.float32) * (value * scale), x.dtype)

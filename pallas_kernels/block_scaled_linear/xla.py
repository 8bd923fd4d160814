"""The definition of the block-scaled linear layer in plain jnp: widen the whole weight, one product."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.arithmetic import decode_e4m3, decode_e8m0
from pallas_kernels.rounding import round_to

Array = jax.Array


def dequantize(codes: Array, scales: Array, dtype: jnp.dtype) -> Array:
    """[O, K] float8_e4m3fn or uint8 codes and [O/32, K/32] uint8 scales -> [O, K] of `dtype`, exact in bfloat16."""
    if codes.dtype != jnp.uint8:
        codes = lax.bitcast_convert_type(codes, jnp.uint8)
    outputs, inputs = codes.shape
    # Inputs stay the last axis: a TPU stores arrays whose last axis is 32 with four times the bytes.
    blocks = decode_e4m3(codes.astype(jnp.int32)).reshape(outputs // 32, 32, inputs)
    powers = decode_e8m0(jnp.repeat(scales, 32, axis=1).astype(jnp.int32))
    return (blocks * powers[:, None]).astype(dtype).reshape(outputs, inputs)


def block_scaled_linear(x: Array, codes: Array, scales: Array) -> Array:
    """See `pallas_kernels.block_scaled_linear`."""
    weight = dequantize(codes, scales, x.dtype)
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else lax.Precision.DEFAULT
    product = jnp.einsum("nk,ok->no", x, weight, precision=precision, preferred_element_type=jnp.float32)
    return round_to(product, x.dtype)

"""The definition of `grouped_linear`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.rounding import round_to

Array = jax.Array


def grouped_linear(x: Array, weight: Array) -> Array:
    """See `pallas_kernels.grouped_linear`; one layer's weight, one part."""
    if x.dtype == jnp.bfloat16 and weight.dtype == jnp.bfloat16:
        product = jnp.einsum("ngi,goi->ngo", x, weight, preferred_element_type=jnp.float32)
    else:
        product = jnp.einsum(
            "ngi,goi->ngo", x.astype(jnp.float32), weight.astype(jnp.float32), precision=lax.Precision.HIGHEST
        )
    rows, groups, outputs = product.shape
    return round_to(product, x.dtype).reshape(1, rows, groups * outputs)

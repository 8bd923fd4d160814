"""Matrix products: one function for float operands, one for the FP8 weights of the checkpoint.

Every product accumulates in float32. Whether a weight is still in its stored codes or was widened at load is a
property of its `LinearWeight`, so that a layer is written once.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.backend import slow_alone
from pallas_kernels.block_scaled_linear import block_scaled_linear
from pallas_kernels.rounding import round_to
from v41jax.precision import Precision
from v41jax.quantization import fake_q8

Array = jax.Array


class LinearWeight(NamedTuple):
    """A weight `[O, K]` of `y = x . W^T`.

    Attributes:
      values: [..., O, K]; a float dtype (widened), or E4M3 codes of the stored form.
      scales: [..., O / 32, K / 32] uint8 E8M0 codes of the stored form; None when widened.
      layer: int32 scalar, which layer of its run this is, where `values` and `scales` still hold the whole run,
        [layers, ...]; None when they hold one weight.
    """

    values: Array
    scales: Array | None = None
    layer: Array | None = None


def product(x: Array, weight: Array) -> Array:
    """`x . weight^T` in float32, exact per product.

    Args:
      x: [..., K].
      weight: [O, K].

    Returns:
      [..., O] float32. Two bfloat16 operands are multiplied as such; anything else at full float32 precision.
    """
    dimensions = (((x.ndim - 1,), (1,)), ((), ()))
    if x.dtype == jnp.bfloat16 and weight.dtype == jnp.bfloat16:
        if x.size == x.shape[-1] and slow_alone(x.dtype):
            # Behind a barrier, or the two equal rows would be simplified to one again.
            twice = lax.optimization_barrier(jnp.broadcast_to(x.reshape(1, -1), (2, x.size)))
            return product(twice, weight)[0].reshape(*x.shape[:-1], -1)
        return lax.dot_general(x, weight, dimensions, preferred_element_type=jnp.float32)
    return lax.dot_general(
        x.astype(jnp.float32),
        weight.astype(jnp.float32),
        dimensions,
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )


def quantize_input(x: Array, precision: Precision) -> Array:
    """Fake Q8 of a linear's input, [..., K]; the identity when activation quantization is off.

    Apart from `linear` because several linears share one quantized input (model specification, "Where each
    quantizer is applied in the forward").
    """
    return fake_q8(x) if precision.activation_quantization else x


def linear(x: Array, weight: LinearWeight, kernels: str) -> Array:
    """An FP8 linear of an input that `quantize_input` has seen (model specification, "Quantized GEMM").

    Args:
      x: [N, K] activation dtype.
      weight: [O, K].
      kernels: implementation of the operation on stored codes.

    Returns:
      [N, O] in the dtype of `x`.
    """
    if weight.scales is None:
        return round_to(product(x, weight.values), x.dtype)
    return block_scaled_linear(x, weight.values, weight.scales, layer=weight.layer, implementation=kernels)

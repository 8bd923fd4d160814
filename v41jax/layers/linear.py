"""Matrix products: one function for float operands, one for the FP8 weights of the checkpoint.

Every product accumulates in float32. Whether a weight is still in its stored codes or was widened at load is a
property of its `LinearWeight`, so that a layer is written once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.backend import slow_alone
from pallas_kernels.block_scaled_linear import block_scaled_linear, block_scaled_parts
from pallas_kernels.quantized_rows import QuantizedRows
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


def linear(x: Array | QuantizedRows, weight: LinearWeight, kernels: str) -> Array:
    """An FP8 linear (model specification, "Quantized GEMM").

    Args:
      x: [N, K], an input that `quantize_input` has seen, or rows with it.
      weight: [O, K].
      kernels: implementation of the operation on stored codes.

    Returns:
      [N, O] in the dtype of `x`.
    """
    rows, lanes = (x.quantized, x.lanes) if isinstance(x, QuantizedRows) else (x, None)
    if weight.scales is None:
        return round_to(product(rows, weight.values), rows.dtype)
    return block_scaled_linear(
        rows, weight.values, weight.scales, layer=weight.layer, lanes=lanes, implementation=kernels
    )


def linear_parts(x: QuantizedRows, weights: Sequence[LinearWeight], kernels: str) -> tuple[Array, ...]:
    """`linear` with weights of one shape and run, as parts [P, N, O] for a consumer that adds them up and rounds
    (`block_scaled_parts`)."""
    if any(weight.scales is None for weight in weights):
        return tuple(linear(x, weight, kernels)[None] for weight in weights)
    stored = [(weight.values, weight.scales) for weight in weights if weight.scales is not None]
    return block_scaled_parts(x.quantized, stored, layer=weights[0].layer, lanes=x.lanes, implementation=kernels)

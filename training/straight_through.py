"""The model's rounding points with gradients: every codec is the serving one, its derivative is the identity.

Matrix products are here too, because their backward pass must not widen bfloat16 operands.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_kernels.rounding import round_to
from v41jax.quantization import (
    BLOCK,
    E4M3_MAX,
    decode_e8m0,
    dequantize_dense,
    encode_e4m3,
    fake_q4m,
    fake_q4n,
    fake_q8,
    power_of_two_ceiling_code,
    quantize_q4m,
    quantize_q8,
)

Array = jax.Array

_SMALLEST_PEAK = 2.0**-60
"""Largest magnitude that a block of weights is taken to have at least, so that scales stay ordinary numbers."""


def straight_through(function: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """`function`, which keeps shape and dtype, with the derivative of the identity."""

    @jax.custom_jvp
    def wrapped(x: Array) -> Array:
        return function(x)

    @wrapped.defjvp
    def _(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
        return wrapped(*primals), tangents[0]

    return wrapped


def quantize_dense(weight: Array) -> tuple[Array, Array]:
    """A dense weight as stored: [O, K] to E4M3 codes uint8 [O, K] and E8M0 scales [O / 32, K / 32].

    Source: model specification, "Scale naming and block rules".
    """
    rows, columns = weight.shape
    blocks = weight.astype(jnp.float32).reshape(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
    peak = jnp.maximum(jnp.max(jnp.abs(blocks), axis=(1, 3)), _SMALLEST_PEAK)
    scales = power_of_two_ceiling_code(peak * jnp.float32(1 / E4M3_MAX))
    codes = encode_e4m3(blocks / decode_e8m0(scales)[:, None, :, None])
    return codes.reshape(rows, columns), scales


def quantize_expert(weight: Array) -> tuple[Array, Array]:
    """Routed expert weights [.., O, K] to E2M1 codes [.., O, K] (unpacked) and E8M0 scales [.., O, K / 32]."""
    return quantize_q4m(weight)


def quantize_table(rows: Array) -> tuple[Array, Array]:
    """Engram rows [.., n] to E4M3 codes and E8M0 scales [.., n / 32]."""
    return quantize_q8(rows)


fake_dense = straight_through(lambda weight: dequantize_dense(*quantize_dense(weight)))
fake_expert = straight_through(fake_q4m)
fake_table = straight_through(fake_q8)
q8 = straight_through(fake_q8)
q4m = straight_through(fake_q4m)
q4n = straight_through(fake_q4n)
as_bfloat16 = straight_through(lambda x: round_to(x, jnp.bfloat16).astype(x.dtype))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def contract(equation: str, left: Array, right: Array) -> Array:
    """`einsum` of two operands with float32 accumulation and result.

    bfloat16 operands are multiplied as such, in the backward pass too, where the cotangent is rounded to bfloat16;
    float32 ones at full precision. Every index of an operand must occur in the other one or in the result.
    """
    if jax.default_backend() == "cpu":  # which has no batched bfloat16 product; widening is exact
        left, right = left.astype(jnp.float32), right.astype(jnp.float32)
    precision = None if left.dtype == right.dtype == jnp.bfloat16 else jax.lax.Precision.HIGHEST
    return jnp.einsum(equation, left, right, precision=precision, preferred_element_type=jnp.float32)


def _contract_forward(equation: str, left: Array, right: Array) -> tuple[Array, tuple[Array, Array]]:
    return contract(equation, left, right), (left, right)


def _contract_backward(equation: str, operands: tuple[Array, Array], cotangent: Array) -> tuple[Array, Array]:
    left, right = operands
    inputs, result = equation.split("->")
    of_left, of_right = inputs.split(",")
    cotangent = cotangent.astype(jnp.promote_types(left.dtype, right.dtype))
    to_left = contract(f"{result},{of_right}->{of_left}", cotangent, right)
    to_right = contract(f"{result},{of_left}->{of_right}", cotangent, left)
    return to_left.astype(left.dtype), to_right.astype(right.dtype)


contract.defvjp(_contract_forward, _contract_backward)


def linear(x: Array, weight: Array) -> Array:
    """`x . weight^T` rounded to the dtype of `x`: [N, K], [O, K] -> [N, O]."""
    return round_to(contract("nk,ok->no", x, weight), x.dtype)

"""Stored E4M3 weights with block scales to bfloat16 inside Triton kernels.

Widening decides the speed of a product over few rows: at the rate of the memory a GPU has about 7 instruction slots
for an FP8 element, half of that for integer ones. On CUDA it is a few packed instructions; elsewhere, and in interpret
mode, the same values come from plain operations. The order of inner dims is free as long as both operands of a product
agree on it, and is chosen here so that nothing is shuffled: the other operand goes through `fp8_operand` once, in XLA.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import backend
from pallas_kernels.arithmetic import decode_e8m0

Array = jax.Array

LANE_GROUP = 64
"""Stored bytes of one output that four lanes of a tensor core hold, 16 bytes each: the unit of the inner order."""

E4M3_CUDA = """{
.reg .b16 low, high, a, b, c, d;
.reg .b32 first, second;
.reg .f32 e, f, g, h;
mov.b32 {low, high}, $2;
cvt.rn.f16x2.e4m3x2 first, low;
cvt.rn.f16x2.e4m3x2 second, high;
mov.b32 {a, b}, first;
mov.b32 {c, d}, second;
cvt.f32.f16 e, a;
cvt.f32.f16 f, b;
cvt.f32.f16 g, c;
cvt.f32.f16 h, d;
cvt.rn.bf16x2.f32 first, f, e;
cvt.rn.bf16x2.f32 second, h, g;
mul.rn.bf16x2 $0, first, $3;
mul.rn.bf16x2 $1, second, $4;
}"""
"""PTX: four E4M3 codes $2 and their scales $3, $4 (bfloat16 pairs) -> values $0, $1. By way of float32, because a
direct conversion of float16 to bfloat16 runs at a quarter of the rate."""


def packed_instructions() -> bool:
    """Whether kernels traced now may use CUDA's packed instructions."""
    target = backend.current_target()
    return target.generation == "cuda" and not target.interpret


def _lane_order(values: Array) -> Array:
    """[a, b] in the order of stored bytes -> [a, b] in the order in which tensor cores take inner dims.

    For every 16 inner dims a lane holds two pairs, 8 apart. Of each `LANE_GROUP` bytes, lane t of four gets bytes
    16 t to 16 t + 15 and uses them for four such steps, so that it reads them at once.
    """
    rows, count = values.shape
    groups = values.reshape(rows, count // LANE_GROUP, 4, 4, 2, 2)
    return groups.transpose(0, 1, 3, 4, 2, 5).reshape(rows, count)


def place_in_lanes(column: Array) -> Array:
    """int32 places in the order of stored bytes -> their places in the order of `_lane_order`."""
    lane, step, half, parity = (column >> 4) & 3, (column >> 2) & 3, (column >> 1) & 1, column & 1
    return (column & ~(LANE_GROUP - 1)) | (step << 4) | (half << 3) | (lane << 1) | parity


def _pad(x: Array, count: int) -> Array:
    return jnp.pad(x, ((0, 0), (0, count - x.shape[1]))) if count > x.shape[1] else x


def fp8_operand(x: Array, count: int) -> Array:
    """x [N, K] -> [N, count] in the order of `widen_e4m3`, zero past K; count is a multiple of `LANE_GROUP`."""
    return _lane_order(_pad(x, count))


def power_bfloat16(scales: Array) -> Array:
    """uint8 E8M0 -> bfloat16 powers of two of the same shape; 0 is the subnormal 2^-127, 255 is NaN."""
    code = scales.astype(jnp.uint16)
    bits = jnp.where(code == 0, jnp.uint16(0x0040), code << 7)
    return lax.bitcast_convert_type(jnp.where(code == 255, jnp.uint16(0x7FC0), bits), jnp.bfloat16)


def e4m3_values(codes: Array, scales: Array, cuda: bool) -> Array:
    """Values [a, b] bfloat16 in the order of the codes, exact.

    codes: [a, b] uint8; scales: [a, b / 32] uint8 E8M0.
    """
    rows, count = codes.shape
    groups = scales.shape[1]
    if not cuda:
        values = lax.bitcast_convert_type(codes, jnp.float8_e4m3fn).astype(jnp.float32)
        powers = decode_e8m0(scales.astype(jnp.int32))[:, :, None]
        widened = (values.reshape(rows, groups, count // groups) * powers).reshape(rows, count)
        return widened.astype(jnp.bfloat16)
    spread = jnp.broadcast_to(power_bfloat16(scales)[:, :, None], (rows, groups, count // groups))
    [values] = backend.triton().elementwise_inline_asm(
        E4M3_CUDA,
        args=[codes, spread.reshape(rows, count)],
        constraints="=r,=r,r,r,r",
        pack=4,
        result_shape_dtypes=[jax.ShapeDtypeStruct((rows, count), jnp.bfloat16)],
    )
    return values


def widen_e4m3(codes: Array, scales: Array, cuda: bool) -> Array:
    """`e4m3_values` in the order of `fp8_operand`; b is a multiple of `LANE_GROUP`."""
    return _lane_order(e4m3_values(codes, scales, cuda))

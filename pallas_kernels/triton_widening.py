"""Stored weights to bfloat16 inside Triton kernels: E4M3 with block scales, packed E2M1 with group scales.

Widening decides the speed of a product over few rows: at the rate of the memory a GPU has about 3.5 instruction slots
for an FP4 element and 7 for an FP8 element, half of that for integer operations. On CUDA both are a few packed
instructions; elsewhere, and in interpret mode, the same values come from plain operations. The order of inner dims is
free as long as both operands of a product agree on it, and is chosen here so that nothing is shuffled: the other
operand goes through `fp4_operand` or `fp8_operand` once, in XLA.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import backend
from pallas_kernels.arithmetic import decode_e8m0, scaled_e2m1

Array = jax.Array

LANE_GROUP = 64
"""Stored bytes of one output that four lanes of a tensor core hold, 16 bytes each: the unit of the inner order."""

UNIT_EXPONENT = 32
"""FP4 weights are widened to their value times 2^-32, and `fp4_operand` multiplies the other operand by 2^32.

A code moved to the place of a bfloat16 exponent is its value times 2^-126, and no bfloat16 scale takes all of that
back. Scale codes 34 to 160 (2^-93 to 2^33) and operands below 2^95 are exact; larger codes give NaN.
"""

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


def e2m1_cuda(high: bool) -> str:
    """PTX: four bytes $2 and their scales $3, $4 (bfloat16 pairs) -> values $0, $1 of one nibble of each byte.

    Bytes 0 and 2 of the word become the first pair and bytes 1 and 3 the second: no instruction spreads them.

    Args:
      high: the high nibbles instead of the low ones.
    """
    lines = ["{", ".reg .b32 part, sign;"]
    for result, scale, left in (("$0", "$3", 6 - 4 * high), ("$1", "$4", -2 - 4 * high)):
        for register, shift in (("part", left), ("sign", left + 6)):
            by = f"shl.b32 {register}, $2, {shift};" if shift > 0 else f"shr.b32 {register}, $2, {-shift};"
            lines.append(by if shift else f"mov.b32 {register}, $2;")
        lines += [
            "and.b32 part, part, 0x01C001C0;",
            "lop3.b32 part, sign, 0x80008000, part, 0xEA;",
            f"mul.rn.bf16x2 {result}, part, {scale};",
        ]
    return "\n".join([*lines, "}"])


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


def _pad(x: Array, count: int) -> Array:
    return jnp.pad(x, ((0, 0), (0, count - x.shape[1]))) if count > x.shape[1] else x


def fp8_operand(x: Array, count: int) -> Array:
    """x [N, K] -> [N, count] in the order of `widen_e4m3`, zero past K; count is a multiple of `LANE_GROUP`."""
    return _lane_order(_pad(x, count))


def fp4_operand(x: Array, count: int) -> Array:
    """x [N, K] bfloat16 -> [N, 2 count] in the order of `widen_e2m1`, times 2^32, zero past K.

    The operand of the low nibbles (even dims) comes first, then that of the high ones.

    Args:
      count: packed bytes of an output, padded to a multiple of `LANE_GROUP`; at least K / 2.
    """
    rows = x.shape[0]
    # Byte 2 c + b of a word is member 2 b + c of the widened four.
    groups = _pad(x, 2 * count).reshape(rows, count // LANE_GROUP, 4, 4, 2, 2, 2)
    ordered = groups.transpose(0, 6, 1, 3, 5, 2, 4).reshape(rows, 2 * count)
    return ordered * jnp.asarray(2.0**UNIT_EXPONENT, x.dtype)


def fp4_place(dim: Array, count: int) -> Array:
    """Where inner dim `dim` (int32) lies in the result of `fp4_operand`."""
    byte = lax.div(dim, 2)
    group, inside = lax.div(byte, LANE_GROUP), lax.rem(byte, LANE_GROUP)
    lane, word = lax.div(inside, 16), lax.rem(lax.div(inside, 4), 4)
    pair, member = lax.rem(inside, 2), lax.rem(lax.div(inside, 2), 2)
    return lax.rem(dim, 2) * count + group * LANE_GROUP + word * 16 + pair * 8 + lane * 2 + member


def widen_e2m1(packed: Array, scales: Array, cuda: bool) -> tuple[Array, Array]:
    """Values of the low and of the high nibbles times 2^-32, both [a, b] bfloat16, in the order of `fp4_operand`.

    packed: [a, b] uint8, b a multiple of `LANE_GROUP`; scales: [a, b / 16] uint8 E8M0, one per 16 bytes.
    """
    rows, count = packed.shape
    groups = scales.shape[1]
    if not cuda:
        powers = (decode_e8m0(scales.astype(jnp.int32)) * 2.0 ** (14 - UNIT_EXPONENT))[:, :, None]
        wide = packed.astype(jnp.uint16)

        def widen(codes: Array) -> Array:
            grouped = scaled_e2m1(codes).reshape(rows, groups, count // groups) * powers
            words = grouped.reshape(rows, count // 4, 2, 2).transpose(0, 1, 3, 2)
            return _lane_order(words.reshape(rows, count).astype(jnp.bfloat16))

        return widen(wide), widen(wide >> 4)
    spread = jnp.broadcast_to(fp4_scale(scales)[:, :, None], (rows, groups, count // groups)).reshape(rows, count)
    result = jax.ShapeDtypeStruct((rows, count), jnp.bfloat16)

    def widen_packed(high: bool) -> Array:
        [values] = backend.triton().elementwise_inline_asm(
            e2m1_cuda(high), args=[packed, spread], constraints="=r,=r,r,r,r", pack=4, result_shape_dtypes=[result]
        )
        return _lane_order(values)

    return widen_packed(False), widen_packed(True)


def fp4_scale(scales: Array) -> Array:
    """uint8 E8M0 -> what `e2m1_cuda` multiplies by, bfloat16: the power of two times 2^94; not finite past code 160."""
    bits = (scales.astype(jnp.uint16) << 7) + jnp.uint16((126 - UNIT_EXPONENT) << 7)
    return lax.bitcast_convert_type(jnp.minimum(bits, jnp.uint16(0x7FC0)), jnp.bfloat16)


def power_bfloat16(scales: Array) -> Array:
    """uint8 E8M0 -> bfloat16 powers of two of the same shape; 0 is the subnormal 2^-127, 255 is NaN."""
    code = scales.astype(jnp.uint16)
    bits = jnp.where(code == 0, jnp.uint16(0x0040), code << 7)
    return lax.bitcast_convert_type(jnp.where(code == 255, jnp.uint16(0x7FC0), bits), jnp.bfloat16)


def widen_e4m3(codes: Array, scales: Array, cuda: bool) -> Array:
    """Values [a, b] bfloat16 in the order of `fp8_operand`, exact.

    codes: [a, b] uint8, b a multiple of `LANE_GROUP`; scales: [a, b / 32] uint8 E8M0.
    """
    rows, count = codes.shape
    groups = scales.shape[1]
    if not cuda:
        values = lax.bitcast_convert_type(codes, jnp.float8_e4m3fn).astype(jnp.float32)
        powers = decode_e8m0(scales.astype(jnp.int32))[:, :, None]
        widened = (values.reshape(rows, groups, count // groups) * powers).reshape(rows, count)
        return _lane_order(widened.astype(jnp.bfloat16))
    spread = jnp.broadcast_to(power_bfloat16(scales)[:, :, None], (rows, groups, count // groups))
    [values] = backend.triton().elementwise_inline_asm(
        E4M3_CUDA,
        args=[codes, spread.reshape(rows, count)],
        constraints="=r,=r,r,r,r",
        pack=4,
        result_shape_dtypes=[jax.ShapeDtypeStruct((rows, count), jnp.bfloat16)],
    )
    return _lane_order(values)

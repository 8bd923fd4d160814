"""Packed E2M1 weights with group scales to bfloat16 inside Triton kernels.

Widening decides the speed of a product over few rows: a GPU has about seven instruction slots per FP4 element before
arithmetic costs more than the bytes. On CUDA eight elements take a handful of packed instructions; elsewhere, and in
interpret mode, the same values come from plain operations.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels import backend
from pallas_kernels.arithmetic import decode_e8m0, scaled_e2m1
from pallas_kernels.triton_widening import power_bfloat16

Array = jax.Array


def e2m1_cuda(shift: int) -> str:
    """PTX: four bytes $2 and their scales $3, $4 (bfloat16 pairs) -> values $0, $1 of one nibble of each byte.

    Bytes are spread to halfwords. A code whose exponent and mantissa bits are moved to those of a bfloat16 is its value
    times 2^-126, the subnormal code included, which `unit` takes back before the scale is applied.

    Args:
      shift: how far left the nibble's three low bits go: 6 for the low nibble, 2 for the high one.
    """
    lines = ["{", ".reg .b32 pair, part, sign, unit;", "mov.b32 unit, 0x7E807E80;"]
    for result, scale, spread in (("$0", "$3", "0x4140"), ("$1", "$4", "0x4342")):
        lines += [
            f"prmt.b32 pair, $2, 0, {spread};",
            f"shl.b32 part, pair, {shift};",
            f"shl.b32 sign, pair, {shift + 6};",
            "and.b32 part, part, 0x01C001C0;",
            "lop3.b32 part, sign, 0x80008000, part, 0xEA;",
            "mul.rn.bf16x2 part, part, unit;",
            f"mul.rn.bf16x2 {result}, part, {scale};",
        ]
    return "\n".join([*lines, "}"])


def widen_e2m1(packed: Array, scales: Array, cuda: bool) -> tuple[Array, Array]:
    """Values of the low and of the high nibbles, both [a, b] bfloat16, exact.

    packed: [a, b] uint8; scales: [a, b / 16] uint8 E8M0, one per 16 bytes.
    """
    rows, count = packed.shape
    groups = scales.shape[1]
    if not cuda:
        powers = (decode_e8m0(scales.astype(jnp.int32)) * 2.0**14)[:, :, None]
        wide = packed.astype(jnp.uint16)

        def widen(codes: Array) -> Array:
            grouped = scaled_e2m1(codes).reshape(rows, groups, count // groups) * powers
            return grouped.reshape(rows, count).astype(jnp.bfloat16)

        return widen(wide), widen(wide >> 4)
    spread = jnp.broadcast_to(power_bfloat16(scales)[:, :, None], (rows, groups, count // groups))
    result = jax.ShapeDtypeStruct((rows, count), jnp.bfloat16)
    spread = spread.reshape(rows, count)

    def widen_packed(shift: int) -> Array:
        [values] = backend.triton().elementwise_inline_asm(
            e2m1_cuda(shift), args=[packed, spread], constraints="=r,=r,r,r,r", pack=4, result_shape_dtypes=[result]
        )
        return values

    return widen_packed(6), widen_packed(2)

"""Packed E2M1 weights with group scales to bfloat16 inside Triton kernels.

Widening decides the speed of a product over few rows: a GPU has about four instruction slots per FP4 element before
arithmetic costs more than the bytes. Weights are read as 16-bit words of four codes, two words a register: on CUDA one
code of both becomes a bfloat16 pair in a handful of instructions and nothing is shuffled; elsewhere, and in interpret
mode, the same values come from plain operations. Code `p` of the words are the inner dims 4 i + p, so the other operand
goes through `by_code` once, in XLA.

On CUDA a weight is its value times 2^-60 and the other operand is made 2^60 times as large (`OPERAND_POWER`): a code's
bits are a bfloat16 times 2^-126, and one multiplication then both normalizes it and applies the scale. Exact for scales
from 2^-72 to 2^61 and operands below 2^68; a larger scale gives infinities and NaN.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import backend
from pallas_kernels.arithmetic import by_residue, decode_e8m0, in_words, scaled_e2m1

Array = jax.Array

CODES = 4
"""Codes of a word."""
GROUP_WORDS = 32 // CODES
"""Words that share a scale."""
OPERAND_POWER = 60
"""Of two, by which the other operand of a product is multiplied where weights are widened by CUDA's instructions."""


def words_of(packed: Array) -> Array:
    """uint8 [..., K / 2] -> uint16 [..., K / 4]. The bytes stay where they are.

    Words and not bytes also because the lowering's offsets are 32 bits of elements up to 4 GiB: those into a run's
    stack of more than 2 GiB would be negative.
    """
    return in_words(packed, jnp.uint16)


def by_code(x: Array) -> Array:
    """Reorders the last axis so that the dims 4 i + p of a `p` lie together, p ascending."""
    return by_residue(x, CODES)


def e2m1_cuda(code: int) -> str:
    """PTX: two words $1 and their factors $2 (a bfloat16 pair) -> values $0 of code `code` of each, a bfloat16 pair.

    A code whose exponent and mantissa bits are moved to those of a bfloat16 is its value times 2^-126, the subnormal
    code included; see `factors`.
    """

    def moved(target: str, by: int) -> str:
        if by == 0:
            return f"mov.b32 {target}, $1;"
        return f"{'shl' if by > 0 else 'shr'}.b32 {target}, $1, {abs(by)};"

    lines = [
        "{",
        ".reg .b32 part, sign;",
        moved("part", 6 - 4 * code),
        moved("sign", 12 - 4 * code),
        "and.b32 part, part, 0x01C001C0;",
        "lop3.b32 part, sign, 0x80008000, part, 0xEA;",
        "mul.rn.bf16x2 $0, part, $2;",
        "}",
    ]
    return "\n".join(lines)


def factors(scales: Array) -> Array:
    """uint8 E8M0 -> bfloat16 scales times 2^(126 - `OPERAND_POWER`); NaN past the largest, which 255 is."""
    # The bits of an infinity and everything past them: one bound serves both.
    bits = jnp.minimum((scales.astype(jnp.int32) << 7) + ((126 - OPERAND_POWER) << 7), 0x7FC0)
    return lax.bitcast_convert_type(bits.astype(jnp.uint16), jnp.bfloat16)


def widen_e2m1(words: Array, scales: Array, cuda: bool) -> list[Array]:
    """Values [a, b] bfloat16, exact, one array for each code of a word; on CUDA times 2^-`OPERAND_POWER`.

    words: [a, b] uint16; scales: [a, b / GROUP_WORDS] uint8 E8M0.
    """
    rows, count = words.shape
    groups = scales.shape[1]
    grouped = (rows, groups, count // groups)
    if not cuda:
        powers = (decode_e8m0(scales.astype(jnp.int32)) * 2.0**14)[:, :, None]

        def widen(codes: Array) -> Array:
            return (scaled_e2m1(codes).reshape(grouped) * powers).reshape(rows, count).astype(jnp.bfloat16)

        return [widen(words >> (4 * code)) for code in range(CODES)]
    spread = jnp.broadcast_to(factors(scales)[:, :, None], grouped).reshape(rows, count)
    parts = []
    for code in range(CODES):
        [values] = backend.triton().elementwise_inline_asm(
            e2m1_cuda(code),
            args=[words, spread],
            constraints="=r,r,r",
            pack=2,
            result_shape_dtypes=[jax.ShapeDtypeStruct((rows, count), jnp.bfloat16)],
        )
        parts.append(values)
    return parts

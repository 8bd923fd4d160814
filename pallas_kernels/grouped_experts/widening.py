"""Packed E2M1 weights with group scales to bfloat16 inside Triton kernels.

Widening decides the speed of a product over few rows: a GPU has about four instruction slots per FP4 element before
arithmetic costs more than the bytes. Weights are read as 16-bit words of four codes, two words a register: on CUDA one
code of both becomes a bfloat16 pair in a handful of instructions and nothing is shuffled; elsewhere, and in interpret
mode, the same values come from plain operations. Code `p` of the words are the inner dims 4 i + p, so the other operand
goes through `by_code` once, in XLA.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels import backend
from pallas_kernels.arithmetic import by_residue, decode_e8m0, in_words, scaled_e2m1
from pallas_kernels.triton_widening import power_bfloat16

Array = jax.Array

CODES = 4
"""Codes of a word."""
GROUP_WORDS = 32 // CODES
"""Words that share a scale."""


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
    """PTX: two words $1 and their scales $2 (a bfloat16 pair) -> values $0 of code `code` of each, a bfloat16 pair.

    A code whose exponent and mantissa bits are moved to those of a bfloat16 is its value times 2^-126, the subnormal
    code included, which `unit` takes back before the scale is applied.
    """

    def moved(target: str, by: int) -> str:
        if by == 0:
            return f"mov.b32 {target}, $1;"
        return f"{'shl' if by > 0 else 'shr'}.b32 {target}, $1, {abs(by)};"

    lines = [
        "{",
        ".reg .b32 part, sign, unit;",
        "mov.b32 unit, 0x7E807E80;",
        moved("part", 6 - 4 * code),
        moved("sign", 12 - 4 * code),
        "and.b32 part, part, 0x01C001C0;",
        "lop3.b32 part, sign, 0x80008000, part, 0xEA;",
        "mul.rn.bf16x2 part, part, unit;",
        "mul.rn.bf16x2 $0, part, $2;",
        "}",
    ]
    return "\n".join(lines)


def widen_e2m1(words: Array, scales: Array, cuda: bool) -> list[Array]:
    """Values [a, b] bfloat16, exact, one array for each code of a word.

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
    spread = jnp.broadcast_to(power_bfloat16(scales)[:, :, None], grouped).reshape(rows, count)
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

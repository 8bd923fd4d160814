"""Packed E2M1 weights with group scales to bfloat16 inside Triton kernels.

Widening decides the speed of a product over few rows: a GPU has about four instruction slots per FP4 element before
arithmetic costs more than the bytes. Weights are read as 16-bit words of four codes, two words a register: on CUDA one
code of both becomes a bfloat16 pair in a handful of instructions and nothing is shuffled; elsewhere, and in interpret
mode, the same values come from plain operations. Code `p` of the words are the inner dims 4 i + p, so the other operand
goes through `arrangement.by_code` once, in XLA.

On CUDA a weight is its value times 2^-60 and the other operand is made 2^60 times as large (`OPERAND_POWER`): a code's
bits are a bfloat16 times 2^-126, and one multiplication then both normalizes it and applies the scale. Exact for scales
from 2^-72 to 2^61 and operands below 2^68; a larger scale gives infinities and NaN.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import backend
from pallas_kernels.arithmetic import decode_e8m0, scaled_e2m1
from pallas_kernels.grouped_experts.arrangement import BLOCK_GROUPS, BLOCK_WORDS, FIELDS, GROUP_WORDS
from pallas_kernels.grouped_experts.types import Order

Array = jax.Array

OPERAND_POWER = 60
"""Of two, by which the other operand of a product is multiplied where weights are widened by CUDA's instructions."""


def groups_of_step(words: int, order: Order) -> int:
    """Scales that `widen_e2m1` needs for `words` words; half a block of arranged ones has words of all its groups."""
    return words // GROUP_WORDS if order == "released" else max(BLOCK_GROUPS, words // GROUP_WORDS)


def first_group(word: Array, order: Order) -> Array:
    """The first of these scales for a step that begins at `word`."""
    return lax.div(word, GROUP_WORDS) if order == "released" else lax.div(word, BLOCK_WORDS) * BLOCK_GROUPS


def e2m1_cuda(low: int, sign: int) -> str:
    """PTX: two words $1 and their factors $2 (a bfloat16 pair) -> values $0 of one code of each, a bfloat16 pair.

    A code whose exponent and mantissa bits are moved to those of a bfloat16 is its value times 2^-126, the subnormal
    code included; see `factors`. Shifts also move bits from one word to the other, which the masks remove.

    low, sign: where the code's bits lie, see `arrangement.FIELDS`.
    """

    def moved(target: str, by: int) -> str:
        if by == 0:
            return f"mov.b32 {target}, $1;"
        return f"{'shl' if by > 0 else 'shr'}.b32 {target}, $1, {abs(by)};"

    to_place, to_sign = 6 - low, 15 - sign
    if to_place == to_sign:
        bits = ["and.b32 part, part, 0x81C081C0;"]
    else:
        bits = [
            moved("sign", to_sign),
            "and.b32 part, part, 0x01C001C0;",
            "lop3.b32 part, sign, 0x80008000, part, 0xEA;",
        ]
    return "\n".join(["{", ".reg .b32 part, sign;", moved("part", to_place), *bits, "mul.rn.bf16x2 $0, part, $2;", "}"])


def factors(scales: Array) -> Array:
    """uint8 E8M0 -> bfloat16 scales times 2^(126 - `OPERAND_POWER`); NaN past the largest, which 255 is."""
    # The bits of an infinity and everything past them: one bound serves both.
    bits = jnp.minimum((scales.astype(jnp.int32) << 7) + ((126 - OPERAND_POWER) << 7), 0x7FC0)
    return lax.bitcast_convert_type(bits.astype(jnp.uint16), jnp.bfloat16)


def widen_e2m1(words: Array, scales: Array, order: Order, cuda: bool) -> list[Array]:
    """Values [a, b] bfloat16, exact, one array for each code of a word; on CUDA times 2^-`OPERAND_POWER`.

    words: [a, b] uint16, whole groups, or arranged half a block or whole blocks; scales: [a, `groups_of_step`] uint8
    E8M0.
    """
    if not cuda:
        powers = _spread(decode_e8m0(scales.astype(jnp.int32)) * 2.0**14, words.shape, order)
        return [(scaled_e2m1(words, *field) * powers).astype(jnp.bfloat16) for field in FIELDS[order]]
    spread = _spread(factors(scales), words.shape, order)
    parts = []
    for field in FIELDS[order]:
        [values] = backend.triton().elementwise_inline_asm(
            e2m1_cuda(*field),
            args=[words, spread],
            constraints="=r,r,r",
            pack=2,
            result_shape_dtypes=[jax.ShapeDtypeStruct(words.shape, jnp.bfloat16)],
        )
        parts.append(values)
    return parts


def _spread(scales: Array, shape: tuple[int, ...], order: Order) -> Array:
    """Scales [a, groups] -> [a, b], those of every word."""
    rows, count = shape
    groups = scales.shape[1]
    if order == "released":
        return jnp.broadcast_to(scales[:, :, None], (rows, groups, count // groups)).reshape(shape)
    blocks = groups // BLOCK_GROUPS
    pairs = (rows, blocks, count // blocks // (2 * BLOCK_GROUPS), BLOCK_GROUPS, 2)
    return jnp.broadcast_to(scales.reshape(rows, blocks, 1, BLOCK_GROUPS, 1), pairs).reshape(shape)

"""Packed rows to bfloat16 inside the decode kernel of NVIDIA GPUs, in four pieces: piece p holds the dims 4 i + p.

Stored bytes are read as words that hold four neighbouring dims, 16 bits of a main row or 32 of a window row, so that a
register pairs the same dim of two words and nothing is shuffled. A value is made 2^-`ROW_POWER` times as large: a code
moved to the place of bfloat16's exponent and mantissa is its value times a power of two, and the multiplication that
takes this power away can then also apply the scale without leaving bfloat16's range. Exact for every E4M3 scale, and
for every E8M0 scale whose products are no smaller than bfloat16's smallest number. Outside CUDA the same values come
from plain operations. Pieces are made one by one, so that a kernel can lay each down before the next takes registers.
"""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp

from pallas_kernels import backend
from pallas_kernels.arithmetic import decode_e8m0, scaled_e2m1, scaled_e4m3
from pallas_kernels.grouped_experts.widening import e2m1_cuda
from pallas_kernels.triton_widening import power_bfloat16

Array = jax.Array

PIECES = 4
"""Dims of a word."""
ROW_POWER = 16
"""Of two, by which widened rows are smaller than their values."""


def e4m3_cuda(byte: int) -> str:
    """PTX: two words $1, $2 and their factors $3 (a bfloat16 pair) -> values $0 of byte `byte` of each, a pair.

    The bytes go to the upper halves of a pair, then exponent and mantissa to their places: the value times 2^-120.
    """
    selector = (0x4000, 0x5010, 0x6020, 0x7030)[byte]
    power = ((127 + 120 - ROW_POWER) << 7) * 0x10001
    lines = [
        "{",
        ".reg .b32 pair, part, power;",
        f"prmt.b32 pair, $1, $2, {selector:#x};",
        "shr.b32 part, pair, 4;",
        "and.b32 part, part, 0x07F007F0;",
        "lop3.b32 part, pair, 0x80008000, part, 0xEA;",
        f"mov.b32 power, {power:#x};",
        "mul.rn.bf16x2 part, part, power;",
        "mul.rn.bf16x2 $0, part, $3;",
        "}",
    ]
    return "\n".join(lines)


def _spread(groups: Array, words: int) -> Array:
    """[keys, g] -> [keys, words], each member for as many neighbouring words."""
    keys, count = groups.shape
    return jnp.broadcast_to(groups[:, :, None], (keys, count, words // count)).reshape(keys, words)


def _piece(text: str, constraints: str, words: Array, factors: Array) -> Array:
    [values] = backend.triton().elementwise_inline_asm(
        text,
        args=[words, factors],
        constraints=constraints,
        pack=2,
        result_shape_dtypes=[jax.ShapeDtypeStruct(words.shape, jnp.bfloat16)],
    )
    return values


def main_factors(scales: Array) -> Array:
    """uint16 E4M3 codes -> bfloat16, what the moved bits of an E2M1 code are multiplied by."""
    return (scaled_e4m3(scales) * 2.0 ** (8 + 126 - ROW_POWER)).astype(jnp.bfloat16)


def main_pieces(words: Array, scales: Array, cuda: bool) -> Iterator[Array]:
    """FP4 rows: words uint16 [keys, n] and two E4M3 scales a word [keys, n / 8] -> four pieces [keys, n] bfloat16."""
    decode = main_factors if cuda else scaled_e4m3
    pair = jnp.stack([decode(scales & 255), decode(scales >> 8)], axis=-1)
    factors = _spread(pair.reshape(scales.shape[0], -1), words.shape[1])
    for p in range(PIECES):
        if cuda:
            yield _piece(e2m1_cuda(4 * p, 4 * p + 3), "=r,r,r", words, factors)
        else:
            yield (scaled_e2m1(words >> (4 * p)) * factors * 2.0 ** (14 + 8 - ROW_POWER)).astype(jnp.bfloat16)


def window_pieces(words: Array, scales: Array, cuda: bool) -> Iterator[Array]:
    """FP8 rows: words uint32 [keys, n] and four E8M0 scales a word [keys, n / 32] -> four pieces [keys, n] bfloat16."""
    codes = [(scales >> (8 * place)) & 255 for place in range(PIECES)]
    if cuda:
        first, second, third, fourth = (power_bfloat16(code) for code in codes)
    else:
        first, second, third, fourth = (decode_e8m0(code.astype(jnp.int32)) for code in codes)
    pairs = [jnp.stack(pair, axis=-1) for pair in ((first, third), (second, fourth))]
    factors = _spread(jnp.stack(pairs, axis=-1).reshape(scales.shape[0], -1), words.shape[1])
    for p in range(PIECES):
        if cuda:
            yield _piece(e4m3_cuda(p), "=r,r,r,r", words, factors)
        else:
            values = scaled_e4m3((words >> (8 * p)).astype(jnp.uint16)) * 2.0 ** (8 - ROW_POWER)
            yield (values * factors).astype(jnp.bfloat16)


def _alternating(first: Array, second: Array) -> Array:
    """Two pieces -> their members alternating, [keys, 2 n]."""
    return jnp.stack([first, second], axis=-1).reshape(first.shape[0], 2 * first.shape[1])


def woven(pieces: list[Array]) -> Array:
    """The four pieces [a, n] in the order of the dims, [a, 4 n]."""
    first, second, third, fourth = pieces
    return _alternating(_alternating(first, third), _alternating(second, fourth))

"""Stored index keys to float16 matrix operands inside Triton kernels, and the query in the order they come out.

Both formats are exact in float16: E4M3 codes as they are, and E2M1 codes times a power of two while a row's group
scales lie within 2^24 of its largest, below which a group changes no float32 sum. An element of the plane holds one or
more codes; each place in it becomes an operand of its own, so that nothing is interleaved.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import backend
from pallas_kernels.arithmetic import decode_e8m0, in_words

Array = jax.Array

LARGEST_OFFSET = 2**31
"""Elements past which the lowering's 32-bit element offsets are negative; it turns to 64 bits at 2^32 bytes."""
FACTOR_EXPONENT = 9
"""The largest group of an E2M1 row is multiplied by 2^9, so that float16 holds the others as far down as it can."""


def packed_view(values: Array, index_format: str) -> Array:
    """The plane's bytes as the kernel's elements.

    fp4: uint32 words of eight codes. fp8: bytes, or pairs of them where byte offsets would leave the lowering's 32
    bits. The bytes stay where they are.
    """
    if index_format == "fp4":
        return in_words(values, jnp.uint32)
    if LARGEST_OFFSET <= values.size <= 2 * LARGEST_OFFSET:
        return in_words(values, jnp.uint16)
    return values


def split_of(elements: Array, index_format: str) -> int:
    """Codes in one element of `packed_view`."""
    return elements.dtype.itemsize * (2 if index_format == "fp4" else 1)


def split_query(operand: Array, split: int) -> Array:
    """[N, Hi, I] to [N, split, Hi, I / split]: dimension `split * i + s` goes to part `s`, place `i`."""
    rows, heads, width = operand.shape
    return operand.reshape(rows, heads, width // split, split).transpose(0, 3, 1, 2)


def stacked_query(operand: Array, split: int) -> Array:
    """`split_query` with the heads of all rows in one axis: [split, N * Hi, I / split]."""
    parts = split_query(operand, split).transpose(1, 0, 2, 3)
    return parts.reshape(split, -1, parts.shape[-1])


def e2m1_cuda(place: int) -> str:
    """PTX: two words $1, $2 of eight E2M1 codes -> code `place` of both, as a float16 pair $0 of 2^-6 times the values.

    The two exponent bits and the mantissa bit become the lowest and highest of E4M3's, the subnormal code included,
    four codes of a word at once; what does not depend on `place` but on its parity is shared by the assembler.
    """
    lines = ["{", ".reg .b32 part, sign, one, two;", ".reg .b16 pair, rest;"]
    for word, result in (("$1", "one"), ("$2", "two")):
        if place % 2:
            lines += [f"shr.b32 part, {word}, 2;", f"mov.b32 sign, {word};"]
        else:
            lines += [f"shl.b32 part, {word}, 2;", f"shl.b32 sign, {word}, 4;"]
        lines += ["and.b32 part, part, 0x1C1C1C1C;", f"lop3.b32 {result}, sign, 0x80808080, part, 0xEA;"]
    halves = "{rest, pair}" if place % 4 >= 2 else "{pair, rest}"
    lines += [
        f"prmt.b32 one, one, two, {'0x7362' if place >= 4 else '0x5140'};",
        f"mov.b32 {halves}, one;",
        "cvt.rn.f16x2.e4m3x2 $0, pair;",
    ]
    return "\n".join([*lines, "}"])


def decoded_fp8(elements: Array) -> list[Array]:
    """Stored elements, [keys, n] uint8 or uint16, to a float16 part [keys, n] for each code in an element."""
    if elements.dtype == jnp.uint8:
        return [lax.bitcast_convert_type(elements, jnp.float8_e4m3fn).astype(jnp.float16)]
    halves = [(elements & 255).astype(jnp.uint8), (elements >> 8).astype(jnp.uint8)]
    return [lax.bitcast_convert_type(half, jnp.float8_e4m3fn).astype(jnp.float16) for half in halves]


def decoded_rows(values: Array, scales: Array, index_format: str) -> tuple[Array, Array]:
    """Stored rows [.., n] uint8 and their scales to float16 [.., I] and the row scale [..] float32 still to be applied.

    For XLA: what `decoded_fp8` and `decoded_fp4` give, with the dims of a row in their own order.
    """
    if index_format == "fp8":
        return decoded_fp8(values)[0], scales
    words = in_words(values, jnp.uint32)
    rows = words.shape[:-1]
    parts, scale = decoded_fp4(words.reshape(-1, words.shape[-1]), scales.reshape(-1, scales.shape[-1]), False)
    return jnp.stack(parts, axis=-1).reshape(*rows, -1), scale.reshape(rows)


def decoded_fp4(words: Array, scales: Array, cuda: bool) -> tuple[list[Array], Array]:
    """Stored rows to eight float16 parts [keys, n] and the row scale still to be applied.

    Args:
      words: [keys, n] uint32.
      scales: [keys, groups] uint8 E8M0.
      cuda: CUDA's packed instructions may be used.

    Returns:
      parts, and [keys] float32 that is NaN where a scale is.
    """
    keys, count = words.shape
    codes = scales.astype(jnp.int32)
    groups = codes.shape[1]
    largest = jnp.max(codes, axis=1)
    # The exponent of a float16 power of two; below its range a group vanishes.
    exponent = jnp.maximum(codes - largest[:, None] + (15 + FACTOR_EXPONENT + 6), 0)
    factor = lax.bitcast_convert_type((exponent << 10).astype(jnp.uint16), jnp.float16)[:, :, None]

    def scaled(values: Array) -> Array:
        return (values.reshape(keys, groups, count // groups) * factor).reshape(keys, count)

    parts = []
    for place in range(8):
        if cuda:
            [value] = backend.triton().elementwise_inline_asm(
                e2m1_cuda(place),
                args=[words],
                constraints="=r,r,r",
                pack=2,
                result_shape_dtypes=[jax.ShapeDtypeStruct((keys, count), jnp.float16)],
            )
        else:
            nibble = (words >> (4 * place)).astype(jnp.uint16)
            # A code whose bits are moved to a float16's own is its value times 2^-14, the subnormal code included.
            value = lax.bitcast_convert_type(((nibble & 7) << 9) | ((nibble & 8) << 12), jnp.float16) * 2.0**8
        parts.append(scaled(value))
    return parts, decode_e8m0(largest) * 2.0**-FACTOR_EXPONENT

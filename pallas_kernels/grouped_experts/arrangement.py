"""Packed E2M1 codes put in the order in which the GPU kernels widen them with the fewest instructions.

An arranged matrix holds the same codes in 16-bit words of four consecutive input dims, but

* a code's sign and its three other bits lie where one shift brings them to their places in a bfloat16 (two of the
  four codes), or two shifts do (the others; see `widening.e2m1_cuda`);
* the words of 128 input dims, 4 groups of 8 words that share a scale, are interleaved two by two, so that each of the
  four lanes that hold a row of a tensor core's operand gets words of one group, and widens them with one factor.

Nothing is computed: `released` is the exact inverse of `arranged`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.arithmetic import by_residue, in_words, shifted
from pallas_kernels.grouped_experts.types import Order

Array = jax.Array

CODES = 4
"""Codes of a word."""
GROUP_WORDS = 32 // CODES
"""Words that share a scale."""
BLOCK_GROUPS = 4
"""Groups whose words are interleaved: as many as lanes hold a row of a tensor core's operand."""
BLOCK_WORDS = BLOCK_GROUPS * GROUP_WORDS
BLOCK_DIMS = BLOCK_WORDS * CODES
"""Input dims that are interleaved; a matrix of another width keeps the released order."""

FIELDS: dict[Order, tuple[tuple[int, int], ...]] = {
    "released": ((0, 3), (4, 7), (8, 11), (12, 15)),
    "arranged": ((6, 15), (3, 12), (9, 14), (0, 13)),
}
"""Of each code of a word: the lowest bit of its exponent and mantissa, three bits in all, and the bit of its sign."""


def words_of(packed: Array) -> Array:
    """Packed codes of either order -> uint16 [..., K / 4]. The bytes stay where they are.

    Words and not bytes also because the lowering's offsets are 32 bits of elements up to 4 GiB: those into a run's
    stack of more than 2 GiB would be negative.
    """
    return packed if packed.dtype == jnp.uint16 else in_words(packed, jnp.uint16)


def arranged(packed: Array) -> Array:
    """uint8 [..., K / 2] as released -> uint16 [..., K / 4] arranged; K is a multiple of `BLOCK_DIMS`."""
    return _interleaved(_with_fields(words_of(packed), "released", "arranged"))


def released(words: Array) -> Array:
    """The inverse of `arranged`."""
    plain = _with_fields(_interleaved(words), "arranged", "released")
    return lax.bitcast_convert_type(plain, jnp.uint8).reshape(*words.shape[:-1], 2 * words.shape[-1])


def by_code(x: Array, order: Order) -> Array:
    """Reorders the last axis [K] as kernels meet the codes of words: code 0 of all words, code 1 of all, and so on."""
    if order == "released":
        return by_residue(x, CODES)
    words = x.shape[-1] // CODES
    place = jnp.arange(x.shape[-1], dtype=jnp.int32)
    dim = place_of_word(lax.rem(place, words), order) * CODES + lax.div(place, words)
    # Not a transposition: XLA makes one of groups this small by way of tiles it leaves nearly empty.
    return x.at[..., dim].get(mode="promise_in_bounds")


def by_step(x: Array, inner: int, order: Order) -> Array:
    """Reorders the last axis of [N, K] as steps of `inner` words meet the codes: code 0 of a step's words, then code 1.

    inner: words, which divide those of K; half a block or whole blocks of arranged ones.
    """
    rows, width = x.shape
    if order == "released":
        return x.reshape(rows, width // (CODES * inner), inner, CODES).swapaxes(2, 3).reshape(rows, width)
    steps = BLOCK_WORDS // inner
    # Group, step of a block, pair of words, word of a pair, code.
    dims = x.reshape(rows, width // BLOCK_DIMS, BLOCK_GROUPS, steps, BLOCK_GROUPS // steps, 2, CODES)
    return dims.transpose(0, 1, 3, 6, 4, 2, 5).reshape(rows, width)


def place_by_code(dim: Array, dims: int, order: Order) -> Array:
    """Where `by_code` puts the int32 places `dim` of `dims`."""
    return lax.rem(dim, CODES) * (dims // CODES) + place_of_word(lax.div(dim, CODES), order)


def place_of_word(word: Array, order: Order) -> Array:
    """Where the released word of int32 place `word` lies; its own inverse."""
    if order == "released":
        return word
    # Bits 3 and 4 are the group of a block, bits 1 and 2 the pair of words of the group.
    return (word & ~(BLOCK_WORDS - 2)) | ((word & 6) << 2) | ((word >> 2) & 6)


def _interleaved(words: Array) -> Array:
    """Words [..., K / 4] with pairs of each block's groups interleaved; its own inverse."""
    pairs = words.reshape(*words.shape[:-1], -1, BLOCK_GROUPS, BLOCK_GROUPS, 2)
    return jnp.swapaxes(pairs, -3, -2).reshape(words.shape)


def _with_fields(words: Array, source: Order, target: Order) -> Array:
    """uint16 words with every code's bits where `target` has them."""
    result = jnp.zeros_like(words)
    for (low, sign), (new_low, new_sign) in zip(FIELDS[source], FIELDS[target], strict=True):
        result |= shifted(words, new_low - low) & jnp.uint16(7 << new_low)
        result |= shifted(words, new_sign - sign) & jnp.uint16(1 << new_sign)
    return result

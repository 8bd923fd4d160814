"""The arranged order of packed expert codes: exact both ways, and every reader agrees on where a code lies."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.grouped_experts.arrangement import (
    BLOCK_DIMS,
    CODES,
    FIELDS,
    arranged,
    by_code,
    by_step,
    place_by_code,
    released,
    words_of,
)
from pallas_kernels.grouped_experts.types import ExpertWeights
from v41jax import quantization_numpy as quantization

EVERY_WORD = np.arange(2**16, dtype=np.uint16)


def codes_of(words, order):
    """[..., K] codes as the fields say, one bit at a time, in the order of the words."""
    codes = np.zeros((*words.shape, CODES), np.uint8)
    for code, (low, sign) in enumerate(FIELDS[order]):
        for bit, place in enumerate((low, low + 1, low + 2, sign)):
            codes[..., code] |= ((words >> place & 1) << bit).astype(np.uint8)
    return codes.reshape(*words.shape[:-1], -1)


@pytest.mark.parametrize("order", FIELDS)
def test_the_fields_are_every_bit_of_a_word_once(order):
    bits = [bit for low, sign in FIELDS[order] for bit in (low, low + 1, low + 2, sign)]
    assert sorted(bits) == list(range(16))


def test_every_word_at_every_place_comes_back():
    # A word at each place of a block, beside others.
    words = np.stack([np.roll(EVERY_WORD, 977 * place) for place in range(BLOCK_DIMS // CODES)], axis=1)
    packed = words.view(np.uint8)
    moved = jax.jit(arranged)(packed)
    assert moved.dtype == jnp.uint16 and moved.shape == words.shape
    np.testing.assert_array_equal(jax.jit(released)(moved), packed)
    assert (np.sort(np.asarray(moved), axis=0) == EVERY_WORD[:, None]).all(), "no two words become one"


def test_arranging_in_place_of_the_released_array_is_exact():
    packed = jnp.asarray(np.random.default_rng(0).integers(0, 256, (2, 3, 5, 192), dtype=np.uint8))
    expected = np.asarray(arranged(packed))
    there_and_back = jax.jit(lambda part: released(arranged(part)), donate_argnums=0)
    np.testing.assert_array_equal(arranged(there_and_back(packed)), expected)


def test_arranged_words_hold_the_codes_of_their_group_two_words_apart():
    """The dims of words 2 lane and 2 lane + 1 of every eight are of group `lane` of the block."""
    dims = np.arange(2 * BLOCK_DIMS)
    packed = quantization.pack_nibbles((dims // 32 % 8).astype(np.uint8)[None])
    groups = codes_of(np.asarray(arranged(jnp.asarray(packed))), "arranged")[0].reshape(2, 4, 4, 2 * CODES)
    for block in range(2):
        for lane in range(4):
            assert (groups[block, :, lane] == 4 * block + lane).all()


@pytest.mark.parametrize("order", FIELDS)
def test_operands_stand_where_their_codes_do(order):
    """x in the order of `by_code` times the codes of the words, code by code, is x times the matrix."""
    random = np.random.default_rng(1)
    codes = random.integers(0, 16, (3, 2 * BLOCK_DIMS), dtype=np.uint8)
    packed = jnp.asarray(quantization.pack_nibbles(codes))
    words = words_of(packed) if order == "released" else arranged(packed)
    met = codes_of(np.asarray(words), order).reshape(3, -1, CODES).swapaxes(1, 2).reshape(3, -1)
    np.testing.assert_array_equal(met, by_code(jnp.asarray(codes), order))


@pytest.mark.parametrize("order", FIELDS)
def test_a_dim_is_placed_where_the_whole_axis_is_reordered_to(order):
    dims = jnp.arange(3 * BLOCK_DIMS, dtype=jnp.int32)
    place = np.asarray(jax.jit(functools.partial(place_by_code, dims=len(dims), order=order))(dims))
    np.testing.assert_array_equal(np.asarray(by_code(dims, order))[place], dims)


def test_weights_know_their_order_and_their_width():
    packed = jnp.zeros((2, 3, 64), jnp.uint8)
    plain = ExpertWeights(packed, jnp.zeros((2, 3, 4), jnp.uint8))
    moved = plain._replace(packed=arranged(packed))
    assert (plain.order, plain.inputs) == ("released", 128)
    assert (moved.order, moved.inputs) == ("arranged", 128)


@pytest.mark.parametrize("order", FIELDS)
@pytest.mark.parametrize("inner", [16, 32])
def test_a_step_meets_the_codes_of_its_words_one_code_after_the_other(order, inner):
    dims = jnp.arange(2 * 3 * BLOCK_DIMS).reshape(2, -1)
    # Places of `by_code`: the code, then the word.
    by_words = np.asarray(by_code(dims, order)).reshape(2, CODES, -1, inner)
    expected = by_words.transpose(0, 2, 1, 3).reshape(dims.shape)
    np.testing.assert_array_equal(by_step(dims, inner, order), expected)

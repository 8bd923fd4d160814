"""Packed expert weights widened by the GPU kernels: plain operations and CUDA instructions, over every word."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.grouped_experts.arrangement import CODES, FIELDS, arranged, by_code, words_of
from pallas_kernels.grouped_experts.widening import OPERAND_POWER, e2m1_cuda, factors, widen_e2m1
from tests.pallas_kernels import ptx
from tests.pallas_kernels.test_expert_arrangement import EVERY_WORD, codes_of
from v41jax import quantization_numpy as quantization


@pytest.mark.parametrize("order", FIELDS)
@pytest.mark.parametrize("code", range(CODES))
@pytest.mark.parametrize("scale", [55, 120, 127, 188])
def test_cuda_instructions_decode_every_word_at_the_operands_power(order, code, scale):
    # Every word in both halves of a register, beside itself, its complement and another.
    other = np.concatenate([EVERY_WORD, ~EVERY_WORD, EVERY_WORD * np.uint16(40_503)])
    words = np.stack([np.tile(EVERY_WORD, 3), other], axis=1)
    words = np.concatenate([words, words[:, ::-1]])
    factor = np.asarray(factors(jnp.full(words.shape, scale, jnp.uint8))).view(np.uint32)[:, 0]
    registers = ptx.run(e2m1_cuda(*FIELDS[order][code]), {"$1": words.view(np.uint32)[:, 0], "$2": factor})
    found = registers["$0"].view(ml_dtypes.bfloat16).reshape(words.shape)
    codes = codes_of(words[:, :, None], order)[..., code]
    expected = quantization.decode_e2m1(codes) * 2.0 ** (scale - 127 - OPERAND_POWER)
    np.testing.assert_array_equal(found.astype(np.float64), expected)
    np.testing.assert_array_equal(np.signbit(found.astype(np.float64)), codes >> 3)


def test_a_factor_multiplies_the_word_it_belongs_to():
    """The two words of a register may have different scales."""
    scales = np.array([120, 130], np.uint8)
    factor = np.asarray(factors(jnp.asarray(scales))).view(np.uint32)
    for order, fields in FIELDS.items():
        word = np.uint16(1 << (fields[1][0] + 1))
        register = np.array([word, word]).view(np.uint32)
        found = ptx.run(e2m1_cuda(*fields[1]), {"$1": register, "$2": factor})["$0"].view(ml_dtypes.bfloat16)
        expected = 2.0 ** (scales.astype(np.float64) - 127 - OPERAND_POWER)
        np.testing.assert_array_equal(found.astype(np.float64), expected, order)


def test_scales_past_the_largest_are_nan():
    found = np.asarray(factors(jnp.arange(256, dtype=jnp.uint8)), np.float32)
    assert (found[:189] == 2.0 ** (np.arange(189) - 127.0 + 126 - OPERAND_POWER)).all()
    assert not np.isfinite(found[189:]).any() and np.isnan(found[190:]).all()


@pytest.mark.parametrize("order", FIELDS)
def test_plain_operations_decode_every_word_and_scale(order):
    packed = EVERY_WORD.view(np.uint8).reshape(64, 2048)
    scales = np.random.default_rng(0).choice(np.array([4, 90, 127, 130, 200], np.uint8), (64, 128))
    words = words_of(jnp.asarray(packed)) if order == "released" else arranged(jnp.asarray(packed))
    parts = jax.jit(lambda w, s: widen_e2m1(w, s, order, cuda=False))(words, scales)
    expected = quantization.dequantize_expert(packed, scales)
    found = np.concatenate(parts, axis=1, dtype=np.float32)
    np.testing.assert_array_equal(found, by_code(jnp.asarray(expected), order))


def test_half_a_block_of_arranged_words_is_widened_with_the_scales_of_all_its_groups():
    random = np.random.default_rng(1)
    packed = random.integers(0, 256, (3, 64), dtype=np.uint8)
    scales = random.integers(110, 140, (3, 4), dtype=np.uint8)
    words = arranged(jnp.asarray(packed))
    whole = widen_e2m1(words, scales, "arranged", cuda=False)
    halves = [widen_e2m1(words[:, first : first + 16], scales, "arranged", cuda=False) for first in (0, 16)]
    for code in range(CODES):
        np.testing.assert_array_equal(np.concatenate([half[code] for half in halves], axis=1), whole[code])


def test_the_order_is_that_of_the_codes_of_a_word():
    np.testing.assert_array_equal(by_code(jnp.arange(8), "released"), [0, 4, 1, 5, 2, 6, 3, 7])

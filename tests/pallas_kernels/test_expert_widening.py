"""Packed expert weights widened by the GPU kernels: plain operations and CUDA instructions, over every byte."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.grouped_experts.widening import (
    CODES,
    OPERAND_POWER,
    by_code,
    e2m1_cuda,
    factors,
    widen_e2m1,
    words_of,
)
from tests.pallas_kernels import ptx
from v41jax import quantization_numpy as quantization


@pytest.mark.parametrize("code", range(CODES))
@pytest.mark.parametrize("scale", [55, 120, 127, 188])
def test_cuda_instructions_decode_every_byte_at_the_operands_power(code, scale):
    packed = np.stack([np.arange(256), np.arange(256)[::-1] ^ 0x5A], axis=1).astype(np.uint8)
    factor = np.asarray(factors(jnp.full(256, scale, jnp.uint8))).view(np.uint32)
    words = ptx.run(e2m1_cuda(code), {"$1": packed.reshape(-1).view(np.uint32), "$2": factor})
    found = words["$0"].view(ml_dtypes.bfloat16)
    nibbles = packed[:, code // 2] >> (4 * (code % 2)) & 15
    expected = quantization.decode_e2m1(nibbles) * 2.0 ** (scale - 127 - OPERAND_POWER)
    np.testing.assert_array_equal(found.astype(np.float64), expected)


def test_scales_past_the_largest_are_nan():
    found = np.asarray(factors(jnp.arange(256, dtype=jnp.uint8)), np.float32)
    assert (found[:189] == 2.0 ** (np.arange(189) - 127.0 + 126 - OPERAND_POWER)).all()
    assert not np.isfinite(found[189:]).any() and np.isnan(found[190:]).all()


def test_plain_operations_decode_every_byte_and_scale():
    packed = np.tile(np.arange(256, dtype=np.uint8), (5, 1))
    scales = np.array([4, 90, 127, 130, 200], np.uint8)[:, None].repeat(16, 1)
    parts = jax.jit(lambda p, s: widen_e2m1(words_of(p), s, cuda=False))(packed, scales)
    expected = quantization.dequantize_expert(packed, scales)
    np.testing.assert_array_equal(np.concatenate(parts, axis=1, dtype=np.float32), by_code(jnp.asarray(expected)))


def test_the_order_is_that_of_the_codes_of_a_word():
    np.testing.assert_array_equal(by_code(jnp.arange(8)), [0, 4, 1, 5, 2, 6, 3, 7])

"""Packed expert weights widened by the GPU kernels: plain operations and CUDA instructions, over every byte."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.grouped_experts.widening import CODES, by_code, e2m1_cuda, widen_e2m1, words_of
from tests.pallas_kernels import ptx
from v41jax import quantization_numpy as quantization


@pytest.mark.parametrize("code", range(CODES))
@pytest.mark.parametrize("exponent", [-126, -7, 0, 60])
def test_cuda_instructions_decode_every_byte(code, exponent):
    packed = np.stack([np.arange(256), np.arange(256)[::-1] ^ 0x5A], axis=1).astype(np.uint8)
    scale = np.full(256, 2.0**exponent, ml_dtypes.bfloat16).view(np.uint32)
    words = ptx.run(e2m1_cuda(code), {"$1": packed.reshape(-1).view(np.uint32), "$2": scale})
    found = words["$0"].view(ml_dtypes.bfloat16)
    nibbles = packed[:, code // 2] >> (4 * (code % 2)) & 15
    np.testing.assert_array_equal(found.astype(np.float64), quantization.decode_e2m1(nibbles) * 2.0**exponent)


def test_plain_operations_decode_every_byte_and_scale():
    packed = np.tile(np.arange(256, dtype=np.uint8), (5, 1))
    scales = np.array([4, 90, 127, 130, 200], np.uint8)[:, None].repeat(16, 1)
    parts = jax.jit(lambda p, s: widen_e2m1(words_of(p), s, cuda=False))(packed, scales)
    expected = quantization.dequantize_expert(packed, scales)
    np.testing.assert_array_equal(np.concatenate(parts, axis=1, dtype=np.float32), by_code(jnp.asarray(expected)))


def test_the_order_is_that_of_the_codes_of_a_word():
    np.testing.assert_array_equal(by_code(jnp.arange(8)), [0, 4, 1, 5, 2, 6, 3, 7])

"""Packed expert weights widened by the GPU kernels: plain operations and CUDA instructions, over every byte."""

import jax
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.grouped_experts.widening import e2m1_cuda, widen_e2m1
from tests.pallas_kernels import ptx
from v41jax import quantization_numpy as quantization


@pytest.mark.parametrize(("shift", "half"), [(6, 0), (2, 1)])
@pytest.mark.parametrize("exponent", [-126, -7, 0, 60])
def test_cuda_instructions_decode_every_byte(shift, half, exponent):
    codes = np.arange(256, dtype=np.uint8)
    scale = np.full(256, 2.0**exponent, ml_dtypes.bfloat16)
    pairs = scale.view(np.uint32).reshape(64, 2)
    words = ptx.run(e2m1_cuda(shift), {"$2": codes.view(np.uint32), "$3": pairs[:, 0].copy(), "$4": pairs[:, 1].copy()})
    found = np.stack([words["$0"], words["$1"]], axis=1).view(ml_dtypes.bfloat16).reshape(256)
    nibble = codes >> 4 if half else codes & 15
    expected = quantization.decode_e2m1(nibble) * 2.0**exponent
    np.testing.assert_array_equal(found.astype(np.float64), expected)


def test_plain_operations_decode_every_byte_and_scale():
    packed = np.tile(np.arange(256, dtype=np.uint8), (5, 1))
    scales = np.array([4, 90, 127, 130, 200], np.uint8)[:, None].repeat(16, 1)
    low, high = jax.jit(lambda p, s: widen_e2m1(p, s, cuda=False))(packed, scales)
    expected = quantization.dequantize_expert(packed, scales)
    np.testing.assert_array_equal(np.asarray(low, np.float32), expected[:, 0::2])
    np.testing.assert_array_equal(np.asarray(high, np.float32), expected[:, 1::2])

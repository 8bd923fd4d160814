"""Stored weights widened by the GPU kernels: plain operations and CUDA's packed instructions, over every code."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import backend
from pallas_kernels.triton_widening import e2m1_cuda, packed_instructions, power_bfloat16, widen_e2m1, widen_e4m3
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


def test_packed_instructions_are_for_cuda_only():
    assert not packed_instructions()
    with backend.use_target(backend.Target("triton", "cuda")):
        assert packed_instructions()
    with backend.use_target(backend.Target("triton", "rocm")):
        assert not packed_instructions()


def test_plain_operations_decode_every_byte_and_scale():
    packed = np.tile(np.arange(256, dtype=np.uint8), (5, 1))
    scales = np.array([4, 90, 127, 130, 200], np.uint8)[:, None].repeat(16, 1)
    low, high = jax.jit(lambda p, s: widen_e2m1(p, s, cuda=False))(packed, scales)
    expected = quantization.dequantize_expert(packed, scales)
    np.testing.assert_array_equal(np.asarray(low, np.float32), expected[:, 0::2])
    np.testing.assert_array_equal(np.asarray(high, np.float32), expected[:, 1::2])
    every = np.tile(np.arange(256, dtype=np.uint8), (4, 1))
    scales = np.array([[110], [120], [127], [130]], np.uint8).repeat(8, 1)
    found = np.asarray(jax.jit(widen_e4m3)(every, scales), np.float32)
    np.testing.assert_array_equal(found, quantization.dequantize_rows(every, scales))


def test_powers_of_two_of_every_scale_code():
    found = np.asarray(power_bfloat16(jnp.arange(256, dtype=jnp.uint8)))
    np.testing.assert_array_equal(found.astype(np.float64)[:255], 2.0 ** (np.arange(255) - 127.0))
    assert np.isnan(found[255].astype(np.float32))

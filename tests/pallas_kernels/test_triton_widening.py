"""Stored weights widened by the GPU kernels: plain operations and CUDA's packed instructions, over every code."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import backend
from pallas_kernels import triton_widening as widening
from tests.pallas_kernels import ptx
from v41jax import quantization_numpy as quantization


def run_cuda(text, codes, scales):
    """The four values of every word of `codes`, with one bfloat16 scale per code."""
    pairs = scales.view(np.uint32).reshape(-1, 2)
    words = ptx.run(text, {"$2": codes.view(np.uint32), "$3": pairs[:, 0].copy(), "$4": pairs[:, 1].copy()})
    return np.stack([words["$0"], words["$1"]], axis=1).view(ml_dtypes.bfloat16).reshape(codes.shape)


@pytest.mark.parametrize("scale", [0, 100, 127, 140])
def test_cuda_instructions_decode_every_e4m3_code(scale):
    codes = np.arange(256, dtype=np.uint8)
    factor = np.asarray(widening.power_bfloat16(jnp.full(256, scale, jnp.uint8)))
    found = run_cuda(widening.E4M3_CUDA, codes, factor).astype(np.float32)
    expected = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float64) * 2.0 ** (scale - 127.0)
    np.testing.assert_array_equal(found, expected.astype(ml_dtypes.bfloat16).astype(np.float32))


def test_packed_instructions_are_for_cuda_only():
    assert not widening.packed_instructions()
    with backend.use_target(backend.Target("triton", "cuda")):
        assert widening.packed_instructions()
    with backend.use_target(backend.Target("triton", "rocm")):
        assert not widening.packed_instructions()


def test_widened_fp8_weights_stand_where_their_operand_does():
    codes = np.tile(np.arange(256, dtype=np.uint8), (4, 1))
    scales = np.array([[110], [120], [127], [130]], np.uint8).repeat(8, 1)
    found = np.asarray(jax.jit(lambda c, s: widening.widen_e4m3(c, s, cuda=False))(codes, scales), np.float32)
    expected = quantization.dequantize_rows(codes, scales)
    # Dims are numbered from 1: zero is the padding past the last one.
    order = np.asarray(widening.fp8_operand(1 + jnp.arange(250)[None], 256), np.int32)[0]
    assert sorted(order) == [0] * 6 + list(range(1, 251))
    np.testing.assert_array_equal(found[:, order > 0], expected[:, order[order > 0] - 1])


def test_scales_of_every_code():
    codes = jnp.arange(256, dtype=jnp.uint8)
    found = np.asarray(widening.power_bfloat16(codes)).astype(np.float64)
    np.testing.assert_array_equal(found[:255], 2.0 ** (np.arange(255) - 127.0))
    assert np.isnan(found[255])

"""The kernels' arithmetic: codecs against `v41jax.quantization_numpy`, to the bit and over every code; SwiGLU."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import arithmetic
from pallas_kernels.quantized_rows import summed_rows
from v41jax import quantization as codecs
from v41jax import quantization_numpy as quantization


def bits(x):
    return np.asarray(x, np.float32).view(np.uint32)


def special_groups(dtype):
    """[9, 64]: random groups of every magnitude beside zeros of both signs, subnormals, infinities and NaN."""
    rng = np.random.default_rng(3)
    x = (rng.normal(size=(9, 64)) * 10.0 ** np.linspace(-40, 36, 9)[:, None]).astype(np.float32)
    x[:, 32:48] *= np.float32(2.0**-12)
    x[0, :32], x[0, 3] = 0.0, -0.0
    x[1, 5], x[2, 40], x[3, 40] = np.nan, np.inf, -np.inf
    x[4, :] = np.linspace(-1.2e-38, 1.2e-38, 64)
    x[5, 7], x[5, 8], x[6, 7], x[6, 9] = np.inf, 1e-39, np.nan, np.inf
    x[7, :4] = [np.finfo(np.float32).max, 1e-39, -1e-39, -np.inf]
    return jnp.asarray(x, dtype)


def test_every_code_of_every_format_decodes_exactly():
    codes = np.arange(256)
    wide = jnp.asarray(codes, jnp.int32)
    np.testing.assert_array_equal(bits(arithmetic.decode_e2m1(wide)), bits(quantization.decode_e2m1(codes % 16)))
    e4m3 = codes.astype(np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    np.testing.assert_array_equal(np.asarray(arithmetic.decode_e4m3(wide)), e4m3)
    np.testing.assert_array_equal(
        np.asarray(arithmetic.decode_e8m0(wide)), quantization.decode_e8m0(codes.astype(np.uint8))
    )


def test_rounding_to_e4m3_equals_the_cast_for_every_bfloat16():
    every = np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)
    every = every[np.abs(every) <= 448]
    ties = np.arange(1 << 14, dtype=np.float32) * 2.0**-11
    values = np.concatenate([every, ties[ties <= 448], -ties[ties <= 448]])
    expected = values.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    np.testing.assert_array_equal(bits(jax.jit(arithmetic.round_to_e4m3)(values)), bits(expected))


def test_fake_q8_equals_the_codec_for_every_block_peak():
    rng = np.random.default_rng(0)
    peaks = np.arange(0, 0x7F80, 7, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)
    peaks = peaks[peaks < 2.0**120]
    x = (rng.uniform(-1, 1, (len(peaks), 64)) * peaks[:, None]).astype(np.float32)
    x[:, 5] = peaks
    for dtype in (jnp.float32, jnp.bfloat16):
        values = np.asarray(jnp.asarray(x, dtype))
        np.testing.assert_array_equal(
            np.asarray(jax.jit(arithmetic.fake_q8)(values)).astype(np.float32),
            quantization.fake_q8(values).astype(np.float32),
        )


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_fake_q8_equals_the_codec_where_values_are_no_numbers_or_next_to_none(dtype):
    x = special_groups(dtype)
    expected = bits(jax.jit(codecs.fake_q8)(x))
    assert np.isnan(expected.view(np.float32)).any() and np.isinf(expected.view(np.float32)).any()
    np.testing.assert_array_equal(bits(jax.jit(arithmetic.fake_q8)(x)), expected)
    groups = x.reshape(-1, arithmetic.Q8_GROUP)
    along = jax.jit(functools.partial(arithmetic.fake_q8_group, axis=0))(groups.T)
    np.testing.assert_array_equal(bits(along).T.reshape(x.shape), expected)
    in_kernel = summed_rows(x[None].astype(jnp.float32), quantize=True, dtype=dtype, implementation="pallas")
    np.testing.assert_array_equal(bits(in_kernel.quantized), expected)


def test_halves_of_an_expert_matrix_are_its_columns_even_first():
    rng = np.random.default_rng(1)
    packed = rng.integers(0, 256, (3, 5, 64)).astype(np.uint8)
    scales = rng.integers(0, 240, (3, 5, 4)).astype(np.uint8)
    found = np.asarray(jax.jit(arithmetic.decode_expert_halves)(packed, scales))
    expected = quantization.dequantize_expert(packed, scales)
    normal = np.abs(expected) >= 2.0**-126
    expected = np.where(normal, expected, 0)
    expected = np.concatenate([expected[..., 0::2], expected[..., 1::2]], -1)
    np.testing.assert_array_equal(np.where(np.abs(found) >= 2.0**-126, found, 0), expected)
    np.testing.assert_array_equal(arithmetic.even_odd(jnp.arange(6)), [0, 2, 4, 1, 3, 5])


def test_rows_of_both_packed_pools_decode_to_the_quantized_values():
    x = np.random.default_rng(2).normal(size=(7, 96)).astype(np.float32)
    codes, scales = quantization.quantize_q4n(x)
    main = np.concatenate([quantization.pack_nibbles(codes), scales], -1)
    np.testing.assert_array_equal(jax.jit(arithmetic.decode_main_row)(main), quantization.fake_q4n(x))
    window = np.concatenate(quantization.quantize_q8(x), -1)
    np.testing.assert_array_equal(jax.jit(arithmetic.decode_window_row)(window), quantization.fake_q8(x))


@pytest.mark.parametrize("limit", [10.0, 0.0])
def test_swiglu_clamps_a_gate_from_above_and_the_other_from_both_sides_and_keeps_nan(limit):
    edge = np.nextafter(np.float32(10), np.float32([0, 20]))
    special = np.float32([0.0, -0.0, 1.0, -1.0, 30.0, -30.0, -1e4, 10.0, -10.0, *edge, *-edge, np.inf, -np.inf, np.nan])
    gate, up = (part.reshape(-1) for part in np.meshgrid(special, special))
    found = jax.jit(arithmetic.swiglu, static_argnums=2)(gate, up, limit)
    with np.errstate(over="ignore", invalid="ignore"):
        a, b = gate.astype(np.float64), up.astype(np.float64)
        if limit:
            a, b = np.minimum(a, 10), np.clip(b, -10, 10)
        expected = a / (1 + np.exp(-a)) * b
    assert found.dtype == np.float32
    assert np.isnan(expected[np.isnan(gate) | np.isnan(up) | (gate == -np.inf)]).all()
    np.testing.assert_allclose(found, expected, rtol=1e-6)

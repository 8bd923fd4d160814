"""Every implementation of `block_scaled_linear` against float64 on the decoded operands."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import backend
from pallas_kernels.backend import KernelUnsupportedError
from pallas_kernels.block_scaled_linear import block_scaled_linear, triton
from v41jax import quantization_numpy as quantization


def linear_case(seed, rows, inputs, outputs, dtype):
    """x on the Q8 grid, codes, scales, and the float64 product."""
    rng = np.random.default_rng(seed)
    x = quantization.fake_q8(np.asarray(jnp.asarray(rng.normal(size=(rows, inputs)), dtype)))
    codes = rng.normal(size=(outputs, inputs)).astype(ml_dtypes.float8_e4m3fn)
    scales = rng.integers(115, 130, (outputs // 32, inputs // 32)).astype(np.uint8)
    weight = quantization.dequantize_dense(codes, scales).astype(np.float64)
    return jnp.asarray(x), jnp.asarray(codes), jnp.asarray(scales), np.asarray(x, np.float64) @ weight.T


def assert_product(found, expected, dtype):
    found = np.asarray(found)
    assert found.dtype == dtype
    step = 2.0**-8 if dtype == jnp.bfloat16 else 3e-5
    np.testing.assert_allclose(found.astype(np.float64), expected, rtol=step, atol=5e-5 * np.abs(expected).max())


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(1, 64, 96), (7, 128, 32), (33, 96, 160)])
def test_product_equals_float64_of_decoded_operands(dtype, rows, inputs, outputs):
    x, codes, scales, expected = linear_case(rows, rows, inputs, outputs, dtype)
    assert_product(jax.jit(block_scaled_linear)(x, codes, scales), expected, dtype)


def test_codes_may_come_as_bytes():
    x, codes, scales, _ = linear_case(0, 3, 64, 64, jnp.float32)
    as_bytes = jax.lax.bitcast_convert_type(codes, jnp.uint8)
    np.testing.assert_array_equal(block_scaled_linear(x, as_bytes, scales), block_scaled_linear(x, codes, scales))


def test_shapes_that_do_not_fit_are_named():
    x, codes, scales, _ = linear_case(0, 3, 64, 64, jnp.float32)
    with pytest.raises(ValueError, match=r"scales \(1, 2\)"):
        block_scaled_linear(x, codes, scales[:1])


@pytest.mark.parametrize(
    ("rows", "inputs", "outputs", "config"),
    [(1, 64, 96, (64, 16, 64, 1)), (21, 512, 160, (64, 16, 128, 4)), (7, 224, 32, (16, 16, 64, 2))],
)
def test_gpu_kernel_equals_float64_of_decoded_operands(rows, inputs, outputs, config):
    x, codes, scales, expected = linear_case(rows, rows, inputs, outputs, jnp.bfloat16)
    run = functools.partial(triton.block_scaled_linear, config=triton.Config(*config, 4, 1), interpret=True)
    assert_product(jax.jit(run)(x, codes, scales), expected, jnp.bfloat16)


@settings(max_examples=6)
@given(st.integers(1, 40), st.integers(1, 6), st.integers(1, 6))
def test_gpu_kernel_of_any_shape_through_the_public_call(rows, inputs, outputs):
    x, codes, scales, expected = linear_case(rows, rows, 32 * inputs, 32 * outputs, jnp.bfloat16)
    run = functools.partial(block_scaled_linear, implementation="pallas")
    assert_product(jax.jit(run)(x, codes, scales), expected, jnp.bfloat16)


@pytest.mark.parametrize("generation", ["cuda", "rocm"])
@pytest.mark.parametrize(("inputs", "outputs"), [(1280, 32_768), (8192, 5120), (5120, 2304), (5120, 1280), (5120, 512)])
def test_splits_fill_the_device_and_none_is_without_work(generation, inputs, outputs):
    config = triton.config_for(1, inputs, outputs, generation)
    steps = -(-inputs // config.inner)
    assert (config.splits - 1) * -(-steps // config.splits) < steps
    assert 160 <= -(-outputs // config.outputs) * config.splits <= 700


def test_a_float32_product_has_no_kernel_and_says_so():
    x, codes, scales, _ = linear_case(0, 3, 64, 64, jnp.float32)
    with pytest.raises(KernelUnsupportedError, match="float32"):
        block_scaled_linear(x, codes, scales, implementation="pallas")


@pytest.mark.parametrize(
    ("rows", "inputs", "outputs", "kernel"),
    [
        (1, 1280, 32_768, True),
        (1, 5120, 512, False),
        (8, 5120, 512, True),
        (64, 8192, 5120, True),
        (65, 5120, 512, False),
    ],
)
def test_auto_takes_the_kernel_where_it_was_measured_to_win(rows, inputs, outputs, kernel):
    arguments = (
        jax.ShapeDtypeStruct((rows, inputs), jnp.bfloat16),
        jax.ShapeDtypeStruct((outputs, inputs), jnp.uint8),
        jax.ShapeDtypeStruct((outputs // 32, inputs // 32), jnp.uint8),
    )
    with backend.use_target(backend.Target("triton", "cuda")):
        traced = jax.make_jaxpr(lambda *x: block_scaled_linear(*x))(*arguments)
    assert ("pallas_call" in str(traced)) == kernel

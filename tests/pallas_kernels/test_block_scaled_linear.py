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
from pallas_kernels.block_scaled_linear import block_scaled_linear, block_scaled_parts, tpu, triton, triton_widened, xla
from pallas_kernels.triton_widening import fp8_operand
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


def test_no_array_as_large_as_the_weight_ends_in_an_axis_that_a_tpu_pads():
    codes, scales = jax.ShapeDtypeStruct((256, 512), jnp.float8_e4m3fn), jax.ShapeDtypeStruct((8, 16), jnp.uint8)
    traced = jax.make_jaxpr(lambda *weight: xla.dequantize(*weight, jnp.bfloat16))(codes, scales)
    shapes = [variable.aval.shape for equation in traced.eqns for variable in equation.outvars]
    assert (256, 512) in shapes
    assert all(shape[-1] % 128 == 0 for shape in shapes if np.prod(shape) >= 256 * 512)


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


@pytest.mark.parametrize("implementation", ["xla", "pallas"])
@pytest.mark.parametrize("inputs", [96, 320])
def test_parts_of_several_weights_add_up_to_their_products(inputs, implementation):
    x, codes, scales, expected = linear_case(0, 5, inputs, 64, jnp.bfloat16)
    others = jnp.flip(codes, axis=0)
    stacks = [(jnp.stack([codes * 0, part]), jnp.stack([scales, power])) for part, power in ((codes, scales),)]
    stacks.append((jnp.stack([codes * 0, others]), jnp.stack([scales, jnp.flip(scales, axis=0)])))
    call = functools.partial(block_scaled_parts, implementation=implementation)
    found = jax.jit(call)(x, stacks, layer=jnp.int32(1))
    lanes = fp8_operand(x, -(-inputs // 64) * 64)
    ordered = jax.jit(call)(x * jnp.nan if implementation == "pallas" else x, stacks, layer=jnp.int32(1), lanes=lanes)
    for parts, again, wanted in zip(found, ordered, (expected, expected[:, ::-1]), strict=True):
        assert_product(jnp.sum(parts.astype(jnp.float32), axis=0).astype(jnp.bfloat16), wanted, jnp.bfloat16)
        np.testing.assert_array_equal(parts, again)
    with pytest.raises(ValueError, match=r"need one shape; got \[\(64, \d+\), \(32, \d+\)\]"):
        call(x, [(codes, scales), (codes[:32], scales[:1])])


@pytest.mark.parametrize(("inputs", "outputs"), [(96, 64), (1280, 32), (512, 96)])
def test_weight_of_many_rows_is_widened_to_the_bits_of_the_definition(inputs, outputs):
    rng = np.random.default_rng(inputs)
    codes = jnp.asarray(rng.integers(0, 256, (3, outputs, inputs)), jnp.uint8)
    scales = jnp.asarray(rng.integers(0, 256, (3, outputs // 32, inputs // 32)), jnp.uint8).at[1, 0, 0].set(255)
    found = triton_widened.widened(codes, scales, jnp.int32(1), interpret=True)
    expected = xla.dequantize(codes[1], scales[1], jnp.bfloat16)
    np.testing.assert_array_equal(np.asarray(found, np.float32), np.asarray(expected, np.float32))
    assert np.isnan(np.asarray(found, np.float32)[:32, :32]).all()


def test_many_rows_are_the_product_of_the_definition():
    x, codes, scales, expected = linear_case(3, triton.MOST_ROWS + 1, 96, 64, jnp.bfloat16)
    stacks = [(jnp.stack([codes * 0, codes]), jnp.stack([scales, scales]))] * 2
    call = functools.partial(block_scaled_parts, implementation="pallas", layer=jnp.int32(1))
    for [product] in jax.jit(call)(x, stacks):
        assert_product(product, expected, jnp.bfloat16)
        np.testing.assert_array_equal(product, xla.block_scaled_linear(x, codes, scales))


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


@pytest.mark.parametrize("implementation", ["xla", "pallas"])
def test_one_layer_of_a_stack_is_that_layer_alone(implementation):
    rng = np.random.default_rng(3)
    x = jnp.asarray(rng.normal(size=(5, 192)), jnp.bfloat16)
    codes = jnp.asarray(rng.integers(0, 0x78, (3, 96, 192)), jnp.uint8)
    scales = jnp.asarray(rng.integers(120, 130, (3, 3, 6)), jnp.uint8)
    call = jax.jit(functools.partial(block_scaled_linear, implementation=implementation))
    for layer in range(3):
        poisoned = scales.at[jnp.asarray([other for other in range(3) if other != layer])].set(255)
        found = call(x, codes, poisoned, layer=jnp.int32(layer))
        np.testing.assert_array_equal(found, call(x, codes[layer], scales[layer]))
    with pytest.raises(ValueError, match="one leading axis as layer is 1"):
        block_scaled_linear(x, codes[0], scales[0], layer=1)
    with pytest.raises(ValueError, match="no leading axes"):
        block_scaled_linear(x, codes, scales)


@pytest.mark.parametrize(
    ("rows", "inputs", "outputs", "generation", "kernel"),
    [
        (1, 1280, 32_768, "cuda", True),
        (1, 5120, 512, "cuda", True),
        (1, 2560, 512, "cuda", False),
        (8, 5120, 512, "cuda", True),
        (64, 8192, 5120, "cuda", True),
        (128, 5120, 512, "rocm", True),
        (129, 5120, 512, "rocm", False),
        (4096, 5120, 512, "cuda", True),
    ],
)
def test_auto_takes_a_kernel_where_it_was_measured_to_win(rows, inputs, outputs, generation, kernel):
    arguments = (
        jax.ShapeDtypeStruct((rows, inputs), jnp.bfloat16),
        jax.ShapeDtypeStruct((outputs, inputs), jnp.uint8),
        jax.ShapeDtypeStruct((outputs // 32, inputs // 32), jnp.uint8),
    )
    with backend.use_target(backend.Target("triton", generation)):
        traced = jax.make_jaxpr(lambda *x: block_scaled_linear(*x))(*arguments)
    assert ("pallas_call" in str(traced)) == kernel


@pytest.mark.parametrize(
    ("rows", "inputs", "outputs", "config"),
    [
        (1, 256, 96, (16, 64, 128, True)),
        (21, 384, 288, (16, 128, 128, True)),
        (21, 384, 288, (32, 256, 128, False)),
        (40, 96, 64, None),
    ],
)
def test_tpu_kernel_equals_float64_and_the_definition(rows, inputs, outputs, config):
    x, codes, scales, expected = linear_case(rows, rows, inputs, outputs, jnp.bfloat16)
    config = config and tpu.Config(*config)
    found = jax.jit(functools.partial(tpu.block_scaled_linear, config=config, interpret=True))(x, codes, scales)
    assert_product(found, expected, jnp.bfloat16)
    defined = np.asarray(xla.block_scaled_linear(x, codes, scales), np.float64)
    np.testing.assert_allclose(np.asarray(found, np.float64), defined, rtol=2.0**-7, atol=1e-4 * np.abs(defined).max())


@pytest.mark.parametrize("rows", [2, 20])
def test_tpu_kernel_keeps_a_poisoned_weight_to_its_outputs(rows):
    x, codes, scales, expected = linear_case(rows, rows, 128, 96, jnp.bfloat16)
    poisoned = codes.at[5, 7].set(jnp.nan)
    found = np.asarray(tpu.block_scaled_linear(x, poisoned, scales.at[2, 1].set(255), interpret=True), np.float64)
    dead = np.isin(np.arange(96), [5, *range(64, 96)])
    assert np.isnan(found[:, dead]).all()
    assert_product(jnp.asarray(found[:, ~dead], jnp.bfloat16), expected[:, ~dead], jnp.bfloat16)


@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(1, 1280, 32_768), (64, 8192, 5120), (17, 288, 5120)])
def test_tpu_blocks_fit_the_models_shapes(rows, inputs, outputs):
    config = tpu.config_for(rows, inputs, outputs)
    assert inputs % config.inner == 0 and config.inner <= tpu.MOST_INNER and config.rows >= min(rows, 128)
    assert config.scale_rows == (rows <= 16)


def test_a_tpu_takes_the_kernel_for_few_rows_and_names_what_it_cannot_do():
    x, codes, scales, expected = linear_case(3, 200, 64, 64, jnp.bfloat16)
    with backend.use_target(backend.Target("tpu", "v5e")):
        taken = ["pallas_call" in str(jax.make_jaxpr(block_scaled_linear)(x[:n], codes, scales)) for n in (1, 128, 129)]
    assert taken == [True, True, False]
    with backend.use_target(backend.Target("tpu", "cpu", interpret=True)):
        run = jax.jit(functools.partial(block_scaled_linear, implementation="pallas"))
        assert_product(run(x[:9], codes, scales), expected[:9], jnp.bfloat16)
        with pytest.raises(KernelUnsupportedError, match="float32"):
            block_scaled_linear(x.astype(jnp.float32), codes, scales, implementation="pallas")
    assert "4160 inner dims" in tpu.unsupported(x, jax.ShapeDtypeStruct((32, 4160), jnp.uint8))

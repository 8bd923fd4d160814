"""Every implementation of `grouped_linear` against float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import backend
from pallas_kernels.backend import KernelUnsupportedError
from pallas_kernels.grouped_linear import grouped_linear, triton


def case(rows, groups, outputs, inputs, dtype=jnp.bfloat16):
    random = np.random.default_rng(rows)
    x = jnp.asarray(random.normal(size=(rows, groups, inputs)), dtype)
    weight = jnp.asarray(random.normal(size=(groups, outputs, inputs)), dtype)
    wanted = np.einsum("ngi,goi->ngo", np.asarray(x, np.float64), np.asarray(weight, np.float64))
    return x, weight, wanted.reshape(rows, groups * outputs)


def assert_product(parts, wanted):
    # A definition in bfloat16 has rounded its only part.
    relative = 2.0**-8 if parts.dtype == jnp.bfloat16 else 3e-6
    found = np.asarray(parts, np.float64).sum(axis=0)
    np.testing.assert_allclose(found, wanted, rtol=relative, atol=3e-6 * np.abs(wanted).max(initial=1))


@pytest.mark.parametrize("implementation", ["xla", "pallas"])
@pytest.mark.parametrize(("rows", "groups", "outputs", "inputs"), [(0, 2, 16, 32), (1, 2, 48, 32), (19, 3, 24, 144)])
def test_product_equals_float64(rows, groups, outputs, inputs, implementation):
    x, weight, wanted = case(rows, groups, outputs, inputs)
    assert_product(jax.jit(functools.partial(grouped_linear, implementation=implementation))(x, weight), wanted)


def test_rows_and_inner_dims_are_cut_among_programs():
    x, weight, wanted = case(21, 2, 40, 128)
    run = functools.partial(triton.grouped_linear, config=triton.Config(16, 16, 32, 2, 4, 1), interpret=True)
    parts = jax.jit(run)(x, weight)
    assert parts.shape == (2, 21, 80)
    assert_product(parts, wanted)
    poisoned = jax.jit(run)(x.at[3].set(jnp.nan), weight)
    np.testing.assert_array_equal(np.delete(poisoned, 3, axis=1), np.delete(parts, 3, axis=1))


@pytest.mark.parametrize("implementation", ["xla", "pallas"])
def test_one_layer_of_a_run_is_that_layer_alone(implementation):
    x, weight, _ = case(3, 2, 32, 32)
    stack = jnp.stack([jnp.full_like(weight, jnp.nan), weight])
    call = jax.jit(functools.partial(grouped_linear, implementation=implementation))
    np.testing.assert_array_equal(call(x, stack, layer=jnp.int32(1)), call(x, weight))


def test_float32_has_no_kernel_and_a_weight_must_fit():
    x, weight, wanted = case(3, 2, 32, 32, jnp.float32)
    assert_product(grouped_linear(x, weight), wanted)
    with pytest.raises(KernelUnsupportedError, match="bfloat16, not float32"):
        grouped_linear(x, weight, implementation="pallas")
    with pytest.raises(ValueError, match=r"with layer 0 got a weight \(2, 32, 32\)"):
        grouped_linear(x, weight, layer=0)


@pytest.mark.parametrize(("rows", "kernel"), [(1, True), (128, True), (129, False)])
def test_auto_takes_the_kernel_where_a_copy_of_the_weight_matters(rows, kernel):
    x, weight = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((rows, 8, 4096), (8, 1024, 4096)))
    with backend.use_target(backend.Target("triton", "cuda")):
        assert ("pallas_call" in str(jax.make_jaxpr(lambda *a: grouped_linear(*a))(x, weight))) == kernel


@pytest.mark.parametrize(("rows", "generation"), [(1, "cuda"), (64, "cuda"), (128, "cuda"), (64, "rocm")])
def test_splits_fill_the_device_with_equal_work(rows, generation):
    config = triton.config_for(rows, 8, 1024, 4096, generation)
    programs = 8 * 1024 // config.outputs * config.splits * -(-rows // config.rows)
    assert 250 <= programs <= 620 and 4096 % (config.inner * config.splits) == 0

"""Rounding points that survive compilation, and the norm's single rounding."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.rounding import round_to
from v41jax.layers.linear import product
from v41jax.layers.norm import rms_norm


def test_a_rounding_point_survives_compilation():
    """A plain cast does not: XLA drops a narrowing that is widened again in the same program."""
    x = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    rounded = jax.jit(lambda x: round_to(x * 3, jnp.bfloat16).astype(jnp.float32) * 2)(x)
    assert np.array_equal(rounded, (x * np.float32(3)).astype(ml_dtypes.bfloat16).astype(np.float32) * 2)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_rounding_to_the_own_dtype_changes_nothing(dtype):
    x = jnp.array([1.0, -0.0, 3.3895e38, jnp.nan], dtype)
    assert np.array_equal(np.asarray(round_to(x, dtype), np.float32), np.asarray(x, np.float32), equal_nan=True)


def test_norm_rounds_once():
    random = np.random.default_rng(1)
    x = random.standard_normal((64, 96)).astype(ml_dtypes.bfloat16)
    weight = random.standard_normal(96).astype(ml_dtypes.bfloat16)
    wide, w = x.astype(np.float64), weight.astype(np.float64)
    exact = w * wide / np.sqrt(np.mean(wide**2, axis=-1, keepdims=True) + 1e-20)
    got = np.asarray(jax.jit(lambda x, w: rms_norm(x, w, 1e-20))(x, weight), np.float64)
    wanted = exact.astype(ml_dtypes.bfloat16).astype(np.float64)
    # A float32 value may lie on the other side of a rounding midpoint than the exact one, and then nowhere else.
    assert np.mean(got == wanted) > 0.995
    assert np.abs(got - exact).max() <= np.abs(exact * 2.0**-8).max()


def test_norm_of_zeros_and_of_tiny_values():
    assert not np.any(rms_norm(jnp.zeros((1, 4)), jnp.ones(4), 1e-20))
    tiny = rms_norm(jnp.full((1, 4), 1e-9), jnp.ones(4), 1e-20)
    assert np.allclose(tiny, 1e-9 / np.sqrt(1e-18 + 1e-20), rtol=1e-6)


@pytest.mark.parametrize("dtypes", [("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "float32")])
def test_products_accumulate_in_float32(dtypes):
    random = np.random.default_rng(2)
    x, w = (jnp.asarray(random.standard_normal(shape), dtype) for shape, dtype in zip(((5, 700), (3, 700)), dtypes))
    exact = np.asarray(x, np.float64) @ np.asarray(w, np.float64).T
    assert np.abs(np.asarray(product(x, w)) - exact).max() < 1e-4

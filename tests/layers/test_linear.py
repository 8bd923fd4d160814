"""Matrix products of activations and weights."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from v41jax.layers.linear import product


@pytest.mark.parametrize("shape", [(1, 96), (96,), (3, 96), (2, 1, 96)])
def test_bfloat16_rows_alone_and_together_are_the_exact_product(shape: tuple[int, ...]) -> None:
    random = np.random.default_rng(1)
    x = jnp.asarray(random.normal(size=shape), jnp.bfloat16)
    weight = jnp.asarray(random.normal(size=(40, 96)), jnp.bfloat16)
    found = jax.jit(product)(x, weight)
    expected = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
    assert found.dtype == jnp.float32 and found.shape == (*shape[:-1], 40)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)

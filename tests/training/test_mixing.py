"""The kernel that differentiates stream mixes against the derivative of their definition."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.stream_mixes.xla import coefficients
from training.mixing import normalized


@pytest.mark.parametrize(("rows", "streams", "iterations"), [(37, 4, 4), (1, 2, 3), (64, 3, 1)])
def test_values_and_derivatives_are_those_of_the_definition(rows: int, streams: int, iterations: int) -> None:
    random = np.random.default_rng(rows)
    width = 2 * streams + streams**2
    logits = jnp.asarray(random.normal(0, 2, (rows, width)), jnp.float32)
    wanted = tuple(
        jnp.asarray(random.normal(size=shape), jnp.float32)
        for shape in ((rows, streams), (rows, streams), (rows, streams, streams))
    )

    def definition(z):
        zero, one = jnp.zeros(width, jnp.float32), jnp.ones(3, jnp.float32)
        return coefficients(z, zero, one, streams=streams, iterations=iterations, epsilon=1e-6)

    expected, reverse = jax.vjp(definition, logits)
    made, reverse_made = jax.vjp(lambda z: normalized(z, streams, iterations, 1e-6, True), logits)
    for one, other in zip(made, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-6)
    np.testing.assert_allclose(reverse_made(wanted)[0], reverse(wanted)[0], rtol=0, atol=2e-5)

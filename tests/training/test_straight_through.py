"""Codecs of training: the bits of the serving codecs, the derivative of the identity."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from training.straight_through import contract, fake_dense, fake_expert, fake_table, q4m, q4n, q8, quantize_dense
from v41jax import quantization_numpy as codecs


@pytest.mark.parametrize(
    ("made", "expected"),
    [(q8, codecs.fake_q8), (q4m, codecs.fake_q4m), (q4n, codecs.fake_q4n), (fake_table, codecs.fake_q8)],
)
def test_an_activation_format_is_the_serving_one_and_passes_gradients_through(made, expected) -> None:
    x = np.random.default_rng(0).normal(0, 3, (5, 64)).astype(np.float32)
    np.testing.assert_array_equal(np.asarray(made(jnp.asarray(x))), expected(x))
    slope = np.random.default_rng(1).normal(size=x.shape).astype(np.float32)
    gradient = jax.grad(lambda value: jnp.sum(made(value) * slope))(jnp.asarray(x))
    np.testing.assert_array_equal(np.asarray(gradient), slope)


def test_a_dense_weight_decodes_to_what_training_used() -> None:
    weight = np.random.default_rng(2).normal(0, 0.02, (64, 96)).astype(np.float32)
    weight[:32, :32] = 0
    codes, scales = (np.asarray(part) for part in quantize_dense(jnp.asarray(weight)))
    decoded = codecs.dequantize_dense(codes, scales)
    np.testing.assert_array_equal(np.asarray(jax.jit(fake_dense)(jnp.asarray(weight))), decoded)
    assert np.abs(decoded - weight).max() <= np.abs(weight).max() * 2**-4
    assert np.abs(decoded[32:] - weight[32:]).mean() < 0.03 * np.abs(weight[32:]).mean()


def test_an_expert_weight_keeps_half_a_step_of_four_bits() -> None:
    weight = np.random.default_rng(3).normal(0, 0.1, (2, 8, 32)).astype(np.float32)
    made = np.asarray(fake_expert(jnp.asarray(weight)))
    peak = np.abs(weight).max(axis=-1, keepdims=True)
    assert (np.abs(made - weight) <= peak / 3).all()
    np.testing.assert_array_equal(made, codecs.fake_q4m(weight))


def test_products_have_the_gradients_of_einsum() -> None:
    random = np.random.default_rng(4)
    left, right = (jnp.asarray(random.normal(size=shape), jnp.float32) for shape in ((2, 3, 5), (2, 4, 5)))

    def through(function):
        return jax.grad(lambda a, b: jnp.sum(jnp.sin(function("bqd,bkd->bqk", a, b))), argnums=(0, 1))(left, right)

    for made, expected in zip(through(contract), through(jnp.einsum)):
        np.testing.assert_allclose(made, expected, rtol=1e-5, atol=1e-6)

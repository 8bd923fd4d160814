"""Index queries as the scorer wants them: rotated, rounded to the activation dtype and to no quantizer's grid."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from v41jax.layers.indexer import IndexerWeights, index_queries
from v41jax.layers.linear import LinearWeight
from v41jax.layers.rope import RopeTable
from v41jax.layers.rows import Rows
from v41jax.presets import preset

TEXT = dataclasses.replace(
    preset("pico").text, index_n_heads=3, index_head_dim=32, qk_rope_head_dim=8, q_lora_rank=32, hidden_size=64
)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_queries_leave_the_quantizer_to_the_scorer(dtype):
    rng = np.random.default_rng(0)
    latent, normalized, wq_b, projection = (
        jnp.asarray(rng.normal(size=shape), dtype) for shape in ((5, 32), (5, 64), (96, 32), (3, 64))
    )
    angles = rng.uniform(0, 6, (5, 4)).astype(np.float32)
    table = RopeTable(jnp.cos(angles), jnp.sin(angles))
    zeros = jnp.zeros(5, jnp.int32)
    rows = Rows(zeros, zeros, *[zeros.astype(bool)] * 2, *[zeros] * 3, zeros.astype(bool), table, table)
    weights = IndexerWeights(LinearWeight(wq_b), projection)
    query, heads = index_queries(normalized, latent, weights, rows, 2, TEXT, "xla")

    exact = (np.asarray(latent, np.float64) @ np.asarray(wq_b, np.float64).T).reshape(5, 3, 32)
    pairs = exact[..., 24:].reshape(5, 3, 4, 2)
    turned = (pairs[..., 0] + 1j * pairs[..., 1]) * np.exp(1j * angles.astype(np.float64))[:, None]
    exact[..., 24:] = np.stack([turned.real, turned.imag], axis=-1).reshape(5, 3, 8)
    assert query.dtype == dtype
    tolerance = 2e-6 if dtype == jnp.float32 else 2e-2
    np.testing.assert_allclose(np.asarray(query, np.float64), exact, rtol=0, atol=tolerance * np.abs(exact).max())
    scale = np.asarray(normalized, np.float64) @ np.asarray(projection, np.float64).T / np.sqrt(32 * 3)
    np.testing.assert_allclose(np.asarray(heads, np.float64), scale, rtol=0, atol=tolerance * np.abs(scale).max())

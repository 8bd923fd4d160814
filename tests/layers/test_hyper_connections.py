"""Hyper-connection coefficients against the published vector, and the two mixing sums against loops."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from pallas_kernels.stream_mixes.xla import sinkhorn
from v41jax.layers.hyper_connections import Mixes, MixWeights, collapse, expand, mixes
from v41jax.presets import preset

TEXT = preset("v4.1-flash").text

PRE = [0.22270113, 0.62246037, 0.3775417, 0.7773009]
POST = [1.124353, 0.6416426, 1.4621172, 1.0]
COMBINATION = [
    [0.15266831, 0.4365122, 0.25814995, 0.15266852],
    [0.2581501, 0.04718636, 0.43651253, 0.25815004],
    [0.15266831, 0.4365122, 0.25814995, 0.15266852],
    [0.4365123, 0.07978829, 0.04718656, 0.43651193],
]


def test_coefficients_are_the_published_vector():
    z = (((7 * np.arange(24)) % 11) - 5) / 4
    # Streams of mean square one, and weights that read `z` off their first element.
    streams = jnp.ones((1, 4, 2), jnp.float32)
    fn = np.zeros((24, 8), np.float32)
    fn[:, 0] = z
    got = mixes(streams, MixWeights(jnp.asarray(fn), jnp.zeros(24), jnp.ones(3)), TEXT, "xla")
    assert np.allclose(got.pre[0], PRE, rtol=1e-6, atol=1e-7)
    assert np.allclose(got.post[0], POST, rtol=1e-6, atol=1e-7)
    assert np.allclose(got.combination[0], COMBINATION, rtol=1e-6, atol=1e-7)


def test_scale_and_base_apply_to_their_own_coefficients():
    random = np.random.default_rng(0)
    text = dataclasses.replace(TEXT, hc_sinkhorn_iters=3)
    streams = random.standard_normal((5, 3, 16)).astype(np.float32)
    fn, base, scale = (random.standard_normal(shape).astype(np.float32) for shape in ((15, 48), 15, 3))
    got = mixes(jnp.asarray(streams), MixWeights(fn, base, scale), text, "xla")
    flat = streams.reshape(5, -1).astype(np.float64)
    z = flat @ fn.T.astype(np.float64) / np.sqrt(np.mean(flat**2, axis=1, keepdims=True))
    assert np.allclose(got.pre, 1 / (1 + np.exp(-(z[:, :3] * scale[0] + base[:3]))) + 1e-6, atol=1e-5)
    assert np.allclose(got.post, 2 / (1 + np.exp(-(z[:, 3:6] * scale[1] + base[3:6]))), atol=1e-5)
    logits = (z[:, 6:] * scale[2] + base[6:]).reshape(5, 3, 3)
    assert np.allclose(got.combination, sinkhorn(jnp.asarray(logits, jnp.float32), 3, 1e-6), atol=1e-5)


def test_the_last_normalization_is_over_source_streams():
    matrix = np.asarray(sinkhorn(jnp.asarray(np.random.default_rng(1).standard_normal((1, 4, 4)) * 4), 1, 1e-6))
    assert np.allclose(matrix.sum(axis=1), 1, atol=1e-5)
    assert not np.allclose(matrix.sum(axis=2), 1, atol=1e-2)


def test_collapse_and_expand_are_the_sums_of_the_specification():
    random = np.random.default_rng(2)
    streams, output = random.standard_normal((2, 4, 8)), random.standard_normal((2, 8))
    pre, post, c = random.uniform(0, 1, (2, 4)), random.uniform(0, 2, (2, 4)), random.uniform(0, 1, (2, 4, 4))
    single = [np.asarray(x, np.float32) for x in (streams, output, pre, post, c)]
    got = collapse(jnp.asarray(single[0]), jnp.asarray(single[2]))
    assert np.allclose(got, sum(pre[:, i, None] * streams[:, i] for i in range(4)), atol=1e-6)
    got = np.asarray(expand(jnp.asarray(single[1]), jnp.asarray(single[0]), Mixes(None, *map(jnp.asarray, single[3:]))))
    for k in range(4):
        wanted = post[:, k, None] * output + sum(c[:, j, k, None] * streams[:, j] for j in range(4))
        assert np.allclose(got[:, k], wanted, atol=1e-6)


def test_collapse_of_the_first_pre_mix_is_stream_zero_bit_for_bit():
    streams = jnp.asarray(np.random.default_rng(3).standard_normal((4, 4, 8)), jnp.bfloat16)
    first = jnp.zeros((4, 4)).at[:, 0].set(1.0)
    assert np.array_equal(np.asarray(collapse(streams, first), np.float32), np.asarray(streams[:, 0], np.float32))

"""The Engram gate against the published fixture, and rows that must not change."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from v41jax.layers.engram import EngramWeights, embed_rows, engram, gates
from v41jax.layers.linear import LinearWeight
from v41jax.precision import Precision
from v41jax.presets import preset

STREAMS = np.array([[[1, -2, 0.5, 3], [0.25, 0.5, -1, 2]]], np.float32)
WEIGHTS = EngramWeights(
    wkv=None,
    q_weight=jnp.array([[1, 1, 1, 1], [0.5, 2, 1, 1]], jnp.float32),
    k_weight=jnp.array([[1, 0.5, 1, 1], [1, 1, -1, 1]], jnp.float32),
)
KEYS = np.array([[[0.5, 1, -1, 2], [2, 0, 1, -0.5]]], np.float32)
VALUE = np.array([1, -1, 0.5, 2], np.float32)
GATES = [0.7367959327, 0.5763225376]
OUTPUT = [[1.7367959, -2.7367959, 0.8683980, 4.4735919], [0.8263225, -0.0763225, -0.7118387, 3.1526451]]
TEXT = dataclasses.replace(preset("v4.1-flash").text, hc_mult=2)


def test_gates_are_the_published_fixture():
    assert np.allclose(gates(jnp.asarray(STREAMS), jnp.asarray(KEYS), WEIGHTS, 1e-20)[0], GATES, rtol=1e-6)


def test_a_zero_dot_keeps_the_gate_off_a_half():
    zero = gates(jnp.asarray(STREAMS), jnp.zeros_like(KEYS), WEIGHTS, 1e-20)
    assert np.allclose(zero, 1 / (1 + np.exp(-0.001)), rtol=1e-7)


def updated(rows: list[bool]) -> np.ndarray:
    """The fixture's update through `engram`, with a projection that gives its keys and value."""
    projection = jnp.asarray(np.concatenate([KEYS.reshape(-1), VALUE])[:, None])
    weights = WEIGHTS._replace(wkv=LinearWeight(projection))
    streams = jnp.asarray(np.repeat(STREAMS, len(rows), axis=0))
    precision = Precision(jnp.float32, activation_quantization=False)
    ones = jnp.ones((len(rows), 1))
    return np.asarray(engram(streams, ones, jnp.array(rows), weights, text=TEXT, precision=precision, kernels="auto"))


def test_the_update_is_the_published_fixture_and_leaves_dead_rows_alone():
    got = updated([True, False])
    assert np.allclose(got[0], OUTPUT, rtol=1e-6)
    assert np.array_equal(got[1], STREAMS[0])


def test_rows_are_dequantized_in_column_order():
    codes = np.zeros((1, 2, 32), np.uint8)
    codes[0, 0, 0], codes[0, 0, 1], codes[0, 1, 31] = 0x38, 0xC4, 0x7E
    scales = np.array([[[127], [128]]], np.uint8)
    row = np.asarray(embed_rows(jnp.asarray(codes), jnp.asarray(scales), jnp.float32))[0]
    assert (row[0], row[1], row[63]) == (1, -3, 896) and not row[2:63].any()

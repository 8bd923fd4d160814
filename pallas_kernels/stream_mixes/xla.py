"""The definition of `stream_mixes`."""

from __future__ import annotations

import jax
import jax.numpy as jnp

Array = jax.Array


def stream_mixes(
    z: Array, base: Array, scale: Array, *, streams: int, iterations: int, epsilon: float
) -> tuple[Array, Array, Array]:
    """See `pallas_kernels.stream_mixes`."""
    pre = jax.nn.sigmoid(z[:, :streams] * scale[0] + base[:streams]) + epsilon
    post = 2.0 * jax.nn.sigmoid(z[:, streams : 2 * streams] * scale[1] + base[streams : 2 * streams])
    logits = (z[:, 2 * streams :] * scale[2] + base[2 * streams :]).reshape(-1, streams, streams)
    return pre, post, sinkhorn(logits, iterations, epsilon)


def sinkhorn(logits: Array, iterations: int, epsilon: float) -> Array:
    """Alternating normalization of [N, S, S] to row and column sums of one; the last pass is over columns."""
    matrix = jax.nn.softmax(logits, axis=-1) + epsilon

    def columns(value: Array) -> Array:
        return value / (jnp.sum(value, axis=-2, keepdims=True) + epsilon)

    def step(_: int, value: Array) -> Array:
        return columns(value / (jnp.sum(value, axis=-1, keepdims=True) + epsilon))

    return jax.lax.fori_loop(0, iterations - 1, step, columns(matrix))

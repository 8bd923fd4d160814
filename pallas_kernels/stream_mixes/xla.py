"""The definition of `stream_mixes`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

Array = jax.Array


def stream_mixes(
    streams: Array,
    fn: Array,
    base: Array,
    scale: Array,
    *,
    iterations: int,
    epsilon: float,
    norm_epsilon: float,
) -> tuple[Array, Array, Array]:
    """See `pallas_kernels.stream_mixes`; the weights are one layer's."""
    z = projections(streams, fn, norm_epsilon)
    return coefficients(z, base, scale, streams=streams.shape[1], iterations=iterations, epsilon=epsilon)


def projections(streams: Array, fn: Array, norm_epsilon: float) -> Array:
    """What the coefficients are made of: streams [N, S, D], normalized over all of them -> [N, 2 S + S^2] float32."""
    rows, count, width = streams.shape
    flat = streams.reshape(rows, count * width).astype(jnp.float32)
    norm = lax.rsqrt(jnp.mean(jnp.square(flat), axis=-1, keepdims=True) + norm_epsilon)
    product = lax.dot_general(
        flat,
        fn.astype(jnp.float32),
        (((1,), (1,)), ((), ())),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    return product * norm


def coefficients(
    z: Array, base: Array, scale: Array, *, streams: int, iterations: int, epsilon: float
) -> tuple[Array, Array, Array]:
    """pre, post and combination of normalized projections z [N, 2 S + S^2]."""
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

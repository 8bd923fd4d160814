"""Single-pass (delayed) hyper-connections: how `S` residual streams feed a sublayer and take its output back.

`post` and `combination` are used by the sublayer that computed them, `pre` by the next one. Everything here is
float32 between the roundings of `collapse` and `expand`.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.rounding import round_to
from v41jax.config import TextConfig
from v41jax.layers.linear import product

Array = jax.Array


class MixWeights(NamedTuple):
    """Weights of one sublayer's mixes, float32 and never narrowed.

    Attributes:
      fn: [2 S + S^2, S D], rows of pre, post and combination.
      base: [2 S + S^2].
      scale: [3], of pre, post and combination.
    """

    fn: Array
    base: Array
    scale: Array


class Mixes(NamedTuple):
    """Coefficients of one sublayer, float32.

    Attributes:
      pre: [N, S], weights of the next sublayer's input.
      post: [N, S], weight of this sublayer's output in each stream.
      combination: [N, S, S], from source stream (first) to destination stream (second).
    """

    pre: Array
    post: Array
    combination: Array


def mixes(streams: Array, weights: MixWeights, text: TextConfig) -> Mixes:
    """Coefficients from the current streams, [N, S, D] (model specification, "Single-pass (delayed) mHC")."""
    rows, count, _ = streams.shape
    flat = streams.reshape(rows, -1)
    norm = jax.lax.rsqrt(jnp.mean(jnp.square(flat.astype(jnp.float32)), axis=-1, keepdims=True) + text.rms_norm_eps)
    z = product(flat, weights.fn) * norm
    scale, base = weights.scale, weights.base
    pre = jax.nn.sigmoid(z[:, :count] * scale[0] + base[:count]) + text.hc_eps
    post = 2.0 * jax.nn.sigmoid(z[:, count : 2 * count] * scale[1] + base[count : 2 * count])
    logits = (z[:, 2 * count :] * scale[2] + base[2 * count :]).reshape(rows, count, count)
    return Mixes(pre, post, sinkhorn(logits, text.hc_sinkhorn_iters, text.hc_eps))


def sinkhorn(logits: Array, iterations: int, epsilon: float) -> Array:
    """Alternating normalization of [N, S, S] to row and column sums of one.

    The softmax and the first column pass count as the first iteration; the last pass is over columns.
    """
    matrix = jax.nn.softmax(logits, axis=-1) + epsilon

    def columns(value: Array) -> Array:
        return value / (jnp.sum(value, axis=-2, keepdims=True) + epsilon)

    def step(_: int, value: Array) -> Array:
        return columns(value / (jnp.sum(value, axis=-1, keepdims=True) + epsilon))

    return jax.lax.fori_loop(0, iterations - 1, step, columns(matrix))


def collapse(streams: Array, pre_mix: Array) -> Array:
    """Weighted sum of the residual streams, the input of the next sublayer.

    Args:
      streams: [N, S, D] activation dtype.
      pre_mix: weights from the previous sublayer, [N, S] float32.

    Returns:
      [N, D] activation dtype; the sum is float32 and rounded once.
    """
    return round_to(jnp.sum(streams.astype(jnp.float32) * pre_mix[:, :, None], axis=1), streams.dtype)


def expand(output: Array, streams: Array, coefficients: Mixes) -> Array:
    """Streams after a sublayer.

    Args:
      output: [N, D] activation dtype, what the sublayer returned.
      streams: [N, S, D] activation dtype, from before the sublayer.
      coefficients: of this sublayer.

    Returns:
      [N, S, D] activation dtype; one rounding.
    """
    residual = streams.astype(jnp.float32)
    # Multiply and add, not a matrix unit: S is tiny and a reduced-precision pass would lose the streams.
    kept = jnp.sum(coefficients.combination[:, :, :, None] * residual[:, :, None, :], axis=1)
    added = coefficients.post[:, :, None] * output.astype(jnp.float32)[:, None, :]
    return round_to(added + kept, streams.dtype)

"""Single-pass (delayed) hyper-connections: how `S` residual streams feed a sublayer and take its output back.

`post` and `combination` are used by the sublayer that computed them, `pre` by the next one. Everything here is
float32 between the roundings of `collapse` and `expand`.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.rounding import round_to
from pallas_kernels.stream_mixes import stream_mixes
from v41jax.config import TextConfig

Array = jax.Array


class MixWeights(NamedTuple):
    """Weights of one sublayer's mixes, float32 and never narrowed.

    Attributes:
      fn: [2 S + S^2, S D], rows of pre, post and combination.
      base: [2 S + S^2].
      scale: [3], of pre, post and combination.
      layer: int32 scalar, which layer of its run this is, where the arrays still hold the whole run, [layers, ...];
        None when they hold one layer.
    """

    fn: Array
    base: Array
    scale: Array
    layer: Array | None = None


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


def mixes(streams: Array, weights: MixWeights, text: TextConfig, kernels: str) -> Mixes:
    """Coefficients from the current streams, [N, S, D] (model specification, "Single-pass (delayed) mHC").

    Args:
      streams: [N, S, D] activation dtype.
      weights: of the sublayer.
      text: configuration.
      kernels: implementation of the operation.
    """
    return Mixes(
        *stream_mixes(
            streams,
            weights.fn,
            weights.base,
            weights.scale,
            layer=weights.layer,
            iterations=text.hc_sinkhorn_iters,
            epsilon=text.hc_eps,
            norm_epsilon=text.rms_norm_eps,
            implementation=kernels,
        )
    )


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

"""Single-pass (delayed) hyper-connections: how `S` residual streams feed a sublayer and take its output back.

`post` and `combination` are used by the sublayer that computed them, `pre` by the next one. Everything here is
float32 between the roundings of `collapse` and `expand`. `collapse` is defined where its kernel is.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.grouped_experts import Order
from pallas_kernels.quantized_rows import QuantizedRows, collapsed_rows
from pallas_kernels.quantized_rows.xla import collapse
from pallas_kernels.rounding import round_to
from pallas_kernels.stream_mixes import stream_mixes
from v41jax.config import TextConfig
from v41jax.layers.stacks import OfRun, stack_and_layer
from v41jax.precision import Precision

__all__ = ["MixWeights", "Mixes", "collapse", "expand", "mixes", "sublayer_input"]

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


def mixes(
    streams: Array, weights: MixWeights, text: TextConfig, kernels: str, *, after: QuantizedRows | None = None
) -> Mixes:
    """Coefficients from the current streams, [N, S, D] (model specification, "Single-pass (delayed) mHC").

    Args:
      streams: [N, S, D] activation dtype.
      weights: of the sublayer.
      text: configuration.
      kernels: implementation of the operation.
      after: rows that are made before, where the coefficients are kernels: they are used when the sublayer has ended,
        and should start at no moment at which a kernel does that others wait for.
    """
    return Mixes(
        *stream_mixes(
            streams,
            weights.fn,
            weights.base,
            weights.scale,
            layer=weights.layer,
            after=None if after is None else after.rounded,
            iterations=text.hc_sinkhorn_iters,
            epsilon=text.hc_eps,
            norm_epsilon=text.rms_norm_eps,
            implementation=kernels,
        )
    )


def sublayer_input(
    streams: Array,
    pre_mix: Array,
    norm: Array | OfRun,
    text: TextConfig,
    precision: Precision,
    kernels: str,
    *,
    codes: Order | None = None,
) -> QuantizedRows:
    """The collapsed and normalized streams, what a sublayer reads.

    Args:
      streams: [N, S, D] activation dtype.
      pre_mix: weights from the previous sublayer, [N, S] float32.
      norm: [D], of the sublayer.
      text: configuration.
      precision: rounding choices.
      kernels: implementation of the operation.
      codes: order of the codes of the routed experts among the readers, see `moe.codes_read`.
    """
    weight, layer = stack_and_layer(norm)
    return collapsed_rows(
        streams,
        pre_mix,
        weight,
        layer=layer,
        epsilon=text.rms_norm_eps,
        quantize=precision.activation_quantization,
        codes=codes,
        implementation=kernels,
    )


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

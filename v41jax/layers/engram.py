"""The device half of the Engram: gathered table rows become a gated update of every residual stream.

Which rows a token reads is decided on the host; the codes arrive as they are stored.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.rounding import round_to
from v41jax.config import TextConfig
from v41jax.layers.linear import LinearWeight, linear, quantize_input
from v41jax.precision import Precision
from v41jax.quantization import dequantize_rows

Array = jax.Array


class EngramWeights(NamedTuple):
    """Weights of one Engram layer; the table itself stays on the host.

    Attributes:
      wkv: [(S + 1) D, columns * head_dim]; S stream keys, then the value.
      q_weight: [S, D].
      k_weight: [S, D].
    """

    wkv: LinearWeight
    q_weight: Array
    k_weight: Array


def embed_rows(codes: Array, scales: Array, dtype: jnp.dtype) -> Array:
    """Table rows as the layer reads them.

    Args:
      codes: [N, columns, head_dim] uint8 E4M3 codes.
      scales: [N, columns, head_dim / 32] uint8 E8M0 codes.
      dtype: activation dtype; the values are exact in bfloat16.

    Returns:
      [N, columns * head_dim].
    """
    return dequantize_rows(codes, scales).astype(dtype).reshape(codes.shape[0], -1)


def gates(streams: Array, keys: Array, weights: EngramWeights, epsilon: float) -> Array:
    """Gate of every stream (engram specification, "Layer arithmetic").

    Args:
      streams: [N, S, D].
      keys: [N, S, D].
      weights: of the layer.
      epsilon: added to the mean squares.

    Returns:
      [N, S] float32.
    """
    h = streams.astype(jnp.float32)
    k = keys.astype(jnp.float32)
    product = weights.q_weight.astype(jnp.float32) * weights.k_weight.astype(jnp.float32)
    norm_h = jax.lax.rsqrt(jnp.mean(jnp.square(h), axis=-1) + epsilon)
    norm_k = jax.lax.rsqrt(jnp.mean(jnp.square(k), axis=-1) + epsilon)
    dot = jnp.sum(h * product * k, axis=-1) * (norm_h * norm_k) * h.shape[-1] ** -0.5
    return jax.nn.sigmoid(jnp.copysign(jnp.sqrt(jnp.maximum(jnp.abs(dot), 1e-6)), dot))


def engram(
    streams: Array,
    embedded: Array,
    engram_rows: Array,
    weights: EngramWeights,
    *,
    text: TextConfig,
    precision: Precision,
    kernels: str,
) -> Array:
    """Adds the gated value to every stream, before the layer computes its mixes.

    Args:
      streams: [N, S, D] activation dtype.
      embedded: [N, columns * head_dim] activation dtype.
      engram_rows: [N] bool; other rows (image spans, padding) keep their streams bit for bit.
      weights: of the layer.
      text: configuration.
      precision: rounding choices.
      kernels: implementation of the linear.

    Returns:
      [N, S, D] activation dtype; one rounding.
    """
    rows, count, width = streams.shape
    projected = linear(quantize_input(embedded, precision), weights.wkv, kernels)
    keys = projected[:, : count * width].reshape(rows, count, width)
    value = projected[:, count * width :].astype(jnp.float32)
    gate = gates(streams, keys, weights, text.rms_norm_eps)
    updated = round_to(streams.astype(jnp.float32) + gate[:, :, None] * value[:, None, :], streams.dtype)
    return jnp.where(engram_rows[:, None, None], updated, streams)

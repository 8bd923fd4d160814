"""The definitions of `quantized_rows`, and the layer arithmetic they are made of."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.arithmetic import swiglu
from pallas_kernels.quantized_rows.types import QuantizedRows
from pallas_kernels.rounding import round_to
from v41jax.quantization import fake_q8

Array = jax.Array


def collapse(streams: Array, pre_mix: Array) -> Array:
    """Weighted sum of the residual streams, the input of the next sublayer.

    Args:
      streams: [N, S, D] activation dtype.
      pre_mix: weights from the previous sublayer, [N, S] float32.

    Returns:
      [N, D] activation dtype; the sum is float32 and rounded once.
    """
    return round_to(jnp.sum(streams.astype(jnp.float32) * pre_mix[:, :, None], axis=1), streams.dtype)


def rms_norm(x: Array, weight: Array, epsilon: float) -> Array:
    """Normalizes the last axis (model specification, "RMSNorm").

    Args:
      x: [..., K] activation dtype.
      weight: [K], any float dtype, multiplied in float32.
      epsilon: added to the mean square (`rms_norm_eps`, 1e-20 in the release).

    Returns:
      [..., K] in the dtype of `x`; everything before the last cast is float32.
    """
    value = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(value), axis=-1, keepdims=True) + epsilon)
    return round_to(weight.astype(jnp.float32) * (value * scale), x.dtype)


def summed(parts: Array, dtype: jnp.dtype) -> Array:
    """[P, N, K] parts of a product -> [N, K] of `dtype`, rounded once."""
    return round_to(parts[0] if len(parts) == 1 else jnp.sum(parts, axis=0), dtype)


def collapsed_rows(streams: Array, pre_mix: Array, weight: Array, *, epsilon: float, quantize: bool) -> QuantizedRows:
    """See `pallas_kernels.quantized_rows`."""
    return _quantized(rms_norm(collapse(streams, pre_mix), weight, epsilon), quantize)


def normalized_rows(parts: Array, weight: Array, *, epsilon: float, quantize: bool, dtype: jnp.dtype) -> QuantizedRows:
    """See `pallas_kernels.quantized_rows`."""
    return _quantized(rms_norm(summed(parts, dtype), weight, epsilon), quantize)


def summed_rows(parts: Array, *, quantize: bool, dtype: jnp.dtype) -> QuantizedRows:
    """See `pallas_kernels.quantized_rows`."""
    return _quantized(summed(parts, dtype), quantize)


def gated_rows(gate: Array, up: Array, *, limit: float, quantize: bool, dtype: jnp.dtype) -> QuantizedRows:
    """See `pallas_kernels.quantized_rows`."""
    return _quantized(round_to(swiglu(summed(gate, dtype), summed(up, dtype), limit), dtype), quantize)


def _quantized(rows: Array, quantize: bool) -> QuantizedRows:
    return QuantizedRows(rows, fake_q8(rows) if quantize else rows)

"""The inputs of linears: a row is summed, normalized or gated, rounded, and quantized, in one launch on a GPU.

Four calls for the places where a layer makes such rows. To XLA each is two to four fusions around its
reductions; at few rows a fusion takes less time than its launch. There is no TPU kernel: XLA's fusions have no cost
of a launch there and move each row once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import backend
from pallas_kernels.grouped_experts.types import Order
from pallas_kernels.quantized_rows import triton, xla
from pallas_kernels.quantized_rows.types import QuantizedRows

__all__ = ["QuantizedRows", "collapsed_rows", "gated_rows", "normalized_rows", "summed_rows"]

Array = jax.Array


def collapsed_rows(
    streams: Array,
    pre_mix: Array,
    weight: Array,
    *,
    epsilon: float,
    quantize: bool,
    layer: Array | int | None = None,
    codes: Order | None = None,
    implementation: str = "auto",
) -> QuantizedRows:
    """rms_norm(sum over streams of pre_mix * stream), the input of a sublayer.

    Args:
      streams: [N, S, D] activation dtype.
      pre_mix: [N, S] float32.
      weight: [D] of the norm, any float dtype.
      epsilon: of the norm.
      quantize: apply Q8.
      layer: int32 scalar or int; weight then is [layers, D], read in place by the GPU kernel.
      codes: order of the codes of the routed experts that read these rows too; None where none do.
      implementation: "auto", "xla" or "pallas".

    Returns:
      The rows; the sum is rounded to the activation dtype, then the normalized row, then Q8. The kernel adds squares
      up in another order than XLA, which can move a rounding.

    Raises:
      ValueError: shapes that do not fit each other, a width that Q8 does not divide, an unknown implementation.
      KernelUnsupportedError: "pallas" where no kernel runs.

    Sources: model specification, "Single-pass (delayed) mHC", "RMSNorm", "The three activation formats".
    """
    width = streams.shape[-1]
    if pre_mix.shape != streams.shape[:2]:
        raise ValueError(f"collapsed_rows of streams {streams.shape} needs pre_mix [N, S]; got {pre_mix.shape}")
    _check_weight("collapsed_rows", weight, width, layer)
    kernel = _kernel(streams.shape[0], width, quantize, implementation)
    options = {"epsilon": epsilon, "quantize": quantize}
    if kernel is not None:
        return kernel(triton.collapsed_rows)(streams, pre_mix, weight, layer, codes=codes, **options)
    return xla.collapsed_rows(streams, pre_mix, _of_layer(weight, layer), **options)


def normalized_rows(
    parts: Array,
    weight: Array,
    *,
    epsilon: float,
    quantize: bool,
    dtype: jax.typing.DTypeLike,
    layer: Array | int | None = None,
    implementation: str = "auto",
) -> QuantizedRows:
    """rms_norm(product), the latent between two linears.

    Args:
      parts: [P, N, K], what `block_scaled_parts` gives.
      weight: [K] of the norm, any float dtype.
      epsilon: of the norm.
      quantize: apply Q8.
      dtype: activation dtype, to which the sum of the parts is rounded first.
      layer: int32 scalar or int; weight then is [layers, K].
      implementation: "auto", "xla" or "pallas".

    Returns, Raises: as of `collapsed_rows`.
    """
    width = parts.shape[-1]
    _check_weight("normalized_rows", weight, width, layer)
    kernel = _kernel(parts.shape[1], width, quantize, implementation)
    options = {"epsilon": epsilon, "quantize": quantize, "dtype": jnp.dtype(dtype)}
    if kernel is not None:
        return kernel(triton.normalized_rows)(parts, weight, layer, **options)
    return xla.normalized_rows(parts, _of_layer(weight, layer), **options)


def summed_rows(
    parts: Array, *, quantize: bool, dtype: jax.typing.DTypeLike, implementation: str = "auto"
) -> QuantizedRows:
    """A product as it is, between two linears.

    Args:
      parts: [P, N, K], what `grouped_linear` or `block_scaled_parts` gives.
      quantize: apply Q8.
      dtype: activation dtype, to which the sum of the parts is rounded.
      implementation: "auto", "xla" or "pallas".

    Returns, Raises: as of `collapsed_rows`.
    """
    # One part has nothing to be summed, and to quantize and reorder it is a launch or two of XLA's.
    kernel = _kernel(parts.shape[1], parts.shape[2], quantize, implementation, len(parts) > 1)
    options = {"quantize": quantize, "dtype": jnp.dtype(dtype)}
    if kernel is not None:
        return kernel(triton.summed_rows)(parts, **options)
    return xla.summed_rows(parts, **options)


def gated_rows(
    gate: Array,
    up: Array,
    *,
    limit: float,
    quantize: bool,
    dtype: jax.typing.DTypeLike,
    implementation: str = "auto",
) -> QuantizedRows:
    """silu(min(gate, limit)) * clip(up, -limit, limit), the hidden rows of an expert.

    Args:
      gate, up: [P, N, K] and [Q, N, K], what `block_scaled_parts` gives.
      limit: of the clamps; <= 0 for none.
      quantize: apply Q8.
      dtype: activation dtype, to which both products and then the result are rounded.
      implementation: "auto", "xla" or "pallas".

    Returns, Raises: as of `collapsed_rows`. Source: model specification, "MoE".
    """
    if gate.shape[1:] != up.shape[1:]:
        raise ValueError(f"gated_rows needs gate and up of the same rows; got {gate.shape} and {up.shape}")
    kernel = _kernel(gate.shape[1], gate.shape[2], quantize, implementation)
    options = {"limit": limit, "quantize": quantize, "dtype": jnp.dtype(dtype)}
    if kernel is not None:
        return kernel(triton.gated_rows)(gate, up, **options)
    return xla.gated_rows(gate, up, **options)


def _kernel(
    rows: int, width: int, quantize: bool, implementation: str, worthwhile: bool = True
) -> Callable[..., Callable] | None:
    """What makes a kernel of the GPU route ready to be called, or None for XLA."""
    if implementation == "pallas" and backend.current_target().route == "tpu":
        # Asking for kernels is no error where none is wanted.
        implementation = "auto"
    candidate = backend.Candidate(triton.unsupported(width, quantize), worthwhile and triton.preferred(rows))
    choice = backend.choose("quantized_rows", implementation, {"triton": candidate})
    if choice.implementation != "triton" or not rows:
        return None
    return lambda function: functools.partial(function, interpret=choice.interpret)


def _check_weight(operation: str, weight: Array, width: int, layer: Array | int | None) -> None:
    if weight.shape[-1] != width or weight.ndim != 1 + (layer is not None):
        raise ValueError(f"{operation} of rows of {width} with layer {layer} got a weight {weight.shape}")


def _of_layer(weight: Array, layer: Array | int | None) -> Array:
    return weight if layer is None else lax.dynamic_index_in_dim(weight, layer, keepdims=False)

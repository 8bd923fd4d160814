"""Linear layer over a weight stored as E4M3 codes with one E8M0 scale per 32 x 32 block."""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jax import lax

from pallas_kernels import backend
from pallas_kernels.block_scaled_linear import tpu, triton, xla

__all__ = ["block_scaled_linear", "block_scaled_parts"]

Array = jax.Array


def block_scaled_linear(
    x: Array,
    codes: Array,
    scales: Array,
    *,
    layer: Array | int | None = None,
    lanes: Array | None = None,
    implementation: str = "auto",
) -> Array:
    """y = x @ dequantized(codes, scales).T, widened inside the product.

    The caller has fake-quantized `x` (Q8) where the model does; its values are then exact in bfloat16, as is every
    widened weight, so this differs from a product of codes only in summation order. Sources: model specification,
    "Quantized GEMM" and "Equivalence that makes JAX easy".

    Args:
      x: [N, K] activation dtype (bfloat16 or float32).
      codes: [O, K] float8_e4m3fn, or uint8 holding the same codes.
      scales: [O / 32, K / 32] uint8 E8M0 codes.
      layer: int32 scalar or int; codes and scales then have one more leading axis, layers, and the GPU kernel reads
        this one in place, without a copy of it.
      lanes: x in the order of the GPU kernel of few rows, where that exists already (`QuantizedRows.lanes`); no other
        implementation reads it.
      implementation: "auto", "xla" or "pallas".

    Returns:
      [N, O] activation dtype, accumulated in float32 and rounded once. A NaN code or scale 255 makes its outputs NaN.

    Raises:
      ValueError: where shapes do not fit each other, or for an unknown implementation.
      KernelUnsupportedError: "pallas" where no kernel runs.
    """
    [product] = _products(x, [(codes, scales)], layer, lanes, False, implementation)
    return product


def block_scaled_parts(
    x: Array,
    weights: Sequence[tuple[Array, Array]],
    *,
    layer: Array | int | None = None,
    lanes: Array | None = None,
    implementation: str = "auto",
) -> tuple[Array, ...]:
    """`block_scaled_linear` with each of several weights of one shape, before its last sum.

    On a GPU few rows take one launch for all weights. It cuts the inner dimension among programs. A consumer that is a
    kernel itself (`quantized_rows`) adds the parts up on its way.

    Args:
      x, layer, lanes, implementation: as of `block_scaled_linear`.
      weights: codes and scales of each.

    Returns:
      [P, N, O] of each, whose float32 sum over P rounded to the activation dtype is the product; where P is 1 it may be
      rounded already.

    Raises:
      As `block_scaled_linear`.
    """
    return _products(x, weights, layer, lanes, True, implementation)


def _products(
    x: Array,
    weights: Sequence[tuple[Array, Array]],
    layer: Array | int | None,
    lanes: Array | None,
    parts: bool,
    implementation: str,
) -> tuple[Array, ...]:
    for codes, scales in weights:
        _check(x, codes, scales, layer)
    codes = weights[0][0]
    if any(other.shape != codes.shape for other, _ in weights):
        raise ValueError(f"weights of one launch need one shape; got {[other.shape for other, _ in weights]}")
    outputs, inputs = codes.shape[-2:]
    choice = backend.choose(
        "block_scaled_linear",
        implementation,
        {
            "triton": backend.Candidate(
                triton.unsupported(x, codes),
                triton.preferred(x.shape[0], outputs * inputs, backend.current_target().generation),
            ),
            "tpu": backend.Candidate(tpu.unsupported(x, codes), tpu.preferred(x.shape[0])),
        },
    )
    if choice.implementation == "triton":
        return triton.block_scaled_linears(x, weights, layer, lanes, parts=parts, interpret=choice.interpret)

    def product(codes: Array, scales: Array) -> Array:
        if layer is not None:
            codes, scales = (lax.dynamic_index_in_dim(part, layer, keepdims=False) for part in (codes, scales))
        if choice.implementation == "tpu":
            return tpu.block_scaled_linear(x, codes, scales, interpret=choice.interpret)
        return xla.block_scaled_linear(x, codes, scales)

    products = tuple(product(codes, scales) for codes, scales in weights)
    return tuple(value[None] for value in products) if parts else products


def _check(x: Array, codes: Array, scales: Array, layer: Array | int | None) -> None:
    *stack, outputs, inputs = codes.shape
    stacked = layer is not None
    if len(stack) != stacked or scales.shape[:-2] != tuple(stack):
        raise ValueError(
            f"block_scaled_linear needs codes and scales with {'one leading axis' if stacked else 'no leading axes'} "
            f"as layer is {layer}; got codes {codes.shape}, scales {scales.shape}"
        )
    if x.shape[-1] != inputs or scales.shape[-2:] != (outputs // 32, inputs // 32) or outputs % 32 or inputs % 32:
        raise ValueError(
            f"block_scaled_linear needs x [N, K], codes [O, K], scales [O/32, K/32] with O and K multiples of 32; "
            f"got x {x.shape}, codes {codes.shape}, scales {scales.shape}"
        )

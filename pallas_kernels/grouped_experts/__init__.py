"""The routed experts of one layer: clamped SwiGLU experts over the rows that chose them, summed per row."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import backend
from pallas_kernels.grouped_experts import dense, tpu, triton, xla
from pallas_kernels.grouped_experts.types import ExpertWeights

__all__ = ["ExpertWeights", "grouped_experts"]

Array = jax.Array


def grouped_experts(
    x: Array,
    expert_ids: Array,
    weights: Array,
    w1: ExpertWeights | Array,
    w3: ExpertWeights | Array,
    w2: ExpertWeights | Array,
    *,
    swiglu_limit: float,
    quantize_hidden: bool,
    valid: Array,
    layer: Array | int | None = None,
    implementation: str = "auto",
) -> Array:
    """y[n] = sum over the chosen experts e, ascending, of w2_e(Q8(round(weight * swiglu(w1_e x, w3_e x)))).

    Sources: model specification, "MoE" and "Quantized GEMM"; kernel chapter, "FP8 block-scaled linear and MXFP4
    grouped GEMM".

    Letters: N rows, k experts per row, E experts held here, D model width, F expert width.

    Args:
      x: [N, D] activation dtype, already fake-quantized (Q8) where the model does.
      expert_ids: [N, k] int32. Ids outside 0 .. E - 1 contribute nothing, which is how a shard that holds some of the
        experts passes ids relative to its first one. The ids of a row are distinct.
      weights: [N, k] float32 routing weights, multiplied into the hidden values before they are rounded.
      w1, w3: gate and up matrices, [E, F, D] of any float dtype, or `ExpertWeights` of that logical shape.
      w2: down matrices, [E, D, F], likewise.
      swiglu_limit: upper clamp of the gate and two-sided clamp of the up value; <= 0 for no clamp.
      quantize_hidden: fake-quantize (Q8) the hidden values after their rounding to the activation dtype.
      valid: [N] bool; rows that are False read no expert and give zeros.
      layer: int32 scalar or int; w1, w3 and w2 then have one more leading axis, layers, and this one is read in place,
        without a copy of its matrices.
      implementation: "auto", "xla" or "pallas".

    Returns:
      [N, D] float32. Gate, up and down products are each rounded to the activation dtype; the sum over experts is
      float32 in ascending expert id. A row's result does not depend on the other rows beyond float32 summation
      order.

    Raises:
      ValueError: for an unknown implementation.
      KernelUnsupportedError: "pallas" where no kernel runs.
    """
    choice = backend.choose(
        "grouped_experts",
        implementation,
        {
            "triton": backend.Candidate(triton.unsupported(x, w1, w2)),
            "tpu": backend.Candidate(tpu.unsupported(x, w1, w2)),
        },
    )
    options = {"swiglu_limit": swiglu_limit, "quantize_hidden": quantize_hidden, "valid": valid}
    widened = not isinstance(w1, ExpertWeights)
    if choice.implementation == "xla" and widened and dense.pays(*expert_ids.shape, w1.shape[-3]):
        matrices = [w if layer is None else lax.dynamic_index_in_dim(w, layer, keepdims=False) for w in (w1, w3, w2)]
        return dense.grouped_experts(x, expert_ids, weights, *matrices, **options)
    layers = 1
    if layer is not None:
        layers, experts = jax.tree.leaves(w1)[0].shape[:2]
        outside = (expert_ids < 0) | (expert_ids >= experts)
        expert_ids = jnp.where(outside, -1, expert_ids + layer * experts)
        w1, w3, w2 = (_joined(weight) for weight in (w1, w3, w2))
    run = {
        "xla": xla.grouped_experts,
        "triton": functools.partial(
            triton.grouped_experts, layer=0 if layer is None else layer, interpret=choice.interpret
        ),
        "tpu": functools.partial(tpu.grouped_experts, interpret=choice.interpret),
    }[choice.implementation]
    return run(x, expert_ids, weights, w1, w3, w2, layers=layers, **options)


def _joined(weight: ExpertWeights | Array) -> ExpertWeights | Array:
    """[layers, E, ...] -> [layers * E, ...]; nothing moves."""
    return jax.tree.map(lambda part: part.reshape(-1, *part.shape[2:]), weight)

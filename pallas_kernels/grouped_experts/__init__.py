"""The routed experts of one layer: clamped SwiGLU experts over the rows that chose them, summed per row."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import backend
from pallas_kernels.grouped_experts import dense, tpu, triton, xla
from pallas_kernels.grouped_experts.arrangement import BLOCK_DIMS
from pallas_kernels.grouped_experts.types import ExpertWeights, Order

__all__ = ["ExpertWeights", "Order", "grouped_experts", "reads_arranged"]

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
    codes: Array | None = None,
    implementation: str = "auto",
) -> Array:
    """y[n] = sum over the chosen experts e, in their order, of w2_e(Q8(round(weight * swiglu(w1_e x, w3_e x)))).

    Sources: model specification, "MoE" and "Quantized GEMM"; kernel chapter, "FP8 block-scaled linear and MXFP4
    grouped GEMM".

    Letters: N rows, k experts per row, E experts held here, D model width, F expert width.

    Args:
      x: [N, D] activation dtype, already fake-quantized (Q8) where the model does.
      expert_ids: [N, k] int32. Ids outside 0 .. E - 1 contribute nothing, which is how a shard that holds some of the
        experts passes ids relative to its first one. The ids of a row are distinct; `route` gives them ascending.
      weights: [N, k] float32 routing weights, multiplied into the hidden values before they are rounded.
      w1, w3: gate and up matrices, [E, F, D] of any float dtype, or `ExpertWeights` of that logical shape. Both
        are of the same order of codes.
      w2: down matrices, [E, D, F], likewise, of either order.
      swiglu_limit: upper clamp of the gate and two-sided clamp of the up value; <= 0 for no clamp.
      quantize_hidden: fake-quantize (Q8) the hidden values after their rounding to the activation dtype.
      valid: [N] bool; rows that are False read no expert and give zeros.
      layer: int32 scalar or int; w1, w3 and w2 then have one more leading axis, layers, and this one is read in place,
        without a copy of its matrices.
      codes: x as the GPU kernel of few rows reads it, in the order of w1, where that exists already
        (`QuantizedRows.codes`); no other implementation reads it.
      implementation: "auto", "xla" or "pallas".

    Returns:
      [N, D] float32. Gate, up and down products are each rounded to the activation dtype; the sum over experts is
      float32 in the order of the ids. A row's result does not depend on the other rows beyond float32 summation
      order.

    Raises:
      ValueError: for an unknown implementation, w1 and w3 of different orders, or arranged weights whose inner width
        is not a multiple of 128.
      KernelUnsupportedError: "pallas" where no kernel runs.
    """
    _check_orders(w1, w3, w2)
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
        w1, w3, w2 = (_joined(weight) for weight in (w1, w3, w2))
        if choice.implementation != "triton":
            outside = (expert_ids < 0) | (expert_ids >= experts)
            expert_ids = jnp.where(outside, -1, expert_ids + layer * experts)
    run = {
        "xla": xla.grouped_experts,
        "triton": functools.partial(
            triton.grouped_experts, codes=codes, layer=0 if layer is None else layer, interpret=choice.interpret
        ),
        "tpu": functools.partial(tpu.grouped_experts, interpret=choice.interpret),
    }[choice.implementation]
    return run(x, expert_ids, weights, w1, w3, w2, layers=layers, **options)


def reads_arranged(width: int, hidden: int, dtype: jax.typing.DTypeLike) -> bool:
    """Whether `auto` runs, on the current target, a kernel for which arranged weights are the faster ones: on NVIDIA
    GPUs, where it was timed and where widening is packed instructions.

    Args:
      width, hidden: D and F of the experts.
      dtype: of the activations.
    """
    target = backend.current_target()
    runs = triton.unsupported_sizes(jnp.dtype(dtype), width, hidden) is None
    return target == backend.Target("triton", "cuda") and runs


def _check_orders(w1: ExpertWeights | Array, w3: ExpertWeights | Array, w2: ExpertWeights | Array) -> None:
    packed = {name: w for name, w in (("w1", w1), ("w3", w3), ("w2", w2)) if isinstance(w, ExpertWeights)}
    faults = [
        f"{name} is arranged but its {weight.inputs} inner dims are not a multiple of {BLOCK_DIMS}"
        for name, weight in packed.items()
        if weight.order == "arranged" and weight.inputs % BLOCK_DIMS
    ]
    if len({packed[name].order for name in ("w1", "w3") if name in packed}) > 1:
        faults.append(f"w1 is {packed['w1'].order} and w3 is {packed['w3'].order}: both must have one order")
    if faults:
        raise ValueError(f"grouped_experts: {'; '.join(faults)}")


def _joined(weight: ExpertWeights | Array) -> ExpertWeights | Array:
    """[layers, E, ...] -> [layers * E, ...]; nothing moves."""
    return jax.tree.map(lambda part: part.reshape(-1, *part.shape[2:]), weight)

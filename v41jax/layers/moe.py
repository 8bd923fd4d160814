"""The mixture of experts: router, routed experts by a grouped product, shared expert."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.grouped_experts import ExpertWeights, grouped_experts
from pallas_kernels.rounding import round_to
from pallas_kernels.route import route as choose_experts
from v41jax.config import TextConfig
from v41jax.layers.collectives import (
    ONE_CHIP,
    Parallel,
    exchanges_rows,
    first_expert,
    gather_quantized,
    gather_rows,
    scatter_rows,
    sum_over_model,
)
from v41jax.layers.linear import LinearWeight, linear, product, quantize_input
from v41jax.precision import Precision

Array = jax.Array


class RouterWeights(NamedTuple):
    """Router of one layer.

    Attributes:
      weight: [E, D].
      bias: [E] float32, selection only, text rows.
      bias_vl: [E] float32, selection only, rows of image spans.
      layer: int32 scalar, which layer of its run this is, where the biases still hold the whole run, [layers, E]; None
        when they hold one layer.
    """

    weight: Array
    bias: Array
    bias_vl: Array
    layer: Array | None = None


class FeedForwardWeights(NamedTuple):
    """Gate, up and down projections; routed experts carry a leading `[E]` axis.

    Stored routed experts hold packed E2M1 pairs `[E, O, K / 2]` uint8 with scales `[E, O, K / 32]`.

    Attributes:
      w1: gate, [.., F, D].
      w3: up, [.., F, D].
      w2: down, [.., D, F].
    """

    w1: LinearWeight
    w3: LinearWeight
    w2: LinearWeight


class MoeWeights(NamedTuple):
    """One layer's mixture.

    Attributes:
      router: of the layer.
      experts: routed experts, of the layer [E, ..] or of its whole run [layers, E, ..].
      shared: of the layer.
      layer: int32 scalar, which layer of its run this is; None when `experts` holds one layer. A slice of the run's
        experts would be a copy of gigabytes in every step.
    """

    router: RouterWeights
    experts: FeedForwardWeights
    shared: FeedForwardWeights
    layer: Array | None = None


class Routing(NamedTuple):
    """Chosen experts.

    Attributes:
      experts: [N, k] int32, ascending expert ids (the order of the float32 combination).
      weights: [N, k] float32.
    """

    experts: Array
    weights: Array


def route(
    normalized: Array, weights: RouterWeights, image_rows: Array, text: TextConfig, kernels: str = "xla"
) -> Routing:
    """Chooses experts (model specification, "MoE"); ties go to the smaller expert id.

    Args:
      normalized: [N, D] activation dtype.
      weights: of the router.
      image_rows: [N] bool.
      text: configuration.
      kernels: implementation of the operation; only "xla" has a derivative.
    """
    experts, factors = choose_experts(
        product(normalized, weights.weight),
        weights.bias,
        weights.bias_vl,
        image_rows,
        chosen=text.num_experts_per_tok,
        temperature=text.gate_temp,
        normalize=text.norm_topk_prob,
        scale=text.routed_scaling_factor,
        layer=weights.layer,
        implementation=kernels,
    )
    return Routing(experts, factors)


def swiglu(gate: Array, up: Array, limit: float) -> Array:
    """`silu(gate) * up` with the released clamps, float32; a limit <= 0 disables them."""
    gate = gate.astype(jnp.float32)
    up = up.astype(jnp.float32)
    if limit > 0:
        gate = jnp.minimum(gate, limit)
        up = jnp.clip(up, -limit, limit)
    return gate * jax.nn.sigmoid(gate) * up


def shared_expert(
    quantized: Array, weights: FeedForwardWeights, text: TextConfig, precision: Precision, kernels: str
) -> Array:
    """The expert every row runs: [N, D] quantized input -> [N, D] activation dtype."""
    gate = linear(quantized, weights.w1, kernels)
    up = linear(quantized, weights.w3, kernels)
    hidden = round_to(swiglu(gate, up, text.swiglu_limit), quantized.dtype)
    return linear(quantize_input(hidden, precision), weights.w2, kernels)


def moe(
    normalized: Array,
    weights: MoeWeights,
    image_rows: Array,
    valid: Array,
    *,
    text: TextConfig,
    precision: Precision,
    kernels: str,
    parallel: Parallel = ONE_CHIP,
) -> tuple[Array, Routing]:
    """Routed and shared experts of every row.

    Args:
      normalized: [N, D] activation dtype, the FFN sublayer's normalized input.
      weights: of the layer.
      image_rows: [N] bool.
      valid: [N] bool, False for padding, which reads no routed expert.
      text: configuration.
      precision: rounding choices.
      kernels: implementation of the operations.
      parallel: the mesh.

    Returns:
      [N, D] activation dtype (float32 sum in ascending expert id, then the shared expert, one rounding), and the
      routing.
    """
    routing = route(normalized, weights.router, image_rows, text, kernels)
    quantized = quantize_input(normalized, precision)
    routed = routed_experts(
        quantized, routing, weights, valid, text=text, precision=precision, kernels=kernels, parallel=parallel
    )
    shared = shared_expert(quantized, weights.shared, text, precision, kernels)
    total = sum_over_model(routed + shared.astype(jnp.float32), parallel)
    return round_to(total, normalized.dtype), routing


def routed_experts(
    quantized: Array,
    routing: Routing,
    weights: MoeWeights,
    valid: Array,
    *,
    text: TextConfig,
    precision: Precision,
    kernels: str,
    parallel: Parallel,
) -> Array:
    """The chosen experts of every row, as far as this chip's share of the sum goes; arguments as of `moe`.

    Returns:
      [N, D] float32; on a mesh to be summed over `model`.
    """
    rows, chosen, factors = quantized, routing.experts, routing.weights
    if exchanges_rows(parallel):
        rows = gather_quantized(quantized, precision.activation_quantization)
        chosen, factors, valid = gather_rows((chosen, factors, valid))
    held = weights.experts.w1.values.shape[0 if weights.layer is None else 1]
    sums = grouped_experts(
        rows,
        chosen - first_expert(held, parallel),
        factors,
        _operand(weights.experts.w1),
        _operand(weights.experts.w3),
        _operand(weights.experts.w2),
        swiglu_limit=text.swiglu_limit,
        quantize_hidden=precision.activation_quantization,
        valid=valid,
        layer=weights.layer,
        implementation=kernels,
    )
    return scatter_rows(sums) if exchanges_rows(parallel) else sums


def _operand(weight: LinearWeight) -> ExpertWeights | Array:
    return weight.values if weight.scales is None else ExpertWeights(weight.values, weight.scales)

"""The mixture of experts: router, routed experts by a grouped product, shared expert."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import backend
from pallas_kernels.grouped_experts import ExpertWeights, Order, grouped_experts
from pallas_kernels.grouped_linear import grouped_linear, reads_run
from pallas_kernels.quantized_rows import QuantizedRows, gated_rows
from pallas_kernels.rounding import round_to
from pallas_kernels.route import route as choose_experts
from v41jax.config import TextConfig
from v41jax.layers import expert_exchange
from v41jax.layers.collectives import ONE_CHIP, Parallel, exchanges_rows, first_expert, sum_over_model
from v41jax.layers.exchange_rule import decide
from v41jax.layers.linear import LinearWeight, linear, linear_parts, product
from v41jax.layers.stacks import OfRun, stack_and_layer, weight_of
from v41jax.precision import Precision

Array = jax.Array


class RouterWeights(NamedTuple):
    """Router of one layer.

    Attributes:
      weight: [E, D].
      bias: [E] float32, selection only, text rows.
      bias_vl: [E] float32, selection only, rows of image spans.
    """

    weight: Array | OfRun
    bias: Array | OfRun
    bias_vl: Array | OfRun


class FeedForwardWeights(NamedTuple):
    """Gate, up and down projections; routed experts carry a leading `[E]` axis.

    Stored routed experts hold packed E2M1 codes, either form of `ExpertWeights`, with scales `[E, O, K / 32]`.

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
    (bias, layer), (bias_vl, _) = stack_and_layer(weights.bias), stack_and_layer(weights.bias_vl)
    experts, factors = choose_experts(
        router_logits(normalized, weights.weight, kernels),
        bias,
        bias_vl,
        image_rows,
        chosen=text.num_experts_per_tok,
        temperature=text.gate_temp,
        normalize=text.norm_topk_prob,
        scale=text.routed_scaling_factor,
        layer=layer,
        implementation=kernels,
    )
    return Routing(experts, factors)


def router_logits(normalized: Array, weight: Array | OfRun, kernels: str) -> Array:
    """Products of the rows with the router's weight: [N, D] activation dtype -> [N, E] float32, not rounded.

    For a few rows on a GPU by the kernel that reads a run where it lies: XLA copies a layer's weight out of its run, in
    every layer, and the copy ends the captured graph that it stands in. The product of one row it reduces in place.

    Args:
      normalized: [N, D].
      weight: [E, D].
      kernels: implementation of the operation.
    """
    stack, layer = stack_and_layer(weight)
    # A widened weight of a comparison has no kernel, and is no reason to refuse the others.
    narrow = normalized.dtype == stack.dtype == jnp.bfloat16
    if layer is not None and narrow and len(normalized) > 1:
        rows, run = normalized[:, None], stack[:, None]
        if reads_run(rows, run, implementation=kernels):
            return jnp.sum(grouped_linear(rows, run, layer=layer, implementation=kernels), axis=0)
    return product(normalized, weight_of(weight))


def shared_hidden(
    rows: QuantizedRows, weights: FeedForwardWeights, text: TextConfig, precision: Precision, kernels: str
) -> QuantizedRows:
    """Hidden values of the expert every row runs: [N, D] input -> [N, F]."""
    return gated_rows(
        *linear_parts(rows, (weights.w1, weights.w3), kernels),
        limit=text.swiglu_limit,
        quantize=precision.activation_quantization,
        dtype=rows.quantized.dtype,
        implementation=kernels,
    )


def shared_expert(hidden: QuantizedRows, weights: FeedForwardWeights, kernels: str) -> Array:
    """What that expert adds: [N, F] hidden values -> [N, D] activation dtype."""
    return linear(hidden, weights.w2, kernels)


def moe(
    rows: QuantizedRows,
    hidden: QuantizedRows,
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
      rows: [N, D], the FFN sublayer's input.
      hidden: [N, F], `shared_hidden` of them.
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
    routing = route(rows.rounded, weights.router, image_rows, text, kernels)
    routed = routed_experts(
        rows, routing, weights, valid, text=text, precision=precision, kernels=kernels, parallel=parallel
    )
    shared = shared_expert(hidden, weights.shared, kernels)
    total = sum_over_model(routed + shared.astype(jnp.float32), parallel)
    return round_to(total, rows.rounded.dtype), routing


def routed_experts(
    inputs: QuantizedRows,
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
    held, width = weights.experts.w1.values.shape[0 if weights.layer is None else 1 :][:2]

    def serve(rows: Array, chosen: Array, factors: Array, valid: Array, codes: Array | None = None) -> Array:
        return grouped_experts(
            rows,
            chosen,
            factors,
            _operand(weights.experts.w1),
            _operand(weights.experts.w3),
            _operand(weights.experts.w2),
            swiglu_limit=text.swiglu_limit,
            quantize_hidden=precision.activation_quantization,
            valid=valid,
            layer=weights.layer,
            codes=codes,
            implementation=kernels,
        )

    rows = inputs.quantized
    if not exchanges_rows(parallel):
        return serve(rows, routing.experts - first_expert(held, parallel), routing.weights, valid, inputs.codes)
    exchange = decide(
        parallel,
        rows.shape[0],
        top_k=text.num_experts_per_tok,
        held=held,
        width=text.hidden_size,
        expert_width=width,
        activation_bytes=rows.dtype.itemsize,
        quantized=precision.activation_quantization,
    )
    backend.record("expert_exchange", exchange.describe(parallel))
    operands = (rows, routing.experts, routing.weights, valid, serve)
    if not exchange.ragged:
        return expert_exchange.gathered(
            *operands, held=held, quantized=precision.activation_quantization, parallel=parallel
        )
    return expert_exchange.ragged(
        *operands,
        held=held,
        places=exchange.places,
        quantized=precision.activation_quantization,
        parallel=parallel,
    )


def codes_read(weights: MoeWeights) -> Order | None:
    """Order of the codes of the experts that read a sublayer's rows; None where they are dequantized."""
    gate = _operand(weights.experts.w1)
    return gate.order if isinstance(gate, ExpertWeights) else None


def _operand(weight: LinearWeight) -> ExpertWeights | Array:
    return weight.values if weight.scales is None else ExpertWeights(weight.values, weight.scales)

"""The definition of the routed experts in plain jnp: sort by expert, then one loop over (expert, row tile) blocks.

The loop's length is the number of blocks that hold rows, so an expert nobody chose is neither read nor widened.
`lax.ragged_dot` is not used: where it has no kernel of its own it multiplies every row with every expert.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.arithmetic import decode_expert_halves, even_odd, fake_q8, swiglu
from pallas_kernels.backend import slow_alone
from pallas_kernels.grouped_experts.arrangement import released
from pallas_kernels.grouped_experts.types import ExpertWeights
from pallas_kernels.rounding import round_to

Array = jax.Array


def row_tile(pairs: int, experts: int) -> int:
    """Rows multiplied at once: about the mean number of rows an expert gets, a power of two from 1 to 64."""
    mean = -(-pairs // experts)
    return min(64, 1 << (mean - 1).bit_length())


def activate(gate: Array, up: Array, routing: Array, swiglu_limit: float, dtype: jnp.dtype) -> Array:
    """Clamped SwiGLU times the routing weight, float32 inside, rounded to `dtype`.

    gate, up: [T, F] already rounded to the activation dtype; routing: [T] float32.
    """
    return round_to(routing[:, None] * swiglu(gate, up, swiglu_limit), dtype)


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
    layers: int = 1,
) -> Array:
    """See `pallas_kernels.grouped_experts`; all chosen experts lie in one of `layers` equal parts."""
    rows, chosen = expert_ids.shape
    pairs = rows * chosen
    experts = (w1.packed if isinstance(w1, ExpertWeights) else w1).shape[0]
    dtype = x.dtype
    precision = lax.Precision.HIGHEST if dtype == jnp.float32 else lax.Precision.DEFAULT

    def project(values: Array, weight: ExpertWeights | Array, index: Array) -> Array:
        if isinstance(weight, ExpertWeights):
            packed, scales = (lax.dynamic_index_in_dim(part, index, keepdims=False) for part in weight)
            packed = packed if weight.order == "released" else released(packed)
            matrix, values = decode_expert_halves(packed, scales).astype(dtype), even_odd(values)
        else:
            matrix = _expert_matrix(weight, index).astype(dtype)
        product = jnp.einsum("tk,ok->to", values, matrix, precision=precision, preferred_element_type=jnp.float32)
        return round_to(product, dtype)

    served = valid[:, None] & (expert_ids >= 0) & (expert_ids < experts)
    flat = jnp.where(served, expert_ids, experts).reshape(-1)
    order = jnp.argsort(flat, stable=True).astype(jnp.int32)
    sizes = jnp.zeros(experts, jnp.int32).at[flat].add(1, mode="drop")
    starts = jnp.cumsum(sizes) - sizes

    tile = max(row_tile(pairs, experts // layers), 2 if slow_alone(dtype) else 1)
    tiles_until = jnp.cumsum(-(-sizes // tile))
    # Sorted operands, padded by a tile: a block's spare rows are the next expert's, which a later block overwrites.
    padded = jnp.concatenate([order, jnp.zeros(tile, jnp.int32)])
    sorted_x = x[padded // chosen]
    sorted_routing = weights.reshape(-1)[padded]

    def block(index: Array, outputs: Array) -> Array:
        chosen_expert = jnp.searchsorted(tiles_until, index, side="right").astype(jnp.int32)
        tile_in_expert = index - jnp.where(chosen_expert > 0, tiles_until[chosen_expert - 1], 0)
        first = starts[chosen_expert] + tile_in_expert * tile
        values = lax.dynamic_slice_in_dim(sorted_x, first, tile)
        routing = lax.dynamic_slice_in_dim(sorted_routing, first, tile)
        gate, up = project(values, w1, chosen_expert), project(values, w3, chosen_expert)
        hidden = activate(gate, up, routing, swiglu_limit, dtype)
        if quantize_hidden:
            hidden = fake_q8(hidden)
        return lax.dynamic_update_slice_in_dim(outputs, project(hidden, w2, chosen_expert), first, 0)

    outputs = lax.fori_loop(0, tiles_until[-1], block, jnp.zeros((pairs + tile, x.shape[1]), dtype))
    place = jnp.zeros(pairs, jnp.int32).at[order].set(jnp.arange(pairs, dtype=jnp.int32))
    return sum_of_pairs(outputs, place.reshape(served.shape), served)


def _expert_matrix(weight: Array, index: Array) -> Array:
    """Matrix `index` of [E, O, K].

    The barrier ties the stack to the loop's index. Without it XLA's CPU backend moves the widening of a bfloat16
    stack in front of the loop and widens every expert.
    """
    weight, index = lax.optimization_barrier((weight, index))
    return lax.dynamic_index_in_dim(weight, index, keepdims=False)


def sum_of_pairs(outputs: Array, position: Array, served: Array) -> Array:
    """Sums each row's expert outputs in float32, one column of experts after the other.

    outputs: [>= N k, D]; position: [N, k], where each pair's output lies; served: [N, k] bool.
    """
    rows, chosen = served.shape
    total = jnp.zeros((rows, outputs.shape[1]), jnp.float32)
    for column in range(chosen):
        term = outputs[position[:, column]].astype(jnp.float32)
        total += jnp.where(served[:, column, None], term, 0)
    return total

"""`route` for GPUs: one warp chooses the experts of one row, whose scores stay in its registers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import backend
from pallas_kernels.route.xla import SUM_FLOOR, scores_of

Array = jax.Array

MOST_CHOSEN = 16
"""Experts of a row up to which the kernel is written out; every further one is two more passes over the row."""
MOST_EXPERTS = 2048
"""Experts up to which a row fits the registers of a warp."""
LOWEST = -(2**31)
"""A key below those of all float32 numbers, of experts that are taken or not there."""


def unsupported(logits: Array, chosen: int) -> str | None:
    """Why the kernel cannot run on these shapes, or None."""
    if logits.dtype != jnp.float32:
        return f"it takes float32 logits, not {logits.dtype.name}"
    if chosen > MOST_CHOSEN:
        return f"it chooses up to {MOST_CHOSEN} experts, not {chosen}"
    if logits.shape[-1] > MOST_EXPERTS:
        return f"it chooses among up to {MOST_EXPERTS} experts, not {logits.shape[-1]}"
    return None


def _key(value: Array) -> Array:
    """float32 to int32 in the same order, NaN as -infinity. No sum with a score, which is at least +0, is -0."""
    bits = lax.bitcast_convert_type(jnp.where(value == value, value, -jnp.inf), jnp.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def _pick(biased_key: Array, scores: Array, index: Array, chosen: int) -> tuple[list[Array], list[Array]]:
    """Ids and scores of the `chosen` largest keys of a row, as scalars in any order; ties go to the smaller id."""
    ids, values = [], []
    for _ in range(chosen):
        best = jnp.max(biased_key)
        expert = jnp.min(jnp.where(biased_key == best, index, index.shape[0]))
        mine = index == expert
        # A sum would be NaN times zero for a row that holds one: the score's bits are picked.
        bits = jnp.max(jnp.where(mine, lax.bitcast_convert_type(scores, jnp.int32), LOWEST))
        ids.append(expert)
        values.append(lax.bitcast_convert_type(bits, jnp.float32))
        biased_key = jnp.where(mine, LOWEST, biased_key)
    return ids, values


def _ascending(ids: list[Array], values: list[Array]) -> tuple[list[Array], list[Array]]:
    """Distinct scalar ids in ascending order and their values, by counting the smaller ones."""
    ranks = [sum((other < mine).astype(jnp.int32) for other in ids) for mine in ids]
    sorted_ids, sorted_values = [], []
    for place in range(len(ids)):
        one, value = ids[0], values[0]
        for rank, other, other_value in zip(ranks[1:], ids[1:], values[1:], strict=True):
            one, value = jnp.where(rank == place, other, one), jnp.where(rank == place, other_value, value)
        sorted_ids.append(one)
        sorted_values.append(value)
    return sorted_ids, sorted_values


@backend.traced_once
def route(
    logits: Array,
    bias: Array,
    bias_vl: Array,
    image_rows: Array,
    *,
    chosen: int,
    temperature: float,
    normalize: bool,
    scale: float,
    layer: Array | int | None = None,
    interpret: bool = False,
) -> tuple[Array, Array]:
    """See `pallas_kernels.route`; `unsupported` has been asked."""
    layer, bias, bias_vl = backend.with_layer(layer, bias, bias_vl)
    rows, experts = logits.shape
    block = max(32, pl.next_power_of_2(experts))
    triton = backend.triton()

    def kernel(logits_ref, bias_ref, bias_vl_ref, image_ref, layer_ref, ids_ref, weights_ref):
        row = pl.program_id(0)
        index = jnp.arange(block, dtype=jnp.int32)
        near = jnp.minimum(index, experts - 1)
        place = layer_ref[0]
        image = image_ref[row]
        biases = [triton.load(ref.at[jnp.broadcast_to(place, (block,)), near]) for ref in (bias_ref, bias_vl_ref)]
        scores = scores_of(triton.load(logits_ref.at[jnp.broadcast_to(row, (block,)), near]), temperature)
        key = _key(scores + jnp.where(image, biases[1], biases[0]))
        ids, values = _ascending(*_pick(jnp.where(index < experts, key, LOWEST), scores, index, chosen))
        if normalize:
            total = sum(values[1:], values[0]) + SUM_FLOOR
            values = [value / total for value in values]
        for column, (expert, value) in enumerate(zip(ids, values, strict=True)):
            ids_ref[row, column] = expert
            weights_ref[row, column] = value * jnp.float32(scale)

    shapes = [jax.ShapeDtypeStruct((rows, chosen), dtype) for dtype in (jnp.int32, jnp.float32)]
    ids, weights = backend.triton_call(
        kernel,
        shapes,
        grid=(rows,),
        num_warps=1,
        num_stages=1,
        interpret=interpret,
        name="route",
    )(logits, bias, bias_vl, image_rows, layer)
    return ids, weights

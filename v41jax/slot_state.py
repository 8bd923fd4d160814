"""What a forward does to the slots of its requests before the first layer and after the last."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.stored_rows import store_rows
from scheduler.batch import BatchStep, Preparation
from scheduler.pools import Pools
from v41jax.layers.rows import Phase

Array = jax.Array


def prepare_slots(pools: Pools, batch: BatchStep, phase: Phase) -> tuple[Pools, Array]:
    """Resets, rewinds or checks the slot of every request (runtime specification, "State preparation before every
    forward").

    Returns:
      The pools, and which CONTINUE requests have a cursor that is not at their start, [R] bool.
    """
    layers, slots = pools.window.shape[:2]
    real = batch.cu_seqlens[1:] > batch.cu_seqlens[:-1]
    reset = real & (batch.preparation == Preparation.RESET)
    moved = reset | (real & (batch.preparation == Preparation.REWIND))
    mismatch = real & ~moved & (pools.cursor[batch.slots, 0] != batch.forward_start)
    start = jnp.concatenate([batch.forward_start[:, None], batch.history], axis=1)
    cursor = pools.cursor.at[jnp.where(moved, batch.slots, slots)].set(start, mode="drop")
    if phase == "decode":
        return pools.replace(cursor=cursor), mismatch

    rings = pools.window.reshape(layers * slots, *pools.window.shape[2:])

    def clear(layer: Array, rings: Array) -> Array:
        # One layer at a time: zeros for all layers of all requests at once would be a large temporary.
        owner = jnp.where(reset, layer * slots + batch.slots, layers * slots)
        return store_rows(rings, (owner,), jnp.zeros((), rings.dtype))

    rings = jax.lax.fori_loop(0, layers, clear, rings)
    cleared = jnp.where(reset, batch.slots, slots)
    return (
        pools.replace(
            window=rings.reshape(pools.window.shape),
            tail_kv=pools.tail_kv.at[:, cleared].set(0, mode="drop"),
            tail_score=pools.tail_score.at[:, cleared].set(0, mode="drop"),
            cursor=cursor,
        ),
        mismatch,
    )


def advance_cursors(pools: Pools, batch: BatchStep) -> Pools:
    """Cursor of every scheduled request after the forward: its end, and the last `Hh` compressed ids before it."""
    slots, width = pools.cursor.shape
    history_size = width - 1
    lengths = batch.cu_seqlens[1:] - batch.cu_seqlens[:-1]
    known = pools.cursor[batch.slots, 1:]
    # Position in (history ++ this forward's ids) of each remembered id.
    wanted = lengths[:, None] + jnp.arange(history_size)
    rows = jnp.clip(batch.cu_seqlens[:-1, None] + wanted - history_size, 0, batch.compressed_ids.shape[0] - 1)
    old = jnp.take_along_axis(known, jnp.clip(wanted, 0, history_size - 1), axis=1)
    history = jnp.where(wanted >= history_size, batch.compressed_ids[rows], old)
    cursor = jnp.concatenate([(batch.forward_start + lengths)[:, None], history], axis=1)
    target = jnp.where(lengths > 0, batch.slots, slots)
    return pools.replace(cursor=pools.cursor.at[target].set(cursor, mode="drop"))

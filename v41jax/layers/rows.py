"""What every layer must know about the rows it computes and the memory of their requests.

`Rows` is per row and can be gathered: bounded replay runs some layers on a part of the rows. `Requests` is per
request and stays as it is. Both are derived from a `BatchStep` once per forward.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from scheduler.batch import DEAD, BatchStep
from v41jax.layers.rope import RopeTable, at_positions

Array = jax.Array

Phase = Literal["prefill", "decode"]
"""`prefill`: attend, then write the ring. `decode`: write the ring, then attend (also verify)."""


class Rows(NamedTuple):
    """One entry per row `[N]`.

    Attributes:
      positions: int32, absolute; padding 0.
      batch_ids: int32, position of the row's request in the batch; padding -1.
      image_rows: bool, selects `bias_vl`.
      engram_rows: bool, the token takes part in the Engram (its gate is 0 otherwise).
      window_floor: int32, first position a window of this row may hold.
      in_forward_from: int32, first position whose window row comes from this forward and not from the ring.
      in_forward_row: int32, this row's index among the window rows of this forward.
      ring_rows: bool, the row is written to the window rings.
      plain: RoPE angles of ratio-0 layers, cos and sin [N, dr / 2] float32.
      yarn: RoPE angles of layers of ratio > 0, same shape.
    """

    positions: Array
    batch_ids: Array
    image_rows: Array
    engram_rows: Array
    window_floor: Array
    in_forward_from: Array
    in_forward_row: Array
    ring_rows: Array
    plain: RopeTable
    yarn: RopeTable

    def angles(self, ratio: int) -> RopeTable:
        """Angles of a layer of this ratio."""
        return self.yarn if ratio else self.plain

    def visible(self, ratio: int) -> Array:
        """Completed groups of `ratio` tokens each row may select from, [N] int32; padding 0."""
        return jnp.where(self.batch_ids >= 0, (self.positions + 1) // ratio, 0)


class Requests(NamedTuple):
    """One entry per request `[R]`.

    Attributes:
      slots: int32 state slot; padding 0.
      block_tables: [R, P] int32 page ids; padding 0.
    """

    slots: Array
    block_tables: Array


def prepare_rows(batch: BatchStep, plain: RopeTable, yarn: RopeTable, *, ring: int, phase: Phase) -> Rows:
    """Windows and ring writes of the encoder's rows (runtime specification, "Attention index lists").

    Args:
      batch: the step; arrays of the device.
      plain: table of ratio-0 layers.
      yarn: table of the other layers.
      ring: rows of one window ring.
      phase: which rows a window reads from the ring.
    """
    count = batch.positions.shape[0]
    real = batch.batch_ids >= 0
    request = jnp.maximum(batch.batch_ids, 0)
    positions = batch.positions
    start = batch.forward_start[request]
    warm_from = batch.swa_cached_until[request]
    floor = batch.swa_replay_start[request]
    if phase == "decode":
        in_forward_from = positions + 1
    else:
        # Recomputed rows below `warm_from` see only each other: the ring no longer holds what precedes `start`.
        recomputed = positions < warm_from
        floor = jnp.where(recomputed, jnp.maximum(floor, start), floor)
        in_forward_from = jnp.where(recomputed, start, jnp.maximum(start, warm_from))
    end = start + batch.cu_seqlens[request + 1] - batch.cu_seqlens[request]
    # Two rows of one request on one ring row would be written in undefined order: only the last `ring` are.
    ring_rows = real & (positions >= end - ring) & (positions >= batch.cached_until[request])
    return Rows(
        positions=positions,
        batch_ids=batch.batch_ids,
        image_rows=batch.image_rows,
        engram_rows=real & (batch.compressed_ids != DEAD),
        window_floor=floor,
        in_forward_from=in_forward_from,
        in_forward_row=jnp.arange(count, dtype=jnp.int32),
        ring_rows=ring_rows,
        plain=at_positions(plain, positions),
        yarn=at_positions(yarn, positions),
    )

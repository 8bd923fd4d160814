"""`ScheduledBatch` -> `BatchStep`: the padded arrays of one compiled step, validated before dispatch.

NumPy only, nothing kept between calls: every array is fresh, so a caller may hand it to an asynchronous transfer.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from scheduler.batch import DEAD, BatchStep, Preparation, TailPlan
from scheduler.buckets import Buckets, StepShape
from scheduler.compression_plans import RowSpans, compression_plan, padded
from scheduler.pool_geometry import V41PoolGeometry
from scheduler.scheduled_batch import ScheduledBatch
from scheduler.sequence import PLACEHOLDER

IntArray = NDArray[np.int32]


class BatchError(ValueError):
    """A scheduled batch that must not be dispatched; `faults` holds one line each."""

    def __init__(self, faults: list[str]):
        self.faults = tuple(faults)
        super().__init__("; ".join(faults))


def validate_batch(
    batch: ScheduledBatch, geometry: V41PoolGeometry, shape: StepShape, num_pages: int, num_slots: int
) -> None:
    """Host validation before dispatch; device state is untouched when it fails.

    Raises:
      BatchError: with every fault (runtime specification, "`BatchStep`").
    """
    faults = []
    lengths = batch.lengths
    count = batch.num_requests
    if count == 0:
        faults.append("the batch has no request")
    if count and int(lengths.min()) < 1:
        faults.append(f"request {batch.request_ids[int(lengths.argmin())]!r} has an empty span")
    if int(lengths.sum()) != batch.num_rows:
        faults.append(f"spans cover {int(lengths.sum())} rows, the batch has {batch.num_rows}")
    if count and int(batch.starts.min()) < 0:
        faults.append(f"a span starts at position {int(batch.starts.min())}")
    if count and (int(batch.slots.min()) < 0 or int(batch.slots.max()) >= num_slots):
        faults.append(f"slots {batch.slots.tolist()} leave 0..{num_slots - 1}")
    if len(np.unique(batch.slots)) != count:
        faults.append(f"slots {batch.slots.tolist()} are not unique")
    needed = -(-batch.ends // geometry.block_size)
    short = np.flatnonzero(needed > batch.table_lengths)
    if len(short):
        row = int(short[0])
        faults.append(
            f"request {batch.request_ids[row]!r} ends at {int(batch.ends[row])} and has "
            f"{int(batch.table_lengths[row])} pages, {int(needed[row])} are needed"
        )
    if batch.block_tables.size and (int(batch.block_tables.min()) < 0 or int(batch.block_tables.max()) >= num_pages):
        faults.append(f"a page id leaves 0..{num_pages - 1}")
    if shape.requests < count:
        faults.append(f"{count} requests exceed the shape's {shape.requests}")
    if shape.rows < batch.num_rows:
        faults.append(f"{batch.num_rows} rows exceed the shape's {shape.rows}")
    if shape.pages < batch.block_tables.shape[1]:
        faults.append(f"{batch.block_tables.shape[1]} page columns exceed the shape's {shape.pages}")
    if count and int(lengths.max()) > shape.query_width:
        faults.append(f"a span of {int(lengths.max())} rows exceeds the query width {shape.query_width}")
    if batch.phase is not shape.phase:
        faults.append(f"a {batch.phase.value} batch got a {shape.phase.value} shape")
    if faults:
        raise BatchError(faults)


def build_batch_step(
    batch: ScheduledBatch,
    geometry: V41PoolGeometry,
    buckets: Buckets,
    compress_ids: Callable[[IntArray], IntArray],
    *,
    num_pages: int,
    num_slots: int,
    shape: StepShape | None = None,
) -> tuple[BatchStep, StepShape]:
    """Arrays and static shape of one forward.

    Args:
      batch: the step as planned. Tokens that a running forward still computes stay -1 in `token_ids` and DEAD in
        `compressed_ids`: fill them first with `resolve_pending` where the host looks up Engram rows.
      geometry: of the pools.
      buckets: shape ladders.
      compress_ids: maps raw ids [k] int32 to compressed Engram ids [k] int32; never called with a negative id.
      num_pages: pages that exist.
      num_slots: slots that exist.
      shape: of the step; None takes the smallest that holds the batch.

    Returns:
      (step, shape); NumPy arrays as documented on `BatchStep`.

    Raises:
      BatchError: when the batch must not be dispatched.
      ValueError: when a ladder of `buckets` ends below what the batch needs.
    """
    if shape is None:
        shape = buckets.shape(batch)
    validate_batch(batch, geometry, shape, num_pages, num_slots)
    count, rows = batch.num_requests, batch.num_rows
    lengths = batch.lengths
    offsets = np.zeros(count + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    batch_ids = np.repeat(np.arange(count, dtype=np.int32), lengths)
    positions = np.arange(rows, dtype=np.int32) - (offsets[:-1] - batch.starts).astype(np.int32)[batch_ids]
    spans = RowSpans(
        positions,
        batch_ids,
        batch.starts,
        batch.ends,
        batch.write_from,
        batch.cached_until,
        batch.preparation == Preparation.REWIND,
    )
    # Every row of a verification is compared with the proposal after it.
    output_rows = np.arange(rows) if shape.verifies else offsets[1:][batch.output_requests] - 1
    tables = np.zeros((shape.requests, shape.pages), np.int32)
    tables[:count, : batch.block_tables.shape[1]] = batch.block_tables
    history = np.full((shape.requests, batch.history.shape[1]), DEAD, np.int32)
    history[:count] = _compressed(batch.history, batch.history < 0, compress_ids)
    dead = batch.image_rows | (batch.token_ids == PLACEHOLDER)
    image_rows = np.zeros(shape.rows, np.bool_)
    image_rows[:rows] = batch.image_rows
    is_final = np.zeros(shape.requests, np.bool_)
    is_final[:count] = batch.is_final
    step = BatchStep(
        token_ids=padded(batch.token_ids, shape.rows, 0),
        compressed_ids=padded(_compressed(batch.token_ids, dead, compress_ids), shape.rows, DEAD),
        positions=padded(positions, shape.rows, 0),
        batch_ids=padded(batch_ids, shape.rows, -1),
        image_rows=image_rows,
        cu_seqlens=padded(offsets, shape.requests + 1, rows),
        slots=padded(batch.slots, shape.requests, 0),
        block_tables=tables,
        preparation=padded(batch.preparation, shape.requests, Preparation.CONTINUE),
        forward_start=padded(batch.starts, shape.requests, 0),
        history=history,
        write_from=padded(batch.write_from, shape.requests, 0),
        cached_until=padded(batch.cached_until, shape.requests, 0),
        swa_cached_until=padded(batch.swa_cached_until, shape.requests, 0),
        swa_replay_start=padded(batch.swa_replay_start, shape.requests, 0),
        is_final=is_final,
        output_rows=padded(output_rows, shape.outputs, shape.rows),
        plans=tuple(compression_plan(spans, ratio, shape, geometry) for ratio in geometry.ratios),
        tail=_tail_plan(batch, offsets, shape, geometry.window_size) if shape.tail else None,
    )
    return step, shape


def _compressed(ids: IntArray, dead: NDArray[np.bool_], compress_ids: Callable[[IntArray], IntArray]) -> IntArray:
    """Compressed ids of any shape, DEAD where `dead`."""
    out = np.full(ids.shape, DEAD, np.int32)
    alive = ~dead
    if alive.any():
        out[alive] = compress_ids(ids[alive])
    return out


def _tail_plan(batch: ScheduledBatch, offsets: NDArray[np.int64], shape: StepShape, window: int) -> TailPlan:
    """Decoder rows of the finishing requests (runtime specification, "Row sets (normative)")."""
    outputs = batch.output_requests
    kept = np.minimum(window, batch.lengths[outputs])
    ends = np.cumsum(kept)
    capacity = shape.decoder_rows(window)
    first_row = offsets[1:][outputs] - kept
    rows = np.arange(int(kept.sum())) + np.repeat(first_row - (ends - kept), kept)
    return TailPlan(
        rows=padded(rows, capacity, shape.rows),
        floor=padded(np.repeat(batch.ends[outputs] - kept, kept), capacity, 0),
        last=padded(ends - 1, shape.outputs, capacity),
    )

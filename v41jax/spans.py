"""Host-side `BatchStep`s of explicitly given spans.

For callers that drive the forward without a scheduler: notebooks, comparisons, tests. A span says in plain terms
which rows of which request run and where that request's memory is; everything else is derived here by the rules of
the runtime specification, "Step metadata and plans".
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from scheduler.batch import DEAD, BatchStep, CompressionPlan, Preparation, TailPlan
from scheduler.pool_geometry import V41PoolGeometry

Ints = NDArray[np.int32]


@dataclasses.dataclass(frozen=True)
class Span:
    """Consecutive rows of one request in one forward.

    Attributes:
      start: position of the first row.
      token_ids: [n] ids.
      compressed_ids: [n] Engram ids, DEAD at image rows.
      slot: state slot.
      pages: page ids that cover positions 0 .. start + n - 1.
      history: [Hh] compressed ids before `start`, oldest first.
      preparation: what happens to the slot first; None resets at position 0 and continues elsewhere.
      image_rows: [n] bool; None is no image.
      write_from: groups ending below it are not written.
      cached_until: positions below it keep their ring and tail rows.
      swa_cached_until: rows from it on read window positions below it from the ring.
      swa_replay_start: floor of every window.
      is_final: the forward ends at the prefill's end.
    """

    start: int
    token_ids: Ints
    compressed_ids: Ints
    slot: int
    pages: Sequence[int]
    history: Ints
    preparation: Preparation | None = None
    image_rows: NDArray[np.bool_] | None = None
    write_from: int = 0
    cached_until: int = 0
    swa_cached_until: int = 0
    swa_replay_start: int = 0
    is_final: bool = True

    @property
    def length(self) -> int:
        """Rows."""
        return len(self.token_ids)

    @property
    def prepared(self) -> Preparation:
        """The resolved `preparation`."""
        if self.preparation is not None:
            return self.preparation
        return Preparation.RESET if self.start == 0 else Preparation.CONTINUE


def batch_of(
    spans: Sequence[Span],
    geometry: V41PoolGeometry,
    *,
    rows: int | None = None,
    requests: int | None = None,
    columns: int | None = None,
    output_rows: Sequence[int] | None = None,
    outputs: int | None = None,
    decoder_replay: bool = False,
) -> BatchStep:
    """The arrays of one forward over `spans`, in their order.

    Args:
      spans: at least one row each, distinct slots.
      geometry: of the pools.
      rows: bucket of rows; None is their number.
      requests: bucket of requests; None is their number.
      columns: bucket of page columns; None is the longest page list.
      output_rows: batch rows whose logits are wanted; None is every row.
      outputs: bucket of output rows; None is their number (every row of the bucket without `output_rows`).
      decoder_replay: run the decoder on the tails of the final spans only; their last rows are then the output rows.

    Raises:
      ValueError: a bucket too small for what it must hold.
    """
    total = sum(span.length for span in spans)
    rows = total if rows is None else rows
    requests = len(spans) if requests is None else requests
    columns = max(len(span.pages) for span in spans) if columns is None else columns
    lengths = [span.length for span in spans]
    if decoder_replay:
        output_rows = [int(end) - 1 for end, span in zip(np.cumsum(lengths), spans) if span.is_final]
    if output_rows is None:
        wanted = np.arange(total)
        outputs = rows if outputs is None else outputs
    else:
        wanted = np.asarray(output_rows, np.int32)
        outputs = len(wanted) if outputs is None else outputs
    _check(spans, geometry, total, rows, requests, columns, len(wanted), outputs)

    def per_row(values: Sequence[NDArray], fill: int, dtype: type = np.int32) -> NDArray:
        return padded(np.concatenate(values), rows, fill, dtype)

    def per_request(values: Sequence[int], fill: int = 0) -> Ints:
        return padded(np.array(values), requests, fill)

    tables = np.zeros((requests, columns), np.int32)
    history = np.full((requests, geometry.history_size), DEAD, np.int32)
    for index, span in enumerate(spans):
        tables[index, : len(span.pages)] = span.pages
        history[index] = span.history
    images = [np.zeros(s.length, bool) if s.image_rows is None else s.image_rows for s in spans]
    return BatchStep(
        token_ids=per_row([span.token_ids for span in spans], 0),
        compressed_ids=per_row([span.compressed_ids for span in spans], DEAD),
        positions=per_row([span.start + np.arange(span.length) for span in spans], 0),
        batch_ids=per_row([np.full(length, index) for index, length in enumerate(lengths)], -1),
        image_rows=per_row(images, False, bool),
        cu_seqlens=padded(np.concatenate([[0], np.cumsum(lengths)]), requests + 1, total),
        slots=per_request([span.slot for span in spans]),
        block_tables=tables,
        preparation=per_request([span.prepared for span in spans], Preparation.CONTINUE),
        forward_start=per_request([span.start for span in spans]),
        history=history,
        write_from=per_request([span.write_from for span in spans]),
        cached_until=per_request([span.cached_until for span in spans]),
        swa_cached_until=per_request([span.swa_cached_until for span in spans]),
        swa_replay_start=per_request([span.swa_replay_start for span in spans]),
        is_final=padded(np.array([span.is_final for span in spans]), requests, False, bool),
        output_rows=padded(wanted, outputs, rows),
        plans=tuple(compression_plan(spans, ratio, geometry, rows, requests) for ratio in geometry.ratios),
        tail=tail_plan(spans, geometry, rows, outputs) if decoder_replay else None,
    )


def tail_plan(spans: Sequence[Span], geometry: V41PoolGeometry, rows: int, outputs: int) -> TailPlan:
    """Decoder rows of the final spans: the last window of each."""
    capacity = min(rows, outputs * geometry.window_size)
    chosen: list[int] = []
    floors: list[int] = []
    last: list[int] = []
    first_row = 0
    for span in spans:
        if span.is_final:
            kept = min(geometry.window_size, span.length)
            chosen += range(first_row + span.length - kept, first_row + span.length)
            floors += [span.start + span.length - kept] * kept
            last.append(len(chosen) - 1)
        first_row += span.length
    return TailPlan(
        rows=padded(np.array(chosen), capacity, rows),
        floor=padded(np.array(floors), capacity, 0),
        last=padded(np.array(last), outputs, capacity),
    )


def compression_plan(
    spans: Sequence[Span], ratio: int, geometry: V41PoolGeometry, rows: int, requests: int
) -> CompressionPlan:
    """Groups of one ratio that close in the forward, and the rows that go to the tails."""
    width = max(ratio, 1 + geometry.speculative_tokens)
    closing: list[tuple[int, int, int, int]] = []
    tails: list[tuple[int, int, int]] = []
    first_row = 0
    for request, span in enumerate(spans):
        end = span.start + span.length
        warm = span.prepared is Preparation.REWIND
        for position in range(span.start, end):
            row = first_row + position - span.start
            if (position + 1) % ratio == 0 and position >= span.write_from:
                base = span.write_from if warm else span.start
                closing.append((row, request, position, ratio - min(position - base + 1, ratio)))
            if ratio > 1 and position >= max(end - width, span.cached_until):
                tails.append((row, request, position))
        first_row += span.length
    closed = np.array(closing, np.int32).reshape(-1, 4)
    tail = np.array(tails, np.int32).reshape(-1, 3)
    capacity = rows // ratio + requests
    tail_capacity = min(rows, requests * width) if ratio > 1 else 0
    return CompressionPlan(
        closing_rows=padded(closed[:, 0], capacity, rows),
        requests=padded(closed[:, 1], capacity, -1),
        positions=padded(closed[:, 2], capacity, -1),
        from_tail=padded(closed[:, 3], capacity, 0),
        tail_rows=padded(tail[:, 0], tail_capacity, rows),
        tail_requests=padded(tail[:, 1], tail_capacity, -1),
        tail_positions=padded(tail[:, 2], tail_capacity, -1),
    )


def padded(values: NDArray, size: int, fill: int, dtype: type = np.int32) -> NDArray:
    """`values` [n] followed by `size - n` times `fill`."""
    out = np.full(size, fill, dtype)
    out[: len(values)] = values
    return out


def _check(
    spans: Sequence[Span],
    geometry: V41PoolGeometry,
    total: int,
    rows: int,
    requests: int,
    columns: int,
    wanted: int,
    outputs: int,
) -> None:
    faults = []
    for name, needed, bucket in (
        ("rows", total, rows),
        ("requests", len(spans), requests),
        ("page columns", max(len(span.pages) for span in spans), columns),
        ("output rows", wanted, outputs),
    ):
        if needed > bucket:
            faults.append(f"{needed} {name} do not fit a bucket of {bucket}")
    slots = [span.slot for span in spans]
    if len(set(slots)) != len(slots):
        faults.append(f"slots {slots} are not distinct")
    for index, span in enumerate(spans):
        needed = geometry.pages_for(span.start + span.length)
        if not span.length:
            faults.append(f"span {index} has no rows")
        if len(span.pages) < needed:
            faults.append(f"span {index} has {len(span.pages)} pages and needs {needed}")
    if faults:
        raise ValueError("; ".join(faults))

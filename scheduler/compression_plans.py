"""Which rows of a step close a compressed group and which feed the compressor tails.

Source: runtime specification, "Compression plans".
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from scheduler.batch import CompressionPlan
from scheduler.buckets import StepShape
from scheduler.pool_geometry import V41PoolGeometry
from scheduler.scheduled_batch import Phase

IntArray = NDArray[np.int32]


class RowSpans(NamedTuple):
    """What the plans need to know about the scheduled rows (`n`) and requests (`b`).

    Attributes:
      positions: [n] int32 absolute positions.
      batch_ids: [n] int32 batch positions.
      starts: [b] int32 first row's position.
      ends: [b] int32 one past the last row's position.
      write_from: [b] int32.
      cached_until: [b] int32.
      rewound: [b] bool, the slot is warm and rows below `write_from` are recomputed.
    """

    positions: IntArray
    batch_ids: IntArray
    starts: IntArray
    ends: IntArray
    write_from: IntArray
    cached_until: IntArray
    rewound: NDArray[np.bool_]


def closing_capacity(shape: StepShape, ratio: int) -> int:
    """Groups of `ratio` that a step of this shape can close at most."""
    if shape.phase is Phase.PREFILL:
        return shape.rows // ratio + shape.requests
    return shape.requests * -(-shape.query_width // ratio)


def tail_depth(geometry: V41PoolGeometry, ratio: int) -> int:
    """Newest rows of a request that the tails keep; 0 at ratio 1, where every token closes its own group."""
    return 0 if ratio == 1 else max(ratio, 1 + geometry.speculative_tokens)


def tail_capacity(shape: StepShape, geometry: V41PoolGeometry, ratio: int) -> int:
    """Rows that a step of this shape can write to the tails at most."""
    depth = tail_depth(geometry, ratio)
    if shape.phase is Phase.PREFILL:
        return min(shape.rows, shape.requests * depth)
    return shape.requests * min(shape.query_width, depth)


def compression_plan(rows: RowSpans, ratio: int, shape: StepShape, geometry: V41PoolGeometry) -> CompressionPlan:
    """The plan of one ratio, padded to the shape's capacities.

    A group is closed once, by its last token, unless it ends below `write_from`. Its leading members come from the
    tail where they lie below the first position this forward computed for the group.
    """
    positions, batch_ids = rows.positions, rows.batch_ids
    closing = np.flatnonzero(((positions + 1) % ratio == 0) & (positions >= rows.write_from[batch_ids]))
    requests = batch_ids[closing]
    ends_at = positions[closing]
    # From an odd resume on a warm slot the straddling group takes its cached half from the tail, not from the
    # recomputed rows.
    base = np.where(rows.rewound, rows.write_from, rows.starts)[requests]
    from_tail = ratio - np.minimum(ends_at - base + 1, ratio)
    depth = tail_depth(geometry, ratio)
    if depth:
        first = np.maximum(rows.ends - depth, rows.cached_until)
        tails = np.flatnonzero(positions >= first[batch_ids])
    else:
        tails = np.empty(0, np.int64)
    closes = closing_capacity(shape, ratio)
    keeps = tail_capacity(shape, geometry, ratio)
    return CompressionPlan(
        closing_rows=padded(closing, closes, shape.rows),
        requests=padded(requests, closes, -1),
        positions=padded(ends_at, closes, -1),
        from_tail=padded(from_tail, closes, 0),
        tail_rows=padded(tails, keeps, shape.rows),
        tail_requests=padded(batch_ids[tails], keeps, -1),
        tail_positions=padded(positions[tails], keeps, -1),
    )


def padded(values: NDArray[np.integer], size: int, fill: int) -> IntArray:
    """[size] int32, `values` then `fill`."""
    out = np.full(size, fill, np.int32)
    out[: len(values)] = values
    return out

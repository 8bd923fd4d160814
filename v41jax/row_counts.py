"""How many rows each part of the model runs: what bounded replay saves, counted on the host from the step's plan."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from scheduler.buckets import StepShape
from scheduler.scheduled_batch import Phase, ScheduledBatch


class RowCounts(NamedTuple):
    """Rows by part of the model (runtime specification, "Row sets (normative)").

    Attributes:
      encoder: of every layer before the first decoder layer.
      published: rows that the first decoder layer compresses.
      decoder: of the rest of that layer and of every later one but the last; also the window keys of the last.
      last: of the last layer beyond its window keys.
    """

    encoder: int = 0
    published: int = 0
    decoder: int = 0
    last: int = 0

    def plus(self, other: RowCounts) -> RowCounts:
        """The sums."""
        return RowCounts(*(a + b for a, b in zip(self, other)))

    def times(self, count: int) -> RowCounts:
        """The same `count` times."""
        return RowCounts(*(count * rows for rows in self))

    def layer_rows(self, layers: int, boundary: int) -> int:
        """Rows times layers: one for every row and layer that runs as a whole.

        Args:
          layers: of the backbone.
          boundary: the first decoder layer.
        """
        return self.encoder * boundary + self.decoder * (layers - 1 - boundary) + self.last


def rows_per_layer(batch: ScheduledBatch, window: int) -> RowCounts:
    """Scheduled rows of a step by part of the model, padding not counted.

    Args:
      batch: as planned.
      window: `W`.
    """
    rows = batch.num_rows
    if batch.phase is not Phase.PREFILL or not batch.decoder_replay:
        return RowCounts(rows, rows, rows, rows)
    outputs = batch.output_requests
    tails = int(np.minimum(batch.lengths[outputs], window).sum())
    return RowCounts(rows, rows, tails, len(outputs))


def computed_rows_per_layer(shape: StepShape, window: int) -> RowCounts:
    """Rows that the program of a shape computes, padding included."""
    last = shape.outputs if shape.tail else shape.rows
    return RowCounts(shape.rows, shape.rows, shape.decoder_rows(window), last)

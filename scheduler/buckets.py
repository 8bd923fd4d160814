"""Static shapes of compiled steps: the ladders that row, request and page counts are rounded up to.

Source: runtime specification, "Bucketing".
"""

from __future__ import annotations

import bisect
import dataclasses
from typing import NamedTuple

from scheduler.pool_geometry import V41PoolGeometry
from scheduler.runtime_config import EngineConfig
from scheduler.scheduled_batch import Phase, ScheduledBatch

DECODE_LADDER = (1, 2, 4, 8, 16, 32, 48, 64, 128, 256)


ROWS_PER_REQUEST = 16
"""Rows of a prefill bucket for each request it can hold; the largest bucket holds every request."""


class StepShape(NamedTuple):
    """Everything static about a compiled step; usable as a cache key. Over several data shards, the shape of each.

    Attributes:
      phase: prefill or decode.
      rows: `N`, rows of the flat batch.
      requests: `R`, request descriptors.
      pages: `P`, columns of the block tables.
      outputs: `F`, rows whose logits are wanted; 0 when no request finishes its prefill.
      query_width: rows of one request at most.
      tail: the decoder runs on the tails of the finishing requests only (decoder replay); False when every row runs
        every layer. With `outputs` 0 and `tail` set the forward ends at the decoder's compression.
    """

    phase: Phase
    rows: int
    requests: int
    pages: int
    outputs: int
    query_width: int
    tail: bool

    @property
    def verifies(self) -> bool:
        """A decode step whose requests may have several rows, every one of which gives logits."""
        return self.phase is Phase.DECODE and self.query_width > 1

    def decoder_rows(self, window_size: int) -> int:
        """`T`, rows of the decoder layers: at most a window of every finishing request, or all rows without a tail."""
        return min(self.outputs * window_size, self.rows) if self.tail else self.rows


def decode_ladder(max_num_seqs: int) -> tuple[int, ...]:
    """The default batch sizes, ending exactly at `max_num_seqs`, doubling above 256."""
    ladder = list(DECODE_LADDER)
    while ladder[-1] < max_num_seqs:
        ladder.append(2 * ladder[-1])
    return (*(size for size in ladder if size < max_num_seqs), max_num_seqs)


def prefill_token_ladder(max_tokens: int) -> tuple[int, ...]:
    """Row counts of prefill steps: 128, doubling, ending at the budget rounded up to 128.

    Doubling keeps the number of programs small; a step computes at most twice the rows it was given.
    """
    return powers_ladder(_round_up(max_tokens, 128), 128, 2)


def powers_ladder(top: int, first: int, factor: int) -> tuple[int, ...]:
    """`first`, `first * factor`, ... below `top`, then `top`."""
    sizes = []
    size = first
    while size < top:
        sizes.append(size)
        size *= factor
    return (*sizes, top)


def verify_ladder(drafts: int, dynamic: bool) -> tuple[int, ...]:
    """Rows for each request of decode steps that verify up to `drafts` proposals: one width, or a few when their number
    is chosen anew for every step. A step that verifies fewer proposals than its program has rows for loses none."""
    if not drafts:
        return ()
    return powers_ladder(drafts + 1, 1, 2) if dynamic else (drafts + 1,)


@dataclasses.dataclass(frozen=True)
class Buckets:
    """The ladders of one engine; every ladder is ascending and its last entry is the most a step can need.

    The programs they imply are few on purpose: all of them are compiled before the first request.

    Attributes:
      decode_requests: batch sizes of decode steps.
      prefill_rows: row counts of prefill steps.
      prefill_requests: most requests of a prefill step of each row count; a step of more, shorter requests takes
        more rows.
      prefill_pages: block-table columns of prefill steps.
      decode_pages: block-table columns of decode steps; one entry keeps the full width.
      verify_rows: rows for each request that decode steps with drafts have, the last a whole draft and its anchor;
        empty without drafts, every request then has one row.
    """

    decode_requests: tuple[int, ...]
    prefill_rows: tuple[int, ...]
    prefill_requests: tuple[int, ...]
    prefill_pages: tuple[int, ...]
    decode_pages: tuple[int, ...]
    verify_rows: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            ladder = list(getattr(self, field.name))
            distinct = sorted(ladder if field.name == "prefill_requests" else set(ladder))
            if field.name == "verify_rows" and not ladder:
                continue
            if not ladder or ladder[0] < 1 or ladder != distinct:
                raise ValueError(f"{field.name} {ladder} must be ascending positive integers")
        if len(self.prefill_requests) != len(self.prefill_rows):
            raise ValueError(
                f"prefill_requests {list(self.prefill_requests)} must have one entry for each of prefill_rows "
                f"{list(self.prefill_rows)}"
            )

    @classmethod
    def default(cls, config: EngineConfig, geometry: V41PoolGeometry, num_pages: int, max_model_len: int) -> Buckets:
        """The ladders a configuration implies."""
        pages = min(geometry.pages_for(max_model_len), num_pages)
        rows = prefill_token_ladder(config.max_num_batched_tokens)
        most = min(config.max_num_seqs, config.max_num_batched_tokens)
        return cls(
            decode_requests=config.decode_buckets or decode_ladder(config.max_num_seqs),
            prefill_rows=rows,
            prefill_requests=(*(min(most, size // ROWS_PER_REQUEST) for size in rows[:-1]), most),
            prefill_pages=powers_ladder(pages, 16, 8),
            decode_pages=(pages,),
            verify_rows=verify_ladder(geometry.speculative_tokens, config.dynamic_verify_lengths),
        )

    def shape(self, batch: ScheduledBatch) -> StepShape:
        """The smallest static shape that holds a batch, of several data shards the batch of each.

        Raises:
          ValueError: when a ladder ends below what the batch needs.
        """
        parts = [part for part in batch.shards if part is not None]
        width = max(max(int(part.table_lengths.max()) for part in parts), 1)
        count = max(part.num_requests for part in parts)
        needed = max(part.num_rows for part in parts)
        if batch.phase is Phase.DECODE:
            requests = _fit("decode requests", self.decode_requests, count)
            pages = _fit("decode pages", self.decode_pages, width)
            wide = [requests * rows for rows in self._rows_per_request]
            # More rows than the widest are a fault that the validation of the batch reports.
            rows = next((rows for rows in wide if rows >= needed), wide[-1])
            return self._decode_shape(rows, requests, pages)
        rows = _fit("prefill rows", self.prefill_rows, needed)
        wide_enough = _fit("prefill requests", self.prefill_requests, count)
        rung = max(self.prefill_rows.index(rows), self.prefill_requests.index(wide_enough))
        rows, requests = self.prefill_rows[rung], self.prefill_requests[rung]
        pages = _fit("prefill pages", self.prefill_pages, width)
        outputs = _fit("outputs", _outputs(requests), max(int(part.is_final.sum()) for part in parts))
        return StepShape(Phase.PREFILL, rows, requests, pages, outputs, rows, batch.decoder_replay)

    def shapes(self, decoder_replay: bool) -> tuple[StepShape, ...]:
        """Every shape that `shape` can return.

        Args:
          decoder_replay: of the prefill steps.
        """
        decode = [
            self._decode_shape(requests * rows, requests, pages)
            for requests in self.decode_requests
            for pages in self.decode_pages
            for rows in self._rows_per_request
        ]
        prefill = [
            StepShape(Phase.PREFILL, rows, requests, pages, outputs, rows, decoder_replay)
            for rows, requests in zip(self.prefill_rows, self.prefill_requests, strict=True)
            for pages in self.prefill_pages
            for outputs in _outputs(requests)
        ]
        return (*decode, *prefill)

    @property
    def draft_requests(self) -> tuple[int, ...]:
        """Batch sizes of draft calls: of any step that gives tokens."""
        return tuple(sorted({*self.decode_requests, self.prefill_requests[-1]}))

    @property
    def _rows_per_request(self) -> tuple[int, ...]:
        return self.verify_rows or (1,)

    def _decode_shape(self, rows: int, requests: int, pages: int) -> StepShape:
        width = self._rows_per_request[-1]
        return StepShape(Phase.DECODE, rows, requests, pages, rows, width, False)


def _outputs(requests: int) -> tuple[int, ...]:
    """Output counts of prefill steps: none finishes, one does, or up to all do."""
    return (0, 1, requests) if requests > 1 else (0, 1)


def _fit(what: str, ladder: tuple[int, ...], size: int) -> int:
    index = bisect.bisect_left(ladder, size)
    if index == len(ladder):
        raise ValueError(f"a step needs {size} {what}, the ladder ends at {ladder[-1]}")
    return ladder[index]


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple

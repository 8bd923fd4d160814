"""The immutable snapshot of one scheduled step and the result a runner returns for it."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from scheduler.sequence import PLACEHOLDER, ImageSpan, RequestId, SamplingParams
from scheduler.states import StateMaintenanceOps

IntArray = NDArray[np.int32]


class Phase(enum.Enum):
    """Kind of a step; never inferred from lengths."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclasses.dataclass(frozen=True, eq=False)
class ScheduledBatch:
    """One step as it was planned; later changes of a request do not reach it. Arrays are read-only.

    Letters: `b` scheduled requests, `n` scheduled rows, `Hh` Engram history length.

    Attributes:
      index: serial number of the step.
      phase: see `Phase`.
      request_ids: [b] requests in batch order.
      generations: [b] the generation each was scheduled in.
      slots: [b] int32 state slots.
      starts: [b] int32 first row's position.
      resumes: [b] int32 tokens whose KV was valid before the step.
      ends: [b] int32 one past the last row's position; of a decode step with drafts one past the last proposal's, of
        which a prefix becomes real.
      is_final: [b] bool the row at `ends - 1` gives a token (always True in a decode step).
      preparation: [b] int32 `Preparation`.
      write_from: [b] int32.
      cached_until: [b] int32.
      swa_cached_until: [b] int32.
      swa_replay_start: [b] int32.
      history: [b, Hh] int32 raw ids before `starts`, oldest first, DEAD rules applied; a look-up of Engram rows reads
        them in every step, the device only where the preparation moves the cursor.
      token_ids: [n] int32 raw ids of the rows, PLACEHOLDER where a running forward still computes the token.
      image_rows: [n] bool the row lies in an image span.
      block_tables: [b, pages] int32, unused entries 0.
      table_lengths: [b] int32 entries of `block_tables` in use.
      sampling: [b] sampling parameters.
      output_positions: [b] generated tokens before this step's, the position in the request's random stream.
      images: [b] image spans of the requests, for the rows' embeddings.
      decoder_replay: final rows run the decoder on a tail only (prefill steps).
      ops: state operations to execute before the forward.
      parts: with several data shards the batch of each, whose ids count inside the shard, None for one that runs
        nothing; the fields above are then those of all, one after the other, and their ids count over all shards.
    """

    index: int
    phase: Phase
    request_ids: tuple[RequestId, ...]
    generations: tuple[int, ...]
    slots: IntArray
    starts: IntArray
    resumes: IntArray
    ends: IntArray
    is_final: NDArray[np.bool_]
    preparation: IntArray
    write_from: IntArray
    cached_until: IntArray
    swa_cached_until: IntArray
    swa_replay_start: IntArray
    history: IntArray
    token_ids: IntArray
    image_rows: NDArray[np.bool_]
    block_tables: IntArray
    table_lengths: IntArray
    sampling: tuple[SamplingParams, ...]
    output_positions: tuple[int, ...]
    images: tuple[tuple[ImageSpan, ...], ...]
    decoder_replay: bool
    ops: StateMaintenanceOps
    parts: tuple[ScheduledBatch | None, ...] = ()

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, np.ndarray):
                value.flags.writeable = False

    @property
    def num_requests(self) -> int:
        """Scheduled requests (`b`)."""
        return len(self.request_ids)

    @property
    def num_rows(self) -> int:
        """Scheduled rows (`n`)."""
        return len(self.token_ids)

    @property
    def shards(self) -> tuple[ScheduledBatch | None, ...]:
        """The batch of every data shard."""
        return self.parts or (self,)

    @property
    def output_requests(self) -> IntArray:
        """Batch positions of the requests that get a token, ascending: the order of `StepResult.tokens`."""
        return np.flatnonzero(self.is_final).astype(np.int32)

    @property
    def lengths(self) -> IntArray:
        """[b] int32 rows of each request."""
        return self.ends - self.starts

    @property
    def has_pending_tokens(self) -> bool:
        """Some input token is still being computed."""
        return bool((self.token_ids == PLACEHOLDER).any())


@dataclasses.dataclass(frozen=True, eq=False)
class StepResult:
    """What a runner returns for a batch.

    Attributes:
      tokens: [outputs] sampled ids, in the order of `ScheduledBatch.output_requests`; of a decode step with drafts
        [outputs, S + 1], the ids that each request's verification emits, then -1.
      extras: anything else the engine wants to carry along; the scheduler does not look at it.
    """

    tokens: ArrayLike
    extras: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def resolve_pending(batch: ScheduledBatch, previous: ScheduledBatch, result: StepResult) -> ScheduledBatch:
    """Fills the pending input tokens of a batch planned one step ahead.

    Records are matched by (request id, generation), never by batch position. Needed where the host must know every
    input token before the forward, as with Engram tables in host memory (runtime specification, "Deferred output").

    Args:
      batch: planned while `previous` was running.
      previous: the step before it.
      result: what `previous` returned.

    Raises:
      RuntimeError: when a pending token has no record in `previous`.
    """
    pending = np.flatnonzero(batch.token_ids == PLACEHOLDER)
    if not len(pending):
        return batch
    tokens = np.asarray(result.tokens).tolist()
    records = {
        (previous.request_ids[position], previous.generations[position]): token
        for position, token in zip(previous.output_requests.tolist(), tokens, strict=True)
    }
    requests = np.searchsorted(np.cumsum(batch.lengths), pending, side="right").tolist()
    filled = batch.token_ids.copy()
    for row, request in zip(pending.tolist(), requests, strict=True):
        key = (batch.request_ids[request], batch.generations[request])
        if key not in records:
            raise RuntimeError(
                f"request {key[0]!r} generation {key[1]} waits for a token that step {previous.index} did not compute"
            )
        filled[row] = records[key]
    parts: list[ScheduledBatch | None] = []
    first = 0
    for part in batch.parts:
        if part is not None:
            part = dataclasses.replace(part, token_ids=filled[first : first + part.num_rows])
            first += part.num_rows
        parts.append(part)
    return dataclasses.replace(batch, token_ids=filled, parts=tuple(parts))

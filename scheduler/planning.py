"""Which tokens of a request the next forward covers, as pure functions on integers.

`plan_chunk` is the normative chunk plan (runtime specification, "Chunk planning and `BlockManager.replay_start`");
`replay_fields` turns a plan into the per-request numbers a forward reads. No request objects, no pools.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from scheduler.batch import Preparation


@dataclasses.dataclass(frozen=True, slots=True)
class ChunkRules:
    """What the configuration fixes about every chunk plan.

    Attributes:
      hash_block: tokens of one hash block, the PAGE.
      cap: `long_prefill_token_threshold`; 0 means none. Counted from the resume point.
      min_final_rows: rows a final forward must hold so that the decoder's tail is whole; `W` under decoder replay, else
        0.
      chunked: whether a prompt may be split over several forwards.
    """

    hash_block: int
    cap: int = 0
    min_final_rows: int = 0
    chunked: bool = True

    @property
    def align(self) -> int:
        """Grid of a chunk length that the step's budget cuts short."""
        return max(self.hash_block, 64)


class ChunkPlan(NamedTuple):
    """Rows of one forward of one request.

    Attributes:
      start: first row's position; below the resume point when rows are recomputed.
      end: one past the last row's position.
      is_final: the forward ends at the prefill end.
    """

    start: int
    end: int
    is_final: bool


def replay_start(resume: int, end: int, final: bool, rebuild: bool, rules: ChunkRules) -> int:
    """First position a forward must cover so that what it reads exists.

    Args:
      resume: tokens whose KV is valid.
      end: planned end of the forward, above `resume`.
      final: `end` is the prefill end.
      rebuild: first forward after a prefix hit under encoder replay; `resume` is then a positive grid position.
      rules: configuration of the plan.

    Returns:
      `resume`, or a lower position on the hash-block grid.
    """
    block = rules.hash_block
    if rebuild:
        return resume - block
    if final and resume > 0 and end - resume < min(rules.min_final_rows, end):
        # One whole block further down than the block `resume` lies in: from an off-grid resume the nearest boundary
        # could leave fewer than `W` rows.
        return max(0, (resume // block - 1) * block)
    return resume


def plan_chunk(
    resume: int, goal: int, budget: int, empty: bool, rebuild: bool, rules: ChunkRules, cut: int = 0
) -> ChunkPlan | None:
    """Plans the next prefill forward of a request.

    Args:
      resume: tokens whose KV is valid, below `goal`.
      goal: the frozen prefill end.
      budget: rows left in this step.
      empty: nothing was scheduled in this step yet.
      rebuild: first forward after a prefix hit under encoder replay.
      rules: configuration of the plan.
      cut: next position above `resume` at which a checkpoint image is wanted; 0 for none. The forward does not pass it.

    Returns:
      The forward, or None when the request must wait for a later step. A returned plan satisfies
      `start <= resume < end <= goal` and `end - start <= budget`.

    Source: runtime specification, "Chunk planning and `BlockManager.replay_start`".
    """
    end = goal
    if rules.chunked:
        if rules.cap:
            end = min(end, resume + rules.cap)
        if cut > resume:
            end = min(end, cut)
    start = replay_start(resume, end, end == goal, rebuild, rules)
    if end - start > budget:
        if not rules.chunked and not empty:
            return None
        rows = budget - budget % rules.align
        if rows == 0:
            if not empty:
                return None
            rows = budget
        end = start + rows
    if end <= resume:
        return None
    return ChunkPlan(start, end, end == goal)


class ReplayFields(NamedTuple):
    """Per-request numbers of a forward; see `BatchStep` for their meaning.

    Attributes:
      preparation: a `Preparation`.
      write_from: groups ending below it are not written.
      cached_until: encoder ring and tail rows below it are kept.
      swa_cached_until: window boundary between ring and forward for rows at or after it.
      swa_replay_start: floor of every encoder window.
    """

    preparation: Preparation
    write_from: int
    cached_until: int
    swa_cached_until: int
    swa_replay_start: int


_CONTINUE = ReplayFields(Preparation.CONTINUE, 0, 0, 0, 0)
_COLD = ReplayFields(Preparation.RESET, 0, 0, 0, 0)


def replay_fields(start: int, resume: int, rebuild: bool) -> ReplayFields:
    """What a forward of `[start, ...)` with valid KV below `resume` must keep, rewrite and see.

    Args:
      start: first row's position.
      resume: tokens whose KV is valid; above `start` when rows are recomputed.
      rebuild: the slot is fresh and its rings are rebuilt from the recomputed rows.

    Source: runtime specification, "Quantities of that forward" and "Back-off (short final forward)".
    """
    if rebuild:
        return ReplayFields(Preparation.RESET, resume, 0, 0, start)
    if start < resume:
        return ReplayFields(Preparation.REWIND, resume, resume, resume, start)
    return _CONTINUE if start else _COLD

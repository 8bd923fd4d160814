"""Freezes a planning decision into a `ScheduledBatch`."""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from scheduler.planning import ChunkPlan, replay_fields
from scheduler.scheduled_batch import Phase, ScheduledBatch
from scheduler.sequence import Sequence
from scheduler.states import ImageRestore, StateMaintenanceOps


class PlannedPrefill(NamedTuple):
    """One request's part of a prefill step.

    Attributes:
      sequence: the request.
      plan: its rows.
      rebuild: the slot is fresh and is rebuilt below the hit.
      restore: image to put into the slot before the forward, when this is the first after an admission.
    """

    sequence: Sequence
    plan: ChunkPlan
    rebuild: bool
    restore: ImageRestore | None


def assemble_prefill(
    index: int,
    planned: Ordered[PlannedPrefill],
    tables: NDArray[np.int32],
    block_size: int,
    history_size: int,
    decoder_replay: bool,
    ops: StateMaintenanceOps,
) -> ScheduledBatch:
    """Snapshot of a prefill step.

    Args:
      index: serial number of the step.
      planned: requests in batch order.
      tables: [num_slots, max_pages] int32 block tables by slot.
      block_size: tokens of one page.
      history_size: ids before each forward.
      decoder_replay: final rows run the decoder on a tail only.
      ops: state operations the step carries.
    """
    sequences = [item.sequence for item in planned]
    plans = [item.plan for item in planned]
    fields = [replay_fields(item.plan.start, item.sequence.num_computed, item.rebuild) for item in planned]
    history = np.empty((len(planned), history_size), np.int32)
    for row, item in enumerate(planned):
        history[row] = item.sequence.history(item.plan.start, history_size)
    columns = np.asarray(fields, np.int32).reshape(-1, 5)
    slots = np.asarray([sequence.slot for sequence in sequences], np.int32)
    # Pages of later chunks are taken already; the step gets only those it can see.
    pages = [min(len(item.sequence.block_table), -(-item.plan.end // block_size)) for item in planned]
    lengths = np.asarray(pages, np.int32)
    block_tables = tables[slots, : max(pages)]
    block_tables[np.arange(max(pages)) >= lengths[:, None]] = 0
    return ScheduledBatch(
        index=index,
        phase=Phase.PREFILL,
        request_ids=tuple(sequence.request_id for sequence in sequences),
        generations=tuple(sequence.generation for sequence in sequences),
        slots=slots,
        starts=np.asarray([plan.start for plan in plans], np.int32),
        resumes=np.asarray([sequence.num_computed for sequence in sequences], np.int32),
        ends=np.asarray([plan.end for plan in plans], np.int32),
        is_final=np.asarray([plan.is_final for plan in plans], np.bool_),
        preparation=columns[:, 0].copy(),
        write_from=columns[:, 1].copy(),
        cached_until=columns[:, 2].copy(),
        swa_cached_until=columns[:, 3].copy(),
        swa_replay_start=columns[:, 4].copy(),
        history=history,
        token_ids=np.concatenate([item.sequence.tokens(item.plan.start, item.plan.end) for item in planned]),
        image_rows=np.concatenate([item.sequence.image_mask(item.plan.start, item.plan.end) for item in planned]),
        block_tables=block_tables,
        table_lengths=lengths,
        sampling=tuple(sequence.sampling for sequence in sequences),
        output_positions=tuple(sequence.num_tokens - sequence.num_prompt_tokens for sequence in sequences),
        images=tuple(sequence.images for sequence in sequences),
        decoder_replay=decoder_replay,
        ops=ops,
    )


def assemble_decode(
    index: int, sequences: Ordered[Sequence], tables: NDArray[np.int32], history_size: int, ops: StateMaintenanceOps
) -> ScheduledBatch:
    """Snapshot of a decode step. Arguments as above.

    A request has one row at its first position without KV, and one for each token drafted to follow it.
    """
    count = len(sequences)
    drafts = [sequence.drafts for sequence in sequences]
    rows = np.fromiter([1 + len(tokens) for tokens in drafts], np.int32, count)
    anchors = np.fromiter([sequence.token(sequence.num_computed) for sequence in sequences], np.int32, count)
    token_ids = anchors
    if any(drafts):
        token_ids = np.asarray(
            [token for anchor, tokens in zip(anchors.tolist(), drafts, strict=True) for token in (anchor, *tokens)],
            np.int32,
        )
    slots = np.fromiter([sequence.slot for sequence in sequences], np.int32, count)
    starts = np.fromiter([sequence.num_computed for sequence in sequences], np.int32, count)
    lengths = np.fromiter([len(sequence.block_table) for sequence in sequences], np.int32, count)
    zeros = np.zeros(count, np.int32)
    history = np.empty((count, history_size), np.int32)
    for row, sequence in enumerate(sequences):
        history[row] = sequence.history(sequence.num_computed, history_size)
    return ScheduledBatch(
        index=index,
        phase=Phase.DECODE,
        request_ids=tuple([sequence.request_id for sequence in sequences]),
        generations=tuple([sequence.generation for sequence in sequences]),
        slots=slots,
        starts=starts,
        resumes=starts,
        ends=starts + rows,
        is_final=np.ones(count, np.bool_),
        preparation=zeros,
        write_from=zeros,
        cached_until=zeros,
        swa_cached_until=zeros,
        swa_replay_start=zeros,
        history=history,
        token_ids=token_ids,
        image_rows=np.zeros(len(token_ids), np.bool_),
        block_tables=tables[slots, : int(lengths.max())],
        table_lengths=lengths,
        sampling=tuple([sequence.sampling for sequence in sequences]),
        output_positions=tuple([sequence.num_tokens - sequence.num_prompt_tokens for sequence in sequences]),
        images=((),) * count,
        decoder_replay=False,
        ops=ops,
    )

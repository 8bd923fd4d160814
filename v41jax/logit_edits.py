"""Host half of what changes logits: biases, penalties and constraints of the requests of a step.

A slot's biases and penalties live on the device as one row of adjustments; the host knows which request the row belongs
to and how many of its tokens are counted, and sends one change per row and step, or a whole row when a request enters
the slot. Masks of constraints are made anew for every step. A proposal's row counts the proposals up to it as if they
were accepted; the device keeps the changes of those that are. The device half is `sampling.change_adjustments` and
`edit_logits`, with proposals `verification.edit_rows` and `keep_changes`.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from scheduler.scheduled_batch import Phase, ScheduledBatch
from scheduler.sequence import RequestId, SamplingParams, Sequence
from v41jax.sampling import LogitEdits


class GeneratedTokens(NamedTuple):
    """What a request has generated, the newest token apart: the scheduler may not have taken it in yet.

    Attributes:
      before: [n - 1] int32, all but the newest; [0] when there is none.
      newest: the newest token; None when nothing was generated.
    """

    before: NDArray[np.int32]
    newest: int | None

    @property
    def count(self) -> int:
        """Generated tokens."""
        return len(self.before) + (self.newest is not None)


class TokenConstraint(Protocol):
    """Which tokens may follow; one object per request."""

    def write_mask(self, generated: GeneratedTokens, words: NDArray[np.uint32]) -> bool:
        """Writes the tokens allowed after `generated` into `words`; False when all are, and nothing was written.

        A preempted request may come back with fewer or other tokens than it had.
        """
        ...


@dataclasses.dataclass
class _Row:
    request_id: RequestId
    generation: int
    counts: Counter[int]
    total: int
    proposed: tuple[int, ...] = ()  # by the last step: the device counts those that were accepted


def generated_tokens(sequence: Sequence, batch: ScheduledBatch, index: int) -> GeneratedTokens:
    """What request `index` of a batch with known tokens has generated before the token the batch gives it."""
    proposals = len(proposed_tokens(batch, index))
    end = int(batch.ends[index]) - proposals
    prompt = sequence.num_prompt_tokens
    if end <= prompt:
        return GeneratedTokens(sequence.tokens(0, 0), None)
    newest = int(batch.token_ids[int(batch.lengths[: index + 1].sum()) - 1 - proposals])
    return GeneratedTokens(sequence.tokens(prompt, end - 1), newest)


def proposed_tokens(batch: ScheduledBatch, index: int) -> tuple[int, ...]:
    """What request `index` of a batch verifies besides its newest token."""
    if batch.phase is not Phase.DECODE:
        return ()
    end = int(batch.lengths[: index + 1].sum())
    return tuple(batch.token_ids[end - int(batch.lengths[index]) + 1 : end].tolist())


def first_output_rows(batch: ScheduledBatch) -> NDArray[np.int64]:
    """[outputs] first output row of each request that gets a token; more follow for its proposals."""
    outputs = batch.output_requests
    if batch.phase is not Phase.DECODE:
        return np.arange(len(outputs))
    return (np.cumsum(batch.lengths) - batch.lengths)[outputs]


class EditPlanner:
    """Edits of each step.

    Attributes:
      constraints: of live requests that have one; the engine adds and removes them.

    Args:
      slots: state slots.
      vocabulary: tokens.
      empty: makes the edits of a step of `F` output rows.
      load: replaces a slot's row of adjustments on the device.
    """

    def __init__(
        self,
        slots: int,
        vocabulary: int,
        empty: Callable[[int, int, int], LogitEdits],
        load: Callable[[int, NDArray[np.float32]], None],
    ):
        self.constraints: dict[RequestId, TokenConstraint] = {}
        self._vocabulary = vocabulary
        self._empty = empty
        self._load = load
        self._rows: list[_Row | None] = [None] * slots

    def plan(
        self,
        batch: ScheduledBatch,
        outputs: int,
        sequence: Callable[[RequestId], Sequence | None],
        rows: NDArray[np.int64] | None = None,
    ) -> LogitEdits | None:
        """Edits of a batch whose tokens are all known.

        Args:
          batch: the step.
          outputs: `F`.
          sequence: live request by id.
          rows: [outputs] first output row of each request that gets a token; None where no shard's part is padded.

        Returns:
          None when no row has any.
        """
        edits = None
        rows = first_output_rows(batch) if rows is None else rows
        for row, index in zip(rows.tolist(), batch.output_requests.tolist(), strict=True):
            request_id, sampling = batch.request_ids[index], batch.sampling[index]
            constraint = self.constraints.get(request_id)
            live = sequence(request_id)
            if live is None or not (sampling.adjusts_logits or constraint is not None):
                continue
            if edits is None:
                edits = self._empty(outputs, len(self._rows), self._vocabulary)
            generated = generated_tokens(live, batch, index)
            proposals = proposed_tokens(batch, index)
            if constraint is not None:
                _constrain(edits, row, constraint, generated, proposals)
            if sampling.adjusts_logits:
                slot = int(batch.slots[index])
                edits.slots[row : row + 1 + len(proposals)] = slot
                change = self._follow(slot, request_id, batch.generations[index], sampling, generated)
                if change is not None:
                    edits.tokens[row], edits.changes[row] = change
                known = self._rows[slot]
                assert known is not None
                known.proposed = proposals
                counts = Counter(known.counts)
                for place, token in enumerate(proposals, row + 1):
                    counts[token] += 1
                    edits.tokens[place], edits.changes[place] = token, _change(sampling, counts[token])
        return edits

    def _follow(
        self, slot: int, request_id: RequestId, generation: int, sampling: SamplingParams, generated: GeneratedTokens
    ) -> tuple[int, float] | None:
        """Brings a slot's row up to the newest token: by one change that is returned, or by loading it."""
        row = self._rows[slot]
        newest = generated.newest
        if row is not None and (row.request_id, row.generation) == (request_id, generation) and newest is not None:
            accepted = tuple(generated.before[row.total :].tolist())
            if row.total + len(accepted) == generated.count - 1 and accepted == row.proposed[: len(accepted)]:
                row.counts.update(accepted)
                row.counts[newest] += 1
                row.total = generated.count
                return newest, _change(sampling, row.counts[newest])
        counts = Counter(generated.before.tolist())
        if newest is not None:
            counts[newest] += 1
        self._rows[slot] = _Row(request_id, generation, counts, generated.count)
        values = np.zeros(self._vocabulary, np.float32)
        for token, bias in sampling.logit_bias:
            values[token] = bias
        for token, count in counts.items():
            values[token] -= _penalty(sampling, count)
        self._load(slot, values)
        return None


def _constrain(
    edits: LogitEdits,
    row: int,
    constraint: TokenConstraint,
    generated: GeneratedTokens,
    proposals: tuple[int, ...],
) -> None:
    """Masks of a request's rows, one a token further each, up to a proposal that is not allowed: the target will not
    choose it, and nothing after it is emitted."""
    edits.constrained[row] = constraint.write_mask(generated, edits.allowed[row])
    for place, token in enumerate(proposals, row + 1):
        words = edits.allowed[place - 1]
        if edits.constrained[place - 1] and not words[token // 32] >> np.uint32(token % 32) & 1:
            return
        before = generated.before
        if generated.newest is not None:
            before = np.append(before, np.int32(generated.newest))
        generated = GeneratedTokens(before, token)
        edits.constrained[place] = constraint.write_mask(generated, edits.allowed[place])


def _change(sampling: SamplingParams, count: int) -> float:
    """What changes for a token when it is generated for the `count`-th time."""
    return -_penalty(sampling, count) + _penalty(sampling, count - 1)


def _penalty(sampling: SamplingParams, count: int) -> float:
    """What a token generated `count` times loses."""
    return sampling.frequency_penalty * count + (sampling.presence_penalty if count else 0.0)

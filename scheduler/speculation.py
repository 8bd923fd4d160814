"""Host rules of speculative decoding: how many proposals a request may verify, and which emitted tokens it keeps.

A verify step emits up to `S + 1` tokens a request. Stop rules hold after every one of them, as in plain decoding;
what was accepted beyond the token that ends a request is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence as Ordered

import numpy as np

from scheduler.outcomes import stop_reason, token_limit
from scheduler.scheduled_batch import ScheduledBatch, StepResult
from scheduler.sequence import Sequence


def proposal_limit(sequence: Sequence, drafted: int, max_model_len: int) -> int:
    """Proposals that can be of use to a request whose newest token is the anchor: at least one token is always emitted
    besides them, and none may pass the request's length limit.

    Args:
      sequence: no token of it is in flight.
      drafted: proposals there are.
      max_model_len: longest sequence.
    """
    room = token_limit(sequence, max_model_len) - sequence.num_finalized_tokens
    return max(0, min(drafted, room - 1))


def finalize_block(
    sequence: Sequence, tokens: Ordered[int], eos_token_ids: tuple[int, ...], max_model_len: int
) -> tuple[tuple[int, ...], str | None]:
    """Appends the tokens of one verification in order, up to and with the one that ends the request.

    Args:
      sequence: no token of it is in flight.
      tokens: emitted by the verify step, at least one.
      eos_token_ids: of the model.
      max_model_len: longest sequence.

    Returns:
      The tokens kept, and why the request ends, or None.

    Raises:
      RuntimeError: when tokens of the request are still in flight.
    """
    kept = []
    for token in tokens:
        sequence.append_placeholder()
        sequence.finalize(sequence.num_tokens - 1, token)
        kept.append(token)
        reason = stop_reason(sequence, eos_token_ids, max_model_len)
        if reason is not None:
            return tuple(kept), reason
    return tuple(kept), None


def emitted_blocks(batch: ScheduledBatch, result: StepResult) -> list[list[int]]:
    """What the verification of each request emitted: accepted proposals and the target's own token after them.

    Args:
      batch: a decode step with drafts.
      result: what the runner returned for it.

    Returns:
      One list a request, in batch order; as many input rows of it became real.

    Raises:
      RuntimeError: when some request emitted nothing, or more than it has rows.
    """
    tokens = np.asarray(result.tokens)
    lengths = batch.lengths
    if tokens.ndim != 2 or len(tokens) != batch.num_requests:
        raise RuntimeError(
            f"step {batch.index} verifies {batch.num_requests} requests, the result has shape {list(tokens.shape)}"
        )
    counts = np.argmin(np.pad(tokens, ((0, 0), (0, 1)), constant_values=-1) >= 0, axis=1)
    wrong = np.flatnonzero((counts < 1) | (counts > lengths))
    if len(wrong):
        row = int(wrong[0])
        raise RuntimeError(
            f"step {batch.index}: request {batch.request_ids[row]!r} committed {int(counts[row])} of its "
            f"{int(lengths[row])} rows, must be at least 1 and no more than them"
        )
    return [row[:count] for row, count in zip(tokens.tolist(), counts.tolist(), strict=True)]

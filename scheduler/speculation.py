"""Host rules of speculative decoding: how many proposals a request may verify, and which emitted tokens it keeps.

A verify step emits up to `S + 1` tokens a request. Stop rules hold after every one of them, as in plain decoding;
what was accepted beyond the token that ends a request is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence as Ordered

from scheduler.outcomes import stop_reason, token_limit
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

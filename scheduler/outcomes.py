"""When a request stops, why, and the counters a scheduler reports."""

from __future__ import annotations

import dataclasses

from scheduler.sequence import RequestOutput, Sequence


def stop_reason(sequence: Sequence, eos_token_ids: tuple[int, ...], max_model_len: int) -> str | None:
    """Why the newest finalized token ends the request, or None.

    The stop token itself stays part of the output.
    """
    sampling = sequence.sampling
    last = sequence.num_finalized_tokens - 1
    token = sequence.token(last)
    if not sampling.ignore_eos and token in eos_token_ids:
        return "eos"
    if token in sampling.stop_token_ids:
        return f"stop_{token}"
    for stop in sampling.stop_sequences:
        first = sequence.num_finalized_tokens - len(stop)
        if stop and first >= sequence.num_prompt_tokens and tuple(sequence.tokens(first, last + 1).tolist()) == stop:
            return "stop_sequence"
    if sequence.num_finalized_tokens >= token_limit(sequence, max_model_len):
        return "max_tokens"
    return None


def token_limit(sequence: Sequence, max_model_len: int) -> int:
    """Tokens, prompt included, at which a request ends; a prompt of the full length still gives one token."""
    prompt = sequence.num_prompt_tokens
    return min(prompt + sequence.sampling.max_tokens, max(max_model_len, prompt + 1))


def make_output(sequence: Sequence, new_tokens: tuple[int, ...] = (), reason: str | None = None) -> RequestOutput:
    """The report of one request; finished when `reason` is given."""
    return RequestOutput(
        sequence.request_id,
        new_tokens,
        reason is not None,
        reason,
        sequence.num_prompt_tokens,
        sequence.num_output_tokens,
        sequence.reported_hit_tokens,
    )


@dataclasses.dataclass
class Counters:
    """Running totals since the scheduler was made.

    Attributes:
      steps, prefill_steps, decode_steps: batches handed out; over several data shards, steps in which any of them ran.
      rows_scheduled: rows of those batches.
      rows_replayed: rows of them that recomputed cached tokens.
      admissions: times a request got pages and a slot.
      prompt_tokens: tokens to prefill over all admissions, the reused ones included.
      hit_tokens: tokens reused over all admissions.
      prompt_images: images of the requests over all admissions.
      hit_images: of these, images whose every position was reused.
      preemptions: times a running request was sent back.
      stale_results: results dropped because their request had moved on.
      refused, aborted, finished, failed: requests by outcome; every request ends in exactly one.
      output_tokens: tokens finalized.
      draft_tokens: proposals that were verified.
      accepted_tokens: of these, proposals that equal the target's choice, stop rules not considered.
    """

    steps: int = 0
    prefill_steps: int = 0
    decode_steps: int = 0
    rows_scheduled: int = 0
    rows_replayed: int = 0
    admissions: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    prompt_images: int = 0
    hit_images: int = 0
    preemptions: int = 0
    stale_results: int = 0
    refused: int = 0
    aborted: int = 0
    finished: int = 0
    failed: int = 0
    output_tokens: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0


@dataclasses.dataclass(frozen=True)
class Statistics:
    """A snapshot for operators.

    Attributes:
      queue: requests waiting.
      running: requests that hold a slot.
      partial: running requests whose prefill is not complete.
      pages_total, pages_used, pages_cached, pages_vacant, pages_raw: PAGE units by state; the last four add up to the
        first.
      slots_free: state slots nobody holds.
      images, images_stored, images_evicted: checkpoint images now and in total.
      counters: running totals.
      shards: the same of every data shard, which the numbers above are sums of; empty with one.
    """

    queue: int
    running: int
    partial: int
    pages_total: int
    pages_used: int
    pages_cached: int
    pages_vacant: int
    pages_raw: int
    slots_free: int
    images: int
    images_stored: int
    images_evicted: int
    counters: Counters
    shards: tuple[Statistics, ...] = ()

"""The arrays one forward reads: `BatchStep` and its parts, as pytrees of NumPy (host) or JAX (device) arrays.

NumPy only. Letters: `N` rows of the flat batch (a bucket size), `R` requests (a bucket size), `P` page columns,
`Hh` Engram history length (`engram_max_ngram_size - 1`), `F` rows whose logits are wanted.
"""

from __future__ import annotations

import enum
from typing import Any, NamedTuple

Array = Any  # numpy.ndarray on the host, jax.Array inside a step

DEAD = -1
"""Compressed Engram id of "no token here": before position 0, an image position, or padding."""


class Preparation(enum.IntEnum):
    """What happens to a request's slot before anything in the forward reads it."""

    CONTINUE = 0  # the cursor must already stand at the forward's start
    RESET = 1  # zero the whole slot, then cursor = (start, history)
    REWIND = 2  # rings and tails stay, cursor = (start, history)


class CompressionPlan(NamedTuple):
    """Which tokens of the batch close a compressed group of one ratio, and which rows go to the tails.

    Attributes:
      closing_rows: [C] int32, batch row of the group's last token; padding N.
      requests: [C] int32, batch position of its request; padding -1.
      positions: [C] int32, absolute position of the group's last token; padding -1.
      from_tail: [C] int32, how many leading members come from the slot's tail (0 or 1 at ratio 2); padding 0.
      tail_rows: [T] int32, batch row whose projection is written to the tail; padding N. T = 0 at ratio 1.
      tail_requests: [T] int32; padding -1.
      tail_positions: [T] int32, written at `position mod ring_c`; padding -1.
    """

    closing_rows: Array
    requests: Array
    positions: Array
    from_tail: Array
    tail_rows: Array
    tail_requests: Array
    tail_positions: Array


class TailPlan(NamedTuple):
    """Decoder rows of the finishing requests under decoder replay (absent when every row runs every layer).

    `T` is `StepShape.decoder_rows`; with no finishing request T = F = 0.

    Attributes:
      rows: [T] int32, batch rows, ascending, so that those of one request are together; padding N.
      floor: [T] int32, first tail position of the row's request, the floor of its decoder windows; padding 0.
      last: [F] int32, index among the T rows of each finishing request's last row; padding T.
    """

    rows: Array
    floor: Array
    last: Array


class BatchStep(NamedTuple):
    """One forward over rows of any mixture of requests.

    Rows of one request are consecutive and ascending in position; requests follow each other in batch order.

    Attributes:
      token_ids: [N] int32; -1 means "the token in `last_token[slot]`"; padding 0.
      compressed_ids: [N] int32, Engram ids of the same tokens; DEAD for image rows and padding.
      positions: [N] int32, absolute; padding 0.
      batch_ids: [N] int32, batch position of the row's request; padding -1.
      image_rows: [N] bool, row lies in an image span (selects `bias_vl`); padding False.
      cu_seqlens: [R + 1] int32, row offsets of the requests; padding repeats the scheduled row count.
      slots: [R] int32; padding 0, a real slot, never dereferenced for an empty request.
      block_tables: [R, P] int32 page ids; padding 0, a real page.
      preparation: [R] int32, a `Preparation`; padding CONTINUE.
      forward_start: [R] int32, position of the request's first row.
      history: [R, Hh] int32, compressed ids before `forward_start`, oldest first; the device
        reads them for RESET and REWIND, the Engram look-up always.
      write_from: [R] int32, groups ending below it are not written.
      cached_until: [R] int32, positions below it keep the encoder ring and tail rows they hold.
      swa_cached_until: [R] int32, for rows at or after it, window positions below it come from the ring.
      swa_replay_start: [R] int32, floor of every encoder window of the request in this forward.
      is_final: [R] bool, the forward ends at the request's prefill end (always True for decode).
      output_rows: [F] int32, batch rows whose logits are wanted; padding N.
      plans: one `CompressionPlan` per distinct ratio, ascending ratio (`V41PoolGeometry.ratios`).
      tail: a `TailPlan`, or None when every row runs every layer.
    """

    token_ids: Array
    compressed_ids: Array
    positions: Array
    batch_ids: Array
    image_rows: Array
    cu_seqlens: Array
    slots: Array
    block_tables: Array
    preparation: Array
    forward_start: Array
    history: Array
    write_from: Array
    cached_until: Array
    swa_cached_until: Array
    swa_replay_start: Array
    is_final: Array
    output_rows: Array
    plans: tuple[CompressionPlan, ...]
    tail: TailPlan | None = None


class EngramRows(NamedTuple):
    """Table rows gathered on the host for every batch row, still in their stored codes.

    Attributes:
      codes: per Engram layer [N, columns, head_dim] uint8, E4M3 codes; padding rows 0.
      scales: per Engram layer [N, columns, head_dim // 32] uint8, E8M0 codes; padding rows 127.
    """

    codes: tuple[Array, ...]
    scales: tuple[Array, ...]

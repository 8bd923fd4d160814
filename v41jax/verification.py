"""Verification of drafted tokens and the commit of the accepted prefix, as pure functions on the device.

A verify step forwards `1 + ell` rows a request, the anchor first. The target's own choice after every row is drawn
exactly as plain decoding would draw it; a proposal survives if it equals the choice before it. Only the cursor and the
newest token need a commit: rings and tails are wide enough that rejected rows lie beyond anything read again, and
compressed rows past the new end are invisible until they are rewritten (runtime specification, "Speculative
staging").
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from scheduler.batch import BatchStep
from scheduler.pools import Pools
from v41jax.sampling import LogitEdits, SamplingInputs, constrain, on_gpu, sample

Array = jax.Array


class Verified(NamedTuple):
    """Outcome of a verify step, by batch position.

    Attributes:
      tokens: [R, S + 1] int32, the target's choices; the first `committed` are emitted, the rest are -1.
      committed: [R] int32 input rows that became real, the anchor included: accepted proposals + 1, and as many tokens
        are emitted. 0 for padding requests.
    """

    tokens: Array
    committed: Array


class Staged(NamedTuple):
    """What a commit of each possible prefix would write, held outside the pools until one is chosen.

    Attributes:
      slots: [R] int32.
      lengths: [R] int32 rows of the request in this step; 0 for padding.
      cursors: [R, S + 1, 1 + Hh] int32; entry `n - 1` is the cursor after `n` committed rows.
    """

    slots: Array
    lengths: Array
    cursors: Array


class AcceptanceError(RuntimeError):
    """A verify step returned a prefix it did not stage."""


def row_sampling(sampling: SamplingInputs, batch: BatchStep) -> SamplingInputs:
    """Parameters of every row from those of its request.

    Row `j` of a request chooses the token `j` positions after the one its first row chooses, and draws with that
    position's noise: the draw of plain decoding there.

    Args:
      sampling: [R], `positions` those of the token that the request's first row chooses.
      batch: the verify step.

    Returns:
      [N]; padding rows are greedy.
    """
    request = jnp.maximum(batch.batch_ids, 0)
    rows = jax.tree.map(lambda leaf: leaf[request], sampling)
    offset = jnp.arange(request.shape[0], dtype=jnp.int32) - request_spans(batch)[0][request]
    return rows._replace(
        temperature=jnp.where(batch.batch_ids >= 0, rows.temperature, 0),
        positions=rows.positions + offset,
    )


def verify(logits: Array, batch: BatchStep, sampling: SamplingInputs, width: int) -> tuple[Verified, Array]:
    """Draws the target's choice after every row and accepts the leading proposals that agree with it.

    Args:
      logits: [N, V] float32, one row per batch row (`output_rows` of the step are all its rows, in order).
      batch: the verify step; a request's rows after the first are its proposals.
      sampling: see `row_sampling`. Temperature 0 is greedy verification, anything else sample-and-match (DSpark
        specification, "Verification").
      width: `S + 1`, static.

    Returns:
      The outcome, and the target's choice after every row, [N] int32.
    """
    choices = sample(logits, row_sampling(sampling, batch))
    return accept(choices, batch, width), choices


def edit_rows(logits: Array, adjustments: Array, edits: LogitEdits, batch: BatchStep, width: int) -> Array:
    """Biases, penalties and constraints of every row, as if the proposals up to it were accepted.

    Changes are added one row after the other, so that a row's logits are those of plain decoding to the bit.

    Args:
      logits: [N, V] float32.
      adjustments: [slots, V] float32, before the step.
      edits: per row; a row's change is that of its own token, and later rows of its request see it too.
      batch: the verify step.
      width: `S + 1`, static.

    Returns:
      [N, V] logits to choose from.
    """
    slots, vocabulary = adjustments.shape
    count = logits.shape[0]
    request = jnp.maximum(batch.batch_ids, 0)
    row = jnp.arange(count, dtype=jnp.int32)
    first = request_spans(batch)[0][request]
    adjusted = (edits.slots < slots) & (batch.batch_ids >= 0)

    def adjust() -> Array:
        sums = adjustments[jnp.minimum(edits.slots, slots - 1)]
        for offset in range(width):
            before = jnp.minimum(first + offset, count - 1)
            token = jnp.where(first + offset <= row, edits.tokens[before], vocabulary)
            sums = sums.at[row, token].add(edits.changes[before], mode="drop")
        return jnp.where(adjusted[:, None], logits + sums, logits)

    return constrain(jax.lax.cond(jnp.any(adjusted), adjust, lambda: logits), edits)


def keep_changes(adjustments: Array, edits: LogitEdits, batch: BatchStep, verified: Verified, width: int) -> Array:
    """The adjustments after a verify step: with the changes of the rows that became real, in their order.

    Where nothing changes that is skipped, but not on a GPU: XLA copies what a branch hands through, and the adjustments
    of all slots take longer to copy than a few numbers to add.

    Args:
      adjustments: [slots, V] float32, before the step.
      edits: see `edit_rows`.
      batch: the verify step.
      verified: its outcome.
      width: `S + 1`, static.
    """
    slots = adjustments.shape[0]
    rows, _ = _rows(batch, width)

    def change() -> Array:
        changed = adjustments
        for offset in range(width):
            row = rows[:, offset]
            slot = jnp.where(offset < verified.committed, edits.slots[row], slots)
            changed = changed.at[slot, edits.tokens[row]].add(edits.changes[row], mode="drop")
        return changed

    if on_gpu():
        return change()
    return jax.lax.cond(jnp.any(edits.slots < slots), change, lambda: adjustments)


def accept(choices: Array, batch: BatchStep, width: int) -> Verified:
    """The longest prefix of each request's proposals that equals the choices before them.

    Args:
      choices: [N] int32, the target's choice after every row.
      batch: the verify step.
      width: `S + 1`, static.
    """
    rows, real = _rows(batch, width)
    tokens = choices[rows]
    agree = real[:, 1:] & (tokens[:, :-1] == batch.token_ids[rows][:, 1:])
    accepted = jnp.sum(jnp.cumprod(agree.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)
    committed = jnp.where(real[:, 0], accepted + 1, 0)
    emitted = jnp.arange(width, dtype=jnp.int32) < committed[:, None]
    return Verified(jnp.where(emitted, tokens, -1), committed)


def stage(pools: Pools, batch: BatchStep, width: int) -> Staged:
    """Cursor after every prefix that a verify step may commit.

    Args:
      pools: before the commit; the cursors still stand where the step starts.
      batch: the verify step.
      width: `S + 1`, static.
    """
    rows, real = _rows(batch, width)
    history = pools.cursor[batch.slots, 1:]
    size = history.shape[1]
    known = jnp.concatenate([history, batch.compressed_ids[rows]], axis=1)
    counts = jnp.arange(1, width + 1, dtype=jnp.int32)
    histories = known[:, counts[:, None] + jnp.arange(size, dtype=jnp.int32)]
    ends = batch.forward_start[:, None] + counts
    return Staged(
        slots=batch.slots,
        lengths=jnp.sum(real, axis=1, dtype=jnp.int32),
        cursors=jnp.concatenate([ends[:, :, None], histories], axis=2),
    )


def commit(pools: Pools, staged: Staged, verified: Verified) -> Pools:
    """Moves the cursors past the accepted prefix and puts the newest token, the next anchor, in its place.

    Padding requests name a slot and write nothing, and neither does a count outside `1..length`; the host refuses
    those by `check_committed`.
    """
    committed = verified.committed
    chosen = jnp.clip(committed - 1, 0, staged.cursors.shape[1] - 1)[:, None]
    cursor = jnp.take_along_axis(staged.cursors, chosen[:, :, None], axis=1)[:, 0]
    newest = jnp.take_along_axis(verified.tokens, chosen, axis=1)[:, 0]
    valid = (committed >= 1) & (committed <= staged.lengths)
    target = jnp.where(valid, staged.slots, pools.cursor.shape[0])
    return pools.replace(
        cursor=pools.cursor.at[target].set(cursor, mode="drop"),
        last_token=pools.last_token.at[target].set(newest, mode="drop"),
    )


def check_committed(committed: ArrayLike, lengths: ArrayLike) -> None:
    """Host-side check of a result before progress is advanced.

    Args:
      committed: [R] counts that the step returned.
      lengths: [b] rows that were scheduled, b <= R.

    Raises:
      AcceptanceError: a scheduled request committed nothing or more than its rows, or padding committed something.
    """
    counts, rows = np.asarray(committed), np.asarray(lengths)
    expected = np.zeros(counts.shape, rows.dtype)
    expected[: rows.size] = rows
    wrong = np.flatnonzero((counts < np.minimum(expected, 1)) | (counts > expected))
    if wrong.size:
        raise AcceptanceError(
            "; ".join(f"batch position {row} committed {counts[row]} of {expected[row]} rows" for row in wrong.tolist())
        )


def _rows(batch: BatchStep, width: int) -> tuple[Array, Array]:
    """Batch rows of each request, [R, width] clamped, and which of them exist."""
    first, end = request_spans(batch)
    rows = first[:, None] + jnp.arange(width, dtype=jnp.int32)
    return jnp.minimum(rows, batch.positions.shape[0] - 1), rows < end[:, None]


def request_spans(batch: BatchStep) -> tuple[Array, Array]:
    """First row of each request and one past its last, [R] int32 each.

    In the whole step of several data shards (`mesh_forward.whole_step`) every shard has an offset more than it has
    requests.
    """
    shards = batch.cu_seqlens.shape[0] - batch.slots.shape[0]
    offsets = batch.cu_seqlens.reshape(shards, -1)
    return offsets[:, :-1].reshape(-1), offsets[:, 1:].reshape(-1)

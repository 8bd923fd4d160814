"""The two programs of a speculating engine: verify and draft; pure, jitted by the runner once per bucket.

A step is one verify call and one draft call. Forward, draw, acceptance and commit are one program, so that no state
between a tentative forward and its commit exists outside of it.
"""

from __future__ import annotations

from typing import NamedTuple

import jax

from scheduler.batch import BatchStep, EngramRows
from scheduler.pools import Pools
from v41jax.draft_parameters import DraftParameters
from v41jax.dspark import DraftBlock, committed_requests, draft_block, write_draft_context
from v41jax.model import ModelSetup, forward
from v41jax.parameters import Parameters
from v41jax.sampling import SamplingInputs
from v41jax.verification import Verified, commit, stage, verify

Array = jax.Array


class VerifyOutput(NamedTuple):
    """What a verify step leaves on the device besides the pools.

    Attributes:
      verified: emitted tokens and committed rows by batch position.
      logits: [N, V] float32, one row per batch row; row `j` of a request is the distribution of its `j`-th emitted
        token.
      cursor_mismatch: [R] bool, see `ForwardOutput`.
    """

    verified: Verified
    logits: Array
    cursor_mismatch: Array


def verify_step(
    params: Parameters,
    draft: DraftParameters,
    pools: Pools,
    batch: BatchStep,
    engram_rows: EngramRows,
    sampling: SamplingInputs,
    *,
    setup: ModelSetup,
) -> tuple[Pools, VerifyOutput]:
    """Forwards anchors and proposals, draws, accepts and commits.

    Args:
      params: the target's weights.
      draft: the draft's weights, for the context keys of the rows.
      pools: request memory, donated.
      batch: a decode step of 1 to `S + 1` rows a request, every row an output row, every request continuing.
      engram_rows: table rows of the batch.
      sampling: [R] per request, `positions` those of the token that its first row chooses.
      setup: static.
    """
    width = setup.geometry.speculative_tokens + 1
    pools, output = forward(params, pools, batch, engram_rows, setup=setup, phase="decode", advance=False)
    # Rejected rows get context keys too: like the backbone's rows they are never visible.
    pools = write_draft_context(draft, pools, output.taps, batch.slots, setup=setup)
    verified = verify(output.logits, batch, sampling, width)
    pools = commit(pools, stage(pools, batch, width), verified)
    return pools, VerifyOutput(verified, output.logits, output.cursor_mismatch)


def draft_step(
    params: Parameters,
    draft: DraftParameters,
    pools: Pools,
    slots: Array,
    live: Array,
    sampling: SamplingInputs | None = None,
    *,
    setup: ModelSetup,
    confidence: bool = True,
) -> DraftBlock:
    """Drafts for requests whose newest token is in the pools, after a verify step or a final prefill.

    Args:
      params: the target's weights.
      draft: the draft's weights.
      pools: request memory; read, not donated.
      slots: [R] int32; padding 0.
      live: [R] bool.
      sampling: see `draft_block`.
      setup: static.
      confidence: static; off when the verification width is fixed.
    """
    requests = committed_requests(pools, slots, live)
    return draft_block(params, draft, pools, requests, setup=setup, confidence=confidence, sampling=sampling)

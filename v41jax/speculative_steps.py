"""The programs of a speculating engine: prefill, verify and draft; pure, jitted by the runner once per bucket.

A decode step is one verify call and one draft call. Forward, draw, acceptance and commit are one program, so that no
state between a tentative forward and its commit exists outside of it.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from scheduler.batch import BatchStep, EngramRows
from scheduler.pools import Pools
from v41jax.draft_parameters import DraftParameters
from v41jax.dspark import DraftBlock, committed_requests, draft_block, write_draft_context
from v41jax.model import ForwardOutput, ModelSetup, forward
from v41jax.parameters import Parameters
from v41jax.sampling import LogitEdits, SamplingInputs, TokenScores, token_scores
from v41jax.verification import Verified, commit, edit_rows, keep_changes, stage, verify

Array = jax.Array


class VerifyOutput(NamedTuple):
    """What a verify step leaves on the device besides the pools.

    Attributes:
      verified: emitted tokens and committed rows by batch position.
      logits: [N, V] float32, one row per batch row; row `j` of a request is the distribution of its `j`-th emitted
        token, before edits.
      cursor_mismatch: [R] bool, see `ForwardOutput`.
      scores: [N] of the target's choice after every row, all zero unless the step was asked for them.
    """

    verified: Verified
    logits: Array
    cursor_mismatch: Array
    scores: TokenScores


def context_step(
    params: Parameters,
    draft: DraftParameters,
    pools: Pools,
    batch: BatchStep,
    engram_rows: EngramRows,
    *,
    setup: ModelSetup,
    image_embeddings: Array | None = None,
    keep_flow: bool = False,
) -> tuple[Pools, ForwardOutput]:
    """A prefill forward that leaves the draft its context: of the rows that ran the decoder, of none when it did not
    run.

    Args:
      params: the target's weights.
      draft: the draft's weights.
      pools: request memory, donated.
      batch: a prefill step.
      engram_rows: table rows of the batch.
      setup: static.
      image_embeddings: see `forward`.
      keep_flow: static, see `forward`.
    """
    pools, output = forward(
        params,
        pools,
        batch,
        engram_rows,
        setup=setup,
        phase="prefill",
        image_embeddings=image_embeddings,
        keep_flow=keep_flow,
    )
    if output.taps is not None:
        pools = write_draft_context(draft, pools, output.taps, batch.slots, setup=setup)
    return pools, output


def verify_step(
    params: Parameters,
    draft: DraftParameters,
    pools: Pools,
    adjustments: Array,
    batch: BatchStep,
    engram_rows: EngramRows,
    sampling: SamplingInputs,
    edits: LogitEdits,
    scored: Array,
    *,
    setup: ModelSetup,
) -> tuple[Pools, Array, VerifyOutput]:
    """Forwards anchors and proposals, draws, accepts and commits. The image placeholder is never chosen.

    Args:
      params: the target's weights.
      draft: the draft's weights, for the context keys of the rows.
      pools: request memory, donated.
      adjustments: [slots, V] float32, donated; biases and penalties of the slots.
      batch: a decode step of 1 to `S + 1` rows a request, every row an output row, every request continuing.
      engram_rows: table rows of the batch.
      sampling: [R] per request, `positions` those of the token that its first row chooses.
      edits: [N] per row, see `edit_rows`.
      scored: scalar bool, log-probabilities are wanted.
      setup: static.
    """
    pools, output = forward(params, pools, batch, engram_rows, setup=setup, phase="decode", advance=False)
    # Rejected rows get context keys too: like the backbone's rows they are never visible.
    pools = write_draft_context(draft, pools, output.taps, batch.slots, setup=setup)
    return accept_and_commit(pools, adjustments, batch, output, sampling, edits, scored, setup=setup)


def accept_and_commit(
    pools: Pools,
    adjustments: Array,
    batch: BatchStep,
    output: ForwardOutput,
    sampling: SamplingInputs,
    edits: LogitEdits,
    scored: Array,
    *,
    setup: ModelSetup,
) -> tuple[Pools, Array, VerifyOutput]:
    """What a verify step does after its forward; arguments and results as of `verify_step`."""
    width = setup.geometry.speculative_tokens + 1
    logits = edit_rows(output.logits, adjustments, edits, batch, width)
    logits = logits.at[:, setup.config.image_token_id].set(-jnp.inf)
    verified, choices = verify(logits, batch, sampling, width)
    adjustments = keep_changes(adjustments, edits, batch, verified, width)
    pools = commit(pools, stage(pools, batch, width), verified)
    scores = token_scores(output.logits, choices, scored)
    return pools, adjustments, VerifyOutput(verified, output.logits, output.cursor_mismatch, scores)


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
      sampling: see `draft_block`; positions are those of the first proposals whatever they hold here.
      setup: static.
      confidence: static; off when the verification width is fixed.
    """
    requests = committed_requests(pools, slots, live)
    if sampling is not None:
        sampling = sampling._replace(positions=requests.positions + 2)
    return draft_block(params, draft, pools, requests, setup=setup, confidence=confidence, sampling=sampling)

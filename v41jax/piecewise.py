"""One step as separately compiled pieces, a debugging aid: what lies between two pieces can be looked at from Python.

The pieces are embedding and slot preparation, encoder, decoder, and head with sampling. They run the functions of which
`model.forward` consists; the results are those of the whole step up to the order in which sums are fused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from scheduler.batch import BatchStep, EngramRows
from scheduler.pools import Pools
from v41jax.bounded_replay import take_rows
from v41jax.flow import Flow
from v41jax.layers.rows import Phase
from v41jax.model import (
    ForwardOutput,
    ModelSetup,
    decoder_start,
    embed,
    output_logits,
    prepare_step,
    run_layers,
    run_tail,
)
from v41jax.parameters import Parameters
from v41jax.slot_state import advance_cursors, prepare_slots

Array = jax.Array

Finish = Callable[..., tuple[Pools, Array, Any]]
"""(params, pools, adjustments, batch, forward output, sampling, *, setup): what a step does after its forward."""


class PiecewiseStep:
    """Called like `runner.serve_step`; each piece is compiled at its first use and donates the pools.

    Args of the constructor:
      setup: what the forward is specialized on; without drafts.
      phase: of the step.
      finish: see `Finish`.
    """

    def __init__(self, setup: ModelSetup, phase: Phase, finish: Finish):
        if setup.geometry.speculative_tokens:
            raise ValueError(
                f"a step in pieces keeps no features for {setup.geometry.speculative_tokens} drafted tokens: use the "
                "execution mode FULL with speculation"
            )
        self._setup = setup
        self._phase: Phase = phase
        self._finish = finish
        self._begin = jax.jit(self._begin_piece, donate_argnums=1)
        self._encoder = jax.jit(self._encoder_piece, donate_argnums=2)
        self._decoder = jax.jit(self._decoder_piece, donate_argnums=2)
        self._end = jax.jit(self._end_piece, donate_argnums=(1, 2))

    def __call__(
        self,
        params: Parameters,
        pools: Pools,
        adjustments: Array,
        batch: BatchStep,
        engram_rows: EngramRows,
        sampling: Any,
        image_embeddings: Array | None = None,
    ) -> tuple[Pools, Array, Any]:
        """Runs the pieces one after the other; arguments and results as of `runner.serve_step`."""
        pools, mismatch, flow = self._begin(params, pools, batch, image_embeddings)
        flow, pools = self._encoder(params, flow, pools, batch, engram_rows)
        flow, pools = self._decoder(params, flow, pools, batch, engram_rows)
        return self._end(params, pools, adjustments, batch, flow, mismatch, sampling)

    def _begin_piece(
        self, params: Parameters, pools: Pools, batch: BatchStep, image_embeddings: Array | None
    ) -> tuple[Pools, Array, Flow]:
        pools, mismatch = prepare_slots(pools, batch, self._phase)
        return pools, mismatch, embed(params, pools, batch, self._setup, image_embeddings)

    def _encoder_piece(
        self, params: Parameters, flow: Flow, pools: Pools, batch: BatchStep, engram_rows: EngramRows
    ) -> tuple[Flow, Pools]:
        step = prepare_step(params, batch, engram_rows, self._setup, self._phase)
        return run_layers(params, flow, pools, step, range(decoder_start(self._setup.config)))

    def _decoder_piece(
        self, params: Parameters, flow: Flow, pools: Pools, batch: BatchStep, engram_rows: EngramRows
    ) -> tuple[Flow, Pools]:
        config = self._setup.config
        step = prepare_step(params, batch, engram_rows, self._setup, self._phase)
        if batch.tail is None:
            layers = range(decoder_start(config), config.text.num_hidden_layers)
            return run_layers(params, flow, pools, step, layers)
        flow, pools, _ = run_tail(params, flow, pools, step, batch.tail)
        return flow, pools

    def _end_piece(
        self,
        params: Parameters,
        pools: Pools,
        adjustments: Array,
        batch: BatchStep,
        flow: Flow,
        mismatch: Array,
        sampling: Any,
    ) -> tuple[Pools, Array, Any]:
        rows = take_rows(flow, batch.output_rows) if batch.tail is None else flow
        logits = output_logits(params, rows, batch, self._setup.config)
        pools = advance_cursors(pools, batch)
        output = ForwardOutput(logits, mismatch, None, None, flow)
        return self._finish(params, pools, adjustments, batch, output, sampling, setup=self._setup)

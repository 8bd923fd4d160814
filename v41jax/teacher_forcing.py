"""Every layer of a forward from given inputs, so that a comparison can tell one layer's error from its history.

The layers run on the same pools in order: a layer that reads another's compressed rows or selection gets what that
layer produced from its own given input.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from scheduler.batch import BatchStep, EngramRows
from scheduler.pools import Pools
from v41jax.config import LayerMode
from v41jax.layers.attention import Selection
from v41jax.layers.moe import Routing
from v41jax.layers.rows import Phase
from v41jax.model import Flow, ModelSetup, prepare_step, run_layer
from v41jax.parameters import Parameters, layer_weights
from v41jax.slot_state import prepare_slots

Array = jax.Array


class ForcedOutput(NamedTuple):
    """What every layer made of its given input.

    Attributes:
      streams: [layers, N, S, D] activation dtype.
      pre_mix: [layers, N, S] float32.
      routing: experts and weights [layers, N, k].
      selections: (layer, `Selection`) of every index source, in order.
      candidates: [N, Nb] of the candidate source, or None.
    """

    streams: Array
    pre_mix: Array
    routing: Routing
    selections: tuple[tuple[int, Selection], ...]
    candidates: Array | None


def forced_layers(
    params: Parameters,
    pools: Pools,
    batch: BatchStep,
    engram_rows: EngramRows,
    streams: Array,
    pre_mix: Array,
    *,
    setup: ModelSetup,
    phase: Phase,
) -> tuple[Pools, ForcedOutput]:
    """Runs every layer on its own given input.

    Args:
      params: weights.
      pools: request memory.
      batch: the step.
      engram_rows: table rows of every batch row.
      streams: [layers, N, S, D], what enters each layer (before an Engram update).
      pre_mix: [layers, N, S] float32, handed to each layer.
      setup: static.
      phase: static.
    """
    pools, _ = prepare_slots(pools, batch, phase)
    step = prepare_step(params, batch, engram_rows, setup, phase)
    dtype = setup.precision.activation_dtype
    flow = Flow(streams[0].astype(dtype), pre_mix[0])
    outputs, selections = [], []
    for topology in setup.config.layers:
        weights = layer_weights(params, setup.config, topology.index)
        given = flow._replace(streams=streams[topology.index].astype(dtype), pre_mix=pre_mix[topology.index])
        flow, pools, routing = run_layer(weights, topology, given, pools, step)
        outputs.append((flow.streams, flow.pre_mix, routing))
        if topology.mode in (LayerMode.FULL, LayerMode.REINDEX):
            selections.append((topology.index, flow.selection))
    made, mixed, routing = jax.tree.map(lambda *parts: jnp.stack(parts), *outputs)
    return pools, ForcedOutput(made, mixed, routing, tuple(selections), flow.candidates)

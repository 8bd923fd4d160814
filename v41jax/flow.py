"""What layers hand to each other, and the records of it that comparisons ask for."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from v41jax.config import CandidateRole, LayerMode
from v41jax.layers.attention import Selection
from v41jax.layers.moe import Routing
from v41jax.parameters import Run

Array = jax.Array


class Flow(NamedTuple):
    """What one layer hands to the next, for the rows that run it.

    Attributes:
      streams: [N, S, D] activation dtype.
      pre_mix: [N, S] float32, weights of the next sublayer's input.
      selection: of the last index source; None before the first.
      candidates: [N, Nb] int32 block ids of the candidate source; None before it.
    """

    streams: Array
    pre_mix: Array
    selection: Selection | None = None
    candidates: Array | None = None


class LayerRecord(NamedTuple):
    """Intermediates of the layers of one run, with a leading axis of its layers.

    Attributes:
      streams: [n, N, S, D] after each layer.
      pre_mix: [n, N, S] handed on by each layer.
      routing: experts and weights [n, N, k].
    """

    streams: Array
    pre_mix: Array
    routing: Routing


class Recorded(NamedTuple):
    """One run of a recorded forward: its layers, the flow after it, and the intermediates."""

    run: Run
    flow: Flow
    layers: LayerRecord


class Record(NamedTuple):
    """Intermediates of a forward, for comparisons. What a row did not run is 0, or -1 where ids are held.

    Attributes:
      layers: one `LayerRecord`, leading axis all layers that were run.
      selections: (layer, `Selection`) of every index source, in order.
      candidates: [N, Nb] of the candidate source, or None.
    """

    layers: LayerRecord
    selections: tuple[tuple[int, Selection], ...]
    candidates: Array | None


def collect(recorded: list[Recorded]) -> Record:
    """One `Record` of all runs, in order."""
    layers = jax.tree.map(lambda *parts: jnp.concatenate(parts), *(entry.layers for entry in recorded))
    selections, candidates = [], None
    for run, flow, _ in recorded:
        if run.topology.mode in (LayerMode.FULL, LayerMode.REINDEX):
            selections.append((run.layers[0], flow.selection))
        if run.topology.candidates is CandidateRole.PUBLISHES:
            candidates = flow.candidates
    return Record(layers, tuple(selections), candidates)


def spread(recorded: list[Recorded], index: Array, count: int) -> list[Recorded]:
    """Records of some rows as records of all rows of the batch.

    Args:
      recorded: of the rows.
      index: batch row of each; out of range at padding.
      count: rows of the batch.
    """

    def zeros_elsewhere(leaf: Array, axis: int) -> Array:
        shape = (*leaf.shape[:axis], count, *leaf.shape[axis + 1 :])
        return jnp.zeros(shape, leaf.dtype).at[(slice(None),) * axis + (index,)].set(leaf, mode="drop")

    def ids(leaf: Array) -> Array:
        return zeros_elsewhere(leaf + 1, 0) - 1

    spread_out = []
    for run, flow, layers in recorded:
        selection, candidates = flow.selection, flow.candidates
        if selection is not None:
            selection = Selection(ids(selection.entries), zeros_elsewhere(selection.counts, 0))
        flow = Flow(
            zeros_elsewhere(flow.streams, 0),
            zeros_elsewhere(flow.pre_mix, 0),
            selection,
            None if candidates is None else ids(candidates),
        )
        spread_out.append(Recorded(run, flow, jax.tree.map(lambda leaf: zeros_elsewhere(leaf, 1), layers)))
    return spread_out

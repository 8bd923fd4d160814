"""The attention sublayer of one layer: selection of entries, window keys and attention, in the order of the phase."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.quantized_rows import QuantizedRows
from pallas_kernels.stored_rows import ordered_after
from scheduler.pools import Pools
from v41jax.config import CandidateRole, LayerMode, LayerTopology
from v41jax.flow import Flow
from v41jax.layers import collectives
from v41jax.layers.attention import KeyMemory, Selection, attend, query_latent, write_ring, write_window_keys
from v41jax.layers.indexer import index_queries, select
from v41jax.layers.rows import Rows
from v41jax.parameters import LayerWeights
from v41jax.quantization import fake_q8
from v41jax.step import Step

Array = jax.Array


class AttentionInputs(NamedTuple):
    """What the attention sublayer works on; M rows give window keys, N of them are queries.

    Attributes:
      normalized: [N, D].
      kv: [M, d] window keys before their Q8, of `Step.rows`; in decode their latents, before norm and rotation too.
      rows: of the N queries.
    """

    normalized: QuantizedRows
    kv: Array
    rows: Rows


def attention_sublayer(
    weights: LayerWeights,
    topology: LayerTopology,
    inputs: AttentionInputs,
    flow: Flow,
    pools: Pools,
    window: Array,
    ring_offset: Array | int,
    step: Step,
) -> tuple[Array, Flow, Array]:
    """Selection, ring write and attention in the order of the phase (runtime specification, "Order inside one
    layer").

    Returns:
      [N, D] output, the flow with this layer's selection and candidates, and the window rings.
    """
    setup, requests = step.setup, step.requests
    text, precision, geometry = setup.config.text, setup.precision, setup.geometry
    kernels = setup.kernels
    normalized, kv, rows = inputs
    latent = query_latent(normalized, weights.attention, text, precision, kernels)

    owner = None
    if topology.mode is not LayerMode.WINDOW:
        owner = geometry.owners.index((topology.kv_owner, topology.ratio))
    if weights.indexer is not None:
        flow = select_entries(weights, topology, inputs, latent, flow, pools, owner, step)

    # All layers' rings seen as one array: a layer's ring is `ring_offset + slot`, and nothing is sliced out.
    rings = window.reshape(-1, *window.shape[2:])
    write = {"window_format": geometry.window_format}
    if step.phase == "decode":
        angles = step.rows.angles(topology.ratio)
        rings = write_window_keys(
            rings,
            kv,
            weights.attention,
            angles,
            step.rows,
            requests.slots,
            ring_offset,
            text=text,
            kernels=kernels,
            **write,
        )
        in_forward = kv[:0]
    else:
        in_forward = fake_q8(kv) if precision.activation_quantization else kv
    count = normalized.rounded.shape[0]
    nothing = Selection(jnp.zeros((count, 0), jnp.int32), jnp.zeros(count, jnp.int32))
    memory = KeyMemory(
        selection=nothing if owner is None else flow.selection,
        main=None if owner is None else pools.main[owner],
        window=rings,
        ring_offset=ring_offset,
    )
    partial = attend(
        latent,
        in_forward,
        weights.attention,
        rows,
        requests,
        memory,
        ratio=topology.ratio,
        text=text,
        precision=precision,
        main_format=geometry.main_format,
        window_format=geometry.window_format,
        kernels=kernels,
    )
    if step.phase != "decode":
        slots = ordered_after(requests.slots, partial)
        rings = write_ring(rings, kv, step.rows, slots, ring_offset, **write)
    return collectives.sum_over_model(partial, setup.parallel), flow, rings.reshape(window.shape)


def select_entries(
    weights: LayerWeights,
    topology: LayerTopology,
    inputs: AttentionInputs,
    latent: QuantizedRows,
    flow: Flow,
    pools: Pools,
    owner: int,
    step: Step,
) -> Flow:
    """An index source's selection and candidates; arguments as of `attention_sublayer`, `latent` of `query_latent`.

    The index planes are on every `model` chip: each scores its own part of the rows, and the choices are put together.
    """
    setup = step.setup
    rows, normalized, candidates = inputs.rows, inputs.normalized.rounded, flow.candidates
    split = collectives.splits_rows(normalized.shape[0], setup.parallel)
    if split:
        rows, normalized, latent, candidates = collectives.own_rows(
            (rows, normalized, latent, candidates), setup.parallel
        )
    query, head_weights = index_queries(
        normalized, latent, weights.indexer, rows, topology.ratio, setup.config.text, setup.kernels
    )
    selection, candidates = select(
        query,
        head_weights,
        rows,
        step.requests,
        pools.index_values[owner],
        pools.index_scales[owner],
        candidates,
        ratio=topology.ratio,
        role=topology.candidates,
        text=setup.config.text,
        precision=setup.precision,
        index_format=setup.geometry.index_plane_format,
        kernels=setup.kernels,
    )
    if split:
        selection = collectives.join_rows(selection)
        changed = topology.candidates is CandidateRole.PUBLISHES
        candidates = collectives.join_rows(candidates) if changed else flow.candidates
    return flow._replace(selection=selection, candidates=candidates)

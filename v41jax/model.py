"""The forward: encoder, decoder and head over one flat batch of rows.

Pure functions: pools go in and come out, nothing varies between steps but arrays. Which rows run which layer is
expressed by `Rows`; which they are under bounded replay is said in `bounded_replay`.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.quantized_rows import QuantizedRows
from pallas_kernels.rounding import round_to
from pallas_kernels.stored_rows import load_rows
from scheduler.batch import BatchStep, EngramRows, TailPlan
from scheduler.pools import Pools
from v41jax.attention_sublayer import AttentionInputs, attention_sublayer
from v41jax.bounded_replay import last_rows, tail_rows, take_rows
from v41jax.config import LayerMode, LayerTopology, ModelConfig
from v41jax.flow import Flow, LayerRecord, Record, Recorded, collect, spread
from v41jax.layers import collectives
from v41jax.layers.attention import window_latents, window_rows
from v41jax.layers.compressor import OwnerMemory, compress
from v41jax.layers.engram import embed_rows, engram
from v41jax.layers.hyper_connections import collapse, expand, mixes, sublayer_input
from v41jax.layers.linear import product
from v41jax.layers.moe import Routing, codes_read, moe, shared_hidden
from v41jax.layers.norm import rms_norm
from v41jax.layers.rows import Phase, Requests, Rows, prepare_rows
from v41jax.parameters import LayerWeights, Parameters, Run, layer_of_run, layer_weights, plan_runs
from v41jax.slot_state import advance_cursors, prepare_slots
from v41jax.step import ModelSetup, Step

Array = jax.Array


class Taps(NamedTuple):
    """What the draft model reads of a target forward.

    Attributes:
      features: [M, T D] activation dtype; per layer of `dspark_target_layer_ids`, ascending, the mean over the streams
        of the residual that enters it (DSpark specification, "Target features").
      rows: of the M rows that ran those layers: the tail's under decoder replay.
    """

    features: Array
    rows: Rows


class ForwardOutput(NamedTuple):
    """What a step returns besides the pools.

    Attributes:
      logits: [F, V] float32, of `batch.output_rows`; zero at padding.
      cursor_mismatch: [R] bool, a CONTINUE request whose slot did not stand at `forward_start`: its state is not
        what the scheduler believes and must be rebuilt.
      record: a `Record` when asked for.
      taps: `Taps` when the pools hold draft windows and the decoder ran.
      flow: what the last layer hands on, for all rows of the batch; when asked for.
    """

    logits: Array
    cursor_mismatch: Array
    record: Record | None
    taps: Taps | None = None
    flow: Flow | None = None


def decoder_start(config: ModelConfig) -> int:
    """The first decoder layer, the last KV source; the number of layers when there is none."""
    return config.owners[-1][0] if config.owners else config.text.num_hidden_layers


def forward(
    params: Parameters,
    pools: Pools,
    batch: BatchStep,
    engram_rows: EngramRows,
    *,
    setup: ModelSetup,
    phase: Phase,
    image_embeddings: Array | None = None,
    record: bool = False,
    advance: bool = True,
    keep_flow: bool = False,
) -> tuple[Pools, ForwardOutput]:
    """One forward over any mixture of requests.

    Args:
      params: weights and RoPE tables.
      pools: request memory, to be donated by the caller's `jit`.
      batch: the step.
      engram_rows: table rows of every batch row.
      setup: static.
      phase: static. "decode" needs every request to continue (it never zeroes a slot) and at most `1 + S` rows each.
      image_embeddings: [N, D] float, read where `batch.image_rows`; None when no row of the batch lies in an image.
      record: static; return intermediates.
      advance: static; False leaves the cursors where they are, for a verification that commits a prefix of the rows.
      keep_flow: static; return what the last layer hands on (not under decoder replay, which runs it on few rows).

    Returns:
      The pools after the step, cursors advanced, and the outputs.
    """
    config = setup.config
    pools, mismatch = prepare_slots(pools, batch, phase)
    step = prepare_step(params, batch, engram_rows, setup, phase)
    flow = embed(params, pools, batch, setup, image_embeddings)
    recorded: list[Recorded] | None = [] if record else None
    means: list[Array] | None = [] if setup.geometry.speculative_tokens else None
    ran: Rows | None = step.rows
    kept = None
    if batch.tail is None:
        flow, pools = run_layers(params, flow, pools, step, range(config.text.num_hidden_layers), recorded, means)
        kept = flow if keep_flow else None
        flow = take_rows(flow, batch.output_rows)
    else:
        flow, pools = run_layers(params, flow, pools, step, range(decoder_start(config)), recorded, means)
        flow, pools, ran = run_tail(params, flow, pools, step, batch.tail, recorded, means)
    logits = output_logits(params, flow, batch, config)
    if advance:
        pools = advance_cursors(pools, batch)
    taps = None if means is None or ran is None else Taps(jnp.concatenate(means, axis=1), ran)
    return pools, ForwardOutput(logits, mismatch, None if recorded is None else collect(recorded), taps, kept)


def run_tail(
    params: Parameters,
    flow: Flow,
    pools: Pools,
    step: Step,
    tail: TailPlan,
    recorded: list[Recorded] | None = None,
    means: list[Array] | None = None,
) -> tuple[Flow, Pools, Rows | None]:
    """The decoder under bounded replay; arguments as for `run_layers`, `step` with all rows of the batch.

    Returns:
      The flow of the last rows [F], the pools, and the rows that ran the decoder, None when no request finishes.
    """
    config = step.setup.config
    first, last = decoder_start(config), config.text.num_hidden_layers - 1
    pools = publish(layer_weights(params, config, first), config.layers[first], flow, pools, step)
    if not len(tail.last):
        return take_rows(flow, tail.last), pools, None
    count = len(step.rows.positions)
    rows = tail_rows(step.rows, tail)
    step = step._replace(rows=rows, embedded=(), published=first)
    flow = take_rows(flow, tail.rows)
    if means is not None:
        means[:] = take_rows(means, tail.rows)
    on_tail: list[Recorded] | None = None if recorded is None else []
    flow, pools = run_layers(params, flow, pools, step, range(first, last), on_tail, means)
    step = step._replace(queries=last_rows(rows, tail))
    on_last: list[Recorded] | None = None if recorded is None else []
    flow, pools = run_layers(params, flow, pools, step, range(last, last + 1), on_last, means)
    if recorded is not None:
        recorded += spread(on_tail, tail.rows, count)
        recorded += spread(on_last, jnp.where(tail.last < len(tail.rows), tail.rows[step.queries.index], count), count)
    return flow, pools, rows


def prepare_step(
    params: Parameters, batch: BatchStep, engram_rows: EngramRows, setup: ModelSetup, phase: Phase
) -> Step:
    """What every layer of a forward over all rows of the batch shares."""
    return Step(
        setup=setup,
        phase=phase,
        rows=prepare_rows(batch, params.plain, params.yarn, ring=setup.geometry.ring, phase=phase),
        requests=Requests(batch.slots, batch.block_tables),
        table=params.yarn,
        plans=dict(zip(setup.geometry.ratios, batch.plans)),
        embedded=tuple(
            embed_rows(codes, scales, setup.precision.activation_dtype)
            for codes, scales in zip(engram_rows.codes, engram_rows.scales)
        ),
    )


def embed(
    params: Parameters,
    pools: Pools,
    batch: BatchStep,
    setup: ModelSetup,
    image_embeddings: Array | None = None,
) -> Flow:
    """Token or image embeddings copied to every stream, and the first pre-mix."""
    last = pools.last_token[batch.slots[jnp.maximum(batch.batch_ids, 0)]]
    ids = jnp.where(batch.token_ids == -1, last, batch.token_ids)
    x = collectives.join_columns(load_rows(params.embed, (ids,)), setup.parallel)
    x = x.astype(setup.precision.activation_dtype)
    if image_embeddings is not None:
        x = jnp.where(batch.image_rows[:, None], round_to(image_embeddings, x.dtype), x)
    count = setup.config.text.hc_mult
    streams = jnp.broadcast_to(x[:, None, :], (x.shape[0], count, x.shape[1]))
    first = jnp.zeros((x.shape[0], count), jnp.float32).at[:, 0].set(1.0)
    return Flow(streams, first)


def head(params: Parameters, flow: Flow, config: ModelConfig) -> Array:
    """Logits of every row of `flow`, [F, V] float32 (model specification, "Final norm and head").

    On a mesh these are the logits of this chip's part of the vocabulary.
    """
    x = collapse(flow.streams, flow.pre_mix)
    return product(rms_norm(x, params.norm, config.text.rms_norm_eps), params.head)


def output_logits(params: Parameters, flow: Flow, batch: BatchStep, config: ModelConfig) -> Array:
    """`head` of a step's output rows, which `flow` holds; zero at padding, so that a step of nothing returns zeros."""
    real = batch.output_rows < batch.positions.shape[0]
    return jnp.where(real[:, None], head(params, flow, config), 0)


def run_layers(
    params: Parameters,
    flow: Flow,
    pools: Pools,
    step: Step,
    layers: range,
    recorded: list[Recorded] | None = None,
    means: list[Array] | None = None,
) -> tuple[Flow, Pools]:
    """Runs the layers of a range.

    Args:
      params: weights.
      flow: what enters the first layer.
      pools: request memory.
      step: of the forward.
      layers: layer numbers.
      recorded: receives (run, flow after it, intermediates) of every run.
      means: receives [N, D] of every layer the draft taps, ascending.
    """
    tapped = () if means is None else step.setup.config.text.dspark_target_layer_ids
    for run, stacked in zip(plan_runs(step.setup.config), params.runs):
        part = tuple(layer for layer in run.layers if layer in layers)
        if not part:
            continue
        first = run.layers.index(part[0])
        run = Run(part, dataclasses.replace(run.topology, index=part[0]))
        wanted = [position for position, layer in enumerate(part) if layer in tapped]
        flow, pools, layer_record, entering = run_stacked(
            run, stacked, first, flow, pools, step, recorded is not None, bool(wanted)
        )
        if recorded is not None:
            recorded.append(Recorded(run, flow, layer_record))
        if means is not None:
            means.extend(entering[position] for position in wanted)
    return flow, pools


def stream_mean(streams: Array) -> Array:
    """Plain mean of the streams: [N, S, D] -> [N, D] activation dtype, float32 inside."""
    return round_to(jnp.mean(streams.astype(jnp.float32), axis=1), streams.dtype)


def run_stacked(
    run: Run, stacked: LayerWeights, first: int, flow: Flow, pools: Pools, step: Step, record: bool, tap: bool = False
) -> tuple[Flow, Pools, LayerRecord | None, Array | None]:
    """Consecutive layers of a run: a scan over its stacked weights from entry `first` on, which `unrolls_layers` may
    unroll, or an only layer.

    Returns:
      The flow after it, the pools, intermediates when `record`, and when `tap` the stream means that enter its layers,
      [n, N, D].
    """
    if len(run.layers) == 1:
        entering = stream_mean(flow.streams)[None] if tap else None
        weights = layer_of_run(stacked, first)
        flow, pools, routing = run_layer(weights, run.topology, flow, pools, step)
        layer_record = LayerRecord(flow.streams, flow.pre_mix, routing)
        layer_record = jax.tree.map(lambda leaf: leaf[None], layer_record) if record else None
        return flow, pools, layer_record, entering
    slots = pools.window.shape[1]

    def body(carry: tuple[Array, Array, Array, Array], _: None):
        streams, pre_mix, window, place = carry
        # Indexed here and not scanned over: a part of a run would be a copy of its weights.
        weights = layer_of_run(stacked, place)
        index = place - first + run.layers[0]
        inner = flow._replace(streams=streams, pre_mix=pre_mix)
        inner, window, routing = block(weights, run.topology, inner, pools, window, index * slots, step)
        layer_record = LayerRecord(inner.streams, inner.pre_mix, routing) if record else None
        carry = (inner.streams, inner.pre_mix, window, place + 1)
        return carry, (layer_record, stream_mean(streams) if tap else None)

    # The place is carried and not scanned over: reading it from an array would be a launch of its own on a GPU.
    carry = (flow.streams, flow.pre_mix, pools.window, jnp.int32(first))
    carry, (layer_record, entering) = jax.lax.scan(body, carry, length=len(run.layers), unroll=unrolls_layers(step))
    streams, pre_mix, window, _ = carry
    return flow._replace(streams=streams, pre_mix=pre_mix), pools.replace(window=window), layer_record, entering


def unrolls_layers(step: Step) -> bool:
    """Whether the layers of a run follow each other in the program instead of in a loop.

    They do in decode where a step is one captured graph: there a loop's condition is a kernel that the next layer waits
    for.
    """
    return step.phase == "decode" and collectives.captured(step.setup.parallel)


def run_layer(
    weights: LayerWeights, topology: LayerTopology, flow: Flow, pools: Pools, step: Step
) -> tuple[Flow, Pools, Routing]:
    """One whole layer: its compression if it is FULL and that is not done yet, then `block`."""
    if topology.mode is LayerMode.FULL and topology.index != step.published:
        pools = publish(weights, topology, flow, pools, step)
    ring_offset = topology.index * pools.window.shape[1]
    flow, window, routing = block(weights, topology, flow, pools, pools.window, ring_offset, step)
    return flow, pools.replace(window=window), routing


def attention_input(weights: LayerWeights, flow: Flow, setup: ModelSetup) -> QuantizedRows:
    """Normalized input of the attention sublayer, [N, D]; all that compression needs of a layer."""
    text = setup.config.text
    return sublayer_input(flow.streams, flow.pre_mix, weights.attn_norm, text, setup.precision, setup.kernels)


def publish(weights: LayerWeights, topology: LayerTopology, flow: Flow, pools: Pools, step: Step) -> Pools:
    """A FULL layer's compressed rows and index keys of every row of the batch.

    Apart from `block` because a bounded replay publishes the first decoder layer's entries for all rows and runs the
    rest of it on some. An Engram update of the same layer is computed here and again in `block`.
    """
    setup = step.setup
    geometry = setup.geometry
    flow = engram_update(weights, topology, flow, step)
    owner = geometry.owners.index((topology.index, topology.ratio))
    memory = OwnerMemory(
        main=pools.main[owner],
        index_values=pools.index_values[owner],
        index_scales=pools.index_scales[owner],
        tail_kv=pools.tail_kv,
        tail_score=pools.tail_score,
        tail=geometry.tail_owners.index(owner) if topology.ratio > 1 else None,
    )
    memory = compress(
        attention_input(weights, flow, setup).rounded,
        weights.compressor,
        memory,
        step.plans[topology.ratio],
        step.requests,
        step.table,
        ratio=topology.ratio,
        text=setup.config.text,
        main_format=geometry.main_format,
        index_format=geometry.index_plane_format,
    )

    def put(group: tuple, value: Array | None) -> tuple:
        return (*group[:owner], value, *group[owner + 1 :])

    return pools.replace(
        main=put(pools.main, memory.main),
        index_values=put(pools.index_values, memory.index_values),
        index_scales=put(pools.index_scales, memory.index_scales),
        tail_kv=memory.tail_kv,
        tail_score=memory.tail_score,
    )


def engram_update(weights: LayerWeights, topology: LayerTopology, flow: Flow, step: Step) -> Flow:
    """The Engram of a layer that has one; any other flow is returned as it is."""
    if topology.engram is None:
        return flow
    streams = engram(
        flow.streams,
        step.embedded[topology.engram],
        step.rows.engram_rows,
        weights.engram,
        text=step.setup.config.text,
        precision=step.setup.precision,
        kernels=step.setup.kernels,
    )
    return flow._replace(streams=streams)


def block(
    weights: LayerWeights,
    topology: LayerTopology,
    flow: Flow,
    pools: Pools,
    window: Array,
    ring_offset: Array | int,
    step: Step,
) -> tuple[Flow, Array, Routing]:
    """One layer without its compression (model specification, "Single-pass (delayed) mHC").

    Args:
      weights: of the layer, no leading axis.
      topology: of the layer, or of its run.
      flow: what enters the layer.
      pools: main rows and index keys are read.
      window: [layers, slots, ring, row], read and written.
      ring_offset: layer number times slots.
      step: of the forward.

    Returns:
      The flow after the layer (of `step.queries` where they are given), the window rings, and the routing.
    """
    setup, rows = step.setup, step.rows
    text, precision = setup.config.text, setup.precision
    flow = engram_update(weights, topology, flow, step)
    inputs = attention_input(weights, flow, setup)
    if step.phase == "decode":
        kv = window_latents(inputs, weights.attention, setup.kernels)
    else:
        kv = window_rows(inputs, weights.attention, rows.angles(topology.ratio), text, setup.kernels)
    if step.queries is not None:
        rows = step.queries.rows
        flow, inputs = take_rows((flow, inputs), step.queries.index)
    coefficients = mixes(flow.streams, weights.attn_mix, text, setup.kernels, after=inputs)
    output, flow, window = attention_sublayer(
        weights, topology, AttentionInputs(inputs, kv, rows), flow, pools, window, ring_offset, step
    )
    streams = expand(output, flow.streams, coefficients)

    codes = codes_read(weights.moe)
    inputs = sublayer_input(streams, coefficients.pre, weights.ffn_norm, text, precision, setup.kernels, codes=codes)
    hidden = shared_hidden(inputs, weights.moe.shared, text, precision, setup.kernels)
    ffn = mixes(streams, weights.ffn_mix, text, setup.kernels, after=hidden)
    output, routing = moe(
        inputs,
        hidden,
        weights.moe,
        rows.image_rows,
        rows.batch_ids >= 0,
        text=text,
        precision=precision,
        kernels=setup.kernels,
        parallel=setup.parallel,
    )
    streams = expand(output, streams, ffn)
    return flow._replace(streams=streams, pre_mix=ffn.pre), window, routing

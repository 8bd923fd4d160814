"""The target over whole sequences, differentiable: what every layer does, what it selects, and the indexer's loss."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from training import layer as layers
from training.attention import attend, entry_shares, window_mask
from training.hashing import HashTables, row_ids
from training.layer import Compressed, Layer
from training.selection import best_mask, candidate_mask
from training.straight_through import contract
from training.weights import Masters
from v41jax.config import CandidateRole, LayerMode, LayerTopology, ModelConfig
from v41jax.layers.hyper_connections import collapse, expand
from v41jax.layers.norm import rms_norm
from v41jax.layers.rope import RopeTable
from v41jax.model import decoder_start, stream_mean
from v41jax.precision import Precision

Array = jax.Array

INDEX_STRIDE = 4
"""The indexer's loss looks at one row in this many."""


class Narrowing(NamedTuple):
    """How selective a forward is: int32 scalars, so that training can narrow without another compilation.

    Attributes:
      topk: entries an index source keeps.
      blocks: candidate blocks kept.
    """

    topk: Array | int
    blocks: Array | int


class Cuts(NamedTuple):
    """Where each sequence's windows are rebuilt from, [B] int32; 0 where they are not.

    Attributes:
      encoder: of the layers before the last KV source.
      decoder: of the others.
    """

    encoder: Array
    decoder: Array


class BackboneOutput(NamedTuple):
    """What a forward leaves.

    Attributes:
      hidden: [B, L, D] normalized, what the head reads.
      features: [B, L, taps * D], what the draft reads.
      counts: [layers, E] float32, rows of every expert.
      index_loss: float32 scalar, mean divergence of the indexers from the attention they predict.
    """

    hidden: Array
    features: Array
    counts: Array
    index_loss: Array


@dataclasses.dataclass(frozen=True)
class Setup:
    """What the training forwards are specialized on.

    Attributes:
      config: of the model.
      precision: rounding choices.
      index_loss: compute the indexer's loss.
    """

    config: ModelConfig
    precision: Precision = dataclasses.field(default_factory=Precision)
    index_loss: bool = True


@dataclasses.dataclass
class _Shared:
    """What layers of one forward hand to later ones, and the indexer's side of its loss."""

    compressed: dict[int, Compressed] = dataclasses.field(default_factory=dict)
    chosen: dict[int, Array] = dataclasses.field(default_factory=dict)
    candidates: Array | None = None
    predicted: dict[int, tuple[Array, Array]] = dataclasses.field(default_factory=dict)
    shares: dict[int, list[Array]] = dataclasses.field(default_factory=dict)


def released_narrowing(config: ModelConfig) -> Narrowing:
    """The selection the configuration states."""
    return Narrowing(config.text.index_topk, config.text.candidate_topk_blocks)


def whole(batch: int) -> Cuts:
    """No rebuilt window."""
    nothing = jnp.zeros(batch, jnp.int32)
    return Cuts(nothing, nothing)


def backbone(
    weights: Masters,
    tables: HashTables,
    plain: RopeTable,
    yarn: RopeTable,
    token_ids: Array,
    narrowing: Narrowing,
    cuts: Cuts,
    offset: Array | int,
    *,
    setup: Setup,
) -> BackboneOutput:
    """The target on sequences that start at position 0.

    Args:
      weights: serving weights.
      tables: Engram hash constants.
      plain, yarn: RoPE tables of at least L positions.
      token_ids: [B, L] int32, L a multiple of the window and of `INDEX_STRIDE`.
      narrowing: selection sizes.
      cuts: rebuilt windows.
      offset: int32 scalar below `INDEX_STRIDE`, the first row the indexer's loss looks at.
      setup: static.
    """
    text = setup.config.text
    batch, length = token_ids.shape
    embedded = weights["embed.weight"][token_ids.reshape(-1)].astype(setup.precision.activation_dtype)
    streams = jnp.broadcast_to(embedded[:, None, :], (batch * length, text.hc_mult, text.hidden_size))
    pre_mix = jnp.zeros((batch * length, text.hc_mult), jnp.float32).at[:, 0].set(1.0)
    shared = _Shared()
    decoder = decoder_start(setup.config)
    masks = [window_mask(length, text.sliding_window, cut) for cut in cuts]
    features, counts = [], []
    for topology in setup.config.layers:
        index = topology.index
        layer = Layer(weights, f"layers.{index}", text, setup.precision)
        if index in text.dspark_target_layer_ids:
            features.append(stream_mean(streams))
        if topology.engram is not None:
            rows = row_ids(tables, token_ids, topology.engram)
            fetched = layer.get("engram.embed.weight")[rows].reshape(batch * length, *_table_row(text))
            streams = layers.engram_update(layer, streams, fetched)
        coefficients = layer.mixes(streams, "attn")
        normalized = layer.norm(collapse(streams, pre_mix), "attn_norm")
        angles = _tile(plain if topology.ratio == 0 else yarn, batch, length)
        seen = masks[int(index >= decoder)]
        result = _attention(layer, topology, normalized, angles, yarn, seen, shared, narrowing, offset, batch, setup)
        streams = expand(result, streams, coefficients)
        streams, pre_mix, routing = layers.feed_forward(layer, streams, coefficients.pre)
        counts.append(layers.expert_counts(routing, text.n_routed_experts))
    hidden = rms_norm(collapse(streams, pre_mix), weights["norm.weight"], text.rms_norm_eps)
    return BackboneOutput(
        hidden.reshape(batch, length, -1),
        jnp.concatenate(features, axis=1).reshape(batch, length, -1),
        jnp.stack(counts),
        _index_loss(shared),
    )


def head(weights: Masters, hidden: Array) -> Array:
    """Logits [.., V] float32 of normalized states [.., D] (model specification, "Final norm and head")."""
    flat = contract("nd,vd->nv", hidden.reshape(-1, hidden.shape[-1]), weights["head.weight"])
    return flat.reshape(*hidden.shape[:-1], -1)


def _table_row(text) -> tuple[int, int]:
    return (text.engram_max_ngram_size - 1) * text.engram_n_heads, text.engram_head_dim


def _tile(table: RopeTable, batch: int, length: int) -> RopeTable:
    """Angles of all rows of a batch of sequences from position 0."""
    return RopeTable(jnp.tile(table.cos[:length], (batch, 1)), jnp.tile(table.sin[:length], (batch, 1)))


def _attention(
    layer: Layer,
    topology: LayerTopology,
    normalized: Array,
    angles: RopeTable,
    yarn: RopeTable,
    seen: Array,
    shared: _Shared,
    narrowing: Narrowing,
    offset: Array | int,
    batch: int,
    setup: Setup,
) -> Array:
    """The attention sublayer on its normalized rows [B * L, D]; extends `shared`."""
    text = layer.text
    rows = normalized.shape[0]
    length = rows // batch
    projected = layers.project(layer, normalized, angles)
    query = projected.query.reshape(batch, length, *projected.query.shape[1:])
    entries = chosen = None
    if topology.mode is not LayerMode.WINDOW:
        ratio, owner, source = topology.ratio, topology.kv_owner, topology.topk_owner
        inputs = normalized.reshape(batch, length, -1)
        if topology.mode is LayerMode.FULL:
            latent = layers.pool(layer, inputs, ratio)
            stride = RopeTable(yarn.cos[:length:ratio], yarn.sin[:length:ratio])
            shared.compressed[owner] = layers.publish(layer, latent, stride)
        entries = shared.compressed[owner].entries
        count = entries.shape[1]
        closed = (jnp.arange(length, dtype=jnp.int32) + 1) // ratio
        visible = jnp.broadcast_to(jnp.arange(count) < closed[:, None], (batch, length, count))
        if topology.index == source:
            keys = shared.compressed[owner].index_keys
            latent = projected.latent.reshape(batch, length, -1)
            scores = jax.lax.stop_gradient(layers.index_scores(layer, inputs, latent, angles, keys, visible))
            if topology.candidates is CandidateRole.PUBLISHES:
                shared.candidates = candidate_mask(
                    scores, jnp.broadcast_to(closed, (batch, length)), narrowing.blocks, text.candidate_block_size
                )
            elif topology.candidates is CandidateRole.CONSUMES:
                scores = jnp.where(shared.candidates, scores, -jnp.inf)
            shared.chosen[source] = best_mask(scores, narrowing.topk)
            if setup.index_loss:
                some = _every(visible, offset)
                turned = RopeTable(
                    *(_every(x.reshape(batch, length, -1), offset).reshape(-1, x.shape[-1]) for x in angles)
                )
                shared.predicted[source] = (
                    layers.index_scores(layer, _every(inputs, offset), _every(latent, offset), turned, keys, some),
                    some,
                )
                shared.shares[source] = []
        chosen = shared.chosen[source]
        if setup.index_loss:
            parts = (_every(query, offset), entries, _every(visible, offset))
            shares = entry_shares(*jax.lax.stop_gradient(parts), text.head_dim**-0.5)
            shared.shares[source].append(jax.lax.stop_gradient(shares))
    heads = attend(
        query,
        layer.get("attn.attn_sink"),
        projected.keys.reshape(batch, length, -1),
        seen,
        entries,
        chosen,
        window=text.sliding_window,
        scale=text.head_dim**-0.5,
    )
    return layers.output(layer, heads.reshape(rows, *heads.shape[2:]), angles)


def _every(x: Array, offset: Array | int) -> Array:
    """Rows `offset`, `offset + INDEX_STRIDE`, .. of [B, L, ...]."""
    batch, length = x.shape[:2]
    grouped = x.reshape(batch, length // INDEX_STRIDE, INDEX_STRIDE, *x.shape[2:])
    return jax.lax.dynamic_index_in_dim(grouped, jnp.asarray(offset, jnp.int32), axis=2, keepdims=False)


def _index_loss(shared: _Shared) -> Array:
    """Mean divergence of every source's scores from the attention of the layers that use its selection."""
    losses = []
    for source, (scores, visible) in shared.predicted.items():
        wanted = sum(shared.shares[source]) / len(shared.shares[source])
        logits = jax.nn.log_softmax(jnp.where(visible, scores, -1e30), axis=-1)
        entropy = jnp.where(wanted > 0, wanted * jnp.log(jnp.maximum(wanted, 1e-30)), 0.0)
        crossed = jnp.where(visible, wanted * logits, 0.0)
        losses.append(jnp.mean(jnp.sum(entropy - crossed, axis=-1)))
    return sum(losses) / len(losses) if losses else jnp.zeros((), jnp.float32)

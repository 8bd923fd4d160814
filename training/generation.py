"""Greedy continuations of many prompts at once, a token a step, with dense caches; the draft's own kind of text."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from training import layer as layers
from training.backbone import Setup, head
from training.draft import block_attention
from training.hashing import HashTables, row_ids
from training.layer import Layer
from training.selection import best_mask, candidate_mask
from training.weights import Masters
from v41jax.config import CandidateRole, LayerMode, ModelConfig
from v41jax.layers.hyper_connections import collapse, expand
from v41jax.layers.norm import rms_norm
from v41jax.layers.rope import RopeTable

Array = jax.Array


class Caches(NamedTuple):
    """Memory of `G` sequences of at most `L` tokens.

    Attributes:
      window: [layers, G, W + L, d], row `W + t` is position `t`.
      entries: per owner [G, L / ratio, d].
      keys: per owner [G, L / ratio, I].
      pending: per owner [G, D], the attention input of the last position.
    """

    window: Array
    entries: tuple[Array, ...]
    keys: tuple[Array, ...]
    pending: tuple[Array, ...]


def empty_caches(config: ModelConfig, count: int, length: int, dtype) -> Caches:
    """Zeros."""
    text = config.text
    owners = [length // ratio for _, ratio in config.owners]
    return Caches(
        jnp.zeros((text.num_hidden_layers, count, text.sliding_window + length, text.head_dim), dtype),
        tuple(jnp.zeros((count, entries, text.head_dim), dtype) for entries in owners),
        tuple(jnp.zeros((count, entries, text.index_head_dim), dtype) for entries in owners),
        tuple(jnp.zeros((count, text.hidden_size), dtype) for _ in owners),
    )


def generate(
    weights: Masters,
    tables: HashTables,
    plain: RopeTable,
    yarn: RopeTable,
    prompts: Array,
    length: int,
    *,
    setup: Setup,
) -> Array:
    """Prompts [G, P] continued greedily to [G, length] int32; `length` is even."""
    config = setup.config
    count, given = prompts.shape
    ids = jnp.zeros((count, length + 1), jnp.int32).at[:, :given].set(prompts)
    caches = empty_caches(config, count, length, setup.precision.activation_dtype)

    def step(carry: tuple[Array, Caches], position: Array) -> tuple[tuple[Array, Caches], None]:
        ids, caches = carry
        caches, logits = _step(weights, tables, plain, yarn, ids, caches, position, setup)
        fresh = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        following = jnp.where(position + 1 < given, ids[:, position + 1], fresh)
        return (ids.at[:, position + 1].set(following), caches), None

    (ids, _), _ = jax.lax.scan(step, (ids, caches), jnp.arange(length, dtype=jnp.int32))
    return ids[:, :length]


def _step(
    weights: Masters,
    tables: HashTables,
    plain: RopeTable,
    yarn: RopeTable,
    ids: Array,
    caches: Caches,
    position: Array,
    setup: Setup,
) -> tuple[Caches, Array]:
    """Logits [G, V] after the token at `position` of every sequence."""
    config, text = setup.config, setup.config.text
    count = ids.shape[0]
    window, entries, keys, pending = (list(part) for part in caches)
    newest = jax.lax.dynamic_slice_in_dim(ids, jnp.maximum(position - 3, 0), 4, axis=1)
    token = jnp.take(ids, position, axis=1)
    embedded = weights["embed.weight"][token].astype(setup.precision.activation_dtype)
    streams = jnp.broadcast_to(embedded[:, None, :], (count, text.hc_mult, text.hidden_size))
    pre_mix = jnp.zeros((count, text.hc_mult), jnp.float32).at[:, 0].set(1.0)
    chosen: dict[int, Array] = {}
    candidates = None
    for topology in config.layers:
        layer = Layer(weights, f"layers.{topology.index}", text, setup.precision)
        if topology.engram is not None:
            place = jnp.minimum(position, 3)
            rows = jnp.take(row_ids(tables, newest, topology.engram), place, axis=1)
            streams = layers.engram_update(layer, streams, layer.get("engram.embed.weight")[rows])
        coefficients = layer.mixes(streams, "attn")
        normalized = layer.norm(collapse(streams, pre_mix), "attn_norm")
        table = plain if topology.ratio == 0 else yarn
        angles = _angles(table, jnp.full(count, position))
        projected = layers.project(layer, normalized, angles)
        ring = jax.lax.dynamic_update_slice_in_dim(
            window[topology.index], projected.keys[:, None], text.sliding_window + position, axis=1
        )
        window[topology.index] = ring
        seen = jax.lax.dynamic_slice_in_dim(ring, position + 1, text.sliding_window, axis=1)
        visible = jnp.arange(text.sliding_window) >= text.sliding_window - 1 - position
        visible = jnp.broadcast_to(visible, seen.shape[:2])
        if topology.mode is not LayerMode.WINDOW:
            owner = config.owners.index((topology.kv_owner, topology.ratio))
            if topology.mode is LayerMode.FULL:
                _append(layer, topology.ratio, owner, normalized, position, yarn, entries, keys, pending)
            closed = (position + 1) // topology.ratio
            if topology.index == topology.topk_owner:
                shown = jnp.broadcast_to(jnp.arange(keys[owner].shape[1]) < closed, (count, 1, keys[owner].shape[1]))
                scores = layers.index_scores(
                    layer, normalized[:, None], projected.latent[:, None], angles, keys[owner], shown
                )
                if topology.candidates is CandidateRole.PUBLISHES:
                    candidates = candidate_mask(
                        scores, jnp.full((count, 1), closed), text.candidate_topk_blocks, text.candidate_block_size
                    )
                elif topology.candidates is CandidateRole.CONSUMES:
                    scores = jnp.where(candidates, scores, -jnp.inf)
                chosen[topology.index] = best_mask(scores, text.index_topk)[:, 0]
            seen = jnp.concatenate([seen, entries[owner]], axis=1)
            visible = jnp.concatenate([visible, chosen[topology.topk_owner]], axis=1)
        heads = block_attention(projected.query, seen, visible, layer.get("attn.attn_sink"), text.head_dim**-0.5)
        streams = expand(layers.output(layer, heads, angles), streams, coefficients)
        streams, pre_mix, _ = layers.feed_forward(layer, streams, coefficients.pre)
    hidden = rms_norm(collapse(streams, pre_mix), weights["norm.weight"], text.rms_norm_eps)
    caches = Caches(jnp.stack(window), tuple(entries), tuple(keys), tuple(pending))
    return caches, head(weights, hidden)


def _angles(table: RopeTable, positions: Array) -> RopeTable:
    return RopeTable(table.cos[positions], table.sin[positions])


def _append(
    layer: Layer,
    ratio: int,
    owner: int,
    normalized: Array,
    position: Array,
    yarn: RopeTable,
    entries: list[Array],
    keys: list[Array],
    pending: list[Array],
) -> None:
    """Writes the entry of the group that `position` belongs to.

    A group that is still open gets a value too; it is not visible yet and is written again when it closes.
    """
    group = position // ratio
    members = [normalized] if ratio == 1 else [pending[owner], normalized]
    latent = layers.pool(layer, jnp.stack(members, axis=1), ratio)
    made = layers.publish(layer, latent, _angles(yarn, group[None] * ratio))
    entries[owner] = jax.lax.dynamic_update_slice_in_dim(entries[owner], made.entries, group, axis=1)
    keys[owner] = jax.lax.dynamic_update_slice_in_dim(keys[owner], made.index_keys, group, axis=1)
    pending[owner] = normalized

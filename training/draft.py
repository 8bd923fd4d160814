"""The draft over many anchors of whole sequences, and what it learns from the frozen target.

A block is predicted at an anchor from the target's features before it. Proposals are scored against the target's own
next-token distributions at the positions they stand for, the tokens between being those of the sequence.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.rounding import round_to
from training import layer as layers
from training.backbone import Setup
from training.layer import Layer
from training.straight_through import contract, linear
from training.weights import Masters
from v41jax.draft_parameters import draft_text
from v41jax.layers.hyper_connections import collapse, expand
from v41jax.layers.norm import rms_norm
from v41jax.layers.rope import RopeTable, at_positions

Array = jax.Array

POSITION_DECAY = 0.85
"""Weight of a proposal's loss against that of the one before: later ones matter less often."""
HARD_SHARE = 0.5
"""Share of the loss that looks at the target's best token only; the rest is its whole distribution."""


class DraftOutput(NamedTuple):
    """Of every anchor, `R` of them, blocks of `T`.

    Attributes:
      logits: [R, T, V] float32, with the Markov bias of the tokens before.
      confidence: [R, T] float32 raw logits.
    """

    logits: Array
    confidence: Array


def context_keys(weights: Masters, features: Array, plain: RopeTable, *, setup: Setup) -> Array:
    """Window rows of every stage (DSpark specification, "Context keys and the ring").

    Args:
      features: [B, L, taps * D] of sequences from position 0.

    Returns:
      [stages, B, L, d] activation dtype.
    """
    text = draft_text(setup.config.text)
    batch, length, width = features.shape
    stages = [Layer(weights, f"mtp.{stage}", text, setup.precision) for stage in range(text.num_nextn_predict_layers)]
    first = stages[0]
    projected = linear(first.q8(features.reshape(-1, width)), first.get("main_proj.weight"))
    quantized = first.q8(first.norm(projected, "main_norm"))
    angles = RopeTable(jnp.tile(plain.cos[:length], (batch, 1)), jnp.tile(plain.sin[:length], (batch, 1)))
    return jnp.stack([layers.window_keys(stage, quantized, angles).reshape(batch, length, -1) for stage in stages])


def draft(
    weights: Masters, keys: Array, token_ids: Array, anchors: Array, plain: RopeTable, *, setup: Setup
) -> DraftOutput:
    """Blocks at anchors of whole sequences, every proposal after the sequence's own tokens.

    Args:
      weights: serving weights of the draft, with the target's embedding and head.
      keys: [stages, B, L, d] from `context_keys`.
      token_ids: [B, L] int32.
      anchors: [B, A] int32 positions of the anchors, from 1 to `L - T`.
      plain: RoPE table of at least `L + T` positions.
      setup: static.
    """
    text = draft_text(setup.config.text)
    batch, count = anchors.shape
    width, rows = text.dspark_block_size, anchors.size
    dtype = setup.precision.activation_dtype
    sequence = jnp.repeat(jnp.arange(batch), count)
    anchor = anchors.reshape(-1)
    back = anchor[:, None] - text.sliding_window + jnp.arange(text.sliding_window)
    visible = jnp.concatenate([back >= 0, jnp.ones((rows, width), bool)], axis=1)
    back = jnp.maximum(back, 0)
    own = (anchor[:, None] + jnp.arange(width)).reshape(-1)
    angles = at_positions(plain, own)
    before = token_ids[sequence[:, None], anchor[:, None] + jnp.arange(width)]
    ids = jnp.full((rows, width), text.dspark_noise_token_id).at[:, 0].set(before[:, 0])
    embedded = weights["embed.weight"][ids.reshape(-1)].astype(dtype)
    streams = jnp.broadcast_to(embedded[:, None, :], (rows * width, text.hc_mult, text.hidden_size))
    pre_mix = jnp.zeros((rows * width, text.hc_mult), jnp.float32).at[:, 0].set(1.0)
    for stage in range(text.num_nextn_predict_layers):
        layer = Layer(weights, f"mtp.{stage}", text, setup.precision)
        coefficients = layer.mixes(streams, "attn")
        projected = layers.project(layer, layer.norm(collapse(streams, pre_mix), "attn_norm"), angles)
        context = keys[stage][sequence[:, None], back]
        seen = jnp.concatenate([context, projected.keys.reshape(rows, width, -1)], axis=1)
        heads = block_attention(projected.query, seen, visible, layer.get("attn.attn_sink"), text.head_dim**-0.5)
        streams = expand(layers.output(layer, heads, angles), streams, coefficients)
        streams, pre_mix, _ = layers.feed_forward(layer, streams, coefficients.pre)
    last = f"mtp.{text.num_nextn_predict_layers - 1}"
    hidden = collapse(streams, pre_mix)
    normed = rms_norm(hidden, weights[f"{last}.norm.weight"], text.rms_norm_eps)
    logits = contract("nd,vd->nv", normed, weights["head.weight"])
    markov = weights[f"{last}.markov_head.embed.weight"][before.reshape(-1)].astype(dtype)
    logits = logits + contract("nr,vr->nv", markov, weights[f"{last}.markov_head.head.weight"])
    inputs = jax.lax.stop_gradient(jnp.concatenate([hidden, markov], axis=1)).astype(jnp.float32)
    confidence = inputs @ weights[f"{last}.confidence_head.proj.weight"][0].astype(jnp.float32)
    return DraftOutput(logits.reshape(rows, width, -1), confidence.reshape(rows, width))


def block_attention(query: Array, keys: Array, visible: Array, sink: Array, scale: float) -> Array:
    """Attention whose `T` queries a row see all of its keys: query [R * T, H, d], keys [R, K, d], visible [R, K]."""
    rows, _, width = keys.shape
    heads = query.shape[1]
    scores = contract("rqd,rkd->rqk", query.reshape(rows, -1, width), keys) * scale
    scores = jnp.where(visible[:, None, :], scores, -jnp.inf).reshape(rows, -1, heads, keys.shape[1])
    peak = jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True))
    shares = jnp.exp(scores - peak)
    total = jnp.sum(shares, axis=-1, keepdims=True) + jnp.exp(sink[:, None] - peak)
    shares = round_to(shares, query.dtype).reshape(rows, -1, keys.shape[1])
    result = contract("rqk,rkd->rqd", shares, keys).reshape(rows, -1, heads, width)
    return round_to(result / total, query.dtype).reshape(-1, heads, width)


def proposal_targets(logits: Array, anchors: Array, width: int) -> Array:
    """The target's logits at the positions a block stands for: [B, L, V], [B, A] -> [B * A, T, V]."""
    batch, count = anchors.shape
    sequence = jnp.repeat(jnp.arange(batch), count)
    return logits[sequence[:, None], anchors.reshape(-1)[:, None] + jnp.arange(width)]


def draft_loss(output: DraftOutput, wanted: Array, following: Array) -> tuple[Array, Array]:
    """Loss of the blocks, and [loss, tokens a step, confidence loss] float32.

    Args:
      output: of the blocks.
      wanted: [R, T, V] the target's logits.
      following: [R, T] the sequence's tokens where proposals stand.
    """
    width = wanted.shape[1]
    best = jnp.argmax(wanted, axis=-1)
    given = jax.nn.log_softmax(output.logits, axis=-1)
    hard = -jnp.take_along_axis(given, best[..., None], axis=-1)[..., 0]
    soft = -jnp.sum(jax.nn.softmax(wanted, axis=-1) * given, axis=-1)
    weight = POSITION_DECAY ** jnp.arange(width)
    loss = jnp.sum((HARD_SHARE * hard + (1 - HARD_SHARE) * soft) * weight) / (wanted.shape[0] * jnp.sum(weight))

    proposed = jnp.argmax(output.logits, axis=-1)
    agrees = proposed == best
    # A later proposal was made after the sequence's tokens: it counts where those were the proposals before it.
    reached = jnp.cumprod(jnp.pad(proposed == following, ((0, 0), (1, 0)))[:, :-1].at[:, 0].set(True), axis=1)
    losses = jax.nn.softplus(output.confidence) - agrees * output.confidence
    certainty = jnp.sum(losses * reached) / jnp.maximum(jnp.sum(reached), 1)
    accepted = jnp.mean(jnp.sum(jnp.cumprod(agrees, axis=1), axis=1))
    return loss + certainty, jnp.stack([loss, 1 + accepted, certainty])

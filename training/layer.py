"""One layer over whole sequences, backbone or draft stage: the serving arithmetic on dense [batch, length] arrays.

Norms, stream mixes, rotary embedding, router scores and gates are the runtime's own functions. What differs is where
keys live: here all of them are at hand, so that selection is a mask and nothing is paged.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.arithmetic import swiglu
from pallas_kernels.rotation import rotate
from pallas_kernels.rounding import round_to
from training.mixing import mixes
from training.straight_through import contract, fake_table, linear, q4m, q4n, q8
from training.weights import Masters
from v41jax.config import TextConfig
from v41jax.layers.engram import EngramWeights, gates
from v41jax.layers.hyper_connections import Mixes, MixWeights, collapse, expand
from v41jax.layers.linear import LinearWeight
from v41jax.layers.moe import RouterWeights, Routing, route
from v41jax.layers.norm import rms_norm
from v41jax.layers.rope import RopeTable
from v41jax.precision import Precision

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Layer:
    """Weights of one layer with what its arithmetic depends on.

    Attributes:
      weights: all serving weights.
      name: prefix of the layer's, `layers.3` or `mtp.0`.
      text: configuration as the layer sees it (a draft stage has its own number of experts).
      precision: rounding choices.
    """

    weights: Masters
    name: str
    text: TextConfig
    precision: Precision

    def get(self, name: str) -> Array:
        """A weight of the layer."""
        return self.weights[f"{self.name}.{name}"]

    def q8(self, x: Array) -> Array:
        """Q8 of linear inputs and window rows."""
        return q8(x) if self.precision.activation_quantization else x

    def q4m(self, x: Array) -> Array:
        """Q4m of index queries and keys."""
        return q4m(x) if self.precision.activation_quantization else x

    def q4n(self, x: Array) -> Array:
        """Q4n of compressed rows."""
        return q4n(x) if self.precision.activation_quantization else x

    def norm(self, x: Array, name: str) -> Array:
        """RMSNorm with one of the layer's weights."""
        return rms_norm(x, self.get(f"{name}.weight"), self.text.rms_norm_eps)

    def mixes(self, streams: Array, sublayer: str) -> Mixes:
        """Coefficients of one sublayer from the streams [N, S, D]."""
        parts = (self.get(f"hc_{sublayer}_{part}") for part in ("fn", "base", "scale"))
        return mixes(streams, MixWeights(*parts), self.text)


def engram_update(layer: Layer, streams: Array, rows: Array) -> Array:
    """Adds the gated value of fetched table rows to every stream (Engram specification, "Layer arithmetic").

    Args:
      layer: with an Engram.
      streams: [N, S, D] activation dtype.
      rows: [N, columns, head_dim] float32 masters of the rows.
    """
    count, width = streams.shape[1:]
    embedded = fake_table(rows).astype(streams.dtype).reshape(rows.shape[0], -1)
    projected = linear(layer.q8(embedded), layer.get("engram.wkv.weight"))
    keys = projected[:, : count * width].reshape(-1, count, width)
    value = projected[:, count * width :].astype(jnp.float32)
    weights = EngramWeights(
        LinearWeight(layer.get("engram.wkv.weight")), layer.get("engram.q_weight"), layer.get("engram.k_weight")
    )
    gate = gates(streams, keys, weights, layer.text.rms_norm_eps)
    return round_to(streams.astype(jnp.float32) + gate[:, :, None] * value[:, None, :], streams.dtype)


class Projections(NamedTuple):
    """What the attention sublayer derives from its input rows.

    Attributes:
      latent: [N, rq], `qr` after its Q8.
      query: [N, H, d] rotated.
      keys: [N, d] window rows after their Q8.
    """

    latent: Array
    query: Array
    keys: Array


def project(layer: Layer, normalized: Array, angles: RopeTable) -> Projections:
    """Queries and window rows of rows [N, D] at the angles [N, dr / 2] of their positions."""
    text = layer.text
    quantized = layer.q8(normalized)
    latent = layer.q8(layer.norm(linear(quantized, layer.get("attn.wq_a.weight")), "attn.q_norm"))
    query = linear(latent, layer.get("attn.wq_b.weight")).reshape(-1, text.num_attention_heads, text.head_dim)
    return Projections(latent, rotate(query, *angles), window_keys(layer, quantized, angles))


def window_keys(layer: Layer, quantized: Array, angles: RopeTable) -> Array:
    """Window rows of quantized rows [N, D]: [N, d] after their Q8."""
    return layer.q8(rotate(layer.norm(linear(quantized, layer.get("attn.wkv.weight")), "attn.kv_norm"), *angles))


def output(layer: Layer, heads: Array, angles: RopeTable) -> Array:
    """Inverse rotation and grouped projection: [N, H, d] -> [N, D]."""
    text = layer.text
    turned = rotate(heads, angles.cos, -angles.sin)
    grouped = turned.reshape(heads.shape[0], text.o_groups, -1)
    weight = layer.get("attn.wo_a.weight").reshape(text.o_groups, text.o_lora_rank, -1)
    low = round_to(contract("ngi,goi->ngo", grouped, weight), heads.dtype)
    return linear(layer.q8(low.reshape(heads.shape[0], -1)), layer.get("attn.wo_b.weight"))


def mixture(layer: Layer, normalized: Array) -> tuple[Array, Routing]:
    """Routed and shared experts of rows [N, D], every expert on every row: the unchosen ones have weight zero.

    At the miniature's size this is faster than sorting rows, and exact but for one rounding: the sum over experts is
    rounded once and not once an expert.
    """
    text = layer.text
    rows, width = normalized.shape
    router = RouterWeights(*(layer.get(f"ffn.gate.{name}") for name in ("weight", "bias", "bias_vl")))
    routing = route(normalized, router, jnp.zeros(rows, bool), text)
    chosen = routing.experts[:, :, None] == jnp.arange(text.n_routed_experts)
    shares = jnp.sum(jnp.where(chosen, routing.weights[:, :, None], 0.0), axis=1)
    quantized = layer.q8(normalized)

    def hidden(name: str) -> Array:
        stack = layer.get(f"ffn.experts.{name}.weight")
        return linear(quantized, stack.reshape(-1, width)).reshape(rows, text.n_routed_experts, -1)

    activated = swiglu(hidden("w1"), hidden("w3"), text.swiglu_limit) * shares[:, :, None]
    activated = layer.q8(round_to(activated, normalized.dtype))
    routed = contract("nef,edf->nd", activated, layer.get("ffn.experts.w2.weight"))
    shared = swiglu(
        linear(quantized, layer.get("ffn.shared_experts.w1.weight")),
        linear(quantized, layer.get("ffn.shared_experts.w3.weight")),
        text.swiglu_limit,
    )
    shared = linear(layer.q8(round_to(shared, normalized.dtype)), layer.get("ffn.shared_experts.w2.weight"))
    return round_to(routed + shared.astype(jnp.float32), normalized.dtype), routing


def feed_forward(layer: Layer, streams: Array, pre_mix: Array) -> tuple[Array, Array, Routing]:
    """The FFN sublayer: streams [N, S, D] and pre-mix [N, S] -> the same after it, and the routing."""
    coefficients = layer.mixes(streams, "ffn")
    normalized = layer.norm(collapse(streams, pre_mix), "ffn_norm")
    result, routing = mixture(layer, normalized)
    return expand(result, streams, coefficients), coefficients.pre, routing


def expert_counts(routing: Routing, experts: int) -> Array:
    """Rows that chose each expert, [E] float32."""
    return jnp.sum(routing.experts[:, :, None] == jnp.arange(experts), axis=(0, 1), dtype=jnp.float32)


class Compressed(NamedTuple):
    """What an owner publishes.

    Attributes:
      entries: [B, E, d] rotated, after Q4n.
      index_keys: [B, E, I] rotated, after Q4m; no gradient reaches the latent through them.
    """

    entries: Array
    index_keys: Array


def pool(layer: Layer, normalized: Array, ratio: int) -> Array:
    """Un-rotated latents [B, L / ratio, d] of the input rows [B, L, D] (model specification, "Compressor")."""
    values = contract("bld,kd->blk", normalized, layer.get("attn.compressor.wkv.weight"))
    if ratio > 1:
        scores = contract("bld,kd->blk", normalized, layer.get("attn.compressor.wgate.weight"))
        grouped = (values.shape[0], values.shape[1] // ratio, ratio, values.shape[2])
        shares = jax.nn.softmax(scores.reshape(grouped), axis=2)
        values = jnp.sum(shares * values.reshape(grouped), axis=2)
    return layer.norm(round_to(values, normalized.dtype), "attn.compressor.norm")


def publish(layer: Layer, latent: Array, angles: RopeTable) -> Compressed:
    """Compressed rows and index keys of latents [B, E, d] at the angles [E, dr / 2] of their groups' first tokens."""
    batch, count, width = latent.shape
    tiled = RopeTable(jnp.tile(angles.cos, (batch, 1)), jnp.tile(angles.sin, (batch, 1)))
    rows = latent.reshape(-1, width)
    key = linear(jax.lax.stop_gradient(rows), layer.get("attn.indexer.wk.weight"))
    key = layer.q4m(rotate(layer.norm(key, "attn.indexer.k_norm"), *tiled))
    entries = layer.q4n(rotate(rows, *tiled))
    return Compressed(entries.reshape(batch, count, -1), key.reshape(batch, count, -1))


def index_scores(
    layer: Layer, normalized: Array, latent: Array, angles: RopeTable, keys: Array, visible: Array
) -> Array:
    """Scores of all entries (model specification, "Indexer"); gradients reach the indexer's weights only.

    Args:
      layer: an index source.
      normalized: [B, Q, D] attention input of the scoring rows.
      latent: [B, Q, rq] their `qr` after its Q8.
      angles: [B * Q, dr / 2].
      keys: [B, E, I].
      visible: [B, Q, E] bool.

    Returns:
      [B, Q, E] float32, -inf where not visible.
    """
    text = layer.text
    batch, rows = normalized.shape[:2]
    heads, width = text.index_n_heads, text.index_head_dim
    flat = jax.lax.stop_gradient(latent).reshape(batch * rows, -1)
    query = linear(flat, layer.get("attn.indexer.wq_b.weight")).reshape(batch * rows, heads, width)
    query = layer.q4m(rotate(query, *angles)).reshape(batch, rows * heads, width)
    scale = width**-0.5 * heads**-0.5
    source = jax.lax.stop_gradient(normalized).reshape(batch * rows, -1)
    factors = linear(source, layer.get("attn.indexer.weights_proj.weight"))
    factors = round_to(factors.astype(jnp.float32) * scale, factors.dtype).astype(jnp.float32)
    dots = contract("bqi,bei->bqe", query, keys).reshape(batch, rows, heads, -1)
    scores = jnp.sum(jax.nn.relu(dots) * factors.reshape(batch, rows, heads, 1), axis=2)
    return jnp.where(visible, scores, -jnp.inf)

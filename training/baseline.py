"""The dense baseline: a plain decoder-only transformer of the same active size, trained by the same program.

Rotary embedding, RMSNorm, SwiGLU, full causal attention; bfloat16 products, float32 masters; nothing quantized.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.rotation import rotate
from training.straight_through import contract
from v41jax.layers.rope import RopeTable

Array = jax.Array
Masters = dict[str, Array]


@dataclasses.dataclass(frozen=True)
class BaselineConfig:
    """Sizes; the defaults match the miniature's active parameters (about 5 million beside the embeddings)."""

    vocab_size: int
    hidden_size: int = 256
    layers: int = 8
    heads: int = 4
    width: int = 480


def initial_masters(config: BaselineConfig, seed: int) -> Masters:
    """First values, scaled by inputs; outputs of sublayers smaller."""
    random = np.random.default_rng(seed)
    hidden, width = config.hidden_size, config.width
    shapes = {"embed.weight": (config.vocab_size, hidden), "head.weight": (config.vocab_size, hidden)}
    for layer in range(config.layers):
        prefix = f"layers.{layer}"
        shapes |= {
            f"{prefix}.qkv.weight": (3 * hidden, hidden),
            f"{prefix}.out.weight": (hidden, hidden),
            f"{prefix}.up.weight": (2 * width, hidden),
            f"{prefix}.down.weight": (hidden, width),
        }
    gains = {"out": config.layers**-0.5, "down": config.layers**-0.5, "head": 0.2}
    masters = {}
    for name, shape in shapes.items():
        std = 0.3 if name == "embed.weight" else gains.get(name.split(".")[-2], 1.0) / np.sqrt(shape[-1])
        masters[name] = jnp.asarray(random.normal(0, std, shape), jnp.float32)
    for layer in range(config.layers):
        masters[f"layers.{layer}.attention_norm"] = jnp.ones(hidden, jnp.float32)
        masters[f"layers.{layer}.feed_norm"] = jnp.ones(hidden, jnp.float32)
    masters["norm"] = jnp.ones(hidden, jnp.float32)
    return masters


def baseline_logits(masters: Masters, table: RopeTable, token_ids: Array, config: BaselineConfig) -> Array:
    """Logits [B, L, V] float32 of sequences [B, L]; `table` rotates whole heads."""
    batch, length = token_ids.shape
    dtype = jnp.bfloat16
    weights = {name: master.astype(dtype) for name, master in masters.items()}
    angles = RopeTable(jnp.tile(table.cos[:length], (batch, 1)), jnp.tile(table.sin[:length], (batch, 1)))
    x = masters["embed.weight"][token_ids.reshape(-1)].astype(dtype)
    heads, width = config.heads, config.hidden_size // config.heads

    def norm(value: Array, name: str) -> Array:
        value = value.astype(jnp.float32)
        scaled = value * jax.lax.rsqrt(jnp.mean(jnp.square(value), axis=-1, keepdims=True) + 1e-6)
        return (scaled * masters[name]).astype(dtype)

    def product(value: Array, name: str) -> Array:
        return contract("nk,ok->no", value, weights[name]).astype(dtype)

    for layer in range(config.layers):
        prefix = f"layers.{layer}"
        qkv = product(norm(x, f"{prefix}.attention_norm"), f"{prefix}.qkv.weight").reshape(-1, 3, heads, width)
        query, key = rotate(qkv[:, 0], *angles), rotate(qkv[:, 1], *angles)
        parts = (part.reshape(batch, length, heads, width) for part in (query, key, qkv[:, 2]))
        mixed = jax.nn.dot_product_attention(*parts, is_causal=True)
        x = x + product(mixed.reshape(batch * length, -1), f"{prefix}.out.weight")
        gate, up = jnp.split(product(norm(x, f"{prefix}.feed_norm"), f"{prefix}.up.weight"), 2, axis=-1)
        x = x + product(jax.nn.silu(gate) * up, f"{prefix}.down.weight")
    logits = contract("nd,vd->nv", norm(x, "norm"), weights["head.weight"])
    return logits.reshape(batch, length, -1)

"""From logits to tokens on the device: greedy, temperature, top-k, top-p and min-p, with a seed per request.

A row's token depends on its own logits, its own parameters, its seed and the absolute position of the token it
chooses, and on nothing else in the batch.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array


class SamplingInputs(NamedTuple):
    """Per-row sampling parameters.

    Attributes:
      temperature: [F] float32; 0 chooses the largest logit (the smaller id on ties).
      top_k: [F] int32, keep this many best tokens; 0 keeps all.
      top_p: [F] float32, keep the smallest set of best tokens whose probability reaches it; 1 keeps all.
      min_p: [F] float32, drop tokens below this fraction of the best token's probability; 0 keeps all.
      seeds: [F] uint32, the request's seed.
      positions: [F] int32, absolute position of the token being chosen.
    """

    temperature: Array
    top_k: Array
    top_p: Array
    min_p: Array
    seeds: Array
    positions: Array


def _row_noise(seed: Array, position: Array, vocabulary: int) -> Array:
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), seed), position)
    return jax.random.gumbel(key, (vocabulary,), jnp.float32)


def _kept(scaled: Array, inputs: SamplingInputs) -> Array:
    """Which tokens survive top-k, then top-p, then min-p. [F, V] bool; the best token always survives.

    Tokens are ranked by logit, the smaller id first among equals. top-p and min-p are measured on the distribution
    that the filters before them left.
    """
    vocabulary = scaled.shape[-1]
    order = jnp.argsort(-scaled, axis=-1, stable=True)
    ranked = jnp.take_along_axis(scaled, order, axis=-1)
    rank = jnp.arange(vocabulary, dtype=jnp.int32)
    limit = jnp.where(inputs.top_k > 0, inputs.top_k, vocabulary)
    keep = rank[None, :] < limit[:, None]
    probability = jax.nn.softmax(jnp.where(keep, ranked, -jnp.inf), axis=-1)
    before = jnp.cumsum(probability, axis=-1) - probability
    keep &= (before < inputs.top_p[:, None]) | (inputs.top_p[:, None] >= 1)
    keep &= probability >= inputs.min_p[:, None] * probability[:, :1]
    keep |= rank[None, :] == 0
    rows = jnp.arange(scaled.shape[0])[:, None]
    return jnp.zeros(scaled.shape, bool).at[rows, order].set(keep)


def sample(logits: Array, inputs: SamplingInputs) -> Array:
    """Chooses one token per row.

    Temperature sampling is the Gumbel-max form of the published code (model specification, "Final norm and head"),
    with noise keyed by the seed and the position. Work that no row asks for is skipped at run time, in the same
    compiled program.

    Args:
      logits: [F, V] float32.
      inputs: per-row parameters.

    Returns:
      [F] int32 token ids.
    """
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    is_greedy = inputs.temperature <= 0

    def draw() -> Array:
        scaled = logits / jnp.where(is_greedy, 1.0, inputs.temperature)[:, None]
        filtered = (inputs.top_k > 0) | (inputs.top_p < 1) | (inputs.min_p > 0)
        scaled = jax.lax.cond(
            jnp.any(filtered & ~is_greedy),
            lambda: jnp.where(_kept(scaled, inputs), scaled, -jnp.inf),
            lambda: scaled,
        )
        noise = jax.vmap(_row_noise, in_axes=(0, 0, None))(inputs.seeds, inputs.positions, logits.shape[-1])
        drawn = jnp.argmax(scaled + noise, axis=-1).astype(jnp.int32)
        return jnp.where(is_greedy, greedy, drawn)

    return jax.lax.cond(jnp.any(~is_greedy), draw, lambda: greedy)

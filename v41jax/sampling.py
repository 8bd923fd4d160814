"""From logits to tokens on the device: biases, penalties and constraints, greedy, temperature, top-k, top-p and min-p
with a seed per request, and log-probabilities.

A row's token depends on its own logits, its own parameters, its seed and the absolute position of the token it
chooses, and on nothing else in the batch.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels import backend

MAX_ALTERNATIVES = 20
"""Most likely tokens whose log-probabilities a step can report, as many as the API allows to ask for."""

HOTTEST = 1e30
"""Temperatures from here draw evenly. The reciprocal of a much larger one is no normal number: XLA makes it 0, and 0
times the -inf of a forbidden token NaN."""


class SamplingInputs(NamedTuple):
    """Per-row sampling parameters.

    Attributes:
      temperature: [F] float32; 0 (or less than a normal number) chooses the largest logit (the smaller id on ties).
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


class LogitEdits(NamedTuple):
    """What requests change about their logits before a token is chosen; arrays per output row.

    Attributes:
      slots: [F] int32, row of `adjustments` that is added to the logits; `slots` of them or more adds none.
      tokens: [F] int32, token whose adjustment changes first; the vocabulary size or more changes none.
      changes: [F] float32, added to that adjustment and kept.
      constrained: [F] bool, only tokens of `allowed` may be chosen.
      allowed: [F, ceil(V / 32)] uint32, bit `t % 32` of word `t // 32` is token `t`.
    """

    slots: Array
    tokens: Array
    changes: Array
    constrained: Array
    allowed: Array


class TokenScores(NamedTuple):
    """Log-probabilities of chosen tokens and of the most likely ones; zeros where nobody asked.

    Attributes:
      chosen: [F] float32.
      top: [F, k] float32, descending.
      top_ids: [F, k] int32, the smaller id first among equals.
    """

    chosen: Array
    top: Array
    top_ids: Array


def choose_tokens(
    logits: Array, adjustments: Array, edits: LogitEdits, inputs: SamplingInputs, scored: Array, never: int
) -> tuple[Array, Array, TokenScores]:
    """One token a row and its log-probabilities; where no row asks for more than the largest logit, one branch says so.

    A branch costs a captured graph some ten microseconds, taken or not.

    Args:
      logits: [F, V] float32.
      adjustments: [slots, V] float32; see `edit_logits`.
      edits: per-row changes.
      inputs: per-row parameters.
      scored: scalar bool; compute log-probabilities.
      never: a token that is not chosen.

    Returns:
      The adjustments after this step's changes, [F] int32 tokens and their scores.
    """
    adjustments = change_adjustments(adjustments, edits)
    asked = scored | jnp.any((edits.slots < adjustments.shape[0]) | edits.constrained | ~greedy_rows(inputs))

    def possible(values: Array) -> Array:
        return values.at[:, never].set(-jnp.inf)

    def as_asked() -> tuple[Array, TokenScores]:
        tokens = sample(possible(edit_logits(logits, adjustments, edits)), inputs)
        return tokens, token_scores(logits, tokens, scored)

    def largest() -> tuple[Array, TokenScores]:
        return best_tokens(possible(logits)), no_scores(logits)

    tokens, scores = jax.lax.cond(asked, as_asked, largest)
    return adjustments, tokens, scores


def change_adjustments(adjustments: Array, edits: LogitEdits) -> Array:
    """The adjustments, [slots, V] float32, after a step's changes."""
    return adjustments.at[edits.slots, edits.tokens].add(edits.changes, mode="drop")


def edit_logits(logits: Array, adjustments: Array, edits: LogitEdits) -> Array:
    """Biases, penalties and constraints.

    Args:
      logits: [F, V] float32.
      adjustments: [slots, V] float32, kept between steps: a slot's biases and penalties, this step's changes included.
      edits: per-row changes.

    Returns:
      The logits to choose from, [F, V]; tokens that are not allowed are -inf.
    """
    slots = adjustments.shape[0]
    adjusted = edits.slots < slots

    def adjust() -> Array:
        rows = adjustments[jnp.minimum(edits.slots, slots - 1)]
        return jnp.where(adjusted[:, None], logits + rows, logits)

    return constrain(jax.lax.cond(jnp.any(adjusted), adjust, lambda: logits), edits)


def constrain(logits: Array, edits: LogitEdits) -> Array:
    """Logits, [F, V], with -inf for the tokens that a constrained row does not allow."""

    def mask(values: Array) -> Array:
        bits = (edits.allowed[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
        bits = bits.reshape(len(bits), 32 * bits.shape[1])[:, : values.shape[1]]
        return jnp.where(edits.constrained[:, None] & (bits == 0), -jnp.inf, values)

    return jax.lax.cond(jnp.any(edits.constrained), mask, lambda values: values, logits)


def on_gpu() -> bool:
    """Whether programs are made for a GPU, where what branches hold and hand through has costs of its own."""
    return backend.current_target().generation in ("cuda", "rocm")


def _largest(logits: Array, count: int) -> tuple[Array, Array]:
    """The `count` largest of each row, descending, and their ids, the smaller first among equals; -0.0 equals 0.0.

    For a GPU by sorting: XLA cannot make its top-k part of a captured graph, and with one in a branch the host waits
    for the device in every step, whether the branch is taken or not.
    """
    if not on_gpu():
        # The order of top-k is total: it would put 0.0 before -0.0.
        return jax.lax.top_k(jnp.where(logits == 0, 0.0, logits), count)
    ranked, order = _ranked(logits)
    return ranked[:, :count], order[:, :count]


def _ranked(logits: Array) -> tuple[Array, Array]:
    """Each row's values, descending, and their ids, the smaller first among equals; -0.0 equals 0.0, NaN is last."""
    ids = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    descending, order = jax.lax.sort((-logits, ids), dimension=1, num_keys=2)
    return -descending, order


def token_scores(logits: Array, chosen: Array, wanted: Array, alternatives: int = MAX_ALTERNATIVES) -> TokenScores:
    """Log-softmax of the model's own logits, before temperature, penalties and filters.

    Args:
      logits: [F, V] float32.
      chosen: [F] int32 token ids.
      wanted: scalar bool; False skips the work at run time.
      alternatives: most likely tokens reported.
    """
    k = min(alternatives, logits.shape[1])

    def compute() -> TokenScores:
        normalizer = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
        top, top_ids = _largest(logits, k)
        picked = jnp.take_along_axis(logits, chosen[:, None], axis=-1)
        return TokenScores((picked - normalizer)[:, 0], top - normalizer, top_ids.astype(jnp.int32))

    return jax.lax.cond(wanted, compute, lambda: no_scores(logits, alternatives))


def no_scores(logits: Array, alternatives: int = MAX_ALTERNATIVES) -> TokenScores:
    """`token_scores` where nobody asked."""
    count, k = logits.shape[0], min(alternatives, logits.shape[1])
    zeros = jnp.zeros((count, k), jnp.float32)
    return TokenScores(jnp.zeros(count, jnp.float32), zeros, zeros.astype(jnp.int32))


def _row_noise(seed: Array, position: Array, vocabulary: int) -> Array:
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), seed), position)
    return jax.random.gumbel(key, (vocabulary,), jnp.float32)


def kept(scaled: Array, inputs: SamplingInputs) -> Array:
    """Which tokens survive top-k, then top-p, then min-p; the best token always does.

    Tokens are ranked by logit, the smaller id first among equals. top-p and min-p are measured on the distribution
    that the filters before them left. What survives is a run of the best tokens, so that its last one says it all: a
    token is kept unless it ranks after that one, and nothing is sent back from ranks to ids, which on a mesh would
    reduce a whole [F, V] over all chips.

    Args:
      scaled: [F, V] float32, logits over the temperature.
      inputs: per-row parameters.

    Returns:
      [F, V] bool.
    """
    vocabulary = scaled.shape[-1]
    ids = jax.lax.broadcasted_iota(jnp.int32, scaled.shape, 1)
    ranked, order = _ranked(scaled)
    rank = jnp.arange(vocabulary, dtype=jnp.int32)
    limit = jnp.where(inputs.top_k > 0, inputs.top_k, vocabulary)
    keep = rank[None, :] < limit[:, None]
    probability = jax.nn.softmax(jnp.where(keep, ranked, -jnp.inf), axis=-1)
    before = jnp.cumsum(probability, axis=-1) - probability
    keep &= (before < inputs.top_p[:, None]) | (inputs.top_p[:, None] >= 1)
    keep &= probability >= inputs.min_p[:, None] * probability[:, :1]
    keep |= rank[None, :] == 0
    # Rounding may let a later rank through where an earlier one failed: the run ends before the first that failed.
    last = jnp.where(jnp.all(keep, axis=-1), vocabulary, jnp.argmin(keep, axis=-1))[:, None] - 1
    value = jnp.take_along_axis(ranked, last, axis=-1)
    missing, last_missing = jnp.isnan(scaled), jnp.isnan(value)
    equal = (scaled == value) | (missing & last_missing)
    after = (scaled < value) | (missing & ~last_missing) | (equal & (ids > jnp.take_along_axis(order, last, axis=-1)))
    return ~after


def best_tokens(logits: Array) -> Array:
    """The largest logit of each row of [F, V], the smaller id first among equals: [F] int32."""
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def greedy_rows(inputs: SamplingInputs) -> Array:
    """Which rows choose the largest logit, [F] bool."""
    return inputs.temperature < jnp.finfo(jnp.float32).tiny


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
    greedy = best_tokens(logits)
    is_greedy = greedy_rows(inputs)

    def draw() -> Array:
        # Below the best logit, so that a small temperature cannot raise several to infinity.
        best = jnp.maximum(jnp.max(logits, axis=-1, keepdims=True), jnp.finfo(jnp.float32).min)
        scaled = (logits - best) / jnp.where(is_greedy, 1.0, jnp.minimum(inputs.temperature, HOTTEST))[:, None]
        filtered = (inputs.top_k > 0) | (inputs.top_p < 1) | (inputs.min_p > 0)
        scaled = jax.lax.cond(
            jnp.any(filtered & ~is_greedy),
            lambda: jnp.where(kept(scaled, inputs), scaled, -jnp.inf),
            lambda: scaled,
        )
        noise = jax.vmap(_row_noise, in_axes=(0, 0, None))(inputs.seeds, inputs.positions, logits.shape[-1])
        drawn = jnp.argmax(scaled + noise, axis=-1).astype(jnp.int32)
        return jnp.where(is_greedy, greedy, drawn)

    return jax.lax.cond(jnp.any(~is_greedy), draw, lambda: greedy)

"""Held-out measures: bits per byte of next tokens, and how many tokens a greedy draft step emits."""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from training.backbone import Setup, backbone, released_narrowing, whole
from training.draft import context_keys, draft
from training.objective import Constants
from training.weights import Masters

Array = jax.Array


def held_out_windows(stream: NDArray[np.uint16], length: int, batch: int, begin: int) -> NDArray[np.int32]:
    """Consecutive windows of a stream, [n, length + 1], `n` a multiple of `batch`; the first id is `begin`."""
    count = stream.size // length // batch * batch
    if not count:
        raise ValueError(f"{stream.size} held-out tokens are fewer than {batch} windows of {length}")
    windows = stream[: count * length].astype(np.int32).reshape(count, length)
    return np.concatenate([np.full((count, 1), begin, np.int32), windows], axis=1)


def bits_per_byte(
    nats_of: Callable[[Masters, Array], Array],
    weights: Masters,
    windows: NDArray[np.int32],
    byte_lengths: NDArray[np.int32],
    batch: int,
) -> dict[str, float]:
    """Mean nats a token and bits a byte over windows [n, L + 1]; tokens without text count nats and no bytes.

    Args:
      nats_of: (weights, ids [batch, L + 1]) -> nats [batch, L] of every token after the first.
      weights: its first argument.
      windows: from `held_out_windows`.
      byte_lengths: [V] of every id.
      batch: windows measured together.
    """
    nats = 0.0
    for start in range(0, len(windows), batch):
        nats += float(np.asarray(nats_of(weights, jnp.asarray(windows[start : start + batch])), np.float64).sum())
    targets = windows[:, 1:]
    return {
        "nats_a_token": nats / targets.size,
        "bits_per_byte": nats / math.log(2) / int(byte_lengths[targets].sum()),
        "tokens": float(targets.size),
    }


def acceptance(
    weights: Masters, generated: Array, prompt: int, constants: Constants, *, setup: Setup, batch: int = 16
) -> dict[str, object]:
    """Greedy drafting along the target's own greedy continuations.

    A block is drafted at every position; walking from the prompt's end, a step emits the proposals that agree and one
    token of the target's.

    Args:
      weights: serving weights of target and draft.
      generated: [n, L] int32, prompts of `prompt` tokens continued greedily; n a multiple of `batch`.

    Returns:
      Tokens a step, steps, and the share of steps that accepted proposal 1, 2, ...
    """
    width = setup.config.text.dspark_block_size
    length = generated.shape[1]
    plain = Setup(setup.config, setup.precision, index_loss=False)
    places = jnp.arange(prompt, length - width, dtype=jnp.int32)

    @jax.jit
    def agreed(weights: Masters, ids: Array) -> Array:
        output = backbone(
            weights,
            constants.tables,
            constants.plain,
            constants.yarn,
            ids,
            released_narrowing(setup.config),
            whole(ids.shape[0]),
            0,
            setup=plain,
        )
        keys = context_keys(weights, output.features, constants.plain, setup=setup)
        anchors = jnp.broadcast_to(places, (ids.shape[0], places.size))
        blocks = draft(weights, keys, ids, anchors, constants.plain, setup=setup)
        proposed = jnp.argmax(blocks.logits, axis=-1).reshape(ids.shape[0], places.size, width)
        following = ids[:, places[:, None] + 1 + jnp.arange(width)]
        # Proposals after the first disagreement were made after other tokens: they do not count.
        return jnp.cumprod(proposed == following, axis=-1)

    steps = 0
    accepted = np.zeros(width)
    emitted = 0
    for start in range(0, len(generated), batch):
        table = np.asarray(agreed(weights, generated[start : start + batch]))
        for row in table:
            place = 0
            while place < len(row):
                steps += 1
                accepted += row[place]
                emitted += 1 + int(row[place].sum())
                place += 1 + int(row[place].sum())
    return {
        "tokens_a_step": emitted / steps,
        "draft_steps": steps,
        "accepted_by_position": [round(float(value), 4) for value in accepted / steps],
    }

"""Arithmetic that the GPU kernels of sparse attention share."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import backend

Array = jax.Array

LOG2_E = math.log2(math.e)
"""Scores are kept in base 2, for which GPUs have an instruction."""


def row_of(
    row: Array, batch_ref: object, positions_ref: object, floor_ref: object, window: int
) -> tuple[Array, Array, Array, Array]:
    """Of a query row: whether it has a request, which (0 without), its position and the first one of its window."""
    load = backend.triton().load
    batch = load(batch_ref.at[row])
    live = batch >= 0
    request = jnp.where(live, batch, 0)
    position = load(positions_ref.at[row])
    lowest = jnp.maximum(jnp.maximum(load(floor_ref.at[row]), position - window + 1), 0)
    return live, request, position, lowest


def shares(counts: Sequence[Array], keys: int, split: Array, splits: int) -> Iterator[tuple[Array, Array]]:
    """The tiles of every list that a split takes, [first, last).

    The tiles of all lists, one list after the other, are dealt out in runs of equal length; the last may be shorter.
    The bounds of a list are computed when they are asked for: ask at its loop, so that they take no registers before.

    Args:
      counts: int32 lengths of the lists.
      keys: rows of a tile; a list's last one may be in part empty.
      split: 0 .. splits - 1.
      splits: static.
    """
    tiles = [lax.div(count + (keys - 1), keys) for count in counts]
    share = lax.div(sum(tiles) + (splits - 1), splits)
    begin, end = split * share, (split + 1) * share
    passed = 0
    for count in tiles:
        first = jnp.minimum(jnp.maximum(begin - passed, 0), count)
        last = jnp.minimum(jnp.maximum(end - passed, 0), count)
        yield first, last
        passed = passed + count


def rotated(
    values: Array, first_dim: Array | int, width: int, cos_ref: object, sin_ref: object, row: Array, back: bool
) -> Array:
    """RoPE, or its inverse, on dims first_dim .. of values [H, size] bfloat16; other dims keep their value."""
    heads, size = values.shape
    pairs = cos_ref.shape[-1]
    pair = first_dim // 2 + jnp.arange(size // 2, dtype=jnp.int32) - (width // 2 - pairs)
    turns = pair >= 0
    index = jnp.where(turns, pair, 0)
    cos = jnp.where(turns, backend.triton().load(cos_ref.at[row, index]), 1.0)[None, :]
    sin = jnp.where(turns, backend.triton().load(sin_ref.at[row, index]), 0.0)[None, :]
    first, second = (
        part.reshape(heads, size // 2).astype(jnp.float32)
        for part in lax.split(values.reshape(heads, size // 2, 2), (1, 1), axis=2)
    )
    sin = sin if back else -sin
    turned = jnp.stack([first * cos + second * sin, second * cos - first * sin], axis=-1)
    return turned.reshape(heads, size).astype(values.dtype)

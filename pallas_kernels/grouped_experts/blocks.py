"""Which (row, expert) pairs the programs of the GPU kernels work on."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

Array = jax.Array

MOST_COMPARED = 1024
"""Pairs up to which they are ordered by comparing all with all, a few fused kernels where a sort is many."""


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Which rows of which expert every block holds.

    Attributes:
      expert: [B] int32; the number of experts for a block that holds nothing.
      first, end: [B] int32, sorted positions of the block's first row and of the end of its expert's rows.
      pair: [P] int32, the (row, expert) pair at each sorted position.
    """

    expert: Array
    first: Array
    end: Array
    pair: Array


def blocks_of(ids: Array, experts: int, rows: int) -> Blocks:
    """Blocks of the pairs ids [P], where pairs that are not served have the id `experts`."""
    pairs = ids.shape[0]
    position = jnp.arange(pairs, dtype=jnp.int32)
    expert = jnp.arange(experts, dtype=jnp.int32)
    if pairs <= MOST_COMPARED:
        earlier = (ids[None, :] < ids[:, None]) | (
            (ids[None, :] == ids[:, None]) & (position[None, :] < position[:, None])
        )
        place = jnp.sum(earlier, axis=1, dtype=jnp.int32)
        pair = jnp.sum(jnp.where(place[None, :] == position[:, None], position[None, :], 0), axis=1, dtype=jnp.int32)
        ends = jnp.sum(ids[None, :] <= expert[:, None], axis=1, dtype=jnp.int32)
        starts = jnp.sum(ids[None, :] < expert[:, None], axis=1, dtype=jnp.int32)
    else:
        pair = jnp.argsort(ids, stable=True).astype(jnp.int32)
        sizes = jnp.zeros(experts, jnp.int32).at[ids].add(1, mode="drop")
        ends = jnp.cumsum(sizes)
        starts = ends - sizes
    counts = -(-(ends - starts) // rows)
    until = jnp.sum(jnp.where(expert[None, :] <= expert[:, None], counts[None, :], 0), axis=1, dtype=jnp.int32)
    index = jnp.arange(min(experts, pairs) + pairs // rows, dtype=jnp.int32)
    owner = jnp.sum(until[None, :] <= index[:, None], axis=1, dtype=jnp.int32)
    near = jnp.minimum(owner, experts - 1)
    return Blocks(owner, starts[near] + (index - until[near] + counts[near]) * rows, ends[near], pair)

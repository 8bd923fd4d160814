"""Moves slots and checkpoint images on the device: relocation, store and restore.

Images live in arrays of their own whose bytes are charged to the page budget by the scheduler; an image carries the
rings of every layer and the cursor, never the compressor tails (runtime specification, "`copy`: checkpoints").
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from scheduler.pool_geometry import V41PoolGeometry
from scheduler.pools import Pools

COPIES_PER_CALL = 4
"""Copies one compiled call makes; unused entries are dropped."""


Held = TypeVar("Held", Pools, "Images")


class Images(NamedTuple):
    """Checkpoint images.

    Attributes:
      window: [layers, images, ring, row], the dtype of `Pools.window`.
      cursor: [images, 1 + Hh] int32.
    """

    window: Array
    cursor: Array


def allocate_images(geometry: V41PoolGeometry, pools: Pools, count: int) -> Images:
    """Room for `count` images; zero when the transfer keeps none."""
    layers, _, ring, row = pools.window.shape
    return Images(
        window=jnp.zeros((layers, count, ring, row), pools.window.dtype),
        cursor=jnp.zeros((count, 1 + geometry.history_size), jnp.int32),
    )


def _move(array: Array, sources: Array, destinations: Array, axis: int) -> Array:
    """Copies entries of `axis`; every source is read before any destination is written."""
    moved = jnp.take(array, sources, axis=axis, mode="clip")
    index = (slice(None),) * axis + (destinations,)
    return array.at[index].set(moved, mode="drop")


def _relocate(pools: Pools, sources: Array, destinations: Array) -> Pools:
    return pools.replace(
        window=_move(pools.window, sources, destinations, 1),
        tail_kv=_move(pools.tail_kv, sources, destinations, 1),
        tail_score=_move(pools.tail_score, sources, destinations, 1),
        cursor=_move(pools.cursor, sources, destinations, 0),
        last_token=_move(pools.last_token, sources, destinations, 0),
    )


def _store(images: Images, pools: Pools, slots: Array, image_ids: Array) -> Images:
    return Images(
        window=images.window.at[:, image_ids].set(jnp.take(pools.window, slots, axis=1, mode="clip"), mode="drop"),
        cursor=images.cursor.at[image_ids].set(jnp.take(pools.cursor, slots, axis=0, mode="clip"), mode="drop"),
    )


def _restore(pools: Pools, images: Images, image_ids: Array, slots: Array) -> Pools:
    return pools.replace(
        window=pools.window.at[:, slots].set(jnp.take(images.window, image_ids, axis=1, mode="clip"), mode="drop"),
        cursor=pools.cursor.at[slots].set(jnp.take(images.cursor, image_ids, axis=0, mode="clip"), mode="drop"),
    )


class StateCopies:
    """The three compiled copy programs of one runner; each donates what it rewrites."""

    def __init__(self) -> None:
        self._relocate = jax.jit(_relocate, donate_argnums=0)
        self._store = jax.jit(_store, donate_argnums=0)
        self._restore = jax.jit(_restore, donate_argnums=0)

    def relocate(self, pools: Pools, moves: Sequence[tuple[int, int]]) -> Pools:
        """Moves slots (source, destination); swaps and chains are legal.

        All sources are read before any destination is written, so one call must hold every move: the entries are
        padded to a multiple of `COPIES_PER_CALL`.
        """
        if not moves:
            return pools
        width = -(-len(moves) // COPIES_PER_CALL) * COPIES_PER_CALL
        sources, destinations = _padded(moves, width, pools.cursor.shape[0])
        return self._relocate(pools, sources, destinations)

    def store(self, images: Images, pools: Pools, copies: Sequence[tuple[int, int]]) -> Images:
        """Writes slots into images: (slot, image) pairs."""
        return _in_calls(lambda held, a, b: self._store(held, pools, a, b), images, copies, images.cursor.shape[0])

    def restore(self, pools: Pools, images: Images, copies: Sequence[tuple[int, int]]) -> Pools:
        """Writes images into slots: (image, slot) pairs; one image may fill several slots."""
        return _in_calls(lambda held, a, b: self._restore(held, images, a, b), pools, copies, pools.cursor.shape[0])


def _padded(pairs: Sequence[tuple[int, int]], width: int, dropped: int) -> tuple[np.ndarray, np.ndarray]:
    sources = np.zeros(width, np.int32)
    destinations = np.full(width, dropped, np.int32)
    for index, (source, destination) in enumerate(pairs):
        sources[index], destinations[index] = source, destination
    return sources, destinations


def _in_calls(
    copy: Callable[[Held, np.ndarray, np.ndarray], Held], held: Held, pairs: Sequence[tuple[int, int]], dropped: int
) -> Held:
    for start in range(0, len(pairs), COPIES_PER_CALL):
        held = copy(held, *_padded(pairs[start : start + COPIES_PER_CALL], COPIES_PER_CALL, dropped))
    return held

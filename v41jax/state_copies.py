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

from pallas_kernels.stored_rows import load_rows, store_rows
from scheduler.pool_geometry import V41PoolGeometry
from scheduler.pools import Pools

COPIES_PER_CALL = 4
"""Copies one compiled call makes; unused entries are dropped."""


Held = TypeVar("Held", Pools, "Images")
Pair = tuple[int, int]


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


def _copy(source: Array, sources: Array, target: Array, destinations: Array, axis: int) -> Array:
    """`target` with entries of `axis` overwritten; every source is read before any destination is written."""
    whole = (slice(None),) * axis
    return store_rows(target, (*whole, destinations), load_rows(source, (*whole, sources)))


def relocate_slots(pools: Pools, sources: Array, destinations: Array) -> Pools:
    """Copies slots [n] to slots [n]; a destination past the last slot writes nothing."""
    return pools.replace(
        window=_copy(pools.window, sources, pools.window, destinations, 1),
        tail_kv=_copy(pools.tail_kv, sources, pools.tail_kv, destinations, 1),
        tail_score=_copy(pools.tail_score, sources, pools.tail_score, destinations, 1),
        cursor=_copy(pools.cursor, sources, pools.cursor, destinations, 0),
        last_token=_copy(pools.last_token, sources, pools.last_token, destinations, 0),
    )


def store_images(images: Images, pools: Pools, slots: Array, image_ids: Array) -> Images:
    """Copies slots [n] to images [n]; a destination past the last image writes nothing."""
    return Images(
        window=_copy(pools.window, slots, images.window, image_ids, 1),
        cursor=_copy(pools.cursor, slots, images.cursor, image_ids, 0),
    )


def restore_images(pools: Pools, images: Images, image_ids: Array, slots: Array) -> Pools:
    """Copies images [n] to slots [n]; a destination past the last slot writes nothing."""
    return pools.replace(
        window=_copy(images.window, image_ids, pools.window, slots, 1),
        cursor=_copy(images.cursor, image_ids, pools.cursor, slots, 0),
    )


class StateCopies:
    """The three compiled copy programs of one runner; each donates what it rewrites.

    Ids count over all data shards; a copy never leaves its shard.
    """

    shards = 1

    def __init__(self) -> None:
        self._relocate = jax.jit(relocate_slots, donate_argnums=0)
        self._store = jax.jit(store_images, donate_argnums=0)
        self._restore = jax.jit(restore_images, donate_argnums=0)

    def relocate(self, pools: Pools, moves: Sequence[tuple[int, int]]) -> Pools:
        """Moves slots (source, destination); swaps and chains are legal.

        All sources are read before any destination is written, so one call must hold every move: the entries are
        padded to a multiple of `COPIES_PER_CALL`.
        """
        if not moves:
            return pools
        slots = pools.cursor.shape[0] // self.shards
        by_shard = self._by_shard(moves, slots, slots)
        width = -(-max(map(len, by_shard)) // COPIES_PER_CALL) * COPIES_PER_CALL
        return self._relocate(pools, *_padded(by_shard, width, slots))

    def store(self, images: Images, pools: Pools, copies: Sequence[tuple[int, int]]) -> Images:
        """Writes slots into images: (slot, image) pairs."""
        slots, count = pools.cursor.shape[0] // self.shards, images.cursor.shape[0] // self.shards
        by_shard = self._by_shard(copies, slots, count)
        return _in_calls(lambda held, a, b: self._store(held, pools, a, b), images, by_shard, count)

    def restore(self, pools: Pools, images: Images, copies: Sequence[tuple[int, int]]) -> Pools:
        """Writes images into slots: (image, slot) pairs; one image may fill several slots."""
        slots, count = pools.cursor.shape[0] // self.shards, images.cursor.shape[0] // self.shards
        by_shard = self._by_shard(copies, count, slots)
        return _in_calls(lambda held, a, b: self._restore(held, images, a, b), pools, by_shard, slots)

    def _by_shard(self, pairs: Sequence[tuple[int, int]], sources: int, destinations: int) -> list[list[Pair]]:
        """Pairs of each shard with ids inside it; a shard has so many sources and destinations."""
        found: list[list[Pair]] = [[] for _ in range(self.shards)]
        for source, destination in pairs:
            found[destination // destinations].append((source % sources, destination % destinations))
        return found


def _padded(by_shard: Sequence[Sequence[Pair]], width: int, dropped: int) -> tuple[np.ndarray, np.ndarray]:
    sources = np.zeros((len(by_shard), width), np.int32)
    destinations = np.full((len(by_shard), width), dropped, np.int32)
    for shard, pairs in enumerate(by_shard):
        for index, (source, destination) in enumerate(pairs):
            sources[shard, index], destinations[shard, index] = source, destination
    return sources.reshape(-1), destinations.reshape(-1)


def _in_calls(
    copy: Callable[[Held, np.ndarray, np.ndarray], Held], held: Held, by_shard: Sequence[Sequence[Pair]], dropped: int
) -> Held:
    for start in range(0, max(map(len, by_shard)), COPIES_PER_CALL):
        part = [pairs[start : start + COPIES_PER_CALL] for pairs in by_shard]
        held = copy(held, *_padded(part, COPIES_PER_CALL, dropped))
    return held

"""Copies of slots, images and pages on a mesh: every chip moves what lies in its own part.

Ids inside the programs count inside a shard. Copies of slots and images have arrays that hold every shard's ids, one
shard after the other, and nothing crosses a link; transfers of pages name the shard they are for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh, PartitionSpec

from scheduler.pools import Pools
from v41jax.layers.collectives import DATA, Parallel
from v41jax.page_transfer import Transfers, image_contents, page_contents, with_images, with_pages
from v41jax.sharding import pool_specs
from v41jax.state_copies import Images, StateCopies, relocate_slots, restore_images, store_images

IDS = PartitionSpec(DATA)
IMAGE_SPECS = Images(window=PartitionSpec(None, DATA), cursor=PartitionSpec(DATA))
"""Of the checkpoint images: a shard keeps those of its own requests."""
NOWHERE = np.iinfo(np.int32).max
"""A destination past every page and image."""


def on_shards(function: Callable[..., Any], mesh: Mesh, inputs: Any, outputs: Any, *, donate: bool) -> Any:
    """A compiled function that every chip runs on its own part.

    Args:
      function: of parts.
      mesh: of the devices.
      inputs: partition specs of the arguments.
      outputs: partition specs of the result.
      donate: the first argument is donated.
    """
    local = jax.shard_map(function, mesh=mesh, in_specs=inputs, out_specs=outputs, check_vma=False)
    return jax.jit(local, donate_argnums=(0,) if donate else ())


class MeshStateCopies(StateCopies):
    """The copies of `StateCopies`, each inside its shard."""

    def __init__(self, mesh: Mesh, parallel: Parallel, pools: Pools):
        """Args:
        mesh: of `parallel`.
        parallel: the mesh.
        pools: of all shards, or abstract ones.
        """
        specs = pool_specs(pools, parallel)
        self.shards = parallel.data
        self._relocate = on_shards(relocate_slots, mesh, (specs, IDS, IDS), specs, donate=True)
        self._store = on_shards(store_images, mesh, (IMAGE_SPECS, specs, IDS, IDS), IMAGE_SPECS, donate=True)
        self._restore = on_shards(restore_images, mesh, (specs, IMAGE_SPECS, IDS, IDS), specs, donate=True)


def mesh_transfers(mesh: Mesh, parallel: Parallel, pools: Pools, *, shared: bool) -> Transfers:
    """The transfers of pages and images on a mesh.

    Args:
      mesh: of `parallel`.
      parallel: the mesh.
      pools: of all shards, or abstract ones.
      shared: what is read is sent to the chips of all shards: of several processes each then has it, wherever the
        shard's chips are. Otherwise it stays on the shard's chips.
    """
    specs, whole = pool_specs(pools, parallel), PartitionSpec()

    def gather(contents: Callable[..., Any], held: Any) -> Callable[..., Any]:
        def local(memory: Any, shard: Array, ids: Array) -> Any:
            rows, mine = contents(memory, ids), lax.axis_index(DATA) == shard
            if not shared:
                return rows
            return jax.tree.map(lambda part: lax.psum(jnp.where(mine, part, 0), DATA), rows)

        return on_shards(local, mesh, (held, whole, whole), whole if shared else IDS, donate=False)

    def scatter(write: Callable[..., Any], held: Any, written: int) -> Callable[..., Any]:
        def local(memory: Any, shard: Array, ids: Array, *arrays: Array) -> Any:
            return write(memory, jnp.where(lax.axis_index(DATA) == shard, ids, NOWHERE), *arrays)

        return on_shards(local, mesh, (held, *[whole] * (2 + written)), held, donate=True)

    return Transfers(
        gather_pages=gather(page_contents, specs),
        scatter_pages=scatter(with_pages, specs, 1),
        gather_images=gather(image_contents, IMAGE_SPECS),
        scatter_images=scatter(with_images, IMAGE_SPECS, 2),
        shards=parallel.data,
    )

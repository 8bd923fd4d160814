"""Copies of slots, images and pages on a mesh: every chip moves what lies in its own part, nothing crosses a link.

Ids inside the programs count inside a shard; arrays of ids hold every shard's, one shard after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from scheduler.pools import Pools
from v41jax.layers.collectives import DATA, Parallel
from v41jax.page_transfer import Transfers, image_contents, page_contents, with_images, with_pages
from v41jax.sharding import pool_specs
from v41jax.state_copies import Images, StateCopies, relocate_slots, restore_images, store_images

IDS = PartitionSpec(DATA)
IMAGE_SPECS = Images(window=PartitionSpec(None, DATA), cursor=PartitionSpec(DATA))
"""Of the checkpoint images: a shard keeps those of its own requests."""


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


def mesh_transfers(mesh: Mesh, parallel: Parallel, pools: Pools) -> Transfers:
    """The transfers of pages and images on a mesh; arguments as of `MeshStateCopies`."""
    specs = pool_specs(pools, parallel)
    images = (IDS, IDS)
    return Transfers(
        gather_pages=on_shards(page_contents, mesh, (specs, IDS), IDS, donate=False),
        scatter_pages=on_shards(with_pages, mesh, (specs, IDS, IDS), specs, donate=True),
        gather_images=on_shards(image_contents, mesh, (IMAGE_SPECS, IDS), images, donate=False),
        scatter_images=on_shards(with_images, mesh, (IMAGE_SPECS, IDS, *images), IMAGE_SPECS, donate=True),
        shards=parallel.data,
    )

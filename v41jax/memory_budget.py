"""How many pages, slots and checkpoint images fit the memory that the weights leave."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import jax

from scheduler.pool_geometry import V41PoolGeometry
from scheduler.runtime_config import EngineConfig

CPU_POOL_BYTES = 1 << 28
"""Most that pools take of a CPU's memory unless `num_pages` is given: a laptop has other uses for the rest."""

SCRATCH_FRACTION = 0.05
"""Share of device memory left for the temporaries of compiled steps."""


@dataclasses.dataclass(frozen=True)
class PoolBudget:
    """The outcome of sizing.

    Attributes:
      device_bytes: memory of the device.
      weight_bytes: taken by weights.
      budget_bytes: what was left for pools; 0 when `num_pages` was given.
      num_pages: PAGE units.
      num_slots: state slots.
      num_images: checkpoint images that can exist at once; they are charged to the pages.
      page_bytes: one PAGE unit.
      state_bytes: one slot.
    """

    device_bytes: int
    weight_bytes: int
    budget_bytes: int
    num_pages: int
    num_slots: int
    num_images: int
    page_bytes: int
    state_bytes: int


def device_memory_bytes() -> int:
    """Memory of the first device: what its runtime reports, or a CPU's physical memory."""
    statistics = jax.devices()[0].memory_stats() or {}
    if "bytes_limit" in statistics:
        return int(statistics["bytes_limit"])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def plan_pools(config: EngineConfig, geometry: V41PoolGeometry, max_model_len: int, params: Any) -> PoolBudget:
    """Sizes the pools (runtime specification, "Who allocates").

    State slots come first, one a request; the rest buys pages. More pages than every slot's longest request needs are
    still useful, they keep prefixes.

    Args:
      config: options.
      geometry: of the pools.
      max_model_len: tokens of one request at most.
      params: loaded weights.

    Raises:
      GeometryError: not one page fits; it names the bytes.
    """
    weights = sum(_chip_bytes(leaf) for leaf in jax.tree.leaves(params))
    most = CPU_POOL_BYTES if jax.default_backend() == "cpu" else None
    return size_pools(config, geometry, device_memory_bytes(), weights, most=most)


def _chip_bytes(array: Any) -> int:
    """Bytes of an array on each of its devices."""
    shards = getattr(array, "addressable_shards", None)
    return int(shards[0].data.nbytes if shards else array.nbytes)


def size_pools(
    config: EngineConfig, geometry: V41PoolGeometry, device_bytes: int, weight_bytes: int, *, most: int | None = None
) -> PoolBudget:
    """`plan_pools` for a chip of which only these numbers are known.

    Args:
      config: options.
      geometry: of the pools.
      device_bytes: memory of the chip.
      weight_bytes: of the weights on it.
      most: bytes that pools may take at most; None is no limit.

    Raises:
      GeometryError: not one page fits; it names the bytes.
    """
    slots = config.max_num_seqs
    budget = 0
    if config.num_pages is not None:
        pages = config.num_pages
    else:
        budget = int(device_bytes * (config.memory_utilization - SCRATCH_FRACTION)) - weight_bytes
        budget = budget if most is None else min(budget, most)
        pages = geometry.pages_for_budget(budget, slots)
    keeps_images = config.enable_prefix_caching and not config.encoder_swa_bounded_replay
    images = pages // geometry.units_per_image if keeps_images and config.checkpoint_interval() != 0 else 0
    return PoolBudget(
        device_bytes=device_bytes,
        weight_bytes=weight_bytes,
        budget_bytes=budget,
        num_pages=pages,
        num_slots=slots,
        num_images=images,
        page_bytes=geometry.page_unit_bytes,
        state_bytes=geometry.state_bytes,
    )

"""How many pages, slots and checkpoint images fit the memory that the weights leave."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import jax
import jax.numpy as jnp

from scheduler.buckets import prefill_token_ladder
from scheduler.runtime_config import EngineConfig
from v41jax.layers.collectives import exchanges_rows
from v41jax.layers.indexer import SCORE_TILE_BYTES
from v41jax.model import ModelSetup

CPU_POOL_BYTES = 1 << 28
"""Most that pools take of a CPU's memory unless `num_pages` is given: a laptop has other uses for the rest."""

LEAST_SCRATCH = 0.05
"""Least share of device memory left for temporaries: what shapes do not tell, such as the runtime's own."""

SCORE_TILES = 3
"""Tiles of index scores that exist at once: the scores, and keys and ids of their selection."""

LOGIT_COPIES = 6
"""Copies of the logits that sampling holds: the model's, edited, scaled, sorted with their ids, and noise."""


@dataclasses.dataclass(frozen=True)
class PoolBudget:
    """The outcome of sizing.

    Attributes:
      device_bytes: memory of the device.
      weight_bytes: taken by weights.
      scratch_bytes: left for the temporaries of steps.
      budget_bytes: what was left for pools; 0 when `num_pages` was given.
      num_pages: PAGE units.
      num_slots: state slots.
      num_images: checkpoint images that can exist at once; they are charged to the pages.
      page_bytes: one PAGE unit.
      state_bytes: one slot.
    """

    device_bytes: int
    weight_bytes: int
    scratch_bytes: int
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


def plan_pools(config: EngineConfig, setup: ModelSetup, params: Any) -> PoolBudget:
    """Sizes the pools (runtime specification, "Who allocates").

    State slots come first, one a request; the rest buys pages. More pages than every slot's longest request needs are
    still useful, they keep prefixes.

    Args:
      config: options of one data shard.
      setup: what steps are specialized on.
      params: loaded weights.

    Raises:
      GeometryError: not one page fits; it names the bytes.
    """
    weights = sum(_chip_bytes(leaf) for leaf in jax.tree.leaves(params))
    most = CPU_POOL_BYTES if jax.default_backend() == "cpu" else None
    return size_pools(config, setup, device_memory_bytes(), weights, most=most)


def _chip_bytes(array: Any) -> int:
    """Bytes of an array on each of its devices."""
    shards = getattr(array, "addressable_shards", None)
    return int(shards[0].data.nbytes if shards else array.nbytes)


def step_rows(config: EngineConfig) -> int:
    """Rows of the largest step of a data shard: a prefill, or a decode step with all proposals."""
    verified = config.max_num_seqs * (1 + config.num_speculative_tokens)
    return max(prefill_token_ladder(config.max_num_batched_tokens)[-1], verified)


def row_bytes(setup: ModelSetup) -> int:
    """Temporaries of a step for each of its rows, on one chip; docs/pods.md, "Memory", derives them.

    Where experts lie over both axes a chip is given the rows of all data shards; each of their experts takes a place
    in its blocks.
    """
    text, parallel = setup.config.text, setup.parallel
    width, activation = text.hidden_size, jnp.dtype(setup.precision.activation_dtype).itemsize
    streams = text.hc_mult * width * (2 * activation + 4)
    heads = text.num_attention_heads // parallel.model * text.head_dim * (3 * activation + 4)
    served = parallel.data if exchanges_rows(parallel) else 1
    inner = text.moe_intermediate_size // (parallel.model if parallel.experts == "intermediate" else 1)
    pairs = text.num_experts_per_tok * 3 * (width + inner) * activation
    return streams + heads + served * (pairs + width * (activation + 4))


def scratch_bytes(config: EngineConfig, setup: ModelSetup, device_bytes: int) -> int:
    """Device memory to leave for temporaries: what the largest step needs by its shapes, and a least share.

    Args:
      config: options of one data shard.
      setup: what steps are specialized on.
      device_bytes: memory of the chip.
    """
    text = setup.config.text
    outputs = config.max_num_seqs * (1 + config.num_speculative_tokens)
    logits = LOGIT_COPIES * outputs * 4 * text.vocab_size // setup.parallel.model
    shapes = step_rows(config) * row_bytes(setup) + SCORE_TILES * SCORE_TILE_BYTES + logits
    return max(int(device_bytes * LEAST_SCRATCH), shapes)


def size_pools(
    config: EngineConfig, setup: ModelSetup, device_bytes: int, weight_bytes: int, *, most: int | None = None
) -> PoolBudget:
    """`plan_pools` for a chip of which only these numbers are known.

    Args:
      config: options of one data shard.
      setup: what steps are specialized on.
      device_bytes: memory of the chip.
      weight_bytes: of the weights on it.
      most: bytes that pools may take at most; None is no limit.

    Raises:
      GeometryError: not one page fits; it names the bytes.
    """
    geometry, slots = setup.geometry, config.max_num_seqs
    scratch, budget = scratch_bytes(config, setup, device_bytes), 0
    if config.num_pages is not None:
        pages = config.num_pages
    else:
        budget = int(device_bytes * config.memory_utilization) - scratch - weight_bytes
        budget = budget if most is None else min(budget, most)
        pages = geometry.pages_for_budget(budget, slots)
    keeps_images = config.enable_prefix_caching and not config.encoder_swa_bounded_replay
    images = pages // geometry.units_per_image if keeps_images and config.checkpoint_interval() != 0 else 0
    return PoolBudget(
        device_bytes=device_bytes,
        weight_bytes=weight_bytes,
        scratch_bytes=scratch,
        budget_bytes=budget,
        num_pages=pages,
        num_slots=slots,
        num_images=images,
        page_bytes=geometry.page_unit_bytes,
        state_bytes=geometry.state_bytes,
    )

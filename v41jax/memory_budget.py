"""How many pages, slots and checkpoint images fit the memory that the weights leave.

An engine asks with the arrays it has loaded, a plan with abstract ones: `plan_pools` is the only function that sizes.
"""

from __future__ import annotations

import dataclasses
import math
import os
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from scheduler.buckets import Buckets
from scheduler.model_view import ModelView
from scheduler.pool_geometry import GeometryError, V41PoolGeometry
from scheduler.runtime_config import EngineConfig
from v41jax.config import TextConfig
from v41jax.draft_parameters import draft_text
from v41jax.layers.collectives import exchanges_rows
from v41jax.layers.exchange_rule import exchange_of
from v41jax.layers.indexer import SCORE_TILE_BYTES
from v41jax.model import ModelSetup

CPU_POOL_BYTES = 1 << 28
"""Most that pools take of a CPU's memory unless `num_pages` is given: a laptop has other uses for the rest."""

LEAST_SCRATCH = 0.05
"""Least share of device memory left for temporaries: what shapes do not tell, such as the runtime's own."""

SCORE_TILES = 3
"""Tiles of index scores that exist at once: the scores, and keys and ids of their selection. A GPU's kernels select
without those and decode the index keys of a tile instead, which take no more."""

LOGIT_COPIES = 6
"""Copies of the logits that sampling holds: the model's, edited, scaled, sorted with their ids, and noise."""


class Held(NamedTuple):
    """Everything that lies on the devices of an engine before its pools: pytrees of arrays, or of abstract ones with
    shardings. None is left out.

    Attributes:
      target: weights of the model.
      draft: weights of its draft.
      tower: weights of the vision tower.
      tables: Engram tables in device memory.
    """

    target: Any
    draft: Any = None
    tower: Any = None
    tables: Any = None

    def chip_bytes(self) -> dict[str, int]:
        """Bytes of each on one device; what is left out is 0."""
        return {name: sum(map(_chip_bytes, jax.tree.leaves(part))) for name, part in self._asdict().items()}


def _chip_bytes(array: Any) -> int:
    """Bytes of an array on each of its devices."""
    return math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class PoolBudget:
    """The outcome of sizing.

    Attributes:
      device_bytes: memory of the device.
      weight_bytes: taken by weights.
      scratch_bytes: left for the temporaries of steps.
      adjustment_bytes: of the logit adjustments, a row of the vocabulary for each slot, on one device.
      budget_bytes: what was left for pools and images; 0 when `num_pages` was given.
      num_pages: PAGE units.
      num_slots: state slots.
      num_images: checkpoint images that can exist at once; each also takes pages of the scheduler.
      page_bytes: one PAGE unit.
      state_bytes: one slot.
      image_bytes: one checkpoint image.
    """

    device_bytes: int
    weight_bytes: int
    scratch_bytes: int
    adjustment_bytes: int
    budget_bytes: int
    num_pages: int
    num_slots: int
    num_images: int
    page_bytes: int
    state_bytes: int
    image_bytes: int


def device_memory_bytes() -> int:
    """Memory of the first device: what its runtime reports, or a CPU's physical memory."""
    statistics = jax.devices()[0].memory_stats() or {}
    if "bytes_limit" in statistics:
        return int(statistics["bytes_limit"])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def plan_pools(config: EngineConfig, setup: ModelSetup, held: Held, *, device_bytes: int | None = None) -> PoolBudget:
    """Sizes the pools (runtime specification, "Who allocates").

    State slots come first, one a request, with a row of logit adjustments each; the rest buys pages. More pages than
    every slot's longest request needs are still useful, they keep prefixes. Where checkpoint images are kept, pages and
    images share the rest. A given `num_pages` may take all of the device's memory, not only `memory_utilization` of it.

    Args:
      config: options of one data shard.
      setup: what steps are specialized on.
      held: what lies on the devices already.
      device_bytes: memory of a device that is not there; None asks the runtime, and takes little of a CPU's.

    Raises:
      GeometryError: not one page fits, or not as many as `num_pages`; it names the bytes.
    """
    geometry, slots = setup.geometry, config.max_num_seqs
    adjustments = 4 * slots * setup.config.text.vocab_size // setup.parallel.model
    most = CPU_POOL_BYTES if device_bytes is None and jax.default_backend() == "cpu" else None
    device_bytes = device_memory_bytes() if device_bytes is None else device_bytes
    weights, scratch, budget = sum(held.chip_bytes().values()), scratch_bytes(config, setup, device_bytes), 0
    keeps_images = config.enable_prefix_caching and not config.encoder_swa_bounded_replay
    keeps_images = keeps_images and config.checkpoint_interval() != 0
    if config.num_pages is not None:
        pages = config.num_pages
    else:
        budget = int(device_bytes * config.memory_utilization) - scratch - weights - adjustments
        budget = budget if most is None else min(budget, most)
        try:
            pages = geometry.pages_for_budget(budget, slots)
            if keeps_images:
                pages = pages_beside_images(geometry, budget - slots * geometry.state_bytes)
        except GeometryError as error:
            left = (
                f"{config.memory_utilization} of the device's {device_bytes} bytes are to be used, less weights of "
                f"{weights} bytes, temporaries of {scratch} bytes and logit adjustments of {adjustments} bytes"
            )
            raise GeometryError([f"{reason} ({left})" for reason in error.faults]) from None
    images = pages // geometry.units_per_image if keeps_images else 0
    needed = weights + scratch + adjustments + slots * geometry.state_bytes
    needed += pages * geometry.page_unit_bytes + images * geometry.image_bytes
    if config.num_pages is not None and needed > device_bytes:
        raise GeometryError(
            [
                f"num_pages {pages} of {geometry.page_unit_bytes} bytes, with {images} checkpoint images of "
                f"{geometry.image_bytes} bytes, {slots} slots of {geometry.state_bytes} bytes, logit adjustments of "
                f"{adjustments} bytes, weights of {weights} bytes and temporaries of {scratch} bytes, need {needed} "
                f"of the device's {device_bytes} bytes: lower num_pages or max_num_seqs, or leave num_pages out to "
                "take what is there"
            ]
        )
    return PoolBudget(
        device_bytes=device_bytes,
        weight_bytes=weights,
        scratch_bytes=scratch,
        adjustment_bytes=adjustments,
        budget_bytes=budget,
        num_pages=pages,
        num_slots=slots,
        num_images=images,
        page_bytes=geometry.page_unit_bytes,
        state_bytes=geometry.state_bytes,
        image_bytes=geometry.image_bytes,
    )


def pages_beside_images(geometry: V41PoolGeometry, budget_bytes: int) -> int:
    """PAGE units that leave room for an image to each `units_per_image` of them, which may all hold images at once.

    Args:
      geometry: of the pools.
      budget_bytes: for pages and images.

    Raises:
      GeometryError: when not one page fits, with the image that it then may hold.
    """
    together = geometry.units_per_image * geometry.page_unit_bytes + geometry.image_bytes
    whole, rest = divmod(budget_bytes, together)
    alone = min(rest // geometry.page_unit_bytes, geometry.units_per_image - 1)
    pages = whole * geometry.units_per_image + alone
    if pages < 1:
        raise GeometryError(
            [
                f"{budget_bytes} bytes hold no page of {geometry.page_unit_bytes} bytes beside a checkpoint image of "
                f"{geometry.image_bytes} bytes: raise the budget or lower max_num_seqs"
            ]
        )
    return pages


def scratch_bytes(config: EngineConfig, setup: ModelSetup, device_bytes: int) -> int:
    """Device memory to leave for temporaries: what the largest step needs by its shapes, and a least share.

    docs/pods.md, "Memory", derives the terms.

    Args:
      config: options of one data shard.
      setup: what steps are specialized on.
      device_bytes: memory of the chip.
    """
    text = setup.config.text
    outputs = config.max_num_seqs * (1 + config.num_speculative_tokens)
    logits = LOGIT_COPIES * outputs * 4 * text.vocab_size // setup.parallel.model
    shapes = max(step_bytes(setup, *rows) for rows in step_rows(config, setup)) + SCORE_TILES * SCORE_TILE_BYTES
    return max(int(device_bytes * LEAST_SCRATCH), shapes + logits)


def step_rows(config: EngineConfig, setup: ModelSetup) -> set[tuple[int, int]]:
    """Rows of the encoder and of the decoder of every step that a data shard can have."""
    geometry, view = setup.geometry, ModelView.from_config(setup.config)
    buckets = Buckets.default(config, geometry, 1, geometry.block_size)  # rows do not depend on pages
    shapes = buckets.shapes(config.decoder_replay(view))
    return {(shape.rows, shape.decoder_rows(geometry.window_size)) for shape in shapes}


def step_bytes(setup: ModelSetup, rows: int, decoder: int) -> int:
    """Temporaries that a step has for its rows, on one chip.

    Args:
      setup: what steps are specialized on.
      rows: of one data shard.
      decoder: of them, those that run the decoder.
    """
    text = setup.config.text
    experts = max(expert_bytes(setup, text, count) for count in {rows, decoder})
    if setup.geometry.speculative_tokens:
        block = draft_text(text)
        requests = -(-rows // (1 + setup.geometry.speculative_tokens))
        experts = max(experts, expert_bytes(setup, block, requests * text.dspark_block_size))
    return rows * row_bytes(setup) + experts


def row_bytes(setup: ModelSetup) -> int:
    """Temporaries of a step for each of its rows, without those of routed experts: streams and heads."""
    text, parallel = setup.config.text, setup.parallel
    activation = jnp.dtype(setup.precision.activation_dtype).itemsize
    streams = text.hc_mult * text.hidden_size * (2 * activation + 4)
    return streams + text.num_attention_heads // parallel.model * text.head_dim * (3 * activation + 4)


def expert_bytes(setup: ModelSetup, text: TextConfig, rows: int) -> int:
    """Temporaries of routed experts that serve `rows` rows of each data shard, on one chip.

    Where experts lie over both axes a chip is given rows of all data shards: all of them by a gather, by a ragged
    exchange no more than its places, each with no more experts than the chip has. Every expert of a row takes a place
    in the blocks of the experts.
    """
    parallel, width = setup.parallel, text.hidden_size
    activation = jnp.dtype(setup.precision.activation_dtype).itemsize
    inner = text.moe_intermediate_size // (parallel.model if parallel.experts == "intermediate" else 1)
    pair = 3 * activation * (width + inner)
    given, chosen, kept = rows, text.num_experts_per_tok, width * (activation + 4)
    own = 0
    if exchanges_rows(parallel):
        quantized = setup.precision.activation_quantization
        exchange = exchange_of(text, parallel, rows, activation_bytes=activation, quantized=quantized)
        given = parallel.data * rows
        if exchange.ragged:
            given, chosen = (
                parallel.data * exchange.places,
                min(chosen, text.n_routed_experts // parallel.expert_shards),
            )
            kept += width * 4  # sums that came back
            own = rows * width * (activation + 4)  # what is sent, and the sums so far
    return given * (chosen * pair + kept) + own

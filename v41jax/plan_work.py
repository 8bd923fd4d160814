"""What one step of a sharded model must at least do on each chip: bytes to read, operations, bytes to send.

Counted from the configuration, not from a program: the bound that any implementation has. What a compiled program
sends is in `hlo_collectives`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import numpy as np

from scheduler.pool_geometry import V41PoolGeometry
from v41jax.chips import Chip
from v41jax.config import CandidateRole, LayerMode, ModelConfig
from v41jax.hlo_collectives import Collective
from v41jax.layers.collectives import Parallel, exchanges_rows, splits_rows
from v41jax.layers.exchange_rule import exchange_of
from v41jax.model import decoder_start
from v41jax.parameters import Parameters
from v41jax.sharding import chip_bytes, weight_specs


class Rows(NamedTuple):
    """Rows of one data shard's step.

    Attributes:
      encoder: rows that run the layers before the decoder.
      decoder: rows that run the decoder's layers.
      outputs: rows whose logits are computed.
      context: tokens that a request holds.
    """

    encoder: int
    decoder: int
    outputs: int
    context: int


@dataclasses.dataclass(frozen=True)
class Work:
    """The least work of a step on one chip.

    Attributes:
      memory_bytes: read from device memory: weights (of the experts those that some row is expected to choose, routing
        taken as uniform) and the pool rows that attention and indexers read.
      operations: of matrix products; a multiply and an add are two.
      link_bytes: sent to other chips.
    """

    memory_bytes: float
    operations: float
    link_bytes: float


@dataclasses.dataclass(frozen=True)
class Bound:
    """Least time of a step in seconds, by what limits it.

    Attributes:
      memory, compute, interconnect: each alone.
    """

    memory: float
    compute: float
    interconnect: float

    @property
    def seconds(self) -> float:
        """The largest of the three; they may overlap."""
        return max(self.memory, self.compute, self.interconnect)

    @property
    def dominant(self) -> str:
        """The name of the largest."""
        return max(("memory", "compute", "interconnect"), key=lambda name: getattr(self, name))


def bound_of(work: Work, chip: Chip) -> Bound:
    """The bound of some work on a chip."""
    return Bound(
        work.memory_bytes / chip.memory_rate, work.operations / chip.matrix_rate, work.link_bytes / chip.link_rate
    )


def sent_bytes(collectives: Iterable[Collective]) -> float:
    """Bytes that each chip sends in collectives, by the least that their kind needs."""
    total = 0.0
    for one in collectives:
        part = (one.group - 1) / one.group if one.group > 1 else 1.0
        total += one.count * one.bytes * part * (2 if one.kind == "all-reduce" else 1)
    return total


def expected_collectives(
    config: ModelConfig, parallel: Parallel, rows: Rows, *, activation_bytes: int = 2, quantized: bool = True
) -> list[Collective]:
    """The collectives that the layers ask for in one step, without sampling's; of a ragged exchange one round.

    Args:
      config: of the model.
      parallel: the mesh.
      rows: of one shard.
      activation_bytes: of the activation dtype.
      quantized: activations are quantized.
    """
    text, width = config.text, config.text.hidden_size
    found: list[Collective] = []

    def add(kind: str, size: int, group: int, count: int = 1) -> None:
        if group > 1 and size:
            found.append(Collective(kind, size, group, count))

    add("all-gather", rows.encoder * width * 2, parallel.model)
    for layer in config.layers:
        count = rows.encoder if layer.index < decoder_start(config) else rows.decoder
        add("all-reduce", count * width * 4, parallel.model, 2)
        if exchanges_rows(parallel):
            exchange = exchange_of(text, parallel, count, activation_bytes=activation_bytes, quantized=quantized)
            # Forth as codes and scales or as values, with ids and weights; back as float32.
            every = parallel.data * (exchange.places if exchange.ragged else count)
            kind = "all-to-all" if exchange.ragged else "all-gather"
            add(kind, every * width * (1 if quantized else activation_bytes), parallel.data)
            add(kind, every * width // 32 if quantized else 0, parallel.data)
            routing = every * text.num_experts_per_tok * 4
            if exchange.ragged:
                add(kind, 2 * routing, parallel.data)
                add("all-reduce", 4, parallel.chips)
                add(kind, every * width * 4, parallel.data)
            else:
                add(kind, routing, parallel.data, 2)
                add(kind, every, parallel.data)
                add("reduce-scatter", every * width * 4, parallel.data)
        if layer.mode in (LayerMode.FULL, LayerMode.REINDEX) and splits_rows(count, parallel):
            add("all-gather", count * text.index_topk * 4, parallel.model)
            add("all-gather", count * 4, parallel.model)
            if layer.candidates is CandidateRole.PUBLISHES:
                add("all-gather", count * text.candidate_topk_blocks * 4, parallel.model)
    return found


def least_work(
    config: ModelConfig,
    geometry: V41PoolGeometry,
    params: Parameters,
    parallel: Parallel,
    rows: Rows,
    collectives: Iterable[Collective],
) -> Work:
    """The least work of a step.

    Args:
      config: of the model.
      geometry: of the pools.
      params: abstract weights.
      parallel: the mesh.
      rows: of one shard.
      collectives: that the step does.
    """
    text = config.text
    first = decoder_start(config)
    memory = operations = 0.0
    bodies = params._replace(embed=(), head=(), plain=(), yarn=(), runs=_without_experts(params))
    decoder_share = (len(config.layers) - first) / len(config.layers)
    mean_rows = rows.encoder * (1 - decoder_share) + rows.decoder * decoder_share
    dense = _chip_size(bodies, parallel)
    memory += dense.bytes + (rows.encoder * text.hidden_size * 2)
    operations += 2 * mean_rows * dense.elements
    head = _chip_size(params._replace(embed=(), norm=(), plain=(), yarn=(), runs=()), parallel)
    if rows.outputs:
        memory += head.bytes
        operations += 2 * rows.outputs * head.elements
    experts = _chip_size(
        params._replace(embed=(), head=(), norm=(), plain=(), yarn=(), runs=_experts(params)), parallel
    )
    for layer in config.layers:
        count = rows.encoder if layer.index < first else rows.decoder
        served = count * (parallel.data if parallel.experts == "data_model" else 1)
        missed = (1 - text.num_experts_per_tok / text.n_routed_experts) ** served
        memory += experts.bytes / len(config.layers) * (1 - missed)
        cut = parallel.chips if parallel.experts == "data_model" else parallel.model
        operations += 2 * 3 * text.hidden_size * text.moe_intermediate_size * served * text.num_experts_per_tok / cut
        memory += count * min(text.sliding_window, rows.context) * geometry.window_row_bytes
        keys = min(text.sliding_window, rows.context)
        if layer.ratio:
            entries = rows.context // layer.ratio
            selected = min(text.index_topk, entries)
            keys += selected
            memory += count * selected * geometry.main_row_bytes
            if layer.mode in (LayerMode.FULL, LayerMode.REINDEX):
                scored = entries
                if layer.candidates is CandidateRole.CONSUMES:
                    scored = min(entries, text.candidate_topk_blocks * text.candidate_block_size)
                own = count / parallel.model if splits_rows(count, parallel) else count
                memory += own * scored * geometry.index_row_bytes
                operations += 2 * own * scored * text.index_n_heads * text.index_head_dim
        operations += 4 * count * (text.num_attention_heads / parallel.model) * keys * text.head_dim
    return Work(memory, operations, sent_bytes(collectives))


class _Size(NamedTuple):
    bytes: int
    elements: float


def _chip_size(params: Any, parallel: Parallel) -> _Size:
    specs = weight_specs(params, parallel)

    def elements(path: tuple[Any, ...], leaf: Any) -> Any:
        scale = getattr(path[-1], "name", "") == "scales"
        # Two codes a byte, in bytes as stored or in words.
        codes = 2 * leaf.dtype.itemsize if leaf.dtype in (np.uint8, np.uint16) else 1
        return jax.ShapeDtypeStruct((0,) if scale else (*leaf.shape[:-1], leaf.shape[-1] * codes), np.uint8)

    counted = jax.tree_util.tree_map_with_path(elements, params)
    return _Size(chip_bytes(params, specs, parallel), chip_bytes(counted, specs, parallel))


def _without_experts(params: Parameters) -> tuple[Any, ...]:
    return tuple(run._replace(moe=run.moe._replace(experts=())) for run in params.runs)


def _experts(params: Parameters) -> tuple[Any, ...]:
    def only(run: Any) -> Any:
        empty = {name: () for name in run._fields if name != "moe"}
        return run._replace(moe=run.moe._replace(router=(), shared=()), **empty)

    return tuple(only(run) for run in params.runs)

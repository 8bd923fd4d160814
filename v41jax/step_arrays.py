"""The arrays of a step that schedules nothing, and the abstract inputs of one: what compiling ahead needs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from scheduler.batch import DEAD, BatchStep, CompressionPlan, EngramRows, Preparation, TailPlan
from scheduler.buckets import StepShape
from scheduler.compression_plans import closing_capacity, tail_capacity
from scheduler.pool_geometry import V41PoolGeometry
from v41jax.config import ModelConfig


def empty_step(shape: StepShape, geometry: V41PoolGeometry) -> BatchStep:
    """A step of padding only: it reads nothing, writes nothing and returns rows nobody asked for."""

    def full(size: int | tuple[int, ...], value: int) -> np.ndarray:
        return np.full(size, value, np.int32)

    def plan(ratio: int) -> CompressionPlan:
        closing, tail = closing_capacity(shape, ratio), tail_capacity(shape, geometry, ratio)
        return CompressionPlan(
            closing_rows=full(closing, shape.rows),
            requests=full(closing, -1),
            positions=full(closing, -1),
            from_tail=full(closing, 0),
            tail_rows=full(tail, shape.rows),
            tail_requests=full(tail, -1),
            tail_positions=full(tail, -1),
        )

    tail = None
    if shape.tail:
        capacity = shape.decoder_rows(geometry.window_size)
        tail = TailPlan(rows=full(capacity, shape.rows), floor=full(capacity, 0), last=full(shape.outputs, capacity))
    return BatchStep(
        token_ids=full(shape.rows, 0),
        compressed_ids=full(shape.rows, DEAD),
        positions=full(shape.rows, 0),
        batch_ids=full(shape.rows, -1),
        image_rows=np.zeros(shape.rows, bool),
        cu_seqlens=full(shape.requests + 1, 0),
        slots=full(shape.requests, 0),
        block_tables=full((shape.requests, shape.pages), 0),
        preparation=full(shape.requests, Preparation.CONTINUE),
        forward_start=full(shape.requests, 0),
        history=full((shape.requests, geometry.history_size), 0),
        write_from=full(shape.requests, 0),
        cached_until=full(shape.requests, 0),
        swa_cached_until=full(shape.requests, 0),
        swa_replay_start=full(shape.requests, 0),
        is_final=np.zeros(shape.requests, bool),
        output_rows=full(shape.outputs, shape.rows),
        plans=tuple(plan(ratio) for ratio in geometry.ratios),
        tail=tail,
    )


def engram_shapes(config: ModelConfig, rows: int) -> EngramRows:
    """Abstract `EngramRows` of a step of `rows` rows."""
    text = config.text
    columns = (text.engram_max_ngram_size - 1) * text.engram_n_heads

    def rows_of(width: int) -> tuple[Any, ...]:
        shape = jax.ShapeDtypeStruct((rows, columns, width), jnp.uint8)
        return (shape,) * len(text.engram_layer_ids)

    return EngramRows(codes=rows_of(text.engram_head_dim), scales=rows_of(text.engram_head_dim // 32))


def image_shape(config: ModelConfig, rows: int, dtype: DTypeLike) -> Any:
    """Abstract image embeddings of a step: [N, D] of the activation dtype."""
    return jax.ShapeDtypeStruct((rows, config.text.hidden_size), dtype)

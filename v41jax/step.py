"""What is the same for every layer of a forward: what the model is specialized on, and the step's shared arrays."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax

from scheduler.batch import CompressionPlan
from scheduler.pool_geometry import V41PoolGeometry
from v41jax.bounded_replay import Queries
from v41jax.config import ModelConfig
from v41jax.layers.collectives import Parallel
from v41jax.layers.rope import RopeTable
from v41jax.layers.rows import Phase, Requests, Rows
from v41jax.precision import Precision

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class ModelSetup:
    """Everything a forward is specialized on; hashable, a static argument of `jax.jit`.

    Attributes:
      config: of the checkpoint.
      geometry: of the pools.
      precision: rounding choices.
      kernels: implementation of the operations, "auto", "xla" or "pallas".
      parallel: the mesh the forward runs on; with more than one chip it runs inside `mesh_forward` only.
    """

    config: ModelConfig
    geometry: V41PoolGeometry
    precision: Precision = dataclasses.field(default_factory=Precision)
    kernels: str = "auto"
    parallel: Parallel = Parallel()


class Step(NamedTuple):
    """What is the same for every layer of a forward (never crosses a `jit` boundary).

    Attributes:
      setup: static.
      phase: static.
      rows: of the rows that run the layers.
      requests: of the batch.
      table: RoPE table of layers of ratio > 0, for compressed entries.
      plans: compression plan by ratio.
      embedded: Engram inputs [N, columns * head_dim] by Engram ordinal.
      published: a FULL layer whose entries are already written, or None.
      queries: the only rows that go on after the window keys; None is all of them.
    """

    setup: ModelSetup
    phase: Phase
    rows: Rows
    requests: Requests
    table: RopeTable
    plans: dict[int, CompressionPlan]
    embedded: tuple[Array, ...]
    published: int | None = None
    queries: Queries | None = None

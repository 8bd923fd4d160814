"""The forward on a mesh: the same `forward`, run by every chip on its own rows and its part of the weights.

A step on a mesh is the steps of its `data` shards, concatenated: every id in it (pages, slots, batch positions, rows)
counts inside its shard. `whole_step` translates them to places in the concatenated arrays, for what comes after the
forward.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from scheduler.batch import BatchStep, EngramRows
from scheduler.pools import Pools
from v41jax.layers.collectives import DATA, MODEL, Parallel
from v41jax.layers.rows import Phase
from v41jax.model import ForwardOutput, ModelSetup, Taps, forward
from v41jax.parameters import Parameters
from v41jax.sharding import pool_specs, step_specs, weight_specs

Array = jax.Array


def mesh_forward(
    params: Parameters,
    pools: Pools,
    batch: BatchStep,
    engram_rows: EngramRows,
    *,
    mesh: Mesh,
    setup: ModelSetup,
    phase: Phase,
    image_embeddings: Array | None = None,
    keep_flow: bool = False,
) -> tuple[Pools, ForwardOutput]:
    """`forward` on a mesh; to be called inside `jit`.

    Args:
      params: whole weights, cut as `weight_specs` says.
      pools: of all shards, cut as `pool_specs` says.
      batch: steps of the shards, see `join_steps`.
      engram_rows: of the same rows.
      mesh: with the axes `data` and `model` of `setup.parallel`.
      setup: static.
      phase: static, of every shard.
      image_embeddings: [data N, D], or None.
      keep_flow: static; see `forward`.

    Returns:
      The pools, and the outputs of all shards one after the other; logits [data F, V] cut over both axes.
    """
    rows = PartitionSpec(DATA)

    def local(params: Parameters, pools: Pools, batch: BatchStep, engram_rows: EngramRows, images: Array | None):
        pools, output = forward(
            params,
            pools,
            batch,
            engram_rows,
            setup=setup,
            phase=phase,
            image_embeddings=images,
            keep_flow=keep_flow,
        )
        return pools, output

    taps = Taps(rows, rows) if setup.geometry.speculative_tokens else None
    if batch.tail is not None and not len(batch.tail.last):
        taps = None
    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(
            weight_specs(params, setup.parallel),
            pool_specs(pools, setup.parallel),
            step_specs(batch),
            step_specs(engram_rows),
            rows,
        ),
        out_specs=(
            pool_specs(pools, setup.parallel),
            ForwardOutput(
                logits=PartitionSpec(DATA, MODEL),
                cursor_mismatch=rows,
                record=None,
                taps=taps,
                flow=rows if keep_flow and batch.tail is None else None,
            ),
        ),
        # Replicas are computed, not declared: every `model` chip writes the same bytes to its copy of the pools.
        check_vma=False,
    )(params, pools, batch, engram_rows, image_embeddings)


def whole_step(batch: BatchStep, parallel: Parallel, slots: int) -> BatchStep:
    """The step with ids that count over all shards; only the fields that sampling reads are translated.

    Args:
      batch: steps of the shards.
      parallel: the mesh.
      slots: state slots of one shard.

    Returns:
      `batch_ids`, `output_rows` (padding: the number of all rows) and `slots` as places in the concatenated arrays.
    """
    if parallel.data == 1:
        return batch
    shards = parallel.data
    rows, requests, outputs = (len(field) // shards for field in (batch.positions, batch.slots, batch.output_rows))

    def shard(size: int) -> Array:
        return jnp.repeat(jnp.arange(shards, dtype=jnp.int32), size, total_repeat_length=shards * size)

    output_rows = batch.output_rows + shard(outputs) * rows
    return batch._replace(
        batch_ids=jnp.where(batch.batch_ids >= 0, batch.batch_ids + shard(rows) * requests, -1),
        output_rows=jnp.where(batch.output_rows < rows, output_rows, shards * rows),
        slots=batch.slots + shard(requests) * slots,
    )

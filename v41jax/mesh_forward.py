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
from v41jax.draft_parameters import DraftParameters
from v41jax.dspark import write_draft_context
from v41jax.layers.collectives import DATA, MODEL, Parallel
from v41jax.layers.rows import Phase
from v41jax.model import ForwardOutput, ModelSetup, forward
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
    draft: DraftParameters | None = None,
    advance: bool = True,
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
      draft: whole weights of the draft, cut as `weight_specs` says, which then gets its context; None without one.
      advance: static; see `forward`.

    Returns:
      The pools, and the outputs of all shards one after the other; logits [data F, V] cut over both axes. There are no
      taps: what the draft keeps of them is in the pools.
    """
    rows = PartitionSpec(DATA)

    def local(
        params: Parameters,
        pools: Pools,
        batch: BatchStep,
        engram_rows: EngramRows,
        images: Array | None,
        draft: DraftParameters | None,
    ):
        pools, output = forward(
            params,
            pools,
            batch,
            engram_rows,
            setup=setup,
            phase=phase,
            image_embeddings=images,
            keep_flow=keep_flow,
            advance=advance,
        )
        if draft is not None and output.taps is not None:
            pools = write_draft_context(draft, pools, output.taps, batch.slots, setup=setup)
        return pools, output._replace(taps=None)

    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(
            weight_specs(params, setup.parallel),
            pool_specs(pools, setup.parallel),
            step_specs(batch),
            step_specs(engram_rows),
            rows,
            None if draft is None else weight_specs(draft, setup.parallel),
        ),
        out_specs=(
            pool_specs(pools, setup.parallel),
            ForwardOutput(
                logits=PartitionSpec(DATA, MODEL),
                cursor_mismatch=rows,
                record=None,
                taps=None,
                flow=rows if keep_flow and batch.tail is None else None,
            ),
        ),
        # Replicas are computed, not declared: every `model` chip writes the same bytes to its copy of the pools.
        check_vma=False,
    )(params, pools, batch, engram_rows, image_embeddings, draft)


def whole_step(batch: BatchStep, parallel: Parallel, slots: int) -> BatchStep:
    """The step with ids that count over all shards; only the fields that sampling and verification read are translated.

    Args:
      batch: steps of the shards.
      parallel: the mesh.
      slots: state slots of one shard.

    Returns:
      `batch_ids`, `output_rows` (padding: the number of all rows), `cu_seqlens` and `slots` as places in the
      concatenated arrays; every shard keeps its own offsets, see `verification.request_spans`.
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
        cu_seqlens=batch.cu_seqlens + shard(requests + 1) * rows,
        slots=batch.slots + shard(requests) * slots,
    )

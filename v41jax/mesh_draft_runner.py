"""`MeshDraftRunner`: prefill, verify and draft calls on a mesh.

Draft windows are rings of the pools like any other, draft stages are cut like the layers of the target, and every
`data` shard drafts for its own requests. Acceptance and the choice of proposals run on whole arrays, whose cut XLA
follows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from scheduler.batch import BatchStep, EngramRows
from scheduler.buckets import StepShape
from scheduler.pools import Pools
from v41jax.compiled_steps import Lowered, compiler_options
from v41jax.draft_parameters import DraftParameters, draft_leaves
from v41jax.draft_runner import DraftingWeights, DraftRunner, verified_output
from v41jax.dspark import DraftBlock, DraftRequests, committed_requests, draft_hidden, propose
from v41jax.layers.collectives import DATA, Parallel
from v41jax.mesh_forward import mesh_forward, whole_step
from v41jax.mesh_runner import MeshRunner, mesh_serve_step
from v41jax.model import ModelSetup
from v41jax.parameters import Parameters, TensorSource, WeightForm, describe_checkpoint, load_leaves
from v41jax.runner import StepOutput, StepSampling
from v41jax.sampling import SamplingInputs
from v41jax.sharding import pool_specs, shardings, weight_specs
from v41jax.speculative_steps import accept_and_commit

Array = jax.Array


def mesh_serve_prefill(
    weights: DraftingWeights, *arguments: Any, mesh: Mesh, setup: ModelSetup
) -> tuple[Pools, Array, StepOutput]:
    """`draft_runner.serve_prefill` on a mesh; arguments as of `mesh_serve_step`."""
    return mesh_serve_step(weights.target, *arguments, mesh=mesh, setup=setup, phase="prefill", draft=weights.draft)


def mesh_serve_verify(
    weights: DraftingWeights,
    pools: Pools,
    adjustments: Array,
    batch: BatchStep,
    engram_rows: EngramRows,
    sampling: StepSampling,
    *,
    mesh: Mesh,
    setup: ModelSetup,
) -> tuple[Pools, Array, StepOutput]:
    """`draft_runner.serve_verify` on a mesh; arguments as of `mesh_serve_step`."""
    pools, output = mesh_forward(
        weights.target,
        pools,
        batch,
        engram_rows,
        mesh=mesh,
        setup=setup,
        phase="decode",
        draft=weights.draft,
        advance=False,
    )
    whole = whole_step(batch, setup.parallel, pools.last_token.shape[0] // setup.parallel.data)
    pools, adjustments, found = accept_and_commit(
        pools, adjustments, whole, output, sampling.inputs, sampling.edits, sampling.scored, setup=setup
    )
    return pools, adjustments, verified_output(found)


def mesh_serve_draft(
    weights: DraftingWeights,
    pools: Pools,
    slots: Array,
    live: Array,
    sampling: SamplingInputs,
    *,
    mesh: Mesh,
    setup: ModelSetup,
    confidence: bool,
) -> tuple[Pools, DraftBlock]:
    """`draft_runner.serve_draft` on a mesh.

    Args:
      weights: whole, cut as `weight_specs` says.
      pools: of all shards, donated and handed back as they were.
      slots: [data R] int32, inside the shard.
      live: [data R] bool.
      sampling: [data R] per request.
      mesh: of `setup.parallel`.
      setup: static.
      confidence: static.
    """
    rows = PartitionSpec(DATA)

    def local(weights: DraftingWeights, pools: Pools, slots: Array, live: Array) -> tuple[DraftRequests, Array]:
        requests = committed_requests(pools, slots, live)
        return requests, draft_hidden(*weights, pools, requests, setup)

    requests, hidden = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(weight_specs(weights, setup.parallel), pool_specs(pools, setup.parallel), rows, rows),
        out_specs=(DraftRequests(rows, rows, rows, rows), rows),
        check_vma=False,
    )(weights, pools, slots, live)
    sampling = sampling._replace(positions=requests.positions + 2)
    return pools, propose(*weights, requests, hidden, setup=setup, confidence=confidence, sampling=sampling)


def load_draft_on_mesh(
    checkpoint: TensorSource, mesh: Mesh, parallel: Parallel, *, form: WeightForm, dtype: Any
) -> DraftParameters:
    """`load_draft_parameters` onto a mesh; arguments as of `load_on_mesh`."""
    leaves = draft_leaves(checkpoint.config, describe_checkpoint(checkpoint), form=form, dtype=dtype)
    return load_leaves(checkpoint, leaves, shardings(mesh, weight_specs(leaves, parallel)))


class MeshDraftRunner(DraftRunner, MeshRunner):
    """A `DraftRunner` on a mesh."""

    def __init__(self, params: Parameters, setup: ModelSetup, draft_parameters: DraftParameters, **options: Any):
        """Allocates the pools.

        Args:
          params: weights of the target, cut as `weight_specs` says.
          setup: with `parallel` of the mesh; its pools have draft windows.
          draft_parameters: weights of the draft, cut likewise.
          options: of `DraftRunner` and `MeshRunner`.

        Raises:
          ValueError: as of both.
        """
        super().__init__(params, setup, draft_parameters, **options)

    def step_function(self, shape: StepShape) -> Callable[..., tuple[Pools, Array, StepOutput]]:
        """See `ModelRunner.step_function`."""
        serve = mesh_serve_verify if shape.verifies else mesh_serve_prefill
        return functools.partial(serve, mesh=self.mesh, setup=self.setup)

    def _draft_function(self) -> Callable[..., tuple[Pools, DraftBlock]]:
        return functools.partial(mesh_serve_draft, mesh=self.mesh, setup=self.setup, confidence=self.confidence)

    def _lowered_draft(self, arguments: Sequence[Any]) -> Lowered:
        weights, pools, _, _, sampling = arguments
        rows, whole = PartitionSpec(DATA), PartitionSpec()
        parallel = self.setup.parallel
        held = pool_specs(pools, parallel)
        specs = (weight_specs(weights, parallel), held, rows, rows, jax.tree.map(lambda _: whole, sampling))
        results = (held, DraftBlock(whole, whole if self.confidence else None))
        draft = jax.jit(
            self._draft_function(),
            donate_argnums=1,
            in_shardings=shardings(self.mesh, specs),
            out_shardings=shardings(self.mesh, results),
        )
        # Not packed: every shard is sent its own rows only.
        return Lowered(draft.lower(*arguments), lambda *given: given, compiler_options(self.setup.parallel))

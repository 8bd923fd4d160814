"""`MeshRunner`: a `ModelRunner` whose weights and pools are cut over a mesh of chips.

The forward is `mesh_forward`; sampling runs on the whole vocabulary's logits, whose cut XLA follows. Which chip holds
what is said in `sharding`. Pages, slots and images of all data shards are one pool here, shard after shard.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from scheduler import pools as pool_arrays
from scheduler.batch import BatchStep, EngramRows
from scheduler.buckets import StepShape
from scheduler.pools import Pools
from v41jax.compiled_steps import Lowered, compiler_options
from v41jax.draft_parameters import DraftParameters
from v41jax.layers.collectives import DATA, MODEL, Parallel
from v41jax.layers.rows import Phase
from v41jax.mesh_forward import mesh_forward, whole_step
from v41jax.mesh_memory import IMAGE_SPECS, MeshStateCopies, mesh_transfers
from v41jax.model import ModelSetup
from v41jax.page_transfer import Transfers
from v41jax.parameters import (
    Parameters,
    TensorSource,
    WeightForm,
    describe_checkpoint,
    load_leaves,
    parameter_leaves,
)
from v41jax.runner import ModelRunner, StepOutput, StepSampling, empty_edits, finish_step
from v41jax.sampling import LogitEdits
from v41jax.sharding import pool_specs, shardings, step_specs, weight_specs
from v41jax.state_copies import Images, StateCopies, allocate_images

Array = jax.Array

ADJUSTMENTS = PartitionSpec(DATA, MODEL)
"""Of the logit adjustments [slots, V]."""


def mesh_serve_step(
    params: Parameters,
    pools: Pools,
    adjustments: Array,
    batch: BatchStep,
    engram_rows: EngramRows,
    sampling: StepSampling,
    image_embeddings: Array | None = None,
    *,
    mesh: Mesh,
    setup: ModelSetup,
    phase: Phase,
    draft: DraftParameters | None = None,
) -> tuple[Pools, Array, StepOutput]:
    """`serve_step` on a mesh.

    Args:
      params, pools, batch, engram_rows, image_embeddings: as for `mesh_forward`; pools are donated.
      adjustments: [slots of all shards, V] float32, donated.
      sampling: of the outputs of all shards; slots in its edits count over all shards.
      mesh: of `setup.parallel`.
      setup: static.
      phase: static.
      draft: weights of a draft that is left its context; None for none.
    """
    pools, output = mesh_forward(
        params,
        pools,
        batch,
        engram_rows,
        mesh=mesh,
        setup=setup,
        phase=phase,
        image_embeddings=image_embeddings,
        keep_flow=sampling.targets is not None,
        draft=draft,
    )
    whole = whole_step(batch, setup.parallel, pools.last_token.shape[0] // setup.parallel.data)
    return finish_step(params, pools, adjustments, whole, output, sampling, setup=setup)


def jit_on_mesh(step: Callable[..., Any], mesh: Mesh, setup: ModelSetup, arguments: Sequence[Any]) -> Any:
    """A step with the placement of every argument and result said, to be lowered for these arguments.

    Args:
      step: with the arguments and results of `mesh_serve_step`, without the static ones; weights of any kind.
      mesh: of real devices, or of a topology's.
      setup: static.
      arguments: weights, pools, adjustments, batch, Engram rows, sampling, and image embeddings if there are any;
        abstract or not.
    """
    weights, pools, _, batch, engram_rows, sampling, *images = arguments
    whole = PartitionSpec()
    held = (pool_specs(pools, setup.parallel), ADJUSTMENTS)
    specs = (
        weight_specs(weights, setup.parallel),
        *held,
        step_specs(batch),
        step_specs(engram_rows),
        jax.tree.map(lambda _: whole, sampling),
        *(PartitionSpec(DATA) for _ in images),
    )
    scored = None if sampling.targets is None else whole
    results = (*held, StepOutput(whole, PartitionSpec(DATA, MODEL), whole, whole, scored))
    return jax.jit(
        step,
        donate_argnums=(1, 2),
        in_shardings=shardings(mesh, specs),
        out_shardings=shardings(mesh, results),
    )


def load_on_mesh(
    checkpoint: TensorSource, mesh: Mesh, parallel: Parallel, *, max_model_len: int, form: WeightForm, dtype: Any
) -> Parameters:
    """`load_parameters` onto a mesh: every process reads only the slices of its own chips, each once.

    Args:
      checkpoint: an open checkpoint.
      mesh: of the devices.
      parallel: the same mesh, with the expert arrangement.
      max_model_len: positions the RoPE tables cover.
      form: of the FP8 and FP4 weights.
      dtype: of widened weights.
    """
    describe = describe_checkpoint(checkpoint)
    leaves = parameter_leaves(checkpoint.config, describe, max_model_len=max_model_len, form=form, dtype=dtype)
    return load_leaves(checkpoint, leaves, shardings(mesh, weight_specs(leaves, parallel)))


class MeshRunner(ModelRunner):
    """A runner on a mesh.

    Attributes:
      mesh: with the axes of `setup.parallel`.
    """

    def __init__(self, params: Parameters, setup: ModelSetup, *, mesh: Mesh, **options: Any):
        """Args:
        params: weights, cut as `weight_specs` says.
        setup: with `parallel` of the mesh.
        mesh: of the devices.
        options: of `ModelRunner`; `execution` must be "FULL".

        Raises:
          ValueError: another execution mode.
        """
        if options.get("execution", "FULL") != "FULL":
            raise ValueError(f"execution {options['execution']!r} runs on one device: on a mesh use whole-step 'FULL'")
        self.mesh = mesh
        super().__init__(params, setup, **options)

    def _allocate(self, num_images: int) -> tuple[Pools, Images, Array]:
        geometry = self.setup.geometry
        abstract = pool_arrays.abstract(geometry, self.num_pages, self.num_slots)
        held = shardings(self.mesh, pool_specs(abstract, self.setup.parallel))
        # Made in place: the pools of all chips together do not fit one of them.
        make = jax.jit(lambda: pool_arrays.allocate(geometry, self.num_pages, self.num_slots), out_shardings=held)
        pools = make()
        kept = shardings(self.mesh, IMAGE_SPECS)
        images = jax.jit(lambda: allocate_images(geometry, abstract, num_images), out_shardings=kept)()
        shape = (self.num_slots, self.setup.config.text.vocab_size)
        adjusted = NamedSharding(self.mesh, ADJUSTMENTS)
        return pools, images, jax.jit(lambda: jnp.zeros(shape, jnp.float32), out_shardings=adjusted)()

    def _make_copies(self) -> StateCopies:
        return MeshStateCopies(self.mesh, self.setup.parallel, self._pools)

    @functools.cached_property
    def transfers(self) -> Transfers:
        """As of `ModelRunner`; over several processes every one of them reads what any shard holds."""
        return mesh_transfers(self.mesh, self.setup.parallel, self._pools, shared=jax.process_count() > 1)

    def step_function(self, shape: StepShape) -> Callable[..., tuple[Pools, Array, StepOutput]]:
        """See `ModelRunner.step_function`."""
        return functools.partial(mesh_serve_step, mesh=self.mesh, setup=self.setup, phase=shape.phase.value)

    def _lowered_step(self, shape: StepShape, arguments: Sequence[Any]) -> Lowered:
        # Not packed: every shard is sent its own rows only.
        step = jit_on_mesh(self.step_function(shape), self.mesh, self.setup, arguments)
        return Lowered(step.lower(*arguments), lambda *given: given, compiler_options(self.setup.parallel))

    def _no_edits(self, outputs: int) -> LogitEdits:
        # On the host: an array on one device is no argument for a program of many processes.
        if outputs not in self._empty_edits:
            self._empty_edits[outputs] = empty_edits(outputs, *self._adjustments.shape)
        return self._empty_edits[outputs]

    @functools.cached_property
    def _put_row(self) -> Any:
        return jax.jit(
            lambda adjustments, slot, row: adjustments.at[slot].set(row),
            donate_argnums=0,
            out_shardings=NamedSharding(self.mesh, ADJUSTMENTS),
        )

    def summary(self) -> dict[str, Any]:
        """As of `ModelRunner`, with the mesh; bytes are those of all chips, replicas counted once."""
        parallel = self.setup.parallel
        return {
            **super().summary(),
            "mesh": f"data={parallel.data},model={parallel.model}",
            "experts": parallel.experts,
            "data_shards": parallel.data,
        }

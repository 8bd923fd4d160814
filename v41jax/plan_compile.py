"""Compiles the real steps of a sharded model for a TPU topology that is not there, from abstract shapes.

libtpu compiles without a TPU. Nothing is allocated: weights, pools and steps are shapes, so that the full model is
planned on any machine. What the numbers mean is `plan`'s business.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import backend
from scheduler import pools as pool_arrays
from scheduler.buckets import StepShape
from scheduler.pools import Pools
from scheduler.scheduled_batch import Phase
from v41jax.chips import CHIPS
from v41jax.draft_runner import DraftingWeights
from v41jax.hlo_collectives import Collective, count_collectives
from v41jax.layers.collectives import Parallel
from v41jax.memory_budget import Held
from v41jax.mesh_draft_runner import mesh_serve_prefill, mesh_serve_verify
from v41jax.mesh_runner import jit_on_mesh, mesh_serve_step
from v41jax.model import ModelSetup
from v41jax.runner import StepSampling, empty_edits, sampled_rows, sampling_inputs
from v41jax.sharding import make_mesh
from v41jax.step_arrays import empty_step, engram_shapes

QUICK = {"exec_time_optimization_effort": -1.0}
"""Compiler options of a plan that need not run: the least effort for speed, a fifth of the time to compile. The
temporaries of the parts of the model that were compiled both ways differed by one in a hundred."""


@dataclasses.dataclass(frozen=True)
class CompiledPlan:
    """What the compiler says about one step, per chip.

    Attributes:
      argument_bytes: weights, pools and the step's arrays as laid out on the chip, padding included.
      temporary_bytes: besides arguments and results.
      output_bytes: results that do not take a donated argument's place.
      seconds: of compilation.
      collectives: of one run of the step.
    """

    argument_bytes: int
    temporary_bytes: int
    output_bytes: int
    seconds: float
    collectives: tuple[Collective, ...]


class Topology(NamedTuple):
    """What is known of a topology.

    Attributes:
      devices: JAX devices.
      hosts: machines that they belong to; one process runs on each.
    """

    devices: int
    hosts: int


def topology(name: str) -> Topology:
    """The topology of a name such as `v5p:4x4x4`, or of an accelerator that nothing here compiles for (`mi355x:8`).

    Raises:
      ValueError: as `topology_devices`, or no number of devices.
    """
    generation, _, size = name.partition(":")
    if generation in CHIPS and not CHIPS[generation].compiled:
        if not size.isdigit() or not 1 <= int(size) <= CHIPS[generation].most:
            raise ValueError(f"topology {name!r} must read {generation}:N with N from 1 to {CHIPS[generation].most}")
        return Topology(int(size), 1)
    devices = topology_devices(name)
    return Topology(len(devices), len({device.process_index for device in devices}))


def topology_devices(name: str) -> list[Any]:
    """The devices of a TPU topology such as `v5p:4x4x4`.

    Raises:
      ValueError: libtpu is not installed or does not know the topology; it says which.
    """
    # No chip is attached to, so that several plans may load the library at once.
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    # What libtpu would otherwise look for on a TPU's host, and complain about.
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")
    from jax.experimental import topologies

    try:
        return list(topologies.get_topology_desc(name, "tpu").devices)
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"topology {name!r} cannot be had from libtpu (pip install 'jax[tpu]'): {reason}") from error


def abstract_pools(setup: ModelSetup, pages: int, slots: int) -> Pools:
    """Shapes of the pools of all shards on an accelerator; sizes are one shard's."""
    shards = setup.parallel.data
    pools = pool_arrays.abstract(setup.geometry, pages * shards, slots * shards)

    def native(leaf: Any) -> Any:
        # A CPU holds bfloat16 rows as their bits; the planned device does not.
        return jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16) if leaf.dtype == jnp.uint16 else leaf

    return jax.tree.map(native, pools)


def whole_rows(tree: Any, parallel: Parallel) -> Any:
    """Shapes of the arrays of all shards from those of one."""
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((leaf.shape[0] * parallel.data, *leaf.shape[1:]), leaf.dtype), tree
    )


def compile_step(
    topology: str,
    setup: ModelSetup,
    held: Held,
    shape: StepShape,
    *,
    pages: int,
    slots: int,
    scores_prompts: bool = False,
    options: Mapping[str, Any] = QUICK,
) -> CompiledPlan:
    """Compiles one step, with drafts the one that verifies them or that leaves the draft its context.

    Args:
      topology: name of it.
      setup: with the mesh in `parallel`.
      held: abstract weights.
      shape: of one shard's step.
      pages: PAGE units of one shard.
      slots: state slots of one shard.
      scores_prompts: as of `ModelRunner`.
      options: of the compiler.

    Raises:
      ValueError: the step's arguments and temporaries do not fit a chip; it says what the compiler says.
    """
    parallel = setup.parallel
    mesh = make_mesh(parallel, topology_devices(topology))
    arguments = step_arguments(setup, held, shape, pages=pages, slots=slots, scores_prompts=scores_prompts)
    serve: Callable[..., Any] = functools.partial(mesh_serve_step, phase=shape.phase.value)
    if held.draft is not None:
        serve = mesh_serve_verify if shape.verifies else mesh_serve_prefill
    began = time.perf_counter()
    with backend.use_target(backend.Target("tpu", topology.partition(":")[0])):
        step = jit_on_mesh(functools.partial(serve, mesh=mesh, setup=setup), mesh, setup, arguments)
        lowered = step.trace(*arguments).lower(lowering_platforms=("tpu",))
        try:
            compiled = lowered.compile(dict(options))
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            reason = " ".join(str(error).split())[:200]
            raise ValueError(
                f"a {shape.phase.value} step of {shape.rows} rows a shard does not fit a chip of {topology}: lower "
                f"--max-num-batched-tokens, --max-num-seqs or --memory-utilization ({reason})"
            ) from error
    memory = compiled.memory_analysis()
    return CompiledPlan(
        argument_bytes=int(memory.argument_size_in_bytes),
        temporary_bytes=int(memory.temp_size_in_bytes),
        output_bytes=max(0, int(memory.output_size_in_bytes) - int(memory.alias_size_in_bytes)),
        seconds=time.perf_counter() - began,
        collectives=tuple(count_collectives(compiled.as_text())),
    )


def step_arguments(
    setup: ModelSetup, held: Held, shape: StepShape, *, pages: int, slots: int, scores_prompts: bool
) -> tuple[Any, ...]:
    """Abstract arguments of a step on a mesh; see `compile_step`."""
    parallel, vocabulary = setup.parallel, setup.config.text.vocab_size
    outputs = shape.outputs * parallel.data
    targets = None
    if scores_prompts and shape.phase is Phase.PREFILL:
        targets = np.full(shape.rows * parallel.data, vocabulary, np.int32)
    sampling = StepSampling(
        sampling_inputs([], sampled_rows(shape) * parallel.data),
        empty_edits(outputs, slots * parallel.data, vocabulary),
        np.bool_(False),
        targets,
    )
    weights = held.target if held.draft is None else DraftingWeights(held.target, held.draft)
    return (
        jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), weights),
        abstract_pools(setup, pages, slots),
        jax.ShapeDtypeStruct((slots * parallel.data, vocabulary), jnp.float32),
        whole_rows(empty_step(shape, setup.geometry), parallel),
        whole_rows(engram_shapes(setup.config, shape.rows), parallel),
        jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(np.shape(leaf), leaf.dtype), sampling),
    )

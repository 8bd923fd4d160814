"""How a model fits a pod: weights, pools, temporaries, pages and the bound of a step, for one mesh or for all.

Pools are sized by the function that a serving engine calls, the steps compiled are the ones it runs, and meshes that it
would refuse are refused here by the same checks. A data shard takes its share of `max_num_seqs` and of
`max_num_batched_tokens`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax

from scheduler.buckets import Buckets, StepShape
from scheduler.model_view import ModelView
from scheduler.pool_geometry import GeometryError
from scheduler.runtime_config import EngineConfig, RuntimeConfigError
from scheduler.scheduled_batch import Phase
from v41jax.chips import Chip, chip_of
from v41jax.config import ModelConfig
from v41jax.dspark import check_draft
from v41jax.held_weights import abstract_held, accepts_images, precision_of
from v41jax.host_options import AUTO
from v41jax.layers.collectives import Parallel, exchanges_rows
from v41jax.layers.exchange_rule import exchange_of
from v41jax.memory_budget import Held, PoolBudget, plan_pools
from v41jax.model import ModelSetup
from v41jax.plan_compile import QUICK, CompiledPlan, Topology, abstract_pools, compile_step
from v41jax.plan_work import Bound, Rows, bound_of, expected_collectives, least_work
from v41jax.serving_options import serving_faults
from v41jax.sharding import arrangement, chip_bytes, pool_specs
from v41jax.state_copies import allocate_images

COORDINATOR = "localhost:8476"
"""Stands for the coordinator of a service over several hosts, where none is named or the cluster's environment is to
name it: the options of such a service are checked, too."""


@dataclasses.dataclass(frozen=True)
class MeshPlan:
    """A model on one mesh, per chip.

    Attributes:
      parallel: the mesh.
      processes: that serve it, one a host.
      held_bytes: of target, draft, vision tower and Engram tables.
      pool_bytes: of pages and slots.
      image_bytes: of checkpoint images.
      budget: how the pools of one data shard were sized.
      pages, requests: of the whole mesh.
      rows: of a data shard's decode step with every request running.
      decode: the bound of that step; with drafts of its verification, without the draft's own call.
      tokens_per_second: of all shards at that bound, one token a request: what drafts add depends on the text.
    """

    parallel: Parallel
    processes: int
    held_bytes: dict[str, int]
    pool_bytes: int
    image_bytes: int
    budget: PoolBudget
    pages: int
    requests: int
    rows: int
    decode: Bound
    tokens_per_second: float


@dataclasses.dataclass(frozen=True)
class StepPlan:
    """One step on one mesh.

    Attributes:
      name: what it is.
      shape: of one shard.
      compiled: what the compiler says; None for a device that nothing here compiles for.
      sent_bytes: of the compiled program, or what the layers ask for where none was compiled.
      bound: least time, with those bytes.
      fits: arguments, temporaries and results together fit the chip; of a step that was not compiled weights, pools and
        what is left for temporaries.
      exchanges: how its layers bring rows to experts of other data shards, one line for each number of rows; one round
        of a ragged exchange is counted.
    """

    name: str
    shape: StepShape
    compiled: CompiledPlan | None
    sent_bytes: float
    bound: Bound
    fits: bool
    exchanges: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Planner:
    """A model and options to be planned for a topology.

    Attributes:
      config: of the model.
      engine: options; a search varies `mesh` and `enable_expert_parallel`.
      topology: its name.
      size: its devices and hosts.
      context: tokens that a running request is assumed to hold.
      thorough: compile as for serving, not quickly.
    """

    config: ModelConfig
    engine: EngineConfig
    topology: str
    size: Topology
    context: int
    thorough: bool = False

    @property
    def chip(self) -> Chip:
        """Figures of one device."""
        return chip_of(self.topology)

    @functools.cached_property
    def view(self) -> ModelView:
        """What the host side knows of the model."""
        return ModelView.from_config(self.config)

    def options(self, parallel: Parallel) -> EngineConfig:
        """The options with which an engine serves on a mesh: as many processes as it has hosts."""
        hosts = -(-parallel.chips * self.size.hosts // self.size.devices)
        several = hosts > 1 and self.engine.coordinator in (None, AUTO)
        return dataclasses.replace(
            self.engine,
            mesh={**self.engine.mesh, "data": parallel.data, "model": parallel.model},
            enable_expert_parallel=parallel.experts != "intermediate",
            coordinator=COORDINATOR if several else self.engine.coordinator,
            num_processes=max(hosts, self.engine.num_processes),
        )

    def sees(self, parallel: Parallel) -> bool:
        """Whether an engine on a mesh holds the vision tower; the checkpoint is taken to have it."""
        options = self.options(parallel)
        return accepts_images(options, has_tower=True, several_processes=options.coordinator is not None)

    def held(self, parallel: Parallel) -> Held:
        """Abstract weights, with the shardings of a mesh."""
        length = self.engine.model_len(self.view)
        return abstract_held(self.engine, self.config, parallel, length, sees=self.sees(parallel))

    def setup(self, parallel: Parallel) -> ModelSetup:
        """What a forward on a mesh is specialized on."""
        geometry, precision = self.engine.geometry(self.view), precision_of(self.engine)
        return ModelSetup(self.config, geometry, precision, self.engine.kernels, parallel)

    def faults(self, parallel: Parallel) -> list[str]:
        """Every reason why `serve` refuses a mesh of the topology with these options, from its own checks."""
        options, faults = self.options(parallel), []
        if parallel.chips > self.size.devices:
            faults.append(
                f"a mesh of {parallel.chips} chips is larger than {self.topology}, which has {self.size.devices} "
                "devices"
            )
        faults += serving_faults(options, self.config, self.view)
        drafts = options.num_speculative_tokens > 0
        if drafts and not faults:
            try:
                check_draft(self.setup(parallel))
            except ValueError as error:
                faults.append(str(error))
        return list(dict.fromkeys(faults))

    def asked(self) -> Parallel:
        """The mesh of the options."""
        return arrangement(self.engine.mesh, self.engine.enable_expert_parallel, self.engine.expert_exchange)

    def meshes(self) -> list[Parallel]:
        """Every mesh of all devices that options can name, with cut experts and with whole ones; not all are served."""
        devices = self.size.devices
        found = []
        for model in (size for size in range(1, devices + 1) if devices % size == 0):
            for whole in (False, True):
                mesh = {"data": devices // model, "model": model}
                found.append(arrangement(mesh, whole, self.engine.expert_exchange))
        return found

    def plan(self, parallel: Parallel) -> MeshPlan:
        """Sizes and bounds a mesh without compiling.

        Raises:
          GeometryError: weights and slots leave no room for a page, or for as many as were asked for.
        """
        setup, chip, held = self.setup(parallel), self.chip, self.held(parallel)
        options = self.options(parallel)
        shard = options.of_shard()
        budget = plan_pools(shard, setup, held, device_bytes=chip.memory_bytes)
        pools = abstract_pools(setup, budget.num_pages, budget.num_slots)
        slots = shard.max_num_seqs
        count = slots * (1 + shard.num_speculative_tokens)
        rows = Rows(count, count, count, self.context)
        bound = bound_of(self.work(held, setup, rows), chip)
        return MeshPlan(
            parallel=parallel,
            processes=options.num_processes,
            held_bytes=held.chip_bytes(),
            pool_bytes=chip_bytes(pools, pool_specs(pools, parallel), parallel),
            image_bytes=_bytes(jax.eval_shape(lambda: allocate_images(setup.geometry, pools, budget.num_images))),
            budget=budget,
            pages=budget.num_pages * parallel.data,
            requests=slots * parallel.data,
            rows=count,
            decode=bound,
            tokens_per_second=slots * parallel.data / bound.seconds,
        )

    def work(self, held: Held, setup: ModelSetup, rows: Rows, compiled: CompiledPlan | None = None) -> Any:
        """The least work of a step, with the collectives of a compiled program or those that its layers ask for."""
        precision = setup.precision
        sent = (
            compiled.collectives
            if compiled is not None
            else expected_collectives(
                setup.config,
                setup.parallel,
                rows,
                activation_bytes=precision.activation_dtype.itemsize,
                quantized=precision.activation_quantization,
            )
        )
        return least_work(setup.config, setup.geometry, held.target, setup.parallel, rows, sent)

    def search(self) -> tuple[list[MeshPlan], list[tuple[Parallel, str]]]:
        """Plans of every mesh that can be served, most tokens per second first, and the others with all reasons.

        Raises:
          RuntimeConfigError: options that no mesh is served with; every such reason.
        """
        plans, refused = [], []
        faults = {parallel: self.faults(parallel) for parallel in self.meshes()}
        always = [fault for fault in next(iter(faults.values())) if all(fault in found for found in faults.values())]
        if always:
            raise RuntimeConfigError(always)
        for parallel, found in faults.items():
            if found:
                refused.append((parallel, "; ".join(found)))
                continue
            try:
                plans.append(self.plan(parallel))
            except GeometryError as error:
                refused.append((parallel, str(error)))
        return sorted(plans, key=lambda plan: -plan.tokens_per_second), refused

    def shapes(self, plan: MeshPlan) -> list[tuple[str, StepShape]]:
        """The steps that are compiled, the largest of the engine's buckets: decode with every request, and prefill in
        which one request finishes, with and without decoder replay."""
        options = self.options(plan.parallel).of_shard()
        geometry = self.engine.geometry(self.view)
        buckets = Buckets.default(options, geometry, plan.budget.num_pages, options.model_len(self.view))
        replay = options.decoder_replay(self.view)
        shapes = [("decode", _largest(buckets.shapes(False), Phase.DECODE))]
        if replay:
            shapes.append(("prefill, replay", _largest(buckets.shapes(True), Phase.PREFILL)))
        shapes.append(("prefill", _largest(buckets.shapes(False), Phase.PREFILL)))
        return shapes

    def step(self, plan: MeshPlan, name: str, shape: StepShape) -> StepPlan:
        """Plans one step of a planned mesh: compiles it where libtpu knows the device."""
        parallel = plan.parallel
        setup, held = self.setup(parallel), self.held(parallel)
        compiled = None
        if self.chip.compiled:
            compiled = compile_step(
                self.topology,
                setup,
                held,
                shape,
                pages=plan.budget.num_pages,
                slots=plan.budget.num_slots,
                scores_prompts=self.engine.prompt_logprobs,
                options={} if self.thorough else QUICK,
            )
        rows = Rows(shape.rows, shape.decoder_rows(setup.geometry.window_size), shape.outputs, self.context)
        work = self.work(held, setup, rows, compiled)
        budget = plan.budget
        total = (
            budget.weight_bytes + plan.pool_bytes + plan.image_bytes + budget.adjustment_bytes + budget.scratch_bytes
        )
        if compiled is not None:
            # What a step does not read lies there all the same.
            idle = plan.image_bytes + plan.held_bytes["tower"] + plan.held_bytes["tables"]
            total = compiled.argument_bytes + compiled.temporary_bytes + compiled.output_bytes + idle
        return StepPlan(
            name,
            shape,
            compiled,
            work.link_bytes,
            bound_of(work, self.chip),
            total <= plan.budget.device_bytes,
            self.exchanges(setup, rows),
        )

    def exchanges(self, setup: ModelSetup, rows: Rows) -> tuple[str, ...]:
        """See `StepPlan.exchanges`."""
        if not exchanges_rows(setup.parallel):
            return ()
        precision = setup.precision
        return tuple(
            exchange_of(
                self.config.text,
                setup.parallel,
                count,
                activation_bytes=precision.activation_dtype.itemsize,
                quantized=precision.activation_quantization,
            ).describe(setup.parallel)
            for count in dict.fromkeys((rows.encoder, rows.decoder))
        )


def _bytes(tree: Any) -> int:
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _largest(shapes: tuple[StepShape, ...], phase: Phase) -> StepShape:
    """The shape of most rows and columns; of a prefill one with a single output."""
    return max(
        (shape for shape in shapes if shape.phase is phase and (phase is Phase.DECODE or shape.outputs == 1)),
        key=lambda shape: (shape.rows, shape.requests, shape.pages),
    )


def mesh_name(parallel: Parallel) -> str:
    """`data=D,model=M` and where the experts are."""
    where = {
        "intermediate": "expert width over model",
        "model": "whole experts over model",
        "data_model": "whole experts over data and model",
    }
    return f"data={parallel.data},model={parallel.model}, {where[parallel.experts]}"


def as_json(mesh: MeshPlan, steps: list[StepPlan]) -> dict[str, Any]:
    """One mesh's plan as plain values."""
    return {
        "mesh": {"data": mesh.parallel.data, "model": mesh.parallel.model},
        "experts": mesh.parallel.experts,
        "processes": mesh.processes,
        "per_chip": {
            "memory_bytes": mesh.budget.device_bytes,
            "weight_bytes": mesh.budget.weight_bytes,
            "weights": mesh.held_bytes,
            "pool_bytes": mesh.pool_bytes,
            "image_bytes": mesh.image_bytes,
            "adjustment_bytes": mesh.budget.adjustment_bytes,
            "scratch_bytes": mesh.budget.scratch_bytes,
        },
        "pages": mesh.pages,
        "requests": mesh.requests,
        "pages_per_shard": mesh.budget.num_pages,
        "page_bytes": mesh.budget.page_bytes,
        "state_bytes": mesh.budget.state_bytes,
        "decode_bound_s": dataclasses.asdict(mesh.decode) | {"dominant": mesh.decode.dominant},
        "decode_tokens_per_second_bound": mesh.tokens_per_second,
        "steps": [_step_json(step) for step in steps],
    }


def _step_json(step: StepPlan) -> dict[str, Any]:
    values = {
        "step": step.name,
        "rows_per_shard": step.shape.rows,
        "requests_per_shard": step.shape.requests,
        "page_columns": step.shape.pages,
        "compiled": step.compiled is not None,
        "fits": step.fits,
        "exchanges": list(step.exchanges),
        "sent_bytes": step.sent_bytes,
        "bound_s": dataclasses.asdict(step.bound) | {"dominant": step.bound.dominant},
    }
    if step.compiled is not None:
        values |= {
            "argument_bytes": step.compiled.argument_bytes,
            "temporary_bytes": step.compiled.temporary_bytes,
            "output_bytes": step.compiled.output_bytes,
            "compile_s": round(step.compiled.seconds, 1),
            "collectives": [one._asdict() for one in step.compiled.collectives],
        }
    return values

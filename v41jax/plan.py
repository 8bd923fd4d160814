"""How a model fits a TPU pod: weights, pools, temporaries, pages and the bound of a step, for one mesh or for all.

The pools are sized by the same code that a serving engine uses, the steps compiled are the ones it runs. A data shard
takes its share of `max_num_seqs` and of `max_num_batched_tokens`.
"""

from __future__ import annotations

import dataclasses
from typing import Any, cast

from scheduler.buckets import StepShape
from scheduler.model_view import ModelView
from scheduler.pool_geometry import GeometryError
from scheduler.runtime_config import EngineConfig
from scheduler.scheduled_batch import Phase
from v41jax.chips import Chip, chip_of
from v41jax.config import ModelConfig
from v41jax.layers.collectives import ExpertArrangement, ExpertExchange, Parallel, exchanges_rows
from v41jax.memory_budget import PoolBudget, size_pools
from v41jax.model import ModelSetup
from v41jax.parameters import Parameters
from v41jax.plan_compile import QUICK, CompiledPlan, abstract_pools, abstract_weights, compile_step, share
from v41jax.plan_work import Bound, Rows, bound_of, exchange_of, expected_collectives, least_work, sent_bytes
from v41jax.precision import Precision
from v41jax.sharding import chip_bytes, mesh_faults, pool_specs, weight_specs


@dataclasses.dataclass(frozen=True)
class MeshPlan:
    """A model on one mesh, per chip.

    Attributes:
      parallel: the mesh.
      weight_bytes: of the weights.
      pool_bytes: of pages and slots.
      memory_bytes: of the chip.
      budget: how the pools of one data shard were sized.
      pages, requests: of the whole mesh.
      decode: the bound of a decode step with every request running.
      tokens_per_second: of all shards at that bound.
    """

    parallel: Parallel
    weight_bytes: int
    pool_bytes: int
    memory_bytes: int
    budget: PoolBudget
    pages: int
    requests: int
    decode: Bound
    tokens_per_second: float


@dataclasses.dataclass(frozen=True)
class StepPlan:
    """One compiled step on one mesh.

    Attributes:
      name: what it is.
      shape: of one shard.
      compiled: what the compiler says.
      bound: least time, with the collectives of the compiled program.
      fits: arguments, temporaries and results together fit the chip.
      exchanges: how its layers bring rows to experts of other data shards, one line for each number of rows; one round
        of a ragged exchange is counted.
    """

    name: str
    shape: StepShape
    compiled: CompiledPlan
    bound: Bound
    fits: bool
    exchanges: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Planner:
    """A model and options to be planned for a topology.

    Attributes:
      config: of the model.
      engine: options; `mesh` is what the plans vary.
      topology: its name.
      devices: JAX devices it has.
      context: tokens that a running request is assumed to hold.
      thorough: compile as for serving, not quickly.
    """

    config: ModelConfig
    engine: EngineConfig
    topology: str
    devices: int
    context: int
    thorough: bool = False

    @property
    def chip(self) -> Chip:
        """Figures of one device."""
        return chip_of(self.topology)

    @property
    def view(self) -> ModelView:
        """What the host side knows of the model."""
        return ModelView.from_config(self.config)

    def weights(self) -> Parameters:
        """Abstract weights."""
        return abstract_weights(self.config, self.engine.model_len(self.view))

    def setup(self, parallel: Parallel) -> ModelSetup:
        """What a forward on a mesh is specialized on."""
        return ModelSetup(
            self.config, self.engine.geometry(self.view), Precision(), kernels=self.engine.kernels, parallel=parallel
        )

    def meshes(self) -> list[Parallel]:
        """Every mesh of all devices that the model can be cut over, with whole experts and with cut ones."""
        arrangements: tuple[ExpertArrangement, ...] = ("intermediate", "model", "data_model")
        found = []
        for model in range(1, self.devices + 1):
            if self.devices % model:
                continue
            data = self.devices // model
            for experts in arrangements:
                redundant = (experts == "model" and model == 1) or (experts == "data_model" and data == 1)
                parallel = Parallel(data, model, experts, cast(ExpertExchange, self.engine.expert_exchange))
                if not redundant and not mesh_faults(self.config, parallel):
                    found.append(parallel)
        return found

    def plan(self, parallel: Parallel, params: Parameters) -> MeshPlan:
        """Sizes and bounds a mesh without compiling.

        Raises:
          GeometryError: weights and slots leave no room for a page.
        """
        setup, chip = self.setup(parallel), self.chip
        weights = chip_bytes(params, weight_specs(params, parallel), parallel)
        shard = dataclasses.replace(self.engine, mesh={"data": parallel.data, "model": parallel.model}).of_shard()
        budget, slots = size_pools(shard, setup, chip.memory_bytes, weights), shard.max_num_seqs
        pools = abstract_pools(setup, budget.num_pages, budget.num_slots)
        rows = Rows(slots, slots, slots, self.context)
        sent = expected_collectives(self.config, parallel, rows)
        bound = bound_of(least_work(self.config, setup.geometry, params, parallel, rows, sent), chip)
        return MeshPlan(
            parallel=parallel,
            weight_bytes=weights,
            pool_bytes=chip_bytes(pools, pool_specs(pools, parallel), parallel),
            memory_bytes=chip.memory_bytes,
            budget=budget,
            pages=budget.num_pages * parallel.data,
            requests=slots * parallel.data,
            decode=bound,
            tokens_per_second=slots * parallel.data / bound.seconds,
        )

    def search(self, params: Parameters) -> tuple[list[MeshPlan], list[tuple[Parallel, str]]]:
        """Plans of every mesh, most tokens per second first, and the meshes that do not fit with the reason."""
        plans, refused = [], []
        for parallel in self.meshes():
            try:
                plans.append(self.plan(parallel, params))
            except GeometryError as error:
                refused.append((parallel, str(error)))
        return sorted(plans, key=lambda plan: -plan.tokens_per_second), refused

    def shapes(self, parallel: Parallel) -> list[tuple[str, StepShape]]:
        """The steps that are compiled: full decode, and full prefill with and without decoder replay."""
        geometry = self.engine.geometry(self.view)
        columns = geometry.pages_for(self.engine.model_len(self.view))
        requests = share(self.engine.max_num_seqs, parallel.data)
        rows = max(128, share(self.engine.max_num_batched_tokens, parallel.data))
        most = min(requests, rows)
        shapes = [("decode", StepShape(Phase.DECODE, requests, requests, columns, requests, 1, False))]
        if self.engine.decoder_replay(self.view):
            shapes.append(("prefill, replay", StepShape(Phase.PREFILL, rows, most, columns, 1, rows, True)))
        shapes.append(("prefill", StepShape(Phase.PREFILL, rows, most, columns, 1, rows, False)))
        return shapes

    def compile(self, plan: MeshPlan, params: Parameters, name: str, shape: StepShape) -> StepPlan:
        """Compiles one step of a planned mesh."""
        setup = self.setup(plan.parallel)
        pages, slots = plan.budget.num_pages, plan.budget.num_slots
        options = {} if self.thorough else QUICK
        compiled = compile_step(self.topology, setup, params, shape, pages=pages, slots=slots, options=options)
        decoder = shape.decoder_rows(setup.geometry.window_size)
        rows = Rows(shape.rows, decoder, shape.outputs, self.context)
        work = least_work(self.config, setup.geometry, params, plan.parallel, rows, compiled.collectives)
        total = compiled.argument_bytes + compiled.temporary_bytes + compiled.output_bytes
        return StepPlan(
            name,
            shape,
            compiled,
            bound_of(work, self.chip),
            total <= plan.memory_bytes,
            self.exchanges(plan.parallel, rows),
        )

    def exchanges(self, parallel: Parallel, rows: Rows) -> tuple[str, ...]:
        """See `StepPlan.exchanges`."""
        if not exchanges_rows(parallel):
            return ()
        counts = dict.fromkeys((rows.encoder, rows.decoder))
        return tuple(exchange_of(self.config, parallel, count).describe(parallel) for count in counts)


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
        "per_chip": {
            "memory_bytes": mesh.memory_bytes,
            "weight_bytes": mesh.weight_bytes,
            "pool_bytes": mesh.pool_bytes,
        },
        "pages": mesh.pages,
        "requests": mesh.requests,
        "pages_per_shard": mesh.budget.num_pages,
        "page_bytes": mesh.budget.page_bytes,
        "state_bytes": mesh.budget.state_bytes,
        "decode_bound_s": dataclasses.asdict(mesh.decode) | {"dominant": mesh.decode.dominant},
        "decode_tokens_per_second_bound": mesh.tokens_per_second,
        "steps": [
            {
                "step": step.name,
                "rows_per_shard": step.shape.rows,
                "requests_per_shard": step.shape.requests,
                "page_columns": step.shape.pages,
                "argument_bytes": step.compiled.argument_bytes,
                "temporary_bytes": step.compiled.temporary_bytes,
                "output_bytes": step.compiled.output_bytes,
                "fits": step.fits,
                "exchanges": list(step.exchanges),
                "compile_s": round(step.compiled.seconds, 1),
                "sent_bytes": sent_bytes(step.compiled.collectives),
                "bound_s": dataclasses.asdict(step.bound) | {"dominant": step.bound.dominant},
                "collectives": [one._asdict() for one in step.compiled.collectives],
            }
            for step in steps
        ],
    }

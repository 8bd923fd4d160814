"""`v41jax plan`: what a pod would hold and how fast it could be, compiled without owning it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from scheduler.runtime_config import EngineConfig, validate_runtime_config
from v41jax.commands.engine_options import with_engine_options
from v41jax.config import ModelConfig
from v41jax.presets import PRESETS, preset

if TYPE_CHECKING:
    from v41jax.layers.collectives import Parallel
    from v41jax.plan import MeshPlan, StepPlan

SHOWN = 8
"""Meshes of a search that are printed."""


@with_engine_options
def plan(
    engine_config: EngineConfig,
    topology: Annotated[str, typer.Option("--topology", help="As v5p:4x4x4, v6e:8x8, tpu7x:4x4x4.")],
    preset_name: Annotated[str, typer.Option("--preset", help=f"One of {', '.join(PRESETS)}.")] = "v4.1-flash",
    config_file: Annotated[Path | None, typer.Option("--config", help="A config.json instead of a preset.")] = None,
    context: Annotated[int, typer.Option("--context", min=1, help="Tokens a running request holds.")] = 8192,
    steps: Annotated[
        str, typer.Option("--steps", help="Which steps to compile: decode, prefill, both, or none.")
    ] = "both",
    thorough: Annotated[
        bool, typer.Option("--thorough", help="Compile as for serving; takes several times as long.")
    ] = False,
    as_json_text: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compile the sharded model for a TPU topology; without --mesh every mesh is ranked and the best one compiled."""
    if steps not in ("decode", "prefill", "both", "none"):
        raise ValueError(f"--steps {steps!r} is none of decode, prefill, both, none")
    from v41jax.plan import Planner, as_json, mesh_name
    from v41jax.plan_compile import topology_devices
    from v41jax.sharding import MeshError, arrangement, check_mesh

    config = preset(preset_name) if config_file is None else ModelConfig.from_file(config_file)
    devices = len(topology_devices(topology))
    planner = Planner(config, engine_config, topology, devices, context, thorough)
    params = planner.weights()
    ranked: list[MeshPlan] = []
    refused: list[tuple[Parallel, str]] = []
    asked = arrangement(engine_config.mesh, engine_config.enable_expert_parallel, engine_config.expert_exchange)
    validate_runtime_config(engine_config, planner.view)
    if asked.chips > 1:
        check_mesh(config, asked)
        if asked.chips > devices:
            raise MeshError([f"a mesh of {asked.chips} chips is larger than {topology}, which has {devices} devices"])
        chosen = planner.plan(asked, params)
    else:
        ranked, refused = planner.search(params)
        if not ranked:
            raise MeshError([f"{mesh_name(parallel)}: {reason}" for parallel, reason in refused] or ["no mesh divides"])
        chosen = ranked[0]
    compiled = []
    for name, shape in planner.shapes(chosen.parallel):
        if steps == "both" or (steps != "none" and name.startswith(steps)):
            print(f"compiling {name} for {topology}", file=sys.stderr, flush=True)
            compiled.append(planner.compile(chosen, params, name, shape))
    if as_json_text:
        result: dict[str, Any] = {
            "topology": topology,
            "devices": devices,
            "context": context,
            **as_json(chosen, compiled),
            "search": [as_json(one, []) for one in ranked],
            "refused": [{"mesh": mesh_name(parallel), "reason": reason} for parallel, reason in refused],
        }
        print(json.dumps(result))
        return
    _print(topology, devices, context, chosen, compiled, ranked, refused)


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f}"


def _print(
    topology: str,
    devices: int,
    context: int,
    chosen: MeshPlan,
    compiled: list[StepPlan],
    ranked: list[MeshPlan],
    refused: list[tuple[Parallel, str]],
) -> None:
    from v41jax.plan import mesh_name

    console = Console(width=None if sys.stdout.isatty() else 150)
    if ranked:
        table = Table(
            title=f"{topology}: meshes of {devices} devices, {context} tokens a request", title_justify="left"
        )
        headings = ("mesh", "weights GiB", "pools GiB", "pages", "requests", "decode bound ms", "by", "tokens/s")
        for heading in headings:
            table.add_column(heading, justify="left" if heading in ("mesh", "by") else "right")
        for one in ranked[:SHOWN]:
            table.add_row(
                mesh_name(one.parallel),
                _gib(one.weight_bytes),
                _gib(one.pool_bytes),
                f"{one.pages:,}",
                f"{one.requests:,}",
                f"{one.decode.seconds * 1e3:.2f}",
                one.decode.dominant,
                f"{one.tokens_per_second:,.0f}",
            )
        console.print(table)
        for parallel, reason in refused:
            console.print(f"does not fit: {mesh_name(parallel)}: {reason}")
    budget = chosen.budget
    console.print(f"{topology}, {mesh_name(chosen.parallel)}; per chip:")
    console.print(f"  memory     {chosen.memory_bytes:>16,} B  {_gib(chosen.memory_bytes)} GiB")
    console.print(f"  weights    {chosen.weight_bytes:>16,} B  {_gib(chosen.weight_bytes)} GiB")
    console.print(f"  pools      {chosen.pool_bytes:>16,} B  {_gib(chosen.pool_bytes)} GiB")
    console.print(
        f"  pages      {budget.num_pages:>16,} of {budget.page_bytes:,} B each; slots {budget.num_slots} of "
        f"{budget.state_bytes:,} B each (per data shard)"
    )
    for step in compiled:
        plan, bound = step.compiled, step.bound
        console.print(
            f"{step.name}: {step.shape.rows} rows, {step.shape.requests} requests, {step.shape.pages} page columns a "
            f"shard; compiled in {plan.seconds:.0f} s"
        )
        used = plan.argument_bytes + plan.temporary_bytes + plan.output_bytes
        console.print(
            f"  arguments {_gib(plan.argument_bytes)} GiB as laid out, temporaries {_gib(plan.temporary_bytes)} GiB, "
            f"results {_gib(plan.output_bytes)} GiB: {_gib(used)} of {_gib(chosen.memory_bytes)} GiB, "
            f"{'fits' if step.fits else 'DOES NOT FIT'}"
        )
        console.print(
            f"  bound: memory {bound.memory * 1e3:.3f} ms, compute {bound.compute * 1e3:.3f} ms, interconnect "
            f"{bound.interconnect * 1e3:.3f} ms; {bound.dominant} dominates"
        )
        for line in step.exchanges:
            rounds = ", one round counted" if line.startswith("ragged") else ""
            console.print(f"  exchange of expert rows: {line}{rounds}")
        for one in plan.collectives:
            console.print(f"  {one.count:>4} x {one.kind} of {one.bytes:,} B over {one.group} chips")

"""`v41jax plan`: what a pod would hold and how fast it could be, compiled without owning it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from scheduler.runtime_config import EngineConfig, RuntimeConfigError
from v41jax.commands.engine_options import with_engine_options
from v41jax.config import ModelConfig
from v41jax.presets import PRESETS, preset

if TYPE_CHECKING:
    from v41jax.layers.collectives import Parallel
    from v41jax.plan import MeshPlan, Planner, StepPlan

SHOWN = 8
"""Meshes of a search that are printed."""

PARTS = {"target": "model", "draft": "draft", "tower": "vision tower", "tables": "Engram tables"}
"""What weights are called."""


@with_engine_options
def plan(
    engine_config: EngineConfig,
    topology: Annotated[str, typer.Option("--topology", help="As v5p:4x4x4, v6e:8x8, tpu7x:4x4x4, mi355x:8.")],
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
    """Compile the sharded model for a TPU topology; without --mesh every mesh is ranked and the best one compiled.

    For mi355x:N, N GPUs of one host, nothing is compiled: bytes and bounds are counted from shapes.
    """
    from v41jax.plan import Planner, as_json, mesh_name
    from v41jax.plan_compile import topology as topology_of

    config = preset(preset_name) if config_file is None else ModelConfig.from_file(config_file)
    planner = Planner(config, engine_config, topology, topology_of(topology), context, thorough)
    faults = []
    if steps not in ("decode", "prefill", "both", "none"):
        faults.append(f"--steps {steps!r} is none of decode, prefill, both, none")
    asked = planner.asked()
    ranked: list[MeshPlan] = []
    refused: list[tuple[Parallel, str]] = []
    searches = asked.chips == 1 and planner.size.devices > 1
    if not searches or faults:
        faults += planner.faults(asked)
    if faults:
        raise RuntimeConfigError(faults)
    if searches:
        ranked, refused = planner.search()
        if not ranked:
            raise RuntimeConfigError([f"{mesh_name(parallel)}: {reason}" for parallel, reason in refused])
    chosen = ranked[0] if searches else planner.plan(asked)
    planned = []
    for name, shape in planner.shapes(chosen):
        if steps == "both" or (steps != "none" and name.startswith(steps)):
            if planner.chip.compiled:
                print(f"compiling {name} for {topology}", file=sys.stderr, flush=True)
            planned.append(planner.step(chosen, name, shape))
    if as_json_text:
        result: dict[str, Any] = {
            "topology": topology,
            "compiles": planner.chip.compiled,
            "devices": planner.size.devices,
            "hosts": planner.size.hosts,
            "context": context,
            **as_json(chosen, planned),
            "search": [as_json(one, []) for one in ranked],
            "refused": [{"mesh": mesh_name(parallel), "reason": reason} for parallel, reason in refused],
        }
        print(json.dumps(result))
        return
    _print(planner, chosen, planned, ranked, refused)


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f}"


def _print(
    planner: Planner,
    chosen: MeshPlan,
    steps: list[StepPlan],
    ranked: list[MeshPlan],
    refused: list[tuple[Parallel, str]],
) -> None:
    from v41jax.plan import mesh_name

    console = Console(width=None if sys.stdout.isatty() else 150)
    topology, devices = planner.topology, planner.size.devices
    if ranked:
        table = Table(
            title=f"{topology}: meshes of {devices} devices, {planner.context} tokens a request", title_justify="left"
        )
        headings = ("mesh", "weights GiB", "pools GiB", "pages", "requests", "decode bound ms", "by", "tokens/s")
        for heading in headings:
            table.add_column(heading, justify="left" if heading in ("mesh", "by") else "right")
        for one in ranked[:SHOWN]:
            table.add_row(
                mesh_name(one.parallel),
                _gib(one.budget.weight_bytes),
                _gib(one.pool_bytes),
                f"{one.pages:,}",
                f"{one.requests:,}",
                f"{one.decode.seconds * 1e3:.2f}",
                one.decode.dominant,
                f"{one.tokens_per_second:,.0f}",
            )
        console.print(table)
        console.print(f"{len(refused)} of {len(ranked) + len(refused)} meshes cannot be served:")
        for parallel, reason in refused:
            console.print(f"  {mesh_name(parallel)}: {reason}")
    budget = chosen.budget
    where = f"{topology}, {mesh_name(chosen.parallel)}"
    if chosen.processes > 1:
        where += f", {chosen.processes} processes"
    console.print(f"{where}; per chip:")
    console.print(f"  memory     {budget.device_bytes:>16,} B  {_gib(budget.device_bytes)} GiB")
    parts = ", ".join(f"{PARTS[name]} {_gib(size)}" for name, size in chosen.held_bytes.items() if size)
    console.print(f"  weights    {budget.weight_bytes:>16,} B  {_gib(budget.weight_bytes)} GiB ({parts})")
    console.print(f"  pools      {chosen.pool_bytes:>16,} B  {_gib(chosen.pool_bytes)} GiB")
    if chosen.image_bytes:
        console.print(f"  images     {chosen.image_bytes:>16,} B  {_gib(chosen.image_bytes)} GiB")
    adjustments = budget.adjustment_bytes
    console.print(f"  logit adjustments {adjustments:,} B  {_gib(adjustments)} GiB")
    console.print(f"  left for temporaries {budget.scratch_bytes:,} B  {_gib(budget.scratch_bytes)} GiB")
    console.print(
        f"  pages      {budget.num_pages:>16,} of {budget.page_bytes:,} B each; slots {budget.num_slots} of "
        f"{budget.state_bytes:,} B each (per data shard)"
    )
    for step in steps:
        _print_step(console, step, planner)


def _print_step(console: Console, step: StepPlan, planner: Planner) -> None:
    plan, bound, memory = step.compiled, step.bound, planner.chip.memory_bytes
    done = f"not compiled for the device: nothing here compiles for {planner.topology}, counted from shapes"
    if plan is not None:
        done = f"compiled in {plan.seconds:.0f} s"
    console.print(
        f"{step.name}: {step.shape.rows} rows, {step.shape.requests} requests, {step.shape.pages} page columns a "
        f"shard; {done}"
    )
    fits = "fits" if step.fits else "DOES NOT FIT"
    if plan is None:
        console.print(f"  weights, pools and what is left for temporaries: {fits}")
    else:
        used = plan.argument_bytes + plan.temporary_bytes + plan.output_bytes
        console.print(
            f"  arguments {_gib(plan.argument_bytes)} GiB as laid out, temporaries {_gib(plan.temporary_bytes)} GiB, "
            f"results {_gib(plan.output_bytes)} GiB: {_gib(used)} of {_gib(memory)} GiB, {fits}"
        )
    console.print(
        f"  bound: memory {bound.memory * 1e3:.3f} ms, compute {bound.compute * 1e3:.3f} ms, interconnect "
        f"{bound.interconnect * 1e3:.3f} ms; {bound.dominant} dominates; {step.sent_bytes / 1e6:,.0f} MB sent"
    )
    for line in step.exchanges:
        rounds = ", one round counted" if line.startswith("ragged") else ""
        console.print(f"  exchange of expert rows: {line}{rounds}")
    for one in plan.collectives if plan is not None else ():
        console.print(f"  {one.count:>4} x {one.kind} of {one.bytes:,} B over {one.group} chips")

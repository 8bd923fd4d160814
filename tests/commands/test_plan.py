"""`v41jax plan` without libtpu: the ranking, one mesh, and refusals."""

from __future__ import annotations

import json

import jax
import pytest
from typer.testing import CliRunner

from v41jax import plan, plan_compile
from v41jax.cli import app
from v41jax.hlo_collectives import Collective
from v41jax.sharding import MeshError

OPTIONS = ["plan", "--preset", "pico", "--steps", "none", "--max-num-seqs", "8", "--max-model-len", "1024"]


@pytest.fixture(autouse=True)
def four_devices(monkeypatch):
    monkeypatch.setattr(plan_compile, "topology_devices", lambda name: list(range(4)))


def run(*arguments):
    return CliRunner().invoke(app, [*OPTIONS, "--topology", "v5p:2x2x1", *arguments])


def test_every_mesh_is_ranked_by_the_tokens_it_could_give():
    found = json.loads(run("--json").stdout)
    rates = [one["decode_tokens_per_second_bound"] for one in found["search"]]
    assert rates == sorted(rates, reverse=True)
    assert {(one["mesh"]["data"], one["mesh"]["model"]) for one in found["search"]} == {(4, 1), (2, 2)}
    assert found["mesh"] == found["search"][0]["mesh"]
    assert found["requests"] == 8
    assert found["pages"] == found["pages_per_shard"] * found["mesh"]["data"]


def test_one_mesh_is_planned_when_asked_for():
    result = run("--mesh", "data=2,model=2", "--enable-expert-parallel")
    assert "data=2,model=2, whole experts over data and model; per chip:" in result.stdout
    assert "meshes of" not in result.stdout


def test_a_compiled_step_says_how_rows_reach_their_experts(monkeypatch):
    compiled = plan_compile.CompiledPlan(1, 2, 3, 0.0, (Collective("all-to-all", 64, 2, 5),))
    monkeypatch.setattr(plan, "compile_step", lambda *arguments, **options: compiled)
    options = ("--mesh", "data=2,model=2", "--enable-expert-parallel", "--steps", "prefill")
    shown = " ".join(run(*options, "--expert-exchange", "ragged").stdout.split())
    assert "exchange of expert rows: ragged (8192 rows a data shard: 4768 places for each of 2, 3803 expected)" in shown
    assert "5 x all-to-all of 64 B over 2 chips" in shown
    step = json.loads(run(*options, "--expert-exchange", "gather", "--json").stdout)["steps"][-1]
    assert step["exchanges"] == ["gather (8192 rows of each of 2 data shards to every chip)"]


def test_a_mesh_that_does_not_fit_is_refused_with_every_reason():
    result = run("--mesh", "data=1,model=4")
    assert isinstance(result.exception, MeshError)
    assert any("cuts moe_intermediate_size 64 into parts of 16" in fault for fault in result.exception.faults)
    assert isinstance(run("--mesh", "data=8,model=1").exception, MeshError)


def test_a_mesh_that_could_not_be_served_is_refused():
    assert "mesh axis 'dat' is unknown" in str(run("--mesh", "dat=2,model=2").exception)
    assert "mesh axis 'data' has size 0" in str(run("--mesh", "data=0,model=2").exception)
    small = run("--mesh", "data=2,model=2", "--max-num-batched-tokens", "256").exception
    assert "max_num_batched_tokens 128, the share of each of 2 data shards, is below two pages" in str(small)


def test_a_step_that_does_not_fit_is_refused_with_what_to_lower(monkeypatch):
    class Compiler:
        """The program of a step, which needs too much."""

        def trace(self, *arguments):
            return self

        def lower(self, **options):
            return self

        def compile(self, options):
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Ran out of memory on HBM, 108.04G of 95.74G")

    monkeypatch.setattr(plan_compile, "make_mesh", lambda parallel, devices: None)
    monkeypatch.setattr(plan_compile, "jit_mesh_step", lambda *arguments: Compiler())
    result = run("--mesh", "data=2,model=2", "--steps", "decode")
    assert isinstance(result.exception, ValueError)
    assert "a decode step of 4 rows a shard does not fit a chip of v5p:2x2x1: lower" in str(result.exception)
    assert "108.04G of 95.74G" in str(result.exception)


def test_an_unknown_generation_and_unknown_steps_are_refused():
    result = CliRunner().invoke(app, [*OPTIONS, "--topology", "v3:2x2"])
    assert "the generation 'v3' is none of" in str(result.exception)
    assert "is none of decode, prefill, both, none" in str(run("--steps", "all").exception)

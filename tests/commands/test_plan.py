"""`v41jax plan` without libtpu: the ranking, one mesh, and refusals."""

from __future__ import annotations

import json

import jax
import pytest
from typer.testing import CliRunner

from scheduler.runtime_config import RuntimeConfigError
from v41jax import plan, plan_compile
from v41jax.cli import app
from v41jax.hlo_collectives import Collective

OPTIONS = ["plan", "--preset", "pico", "--steps", "none", "--max-num-seqs", "8", "--max-model-len", "1024"]


@pytest.fixture(autouse=True)
def four_devices(monkeypatch):
    monkeypatch.setattr(plan_compile, "topology", lambda name: plan_compile.Topology(4, 1))
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
    ragged = "ragged (8192 rows a data shard: 4768 places for each of 2, 3803 expected, 1.00 rounds)"
    assert f"exchange of expert rows: {ragged}" in shown
    assert "5 x all-to-all of 64 B over 2 chips" in shown
    step = json.loads(run(*options, "--expert-exchange", "gather", "--json").stdout)["steps"][-1]
    assert step["exchanges"] == ["gather (8192 rows of each of 2 data shards to every chip)"]


def test_a_mesh_that_does_not_fit_is_refused_with_every_reason():
    result = run("--mesh", "data=1,model=4")
    assert isinstance(result.exception, RuntimeConfigError)
    assert any("cuts moe_intermediate_size 64 into parts of 16" in fault for fault in result.exception.faults)
    large = run("--mesh", "data=8,model=1").exception
    assert "a mesh of 8 chips is larger than v5p:2x2x1, which has 4 devices" in str(large)


def test_every_fault_of_options_and_mesh_is_reported_together():
    wrong = ("--kv-cache-dtype", "fp9", "--num-speculative-tokens", "9", "--speculative-method", "dspark")
    result = run("--mesh", "data=1,model=16", *wrong, "--steps", "all")
    assert isinstance(result.exception, RuntimeConfigError)
    for part in (
        "--steps 'all' is none of decode, prefill, both, none",
        "a mesh of 16 chips is larger",
        "kv_cache_dtype 'fp9' is unknown",
        "num_speculative_tokens 9 is outside 1..5",
        "tensor parallel size 16 does not divide num_attention_heads 8",
    ):
        assert sum(part in fault for fault in result.exception.faults) == 1


def test_meshes_that_cannot_be_served_are_counted_and_say_why():
    shown = " ".join(run("--max-num-batched-tokens", "512").stdout.split())
    assert "4 of 6 meshes cannot be served:" in shown
    assert "data=4,model=1, whole experts over data and model: max_num_batched_tokens 128, the share of each" in shown
    assert len(json.loads(run("--max-num-batched-tokens", "512", "--json").stdout)["refused"]) == 4
    none = run("--max-num-batched-tokens", "256").exception
    assert isinstance(none, RuntimeConfigError) and len(none.faults) == 6


def test_what_else_lies_on_a_chip_is_named():
    options = ("--speculative-method", "dspark", "--num-speculative-tokens", "5", "--engram-tables", "device")
    images = ("--no-encoder-swa-bounded-replay", "--state-checkpoint-interval-tokens", "128")
    found = json.loads(run("--mesh", "data=2,model=2", *options, *images, "--json").stdout)["per_chip"]
    assert all(size > 0 for size in found["weights"].values())
    assert sum(found["weights"].values()) == found["weight_bytes"]
    assert found["image_bytes"] > 0
    shown = run("--mesh", "data=2,model=2", *options, *images).stdout
    for part in ("draft", "vision tower", "Engram tables", "images", "logit adjustments", "left for temporaries"):
        assert part in shown


def test_given_pages_that_a_chip_does_not_hold_are_refused():
    refused = run("--mesh", "data=2,model=2", "--num-pages", "100000000").exception
    assert "num_pages 100000000 of" in str(refused) and "lower num_pages" in str(refused)


def test_a_gpu_is_planned_without_compiling(monkeypatch):
    monkeypatch.undo()
    words = [*OPTIONS, "--topology", "mi355x:2", "--mesh", "data=1,model=2", "--steps", "both"]
    shown = " ".join(CliRunner().invoke(app, words).stdout.split())
    assert "not compiled for the device: nothing here compiles for mi355x:2, counted from shapes" in shown
    found = json.loads(CliRunner().invoke(app, [*words, "--json"]).stdout)
    assert not found["compiles"]
    assert [step["compiled"] for step in found["steps"]] == [False] * 3
    assert all("temporary_bytes" not in step and step["bound_s"]["memory"] > 0 for step in found["steps"])


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
    monkeypatch.setattr(plan_compile, "jit_on_mesh", lambda *arguments: Compiler())
    result = run("--mesh", "data=2,model=2", "--steps", "decode")
    assert isinstance(result.exception, ValueError)
    assert "a decode step of 4 rows a shard does not fit a chip of v5p:2x2x1: lower" in str(result.exception)
    assert "108.04G of 95.74G" in str(result.exception)


def test_an_unknown_generation_and_unknown_steps_are_refused():
    result = CliRunner().invoke(app, [*OPTIONS, "--topology", "v3:2x2"])
    assert "the generation 'v3' is none of" in str(result.exception)
    assert "is none of decode, prefill, both, none" in str(run("--steps", "all").exception)

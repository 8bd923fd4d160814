"""The least work of a step, against numbers that can be checked by hand."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from scheduler.buckets import Buckets
from scheduler.runtime_config import EngineConfig, RuntimeConfigError, validate_runtime_config
from v41jax.chips import CHIPS, chip_of
from v41jax.hlo_collectives import Collective
from v41jax.layers.collectives import Parallel
from v41jax.plan import Planner
from v41jax.plan_compile import Topology, topology
from v41jax.plan_work import Rows, Work, bound_of, expected_collectives, least_work, sent_bytes
from v41jax.presets import preset
from v41jax.sharding import check_mesh

EXPERT = 18_800_640


@pytest.fixture(scope="module")
def planner():
    return Planner(preset("v4.1-flash"), EngineConfig(max_model_len=4096), "v5p:4x4x4", Topology(64, 16), 4096)


@pytest.fixture(scope="module")
def params(planner):
    return planner.held(Parallel()).target


def test_a_bound_is_the_slowest_of_its_terms():
    bound = bound_of(Work(2765e9, 459e12 * 3, 600e9 * 2), CHIPS["v5p"])
    assert (bound.memory, bound.compute, bound.interconnect) == (1, 3, 2)
    assert (bound.seconds, bound.dominant) == (3, "compute")


def test_a_reduction_sends_twice_what_a_gather_does():
    assert sent_bytes([Collective("all-gather", 800, 8, 3)]) == 3 * 700
    assert sent_bytes([Collective("all-reduce", 800, 8, 1)]) == 2 * 700
    assert sent_bytes([Collective("reduce-scatter", 800, 4, 1)]) == 600


def test_one_row_reads_few_experts_and_many_rows_read_them_all(planner, params):
    setup = planner.setup(Parallel(8, 8, "data_model"))

    def memory(rows):
        shape = Rows(rows, rows, 0, 1)
        return least_work(setup.config, setup.geometry, params, setup.parallel, shape, ()).memory_bytes

    experts = 40 * 384 * EXPERT / 64
    assert memory(4096) - memory(1) == pytest.approx(experts, rel=0.2)


def test_routed_experts_take_the_operations_of_the_chosen_ones(planner, params):
    setup = planner.setup(Parallel())
    first, second = (
        least_work(setup.config, setup.geometry, params, Parallel(), Rows(rows, rows, 0, 1), ()).operations
        for rows in (1, 2)
    )
    text = setup.config.text
    experts = 2 * 40 * 7 * 3 * text.hidden_size * text.moe_intermediate_size
    assert second == pytest.approx(2 * first)
    assert first > experts
    assert first - experts < 2 * 13e9, "the rest of the model is about eight billion weights, used once"


def test_whole_experts_over_data_shards_exchange_rows_and_others_do_not():
    config, rows = preset("v4.1-flash"), Rows(8, 8, 8, 1024)
    kinds = {one.kind for one in expected_collectives(config, Parallel(8, 8, "data_model"), rows)}
    assert kinds == {"all-gather", "all-reduce", "reduce-scatter"}
    assert expected_collectives(config, Parallel(8, 1, "intermediate"), rows) == []


def test_the_search_ranks_the_meshes_that_serve_accepts_and_no_others(planner):
    plans, refused = planner.search()
    assert {(one.parallel.data, one.parallel.model) for one in plans} <= {(64, 1), (32, 2), (16, 4), (8, 8)}
    assert len(plans) + len(refused) == 14
    for one in plans:
        validate_runtime_config(planner.options(one.parallel), planner.view)
        check_mesh(planner.config, one.parallel)
    reasons = {(mesh.data, mesh.model, mesh.experts): reason for mesh, reason in refused}
    assert "does not divide o_groups 8" in reasons[4, 16, "data_model"]
    assert "holds no page" in reasons[64, 1, "intermediate"]
    assert not any(mesh.experts == "model" and mesh.data > 1 for mesh in planner.meshes()), "no option says so"


def test_shards_too_small_to_serve_are_refused_with_the_reason(planner):
    wide = dataclasses.replace(planner, topology="tpu7x:4x4x4", size=Topology(128, 16))
    plans, refused = wide.search()
    reasons = {mesh.data: reason for mesh, reason in refused if mesh.experts == "data_model"}
    assert "max_num_batched_tokens 128, the share of each of 128 data shards, is below two pages" in reasons[128]
    assert all(one.parallel.data < 128 for one in plans)
    assert (plans[0].parallel.data, plans[0].parallel.model) == (32, 4)


def test_options_that_no_mesh_is_served_with_are_reported_once_and_together(planner):
    wrong = dataclasses.replace(planner.engine, kv_cache_dtype="fp9", memory_utilization=2.0, enable_eplb=True)
    with pytest.raises(RuntimeConfigError) as error:
        dataclasses.replace(planner, engine=wrong).search()
    assert len(error.value.faults) == 3
    for part in ("'fp9' is unknown", "memory_utilization 2.0", "enable_eplb is not supported"):
        assert part in str(error.value)


def test_a_mesh_is_served_by_a_process_a_host_which_takes_no_images(planner):
    assert planner.options(Parallel(8, 8, "data_model")).num_processes == 16
    assert planner.options(Parallel(1, 4)).num_processes == 1
    assert planner.sees(Parallel(1, 4)) and not planner.sees(Parallel(8, 8))
    wrong = dataclasses.replace(planner.engine, vision="on", engram_tables="device")
    faults = dataclasses.replace(planner, engine=wrong).faults(Parallel(8, 8, "data_model"))
    assert any("vision 'on' is not supported over several processes" in fault for fault in faults)
    assert any("engram_tables 'device' is not supported over several processes" in fault for fault in faults)
    assert dataclasses.replace(planner, engine=wrong).faults(Parallel(1, 4)) == []


def test_a_coordinator_makes_a_service_of_several_processes_even_on_one_host(planner):
    named = dataclasses.replace(planner, engine=dataclasses.replace(planner.engine, coordinator="localhost:5"))
    assert named.options(Parallel(1, 4)).num_processes == 1
    assert not named.sees(Parallel(1, 4)), "an engine takes text only then"


def test_a_service_of_a_cluster_is_planned_outside_of_it(planner):
    auto = dataclasses.replace(planner, engine=dataclasses.replace(planner.engine, coordinator="auto"))
    for mesh in (Parallel(1, 4), Parallel(8, 8, "data_model")):
        assert auto.faults(mesh) == []


def test_everything_an_engine_holds_is_weighed(planner):
    drafts = {"speculative_method": "dspark", "num_speculative_tokens": 5, "engram_tables": "device", "vision": "on"}
    options = dataclasses.replace(planner.engine, **drafts, dtype="float32")
    held = dataclasses.replace(planner, engine=options).held(Parallel(1, 4, "model")).chip_bytes()
    assert held["tables"] == sum(-(-rows // 4) * (256 + 8) for rows in (384006168, 384016682))
    assert 0.9e9 < held["tower"] < 1.0e9, "485 million weights of two bytes, whole on one chip"
    stages = 3 * 128 * EXPERT / 4
    assert stages < held["draft"] < 1.5 * stages
    plain = planner.held(Parallel(1, 4, "model")).chip_bytes()
    assert plain["draft"] == plain["tables"] == 0
    text = dataclasses.replace(planner.engine, vision="off")
    assert dataclasses.replace(planner, engine=text).held(Parallel(1, 4, "model")).chip_bytes()["tower"] == 0


def test_a_step_with_drafts_is_bound_by_the_rows_that_it_verifies(planner):
    options = dataclasses.replace(planner.engine, speculative_method="dspark", num_speculative_tokens=5)
    drafting = dataclasses.replace(planner, engine=options)
    mesh = Parallel(8, 8, "data_model")
    plain, verifies = planner.plan(mesh), drafting.plan(mesh)
    assert (plain.rows, verifies.rows) == (64, 384)
    assert verifies.decode.seconds > plain.decode.seconds
    shape = dict(drafting.shapes(verifies))["decode"]
    assert shape.verifies and (shape.rows, shape.requests) == (384, 64)


def test_precision_is_that_of_the_options(planner):
    options = dataclasses.replace(planner.engine, dtype="float32", activation_quantization=False)
    exact = dataclasses.replace(planner, engine=options)
    mesh = Parallel(8, 8, "data_model")
    precision = exact.setup(mesh).precision
    assert (precision.activation_dtype, precision.activation_quantization) == (np.float32, False)
    assert exact.plan(mesh).decode.interconnect > planner.plan(mesh).decode.interconnect


def test_steps_are_the_largest_of_the_engine_s_buckets(planner):
    plan = planner.plan(Parallel(8, 8, "data_model"))
    shapes = dict(planner.shapes(plan))
    assert list(shapes) == ["decode", "prefill, replay", "prefill"]
    assert [(shape.rows, shape.requests, shape.pages) for shape in shapes.values()] == [
        (64, 64, 32),
        (2048, 64, 32),
        (2048, 64, 32),
    ]
    assert shapes["prefill, replay"].tail and not shapes["prefill"].tail
    for shape in shapes.values():
        geometry = planner.setup(plan.parallel).geometry
        options = planner.options(plan.parallel).of_shard()
        assert shape in Buckets.default(options, geometry, plan.budget.num_pages, 4096).shapes(shape.tail)


def test_a_plan_holds_what_the_allocator_would_make(planner):
    plan = planner.plan(Parallel(8, 8, "data_model"))
    geometry = planner.setup(plan.parallel).geometry
    left = int(plan.budget.device_bytes * 0.9) - plan.budget.scratch_bytes - plan.budget.weight_bytes
    left -= plan.budget.adjustment_bytes
    assert plan.budget.num_pages == (left - 64 * geometry.state_bytes) // geometry.page_unit_bytes
    assert plan.pool_bytes <= left
    assert plan.pages == 8 * plan.budget.num_pages
    assert plan.requests == 512


def test_meshes_that_hold_no_page_are_refused_with_the_bytes(planner):
    small = dataclasses.replace(planner, topology="v5e:4x4", size=Topology(16, 4))
    plans, refused = small.search()
    assert plans == []
    assert all("holds no page" in reason for mesh, reason in refused if mesh.model <= 8)


def test_gpus_of_one_host_are_counted_and_not_compiled():
    options = EngineConfig(max_model_len=131072)
    gpus = Planner(preset("v4.1-flash"), options, "mi355x:8", topology("mi355x:8"), 8192)
    mesh = Parallel(1, 8, "model")
    assert gpus.options(mesh).num_processes == 1 and not gpus.chip.compiled
    plan = gpus.plan(mesh)
    step = gpus.step(plan, "decode", dict(gpus.shapes(plan))["decode"])
    assert step.compiled is None and step.fits
    assert step.bound == plan.decode
    assert step.bound.memory > 40 * 384 * EXPERT / 8 / 8e12, "512 rows read every expert"
    for name in ("mi355x:9", "mi355x:0", "mi355x:2x4", "mi355x"):
        with pytest.raises(ValueError, match="must read mi355x:N with N from 1 to 8"):
            topology(name)


def test_an_unknown_generation_is_refused():
    with pytest.raises(ValueError, match="'v3' is none of v5e, v5p, v6e, tpu7x, mi355x"):
        chip_of("v3:4x4")

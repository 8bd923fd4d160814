"""The least work of a step, against numbers that can be checked by hand."""

from __future__ import annotations

import pytest

from scheduler.runtime_config import EngineConfig
from v41jax.chips import CHIPS, chip_of
from v41jax.hlo_collectives import Collective
from v41jax.layers.collectives import Parallel
from v41jax.plan import Planner
from v41jax.plan_work import Rows, Work, bound_of, expected_collectives, least_work, sent_bytes
from v41jax.presets import preset

EXPERT = 18_800_640


@pytest.fixture(scope="module")
def planner():
    return Planner(preset("v4.1-flash"), EngineConfig(max_model_len=4096), "v5p:4x4x4", 64, 4096)


@pytest.fixture(scope="module")
def params(planner):
    return planner.weights()


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


def test_the_search_knows_every_mesh_that_divides(planner):
    sizes = {(mesh.data, mesh.model) for mesh in planner.meshes()}
    assert sizes == {(64, 1), (32, 2), (16, 4), (8, 8)}


def test_a_plan_holds_what_the_allocator_would_make(planner, params):
    plan = planner.plan(Parallel(8, 8, "data_model"), params)
    geometry = planner.setup(plan.parallel).geometry
    left = int(plan.memory_bytes * 0.9) - plan.budget.scratch_bytes - plan.weight_bytes
    assert plan.budget.num_pages == (left - 64 * geometry.state_bytes) // geometry.page_unit_bytes
    assert plan.pool_bytes <= left
    assert plan.pages == 8 * plan.budget.num_pages
    assert plan.requests == 512


def test_meshes_that_hold_no_page_are_refused_with_the_bytes(planner):
    small = Planner(planner.config, planner.engine, "v5e:4x4", 16, 4096)
    plans, refused = small.search(small.weights())
    assert plans == []
    assert all("holds no page" in reason for _, reason in refused)


def test_an_unknown_generation_is_refused():
    with pytest.raises(ValueError, match="'v3' is none of v5e, v5p, v6e, tpu7x"):
        chip_of("v3:4x4")

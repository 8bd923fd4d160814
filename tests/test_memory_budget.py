"""What is left for temporaries, and that a plan sizes pools as an engine does."""

from __future__ import annotations

import dataclasses

import pytest

from scheduler.pool_geometry import GeometryError
from scheduler.runtime_config import EngineConfig
from v41jax import memory_budget
from v41jax.layers.collectives import Parallel
from v41jax.memory_budget import plan_pools, row_bytes, scratch_bytes, size_pools, step_rows
from v41jax.plan import Planner
from v41jax.presets import preset

MESH = Parallel(8, 8, "data_model")
OPTIONS = EngineConfig(max_model_len=131072, mesh={"data": 8, "model": 8}, enable_expert_parallel=True)
GIB = 2**30


def planner(**changes):
    return Planner(preset("v4.1-flash"), dataclasses.replace(OPTIONS, **changes), "v6e:8x8", 64, 8192)


def shard(**changes):
    return dataclasses.replace(OPTIONS, **changes).of_shard()


def test_the_largest_step_is_a_prefill_or_a_decode_step_with_all_proposals():
    assert step_rows(shard()) == 2048
    assert step_rows(shard(max_num_batched_tokens=8 * 1000)) == 1024
    assert step_rows(shard(max_num_batched_tokens=1024, num_speculative_tokens=5)) == 64 * 6


def test_every_row_of_the_largest_step_is_paid_for():
    setup = planner().setup(MESH)
    sizes = [scratch_bytes(shard(max_num_batched_tokens=8 * rows), setup, 8 * GIB) for rows in (1024, 2048)]
    assert sizes[1] - sizes[0] == 1024 * row_bytes(setup)
    assert scratch_bytes(shard(), setup, 200 * GIB) == 10 * GIB, "never less than a twentieth of the memory"


def test_rows_of_all_data_shards_come_to_whole_experts_over_both_axes():
    one, eight = (row_bytes(planner().setup(Parallel(data, 8, "data_model"))) for data in (1, 8))
    assert eight > 4 * one
    apart = row_bytes(planner().setup(Parallel(8, 8, "model")))
    assert apart == one, "experts that lie over `model` serve the rows of their own shard"


def test_a_plan_sizes_pools_as_an_engine_does(monkeypatch):
    plans = planner()
    params, chip = plans.weights(), plans.chip
    plan = plans.plan(MESH, params)
    monkeypatch.setattr(memory_budget, "device_memory_bytes", lambda: chip.memory_bytes)
    monkeypatch.setattr(memory_budget, "CPU_POOL_BYTES", chip.memory_bytes)
    monkeypatch.setattr(memory_budget, "_chip_bytes", lambda leaf: leaf)
    assert plan_pools(shard(), plans.setup(MESH), [plan.weight_bytes]) == plan.budget
    used = plan.weight_bytes + plan.pool_bytes + plan.budget.scratch_bytes
    page = plan.budget.page_bytes
    assert 0 <= int(0.9 * chip.memory_bytes) - used < page


def test_memory_without_room_for_a_page_is_refused():
    plans = planner(max_num_batched_tokens=1 << 17)
    with pytest.raises(GeometryError):
        size_pools(shard(max_num_batched_tokens=1 << 17), plans.setup(MESH), 32 * GIB, 7 * GIB)

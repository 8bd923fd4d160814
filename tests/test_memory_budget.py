"""What is left for temporaries, and how the rest is shared."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from scheduler.pool_geometry import GeometryError
from scheduler.runtime_config import EngineConfig
from v41jax import memory_budget
from v41jax.draft_parameters import draft_text
from v41jax.layers.collectives import Parallel
from v41jax.memory_budget import (
    Held,
    expert_bytes,
    pages_beside_images,
    plan_pools,
    row_bytes,
    scratch_bytes,
    step_bytes,
    step_rows,
)
from v41jax.plan import Planner
from v41jax.plan_compile import Topology
from v41jax.presets import preset

MESH = Parallel(8, 8, "data_model")
OPTIONS = EngineConfig(max_model_len=131072, mesh={"data": 8, "model": 8}, enable_expert_parallel=True)
DRAFTS = {"speculative_method": "dspark", "num_speculative_tokens": 5}
GIB = 2**30
ACTIVATION, WIDTH, INNER = 2, 5120, 2304


def planner(**changes):
    return Planner(preset("v4.1-flash"), dataclasses.replace(OPTIONS, **changes), "v6e:8x8", Topology(64, 16), 8192)


def shard(**changes):
    return dataclasses.replace(OPTIONS, **changes).of_shard()


def rows_of(**changes):
    return step_rows(shard(**changes), planner(**changes).setup(MESH))


def experts(rows, mesh=MESH, **changes):
    setup = planner(**changes).setup(mesh)
    return expert_bytes(setup, setup.config.text, rows)


def weights(size):
    return Held(jax.device_put(np.zeros(size, np.uint8)))


def test_steps_are_those_of_the_buckets_with_all_proposals_and_the_tails_of_replay():
    found = rows_of()
    assert max(found) == (2048, 2048) and (2048, 128) in found and (2048, 0) in found and (64, 64) in found
    assert {rows for rows, _ in rows_of(max_num_batched_tokens=8 * 1000)} >= {128, 256, 512, 1024}
    drafting = rows_of(max_num_batched_tokens=2048, **DRAFTS)
    assert max(drafting) == (64 * 6, 64 * 6)
    assert all(rows == decoder for rows, decoder in rows_of(decoder_swa_bounded_replay=False))


def test_every_row_of_the_largest_step_is_paid_for():
    options = {"expert_exchange": "gather"}
    setup = planner(**options).setup(dataclasses.replace(MESH, exchange="gather"))
    sizes = [scratch_bytes(shard(max_num_batched_tokens=8 * rows), setup, 8 * GIB) for rows in (1024, 2048)]
    text = setup.config.text
    row = row_bytes(setup) + expert_bytes(setup, text, 2048) // 2048
    assert sizes[1] - sizes[0] == 1024 * row
    assert scratch_bytes(shard(), setup, 200 * GIB) == 10 * GIB, "never less than a twentieth of the memory"


def test_a_gather_gives_a_chip_the_rows_of_all_data_shards():
    pair = 3 * ACTIVATION * (WIDTH + INNER)
    row = 6 * pair + WIDTH * (ACTIVATION + 4)
    assert experts(64) == 8 * 64 * row
    assert experts(64, Parallel(1, 8, "data_model")) == 64 * row
    assert experts(64, Parallel(8, 8, "model")) == 64 * row, "experts over `model` serve the rows of their own shard"


def test_a_ragged_exchange_gives_a_chip_no_more_rows_than_its_places():
    pair = 3 * ACTIVATION * (WIDTH + INNER)
    sent = 2048 * WIDTH * (ACTIVATION + 4)
    assert experts(2048) == 8 * 240 * (6 * pair + WIDTH * (ACTIVATION + 8)) + sent
    three = Parallel(32, 4, "data_model")
    sent = 512 * WIDTH * (ACTIVATION + 4)
    assert experts(512, three) == 32 * 48 * (3 * pair + WIDTH * (ACTIVATION + 8)) + sent, "a chip has three experts"
    forced = dataclasses.replace(MESH, exchange="gather")
    assert experts(2048, forced) > 6 * experts(2048)


def test_a_smaller_step_that_gathers_may_need_more_than_a_larger_one_that_does_not():
    setup = planner().setup(Parallel(32, 4, "data_model"))
    gathers, ragged = (step_bytes(setup, rows, rows) for rows in (32, 64))
    assert gathers > ragged
    options = shard(mesh={"data": 32, "model": 4}, max_num_batched_tokens=32 * 64, max_num_seqs=32 * 32)
    needed = scratch_bytes(options, setup, 0)
    assert needed > step_bytes(setup, 32, 32) >= max(step_bytes(setup, *rows) for rows in ((1, 1), (16, 16)))


def test_prefill_of_the_released_model_reserves_what_its_ragged_exchange_needs():
    auto, gather = (
        scratch_bytes(shard(), planner().setup(dataclasses.replace(MESH, exchange=exchange)), 32 * GIB) / GIB
        for exchange in ("auto", "gather")
    )
    assert 1.7 < auto < 1.9
    assert 5.6 < gather < 5.8


def test_a_draft_whose_experts_need_more_than_the_model_s_is_paid_for():
    setup = planner(**DRAFTS).setup(MESH)
    assert step_bytes(setup, 384, 384) == 384 * row_bytes(setup) + experts(384), "the released draft needs less"
    text = dataclasses.replace(setup.config.text, dspark_num_experts_per_tok=24)
    large = dataclasses.replace(setup, config=dataclasses.replace(setup.config, text=text))
    drafted = expert_bytes(large, draft_text(text), 64 * 5)
    assert step_bytes(large, 384, 384) == 384 * row_bytes(setup) + drafted > step_bytes(setup, 384, 384)


def test_an_engine_asks_its_device_and_takes_little_of_a_cpu(monkeypatch):
    setup, held = planner().setup(MESH), weights(1 << 20)
    options = shard(max_num_seqs=8)
    monkeypatch.setattr(memory_budget, "device_memory_bytes", lambda: 32 * GIB)
    assert plan_pools(options, setup, held).budget_bytes == memory_budget.CPU_POOL_BYTES
    monkeypatch.setattr(memory_budget, "CPU_POOL_BYTES", 32 * GIB)
    assert plan_pools(options, setup, held) == plan_pools(options, setup, held, device_bytes=32 * GIB)


def test_nothing_is_left_over_but_less_than_a_page():
    setup, held = planner().setup(MESH), weights(1 << 20)
    budget = plan_pools(shard(), setup, held, device_bytes=32 * GIB)
    assert budget.weight_bytes == 1 << 20 and budget.num_images == 0
    used = budget.weight_bytes + budget.scratch_bytes + budget.num_pages * budget.page_bytes
    used += budget.num_slots * budget.state_bytes + budget.adjustment_bytes
    assert 0 <= int(0.9 * 32 * GIB) - used < budget.page_bytes


def test_pages_and_checkpoint_images_share_the_memory():
    options = shard(encoder_swa_bounded_replay=False)
    setup = planner().setup(MESH)
    budget = plan_pools(options, setup, weights(1 << 20), device_bytes=32 * GIB)
    units = setup.geometry.units_per_image
    assert budget.num_images == budget.num_pages // units > 0
    left = int(0.9 * 32 * GIB) - budget.weight_bytes - budget.scratch_bytes - budget.num_slots * budget.state_bytes
    left -= budget.adjustment_bytes
    used = budget.num_pages * budget.page_bytes + budget.num_images * budget.image_bytes
    assert 0 <= left - used < budget.page_bytes + budget.image_bytes
    assert plan_pools(options, setup, weights(1), device_bytes=32 * GIB).num_images > 0
    given = dataclasses.replace(options, num_pages=40)
    assert plan_pools(given, setup, weights(1), device_bytes=32 * GIB).num_pages == 40


def test_every_slot_has_a_row_of_logit_adjustments_cut_over_model():
    setup = planner().setup(MESH)
    few, many = (plan_pools(shard(max_num_seqs=8 * n), setup, weights(1), device_bytes=32 * GIB) for n in (32, 64))
    assert (few.adjustment_bytes, many.adjustment_bytes) == (32 * 4 * 129280 // 8, 64 * 4 * 129280 // 8)
    left = [budget.budget_bytes + budget.scratch_bytes for budget in (few, many)]
    assert left[0] - left[1] == 32 * 4 * 129280 // 8


@pytest.mark.parametrize("images", [False, True])
def test_given_pages_may_take_all_of_the_memory_and_no_more(images):
    options, setup = shard(encoder_swa_bounded_replay=not images), planner().setup(MESH)
    budget = plan_pools(dataclasses.replace(options, num_pages=8000), setup, weights(1), device_bytes=32 * GIB)
    assert budget.num_pages == 8000 and bool(budget.num_images) == images
    needed = budget.weight_bytes + budget.scratch_bytes + budget.adjustment_bytes
    needed += budget.num_slots * budget.state_bytes + 8000 * budget.page_bytes
    needed += budget.num_images * budget.image_bytes
    left = Held(jax.ShapeDtypeStruct((32 * GIB - needed + 1,), np.uint8, sharding=weights(1).target.sharding))
    given = dataclasses.replace(options, num_pages=8000)
    assert plan_pools(given, setup, left, device_bytes=32 * GIB).num_pages == 8000
    with pytest.raises(GeometryError) as refused:
        plan_pools(dataclasses.replace(options, num_pages=8001), setup, left, device_bytes=32 * GIB)
    [fault] = refused.value.faults
    assert f"num_pages 8001 of {budget.page_bytes} bytes" in fault and f"device's {32 * GIB} bytes" in fault
    assert "lower num_pages or max_num_seqs" in fault


@pytest.mark.parametrize("budget", [1, 7, 13, 14, 15, 16, 40, 1001])
def test_pages_beside_images_are_as_many_as_fit(budget):
    geometry = planner().setup(MESH).geometry
    page, image, units = geometry.page_unit_bytes, geometry.image_bytes, geometry.units_per_image
    size = budget * page + 5
    pages = pages_beside_images(geometry, size)

    def used(pages):
        return pages * page + pages // units * image

    assert used(pages) <= size < used(pages + 1)


def test_a_page_that_may_hold_an_image_needs_room_for_it():
    """A large page holds a whole image: one page alone could not keep the image that it is given."""
    geometry = planner(kv_cache_block_size=8192).setup(MESH).geometry
    page, image = geometry.page_unit_bytes, geometry.image_bytes
    assert geometry.units_per_image == 1
    assert pages_beside_images(geometry, page + image) == 1
    with pytest.raises(GeometryError, match=r"hold no page of \d+ bytes beside a checkpoint image"):
        pages_beside_images(geometry, page + image - 1)


def test_memory_without_room_for_a_page_is_refused():
    with pytest.raises(GeometryError, match="hold") as refused:
        plan_pools(shard(max_num_batched_tokens=1 << 20), planner().setup(MESH), weights(77), device_bytes=8 * GIB)
    [fault] = refused.value.faults
    assert f"device's {8 * GIB} bytes" in fault and "weights of 77 bytes" in fault and "temporaries of" in fault

"""Small pools over the stub runner: batch edges, preemption for space, images that compete with pages.

Names carry the numbers of the runtime specification, "Scenarios". Invariants are asserted at every step, unowned memory
is poisoned, and every token is compared with an uninterrupted run's.
"""

import numpy as np
import pytest

from scheduler.scheduled_batch import Phase
from tests.helpers.driver import MODES
from tests.helpers.stub_engine import (
    COPY,
    PAGE,
    SWITCHES,
    check_tokens,
    greedy,
    make_driver,
    prompt,
    steps_until,
)
from tests.helpers.stub_runner import expected_tokens

# A23, A24: edges of decode batches and pools ------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_a23_requests_join_and_leave_around_the_bucket_edges(mode):
    driver = make_driver(mode=mode, max_num_seqs=9, num_pages=200, max_num_batched_tokens=4 * PAGE)
    lengths = (3, 5, 7, 8, 9, 11, 13, 15, 17, 19, 6, 4)
    for number, count in enumerate(lengths):
        driver.add(number, prompt(10 + number, number), greedy(count))
    driver.run()
    for number, count in enumerate(lengths):
        check_tokens(driver, number, prompt(10 + number, number), count)
    sizes = {batch.num_requests for batch in driver.log if batch.phase is Phase.DECODE}
    assert {1, 2, 3, 8, 9} <= sizes


def test_a23_a_step_leaves_idle_slots_untouched():
    driver = make_driver(max_num_seqs=4)
    driver.poison = False
    driver.add("a", prompt(40), greedy(10))
    driver.add("b", prompt(150, 1), greedy(2))
    steps_until(driver, lambda: driver.scheduler.num_partial == 1)
    idle = [item.slot for item in driver.scheduler.running if item.request_id == "a"]
    idle += driver.scheduler.manager.slots.free_slots()
    before = driver.runner.rings[:, idle].copy(), driver.runner.cursor[idle].copy(), driver.runner.tails[idle].copy()
    driver.step()
    assert driver.log[-1].request_ids == ("b",)
    after = driver.runner.rings[:, idle], driver.runner.cursor[idle], driver.runner.tails[idle]
    for old, new in zip(before, after, strict=True):
        np.testing.assert_array_equal(old, new)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("switches", SWITCHES)
def test_a24_requests_that_outgrow_the_pool_together_all_finish(switches, mode):
    driver = make_driver(mode=mode, num_pages=8, **switches)
    for number in range(4):
        driver.add(number, prompt(50 + number, number), greedy(90))
    driver.run()
    for number in range(4):
        check_tokens(driver, number, prompt(50 + number, number), 90)
    assert driver.scheduler.counters.preemptions > 0


def test_preemption_takes_the_newest_request_first():
    driver = make_driver(num_pages=4, max_num_seqs=4, enable_prefix_caching=False, max_num_batched_tokens=4 * PAGE)
    for number in range(4):
        driver.add(number, prompt(24 - 2 * number, number), greedy(40))
    steps_until(driver, lambda: driver.scheduler.counters.preemptions > 0)
    # Request 0 is the first to need a page and three requests stand behind it.
    assert [item.request_id for item in driver.scheduler.waiting] == [3]
    driver.run()
    for number in range(4):
        check_tokens(driver, number, prompt(24 - 2 * number, number), 40)


def test_decode_batches_narrower_than_the_running_requests_take_turns():
    driver = make_driver(decode_buckets=(1, 2), max_num_seqs=4)
    items = [driver.add(number, prompt(20 + number, number), greedy(30)) for number in range(3)]
    driver.step()
    driver.step()
    for _ in range(12):
        driver.step()
        counts = [item.num_output_tokens for item in items]
        assert max(counts) - min(counts) <= 2
    assert {batch.num_requests for batch in driver.log if batch.phase is Phase.DECODE} == {2}
    driver.run()
    for number in range(3):
        check_tokens(driver, number, prompt(20 + number, number), 30)


def test_a_preempted_request_goes_to_the_head_of_the_queue():
    driver = make_driver(max_num_seqs=2)
    for number in range(4):
        driver.add(number, prompt(20 + number, number), greedy(10))
    driver.step()
    driver.scheduler.preempt(0)
    driver.scheduler.preempt(1)
    assert [item.request_id for item in driver.scheduler.waiting] == [1, 0, 2, 3]
    driver.run()
    for number in range(4):
        check_tokens(driver, number, prompt(20 + number, number), 10)


@pytest.mark.parametrize("mode", MODES)
def test_decode_keeps_images_at_boundaries_but_not_on_the_last_step(mode):
    driver = make_driver(**COPY, mode=mode, num_pages=100)
    driver.add("a", prompt(30), greedy(67))  # its last row, at position 95, would end on a boundary
    driver.add("b", prompt(3, 1), greedy(150))
    item = driver.scheduler.sequence("a")
    driver.step()
    slot = item.slot
    driver.run()
    stored = {"a": [], "b": []}
    for batch in driver.log:
        for store in batch.ops.stores:
            stored["a" if store.slot == slot else "b"].append(store.position)
    assert stored == {"a": [32, 64], "b": [32, 64, 96, 128]}
    check_tokens(driver, "a", prompt(30), 67)


def test_the_image_a_request_restored_counts_as_its_last_kept_one():
    driver = make_driver(**COPY, num_pages=100, state_checkpoint_interval_tokens=2 * PAGE)
    driver.add("warm", prompt(100), greedy(2))
    driver.run()
    before = len(driver.log)
    driver.add("again", prompt(100), greedy(80))
    driver.run()
    assert check_tokens(driver, "again", prompt(100), 80).cached_tokens == 96
    assert [store.position for batch in driver.log[before:] for store in batch.ops.stores] == [160]


def test_an_image_goes_with_the_page_that_covers_it():
    driver = make_driver(**COPY, num_pages=24)
    driver.add("a", prompt(70), greedy(2))
    driver.run()
    images, pool = driver.scheduler.manager.images, driver.scheduler.manager.pool
    kept = {image.content_hash for image in images.images()}
    assert kept and kept <= set(pool.index)
    while pool.num_cached:
        pool.take()
    assert images.images() == ()
    assert pool.num_raw == 0


def test_an_image_that_leaves_no_room_for_the_request_is_not_waited_for():
    units = make_driver(**COPY).scheduler.geometry.units_per_image
    driver = make_driver(**COPY, num_pages=3 + units)
    ids = prompt(110)
    driver.add("warm", ids[:65], greedy(2))
    driver.run()
    assert driver.scheduler.statistics().images == 1
    driver.add("long", ids, greedy(4))  # four pages and the image do not fit at once
    driver.run(200)
    assert check_tokens(driver, "long", ids, 4).cached_tokens == 0
    driver.add("short", ids[:70], greedy(4))
    driver.run(200)
    check_tokens(driver, "short", ids[:70], 4)


@pytest.mark.parametrize("mode", MODES)
def test_a_request_waits_for_the_image_it_restored_instead_of_preempting_itself(mode):
    units = make_driver(**COPY).scheduler.geometry.units_per_image
    driver = make_driver(**COPY, mode=mode, num_pages=3 + units, state_checkpoint_interval_tokens=-1)
    ids = prompt(96)
    driver.add("warm", ids, greedy(1))
    driver.run()
    driver.add("again", ids, greedy(6))
    driver.run(200)
    assert check_tokens(driver, "again", ids, 6).cached_tokens == 64
    assert driver.scheduler.counters.preemptions == 0


@pytest.mark.parametrize("mode", MODES)
def test_a_lone_request_that_outgrows_the_pool_ends_with_what_it_has(mode):
    driver = make_driver(mode=mode, num_pages=3)
    driver.add("a", prompt(60), greedy(500))
    driver.run()
    done = driver.finished["a"]
    assert done.reason == "unschedulable: 97 tokens need 4 pages, the pool has 3"
    assert list(done.tokens) == expected_tokens(prompt(60), (), 37)

"""The checkers themselves: every corruption they are meant to notice, they notice."""

import dataclasses

import numpy as np
import pytest

from scheduler.batch import Preparation
from scheduler.checkpoint_images import ImageState
from scheduler.invariants import InvariantError
from scheduler.pages import NO_HASH
from scheduler.scheduled_batch import Phase
from tests.helpers.stub_engine import PAGE, check_tokens, greedy, make_driver, prompt

COPY = {"encoder_swa_bounded_replay": False}


def busy(**options):
    """Two decoding requests with published pages, one waiting."""
    driver = make_driver(max_num_seqs=2, **options)
    for number in range(3):
        driver.add(number, prompt(70 + number, number), greedy(60))
    for _ in range(12):
        driver.step()
    assert len(driver.scheduler.running) == 2
    return driver


def leak_a_reference(driver):
    driver.scheduler.manager.pool.refs[driver.scheduler.running[0].block_table[0]] += 1


def lose_a_page(driver):
    driver.scheduler.manager.pool._vacant.pop()


def share_a_slot(driver):
    first, second = driver.scheduler.running
    second.slot = first.slot


def free_a_used_slot(driver):
    driver.scheduler.manager.slots.release(driver.scheduler.running[0].slot)


def name_a_page_that_does_not_exist(driver):
    sequence = driver.scheduler.running[0]
    driver.scheduler.manager.pool.refs[sequence.block_table[-1]] -= 1
    driver.scheduler.manager.pool._vacant.append(sequence.block_table[-1])
    sequence.block_table[-1] = 64


def change_the_reported_hit(driver):
    driver.scheduler.running[0].reported_hit_tokens += PAGE


def lose_count_of_partial_prefills(driver):
    driver.scheduler._partial += 1


def publish_a_page_without_kv(driver):
    sequence = driver.scheduler.running[0]
    pool = driver.scheduler.manager.pool
    page = sequence.block_table[-1]
    assert pool.hashes[page] == NO_HASH
    pool.publish(page, 1234, b"x")


def publish_other_tokens(driver):
    pool = driver.scheduler.manager.pool
    pool._contents[driver.scheduler.running[0].block_table[0]] = b"other"


def give_a_waiting_request_a_page(driver):
    driver.scheduler.waiting[0].block_table.append(0)


def forget_the_mirror(driver):
    driver.scheduler.manager.tables[driver.scheduler.running[0].slot] = 0


@pytest.mark.parametrize(
    ("corrupt", "number"),
    [
        (leak_a_reference, 1),
        (lose_a_page, 1),
        (forget_the_mirror, 1),
        (share_a_slot, 2),
        (free_a_used_slot, 2),
        (name_a_page_that_does_not_exist, 1),
        (change_the_reported_hit, 31),
        (lose_count_of_partial_prefills, 34),
        (give_a_waiting_request_a_page, 34),
        (publish_a_page_without_kv, 38),
        (publish_other_tokens, 38),
    ],
)
def test_corrupted_memory_is_noticed(corrupt, number):
    driver = busy()
    driver.checker.check_memory()
    corrupt(driver)
    with pytest.raises(InvariantError, match=f"invariant {number}:"):
        driver.checker.check_memory()


def test_images_off_the_grid_or_ready_too_early_are_noticed():
    driver = busy(**COPY)
    images = driver.scheduler.manager.images
    image = images.images()[0]
    image.position += 1
    with pytest.raises(InvariantError, match="invariant 14"):
        driver.checker.check_memory()
    image.position -= 1
    fresh = make_driver(**COPY)
    fresh.add("a", prompt(100), greedy(4))
    while not any(batch.ops.stores for batch in fresh.scheduler.outstanding):
        batch = fresh.scheduler.schedule()
        if not batch.ops.stores:
            fresh.previous = (batch, fresh._execute(batch))
            fresh._postprocess()
    fresh.scheduler.manager.images.images()[-1].state = ImageState.READY
    with pytest.raises(InvariantError, match="invariant 15"):
        fresh.checker.check_memory()


def test_raw_pages_without_an_image_are_noticed():
    driver = busy()
    driver.scheduler.manager.pool.reserve_raw(1)
    with pytest.raises(InvariantError, match="invariant 14"):
        driver.checker.check_memory()
    copy = busy(**COPY)
    copy.scheduler.manager.pool.reserve_raw(1)
    with pytest.raises(InvariantError, match="invariant 1:"):
        copy.checker.check_memory()


def test_a_moved_cursor_or_history_is_noticed():
    for column, number in ((0, 7), (1, 8)):
        driver = busy()
        batch = driver.scheduler.schedule()
        driver._execute(batch)
        driver.runner.cursor[batch.slots[0], column] += 1
        with pytest.raises(InvariantError, match=f"invariant {number}:"):
            driver.checker.executed(batch)


def test_a_rewritten_published_page_is_noticed():
    driver = busy()
    batch = driver.scheduler.schedule()
    driver._execute(batch)
    driver.runner.value[driver.scheduler.running[0].block_table[0], 3] += 1
    with pytest.raises(InvariantError, match="invariant 4:"):
        driver.checker.executed(batch)


@pytest.mark.parametrize(
    ("changes", "number"),
    [
        ({"starts": np.asarray([1], np.int32)}, 30),
        ({"resumes": np.asarray([32], np.int32)}, 30),
        ({"token_ids": np.zeros(100, np.int32)}, 30),
        ({"is_final": np.asarray([True]), "starts": np.asarray([31], np.int32), "resumes": np.asarray([31])}, 30),
    ],
)
def test_plans_off_the_grid_without_progress_or_over_budget_are_noticed(changes, number):
    driver = make_driver()
    driver.add("a", prompt(100), greedy(4))
    batch = driver.scheduler.schedule()
    assert (batch.starts.tolist(), batch.ends.tolist()) == ([0], [32])
    driver.checker.scheduled(batch)
    if "starts" in changes and "resumes" not in changes:
        changes = {**changes, "resumes": np.asarray([5], np.int32)}
    with pytest.raises(InvariantError, match=f"invariant {number}:"):
        driver.checker.scheduled(dataclasses.replace(batch, **changes))


def test_outputs_are_counted():
    driver = make_driver()
    driver.add("a", prompt(5), greedy(1))
    with pytest.raises(InvariantError, match="invariant 33"):
        driver.checker.submitted("a")
    (output,) = driver.step()
    with pytest.raises(InvariantError, match="invariant 33"):
        driver.checker.returned(None, [output])
    with pytest.raises(InvariantError, match="invariant 33"):
        driver.checker.returned(None, [output._replace(request_id="b")])
    driver.checker.submitted("lost")
    with pytest.raises(InvariantError, match=r"invariant 33.*lost"):
        driver.checker.drained()


def test_a_late_token_for_another_generation_is_noticed():
    driver = make_driver(mode="deferred")
    item = driver.add("a", prompt(20), greedy(9))
    driver.step()
    driver.step()
    driver.step()
    driver.scheduler.preempt("a")
    batch, _ = driver.previous
    item.append_placeholder()
    item.finalize(item.num_finalized_tokens, 7)
    with pytest.raises(InvariantError, match="invariant 37"):
        driver.checker.returned(batch, [])


def test_a_busy_engine_is_not_drained():
    driver = busy()
    with pytest.raises(InvariantError, match="invariant 33"):
        driver.checker.drained()


# The stub runner must notice a step that reads or writes the wrong place.


def swap_two_pages(batch, step):
    tables = step.block_tables.copy()
    tables[0, [0, 1]] = tables[0, [1, 0]]
    return step._replace(block_tables=tables)


def skip_the_ring_rebuild(batch, step):
    return step._replace(cached_until=step.write_from)


def read_a_stale_ring(batch, step):
    return step._replace(swa_cached_until=step.write_from, swa_replay_start=0 * step.swa_replay_start)


def forget_the_history(batch, step):
    return step._replace(history=np.full_like(step.history, -1))


def forget_the_rewind(batch, step):
    return step._replace(preparation=np.full_like(step.preparation, Preparation.CONTINUE))


def drop_a_group(batch, step):
    plans = tuple(plan._replace(requests=np.full_like(plan.requests, -1)) for plan in step.plans)
    return step._replace(plans=plans)


@pytest.mark.parametrize(
    "spoil",
    [
        swap_two_pages,
        skip_the_ring_rebuild,
        read_a_stale_ring,
        forget_the_history,
        forget_the_rewind,
        drop_a_group,
    ],
)
def test_the_stub_notices_a_spoiled_step(spoil):
    driver = make_driver(max_num_batched_tokens=4 * PAGE, long_prefill_token_threshold=0)
    ids = prompt(100)
    driver.add("warm", ids, greedy(2))
    driver.run()
    execute = driver.runner.execute
    driver.runner.execute = lambda batch, step, shape: execute(
        batch, spoil(batch, step) if batch.phase is Phase.PREFILL else step, shape
    )
    driver.add("hit", ids[:97], greedy(40))
    with pytest.raises(AssertionError):
        driver.run()
        check_tokens(driver, "hit", ids[:97], 40)

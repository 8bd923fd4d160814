"""The scheduling loop over the stub runner: the acceptance scenarios that need no model.

Names carry the numbers of the runtime specification, "Scenarios". Invariants are asserted at every step, unowned memory
is poisoned, and every token is compared with an uninterrupted run's.
"""

import dataclasses
import itertools

import numpy as np
import pytest

from scheduler.batch import Preparation
from scheduler.scheduled_batch import Phase, StepResult
from scheduler.sequence import ImageSpan
from tests.helpers.driver import MODES
from tests.helpers.stub_engine import PAGE, VIEW, WINDOW, check_tokens, greedy, make_driver, prompt
from tests.helpers.stub_runner import expected_tokens

SWITCHES = [
    pytest.param({"encoder_swa_bounded_replay": encoder, "decoder_swa_bounded_replay": decoder}, id=name)
    for (encoder, decoder), name in zip(
        itertools.product((True, False), (True, False)), ("both", "encoder", "decoder", "neither"), strict=True
    )
]
COPY = {"encoder_swa_bounded_replay": False}
OFF = {"encoder_swa_bounded_replay": False, "decoder_swa_bounded_replay": False}


def spans(driver, request_id):
    """(start, resume, end, is_final) of every prefill forward of a request."""
    found = []
    for batch in driver.log:
        if batch.phase is Phase.PREFILL and request_id in batch.request_ids:
            row = batch.request_ids.index(request_id)
            found.append(
                (int(batch.starts[row]), int(batch.resumes[row]), int(batch.ends[row]), bool(batch.is_final[row]))
            )
    return found


def restores(driver):
    return sum(len(batch.ops.restores) for batch in driver.log)


def steps_until(driver, condition, limit=200):
    for _ in range(limit):
        if condition():
            return
        driver.step()
    raise AssertionError("the condition never held")


# A1 - A4: chunks ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("switches", SWITCHES)
def test_a1_chunked_batched_and_reordered(switches, mode):
    driver = make_driver(mode=mode, **switches)
    prompts = {"long": prompt(150, 1), "short": prompt(70, 2)}
    for name, ids in prompts.items():
        driver.add(name, ids, greedy(10))
    while driver.scheduler.has_work:
        driver.step()
        driver.scheduler.running.reverse()
    for name, ids in prompts.items():
        check_tokens(driver, name, ids, 10)
    assert len(spans(driver, "long")) >= 5


@pytest.mark.parametrize("switches", SWITCHES)
def test_a2_a4_ragged_and_odd_chunks(switches):
    driver = make_driver(max_num_batched_tokens=256, max_num_seqs=2, **switches)
    rules = driver.scheduler.rules
    ids = prompt(400, 3)
    driver.add("a", ids, greedy(5))
    driver.add("b", prompt(231, 4), greedy(5))
    for cap in itertools.cycle((3, 1, 129, 7, 128, 33)):
        driver.scheduler.rules = dataclasses.replace(rules, cap=cap)
        driver.step()
        if not driver.scheduler.has_work:
            break
    check_tokens(driver, "a", ids, 5)
    check_tokens(driver, "b", prompt(231, 4), 5)
    assert any(end % 2 for _, _, end, final in spans(driver, "a") if not final)


@pytest.mark.parametrize("length", [33, 64, 65, 131])
def test_a3_a_chunk_wider_than_the_ring(length):
    options = {"max_num_batched_tokens": 256, "long_prefill_token_threshold": 0, "state_checkpoint_interval_tokens": 0}
    driver = make_driver(**options, **OFF)
    driver.add("a", prompt(length), greedy(40))
    driver.run()
    assert spans(driver, "a") == [(0, 0, length, True)]
    check_tokens(driver, "a", prompt(length), 40)


# A5 - A8: prefixes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("switches", SWITCHES)
def test_a_prompt_sent_twice_reports_every_whole_page_but_the_last_tokens(switches):
    driver = make_driver(**switches)
    ids = prompt(100)
    for name in ("first", "second"):
        driver.add(name, ids, greedy(4))
        driver.run()
    assert check_tokens(driver, "first", ids, 4).cached_tokens == 0
    assert check_tokens(driver, "second", ids, 4).cached_tokens == 96


@pytest.mark.parametrize("switches", SWITCHES)
def test_a_prompt_of_whole_pages_never_reuses_its_last_block(switches):
    driver = make_driver(**switches)
    for name in ("first", "second"):
        driver.add(name, prompt(96), greedy(4))
        driver.run()
    assert check_tokens(driver, "second", prompt(96), 4).cached_tokens == 64


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("switches", SWITCHES)
def test_a5_prefix_fork(switches, mode):
    driver = make_driver(mode=mode, max_num_batched_tokens=4 * PAGE, **switches)
    ids = prompt(100)
    driver.add("warm", ids, greedy(3))
    driver.run()
    before = restores(driver)
    for name in ("left", "right"):
        driver.add(name, ids, greedy(6))
    driver.run()
    for name in ("left", "right"):
        assert check_tokens(driver, name, ids, 6).cached_tokens == 96
    if switches["encoder_swa_bounded_replay"]:
        assert restores(driver) == 0
        assert [span[0] for span in spans(driver, "left")] == [64]
        assert [span[0] for span in spans(driver, "right")] == [64]
    else:
        assert restores(driver) - before == 2
        batch = next(batch for batch in driver.log if batch.ops.restores)
        first, second = batch.ops.restores
        assert first.image == second.image
        assert first.slot != second.slot


def test_a6_a_hit_stops_at_the_last_equal_block():
    driver = make_driver()
    ids = prompt(160)
    driver.add("a", ids, greedy(2))
    driver.run()
    other = ids.copy()
    other[70] += 1
    driver.add("b", other, greedy(5))
    driver.run()
    assert check_tokens(driver, "b", other, 5).cached_tokens == 64


def test_a7_without_its_image_a_hit_falls_back():
    driver = make_driver(**COPY)
    ids = prompt(100)
    driver.add("a", ids, greedy(2))
    driver.run()
    images = driver.scheduler.manager.images
    top = max(images.images(), key=lambda image: image.position)
    assert top.position == 96
    images.drop(top.content_hash)
    driver.add("b", ids, greedy(4))
    driver.run()
    assert check_tokens(driver, "b", ids, 4).cached_tokens == 64
    images.drop_all()
    driver.add("c", ids, greedy(4))
    driver.run()
    assert check_tokens(driver, "c", ids, 4).cached_tokens == 0


def test_a_withheld_boundary_gets_its_image_on_demand():
    driver = make_driver(**COPY, state_checkpoint_interval_tokens=-1, long_prefill_token_threshold=0)
    ids = prompt(130)
    driver.add("a", ids, greedy(2))
    driver.run()
    other = np.concatenate([ids[:70], prompt(60, 9)])
    driver.add("b", other, greedy(2))
    driver.run()
    # 64 tokens match but only 128 has an image: b recomputes and leaves one at 64.
    assert check_tokens(driver, "b", other, 2).cached_tokens == 0
    third = np.concatenate([ids[:70], prompt(60, 10)])
    driver.add("c", third, greedy(2))
    driver.run()
    assert check_tokens(driver, "c", third, 2).cached_tokens == 64


@pytest.mark.parametrize("decoder", [True, False])
def test_a8_every_hit_boundary_is_accepted_under_replay(decoder):
    driver = make_driver(decoder_swa_bounded_replay=decoder)
    ids = prompt(200)
    driver.add("warm", ids, greedy(2))
    driver.run()
    for blocks in range(1, 7):
        cut = np.concatenate([ids[: blocks * PAGE], prompt(1 + blocks, 50 + blocks)])
        driver.add(blocks, cut, greedy(3))
        driver.run()
        assert check_tokens(driver, blocks, cut, 3).cached_tokens == blocks * PAGE
        assert spans(driver, blocks)[0][:2] == ((blocks - 1) * PAGE, blocks * PAGE)


def test_hits_survive_fifty_unrelated_requests_when_capacity_allows():
    driver = make_driver(num_pages=300)
    driver.add("a", prompt(100), greedy(2))
    driver.run()
    for number in range(50):
        driver.add(number, prompt(60, 100 + number), greedy(2))
    driver.run()
    driver.add("again", prompt(100), greedy(2))
    driver.run()
    assert driver.finished["again"].cached_tokens == 96


def test_31_the_reported_hit_is_the_same_with_and_without_replay():
    reports = []
    for switches in ({}, COPY, OFF, {"decoder_swa_bounded_replay": False}):
        driver = make_driver(num_pages=400, **switches)
        ids = prompt(150)
        for number, length in enumerate((150, 40, 97, 128, 150, 64, 33)):
            driver.add(number, ids[:length], greedy(20))
            driver.run()
        reports.append([driver.finished[number].cached_tokens for number in range(7)])
    assert reports[0] == [0, 32, 96, 96, 128, 32, 32]
    assert all(report == reports[0] for report in reports)


def test_follow_up_turns_hit_generated_pages():
    driver = make_driver()
    ids = prompt(40)
    driver.add("a", ids, greedy(60))
    driver.run()
    follow = np.concatenate([ids, driver.finished["a"].tokens, prompt(10, 7)])
    driver.add("b", follow, greedy(3))
    driver.run()
    # 99 of the 100 tokens have KV: the newest one's is never computed.
    assert check_tokens(driver, "b", follow, 3).cached_tokens == 96


def test_a25_equal_ids_with_other_images_never_hit():
    driver = make_driver()
    ids = prompt(120)
    span = ImageSpan(40, 30, b"cat")
    ids[40:70] = VIEW.image_token_id
    for name, digest in (("cat", b"cat"), ("dog", b"dog"), ("cat again", b"cat")):
        images = (span._replace(digest=digest),)
        driver.add(name, ids, greedy(4), images)
        driver.run()
        check_tokens(driver, name, ids, 4, images)
    assert driver.finished["dog"].cached_tokens == 32
    assert driver.finished["cat again"].cached_tokens == 96


# A9 - A11: preemption -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("switches", SWITCHES)
def test_a9_preempt_in_the_middle_of_a_prefill(switches, mode):
    driver = make_driver(mode=mode, **switches)
    ids = prompt(150)
    item = driver.add("a", ids, greedy(4))
    steps_until(driver, lambda: item.num_hashed_tokens >= 2 * PAGE)
    assert item.is_partial_prefill
    assert driver.scheduler.preempt("a")
    driver.run()
    assert check_tokens(driver, "a", ids, 4).cached_tokens >= PAGE
    if not switches["encoder_swa_bounded_replay"]:
        assert restores(driver) >= 1
    else:
        assert restores(driver) == 0
        assert any(start < resume for start, resume, _, _ in spans(driver, "a"))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("switches", SWITCHES)
def test_a10_preempt_in_the_middle_of_a_decode(switches, mode):
    driver = make_driver(mode=mode, **switches)
    ids = prompt(50)
    item = driver.add("a", ids, greedy(30))
    driver.add("b", prompt(20, 8), greedy(30))
    steps_until(driver, lambda: item.num_output_tokens >= 2)
    kept = item.num_output_tokens
    assert driver.scheduler.preempt("a")
    assert (item.num_tokens, item.num_output_tokens, item.num_computed) == (50 + kept, kept, 0)
    driver.run()
    check_tokens(driver, "a", ids, 30)
    check_tokens(driver, "b", prompt(20, 8), 30)
    if mode != "immediate":
        assert driver.scheduler.counters.stale_results == 1


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("switches", SWITCHES)
def test_a11_preempt_after_more_than_a_chunk_of_generated_tokens(switches, mode):
    driver = make_driver(mode=mode, **switches)
    ids = prompt(20)
    item = driver.add("a", ids, greedy(100))
    steps_until(driver, lambda: item.num_output_tokens >= 70)
    kept = item.num_output_tokens
    driver.scheduler.preempt("a")
    driver.step()
    assert item.prefill_end == 20 + kept
    driver.run()
    check_tokens(driver, "a", ids, 100)
    assert driver.finished["a"].cached_tokens >= 2 * PAGE


# A12 - A15: cancellation and reuse ----------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("switches", SWITCHES)
def test_a12_cancel_a_middle_chunk(switches, mode):
    driver = make_driver(mode=mode, **switches)
    item = driver.add("a", prompt(150), greedy(4))
    driver.add("b", prompt(80, 5), greedy(9))
    steps_until(driver, lambda: item.num_computed >= PAGE)
    assert driver.scheduler.abort("a")
    assert not driver.scheduler.abort("a")
    driver.run()
    assert (driver.finished["a"].reason, driver.finished["a"].tokens) == ("aborted", ())
    check_tokens(driver, "b", prompt(80, 5), 9)


@pytest.mark.parametrize("mode", ["deferred", "plan_ahead"])
def test_a13_cancel_at_the_first_deferred_step(mode):
    driver = make_driver(mode=mode)
    item = driver.add("a", prompt(30), greedy(4))
    driver.step()
    assert item.num_output_tokens == 0
    driver.scheduler.abort("a")
    outputs = driver.step()
    assert [output.finish_reason for output in outputs] == ["aborted"]
    assert outputs[0].new_tokens == ()
    driver.run()
    assert driver.finished["a"].tokens == ()
    assert driver.scheduler.counters.stale_results == 1


def test_a14_cancel_while_waiting_runs_no_forward():
    driver = make_driver(max_num_seqs=1)
    driver.add("a", prompt(30), greedy(6))
    driver.add("b", prompt(31), greedy(6))
    driver.step()
    driver.scheduler.abort("b")
    driver.run()
    assert driver.finished["b"].reason == "aborted"
    assert not spans(driver, "b")
    check_tokens(driver, "a", prompt(30), 6)


def test_a14_cancelling_everything_that_runs_is_delivered_without_a_step():
    driver = make_driver()
    driver.add("a", prompt(30), greedy(6))
    driver.step()
    driver.scheduler.abort("a")
    assert driver.scheduler.schedule() is None
    assert [output.finish_reason for output in driver.scheduler.take_outputs()] == ["aborted"]
    assert not driver.scheduler.has_work


@pytest.mark.parametrize("count", [1, 5])
def test_a14_cancelling_while_the_step_runs_drops_its_token(count):
    driver = make_driver()
    driver.add("a", prompt(30), greedy(count))
    batch = driver.scheduler.schedule()
    result = driver._execute(batch)
    driver.scheduler.abort("a")
    outputs = driver.scheduler.postprocess(batch, result)
    assert [(output.new_tokens, output.finish_reason) for output in outputs] == [((), "aborted")]
    assert not driver.scheduler.has_work


@pytest.mark.parametrize("mode", MODES)
def test_a14_cancel_in_decode_leaves_the_survivor_alone(mode):
    driver = make_driver(mode=mode)
    item = driver.add("a", prompt(30), greedy(40))
    driver.add("b", prompt(31), greedy(40))
    steps_until(driver, lambda: item.num_output_tokens >= 5)
    driver.scheduler.abort("a")
    driver.run()
    done = driver.finished["a"]
    assert done.reason == "aborted"
    assert list(done.tokens) == expected_tokens(prompt(30), (), len(done.tokens))
    check_tokens(driver, "b", prompt(31), 40)


def test_a15_a_freed_slot_serves_the_next_request():
    driver = make_driver(max_num_seqs=1, enable_prefix_caching=False)
    for number in range(4):
        driver.add(number, prompt(40 + number, number), greedy(20))
    driver.run()
    assert {int(slot) for batch in driver.log for slot in batch.slots} == {0}
    for number in range(4):
        check_tokens(driver, number, prompt(40 + number, number), 20)


# A16 - A22: replay planning -----------------------------------------------------------------------------------


@pytest.mark.parametrize("rest", [1, 5, 31])
@pytest.mark.parametrize("encoder", [True, False])
def test_a16_a_short_final_chunk_backs_off_to_the_grid(rest, encoder):
    driver = make_driver(encoder_swa_bounded_replay=encoder)
    ids = prompt(3 * PAGE + rest)
    driver.add("a", ids, greedy(40))
    driver.run()
    assert spans(driver, "a")[-1] == (2 * PAGE, 3 * PAGE, 3 * PAGE + rest, True)
    last = [batch for batch in driver.log if batch.phase is Phase.PREFILL][-1]
    assert last.preparation.tolist() == [Preparation.REWIND]
    assert last.write_from.tolist() == last.cached_until.tolist() == last.swa_cached_until.tolist() == [3 * PAGE]
    assert last.swa_replay_start.tolist() == [2 * PAGE]
    check_tokens(driver, "a", ids, 40)


@pytest.mark.parametrize("suffix", [1, 2, 30, 31, 32, 40])
@pytest.mark.parametrize("switches", SWITCHES)
def test_a17_a_hit_with_a_short_suffix(suffix, switches):
    driver = make_driver(**switches)
    ids = prompt(2 * PAGE + 40)
    driver.add("warm", ids, greedy(2))
    driver.run()
    cut = ids[: 2 * PAGE + suffix]
    driver.add("a", cut, greedy(35))
    driver.run()
    assert check_tokens(driver, "a", cut, 35).cached_tokens == (2 if suffix <= PAGE else 3) * PAGE
    start, _, end, final = spans(driver, "a")[-1]
    assert final
    if switches["decoder_swa_bounded_replay"]:
        assert end - start >= WINDOW


@pytest.mark.parametrize("length", [1, 2, 31])
@pytest.mark.parametrize("cap", [0, 1])
def test_a18_a_prompt_shorter_than_the_window(length, cap):
    driver = make_driver()
    driver.scheduler.rules = dataclasses.replace(driver.scheduler.rules, cap=cap)
    driver.add("a", prompt(length), greedy(40))
    driver.run()
    assert spans(driver, "a")[-1][0] == 0
    check_tokens(driver, "a", prompt(length), 40)


def test_a19_too_small_a_rest_of_the_budget_waits_and_goes_first():
    # Budget 4 pages; the first prompt leaves too little of it to carry the second past its hit.
    driver = make_driver(max_num_batched_tokens=4 * PAGE, long_prefill_token_threshold=0)
    ids = prompt(2 * PAGE + 3)
    driver.add("warm", ids, greedy(2))
    driver.run()
    first = prompt(4 * PAGE - 20, 5)
    driver.add("first", first, greedy(2))
    driver.add("hit", ids, greedy(2))
    driver.add("third", prompt(5, 6), greedy(2))
    driver.step()
    assert driver.log[-1].request_ids == ("first",)
    assert [item.request_id for item in driver.scheduler.waiting] == ["hit", "third"]
    driver.step()
    assert driver.log[-1].request_ids == ("hit", "third")
    driver.run()
    check_tokens(driver, "hit", ids, 2)
    check_tokens(driver, "third", prompt(5, 6), 2)


@pytest.mark.parametrize("switches", SWITCHES)
def test_a20_the_cap_counts_new_tokens_only(switches):
    driver = make_driver(**switches)
    ids = prompt(5 * PAGE + 3)
    for name in ("warm", "a"):
        driver.add(name, ids, greedy(2))
        driver.run()
        for _, resume, end, _ in spans(driver, name):
            assert resume < end <= resume + PAGE


def test_a21_a_batch_of_middle_chunks_has_no_output():
    driver = make_driver()
    driver.add("a", prompt(100), greedy(2))
    rows = driver.runner.decoder_rows
    assert driver.step() == []
    assert driver.log[-1].output_requests.tolist() == []
    assert driver.runner.decoder_rows == rows
    driver.run()
    assert driver.runner.decoder_rows == WINDOW + 1


def test_a22_only_finishing_rows_of_a_mixed_batch_give_tokens():
    driver = make_driver(max_num_batched_tokens=4 * PAGE)
    prompts = {"long": prompt(100), "short": prompt(10, 1), "shorter": prompt(3, 2)}
    for name, ids in prompts.items():
        driver.add(name, ids, greedy(4))
    outputs = driver.step()
    assert driver.log[-1].is_final.tolist() == [False, True, True]
    assert [output.request_id for output in outputs] == ["short", "shorter"]
    driver.run()
    for name, ids in prompts.items():
        check_tokens(driver, name, ids, 4)


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
    driver = make_driver(num_pages=4, max_num_seqs=3, enable_prefix_caching=False)
    for number in range(3):
        driver.add(number, prompt(24 - 2 * number, number), greedy(40))
    steps_until(driver, lambda: driver.scheduler.counters.preemptions > 0)
    # Request 0 takes the fourth page; request 1 needs one next and the last in line gives way.
    assert [item.request_id for item in driver.scheduler.waiting] == [2]
    driver.run()
    for number in range(3):
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


# Submission, limits and ends ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "options", "why"),
    [
        (1025, {}, "the prompt has 1025 tokens, max_model_len is 1024"),
        (
            65,
            {"enable_chunked_prefill": False},
            "the prompt has 65 tokens, max_num_batched_tokens is 64 and chunked prefill is off",
        ),
        (97, {"num_pages": 3}, "97 tokens need 4 pages, the pool has 3"),
    ],
)
def test_a_request_that_can_never_run_is_refused_with_the_numbers(length, options, why):
    driver = make_driver(**options)
    driver.add("big", prompt(length), greedy(4))
    assert driver.scheduler.has_work
    outputs = driver.step()
    assert [(output.finished, output.finish_reason) for output in outputs] == [(True, f"unschedulable: {why}")]
    driver.run()
    assert driver.scheduler.counters.refused == 1


def test_prompt_log_probabilities_need_decoder_replay_off():
    driver = make_driver()
    driver.add("a", prompt(5), greedy(2, prompt_logprobs=True))
    driver.run()
    assert driver.finished["a"].reason.startswith("unschedulable: prompt log-probabilities")
    allowed = make_driver(decoder_swa_bounded_replay=False)
    allowed.add("a", prompt(5), greedy(2, prompt_logprobs=True))
    allowed.run()
    check_tokens(allowed, "a", prompt(5), 2)


def test_a_prompt_of_the_full_length_gives_one_token():
    driver = make_driver(max_model_len=64)
    driver.add("full", prompt(64), greedy(10))
    driver.add("nearly", prompt(60), greedy(10))
    driver.run()
    check_tokens(driver, "full", prompt(64), 1)
    check_tokens(driver, "nearly", prompt(60), 4)


def test_request_ids_are_unique_among_live_requests():
    driver = make_driver()
    driver.add("a", prompt(5), greedy(2))
    with pytest.raises(ValueError, match="'a' is in use"):
        driver.scheduler.add(driver.scheduler.sequence("a"))
    driver.run()
    assert not driver.scheduler.abort("a")
    assert not driver.scheduler.preempt("a")


@pytest.mark.parametrize("mode", MODES)
def test_finish_reasons(mode):
    ids = prompt(40)
    tokens = expected_tokens(ids, (), 12)
    view = dataclasses.replace(VIEW, eos_token_ids=(tokens[7],))
    driver = make_driver(mode=mode, view=view)
    plain = greedy(12)
    driver.add("eos", ids, dataclasses.replace(plain, ignore_eos=False))
    driver.add("stop", ids, dataclasses.replace(plain, stop_token_ids=(tokens[5],)))
    driver.add("sequence", ids, dataclasses.replace(plain, stop_sequences=((tokens[2], tokens[3]),)))
    driver.add("length", ids, plain)
    driver.run()
    ends = {name: (done.reason, len(done.tokens)) for name, done in driver.finished.items()}
    first = {name: tokens.index(value) + 1 for name, value in (("eos", tokens[7]), ("stop", tokens[5]))}
    assert ends == {
        "eos": ("eos", first["eos"]),
        "stop": (f"stop_{tokens[5]}", first["stop"]),
        "sequence": ("stop_sequence", 4),
        "length": ("max_tokens", 12),
    }
    assert list(driver.finished["length"].tokens) == tokens


def test_a_stop_sequence_does_not_reach_into_the_prompt():
    ids = prompt(40)
    tokens = expected_tokens(ids, (), 2)
    driver = make_driver()
    driver.add("a", ids, greedy(2, stop_sequences=((int(ids[-1]), tokens[0]),)))
    driver.run()
    check_tokens(driver, "a", ids, 2)


def test_results_are_read_in_order_and_not_too_late():
    driver = make_driver(mode="deferred")
    scheduler = driver.scheduler
    driver.add("a", prompt(150), greedy(4))
    first = scheduler.schedule()
    second = scheduler.schedule()
    with pytest.raises(RuntimeError, match="2 batches wait"):
        scheduler.schedule()
    with pytest.raises(RuntimeError, match=f"got step {second.index}"):
        scheduler.postprocess(second, StepResult([]))
    with pytest.raises(RuntimeError, match="0 output rows"):
        scheduler.postprocess(first, StepResult([1]))
    scheduler.postprocess(first, StepResult([]))
    immediate = make_driver()
    immediate.add("a", prompt(150), greedy(4))
    immediate.scheduler.schedule()
    with pytest.raises(RuntimeError, match="1 batches wait"):
        immediate.scheduler.schedule()


def test_a_chunk_ships_only_the_pages_it_can_see():
    driver = make_driver()
    item = driver.add("a", prompt(300), greedy(4))
    batch = driver.scheduler.schedule()
    assert len(item.block_table) == 10
    assert (batch.block_tables.shape, batch.table_lengths.tolist()) == ((1, 1), [1])
    wide = make_driver(max_num_batched_tokens=4 * PAGE)
    wide.add("a", prompt(40), greedy(4))
    wide.step()
    wide.add("b", prompt(300, 1), greedy(4))
    batch = wide.scheduler.schedule()
    assert batch.request_ids == ("a", "b")
    assert batch.table_lengths.tolist() == [2, 1]
    assert batch.block_tables[1, 1] == 0


def test_a_batch_does_not_change_with_its_requests():
    driver = make_driver()
    item = driver.add("a", prompt(50), greedy(4))
    batch = driver.scheduler.schedule()
    ids, table = batch.token_ids.copy(), batch.block_tables.copy()
    driver.scheduler.preempt("a")
    item._tokens[:] = 0
    driver.scheduler.manager.tables[:] = 77
    np.testing.assert_array_equal(batch.token_ids, ids)
    np.testing.assert_array_equal(batch.block_tables, table)
    assert batch.generations == (1,)


def test_a_fatal_error_ends_every_request_once():
    driver = make_driver(**COPY, max_num_seqs=2)
    for number in range(3):
        driver.add(number, prompt(100), greedy(40))
    for _ in range(8):
        driver.step()
    driver.scheduler.schedule()
    outputs = driver.scheduler.fail_all("device lost")
    assert {output.finish_reason for output in outputs} == {"failed: device lost"}
    driver.checker.returned(None, outputs)
    driver.checker.drained()
    assert driver.scheduler.manager.pool.num_raw == 0


def test_admission_delay_gathers_requests_but_never_holds_a_partial_prefill():
    now = [0.0]
    driver = make_driver(admission_delay_factor=2.0, clock=lambda: now[0])
    execute = driver.runner.execute

    def ten_seconds(*arguments):
        now[0] += 10.0
        return execute(*arguments)

    driver.runner.execute = ten_seconds
    driver.add("a", prompt(70), greedy(20))
    driver.step()
    driver.add("b", prompt(10, 1), greedy(5))
    driver.step()
    assert (driver.log[-1].phase, driver.log[-1].request_ids) == (Phase.PREFILL, ("a",))
    steps_until(driver, lambda: "b" in driver.log[-1].request_ids)
    assert now[0] == 10.0 + 30.0 + 10.0, "b waits until it is past twice the ten seconds of the last prefill"
    driver.run()
    check_tokens(driver, "b", prompt(10, 1), 5)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("switches", SWITCHES)
def test_12_relocations_swap_and_chain(switches, mode):
    driver = make_driver(mode=mode, **switches)
    for number in range(3):
        driver.add(number, prompt(50 + number, number), greedy(40))
    scheduler = driver.scheduler
    while scheduler.has_work:
        driver.step()
        slots = {item.request_id: item.slot for item in scheduler.running}
        free = list(scheduler.manager.slots.free_slots())
        if len(slots) == 3:
            chain = [*slots.values(), free[0]]
            scheduler.relocate(dict(zip(slots, chain[1:], strict=True)))
        elif len(slots) == 2:
            scheduler.relocate(dict(zip(slots, reversed(slots.values()), strict=True)))
    for number in range(3):
        check_tokens(driver, number, prompt(50 + number, number), 40)
    assert sum(len(batch.ops.relocations) for batch in driver.log) > 20


def test_a_relocation_dies_with_its_request():
    driver = make_driver()
    for number in range(2):
        driver.add(number, prompt(10 + number, number), greedy(10))
    driver.step()
    driver.scheduler.relocate({0: 3, 1: 0})
    driver.scheduler.abort(0)
    driver.step()
    assert driver.log[-1].ops.relocations == ((1, 0),)
    driver.scheduler.relocate({1: 2})
    driver.scheduler.abort(1)
    driver.run()
    assert driver.scheduler.queued_relocations == ()


def test_impossible_relocations_are_refused():
    driver = make_driver()
    for number in range(2):
        driver.add(number, prompt(10 + number, number), greedy(10))
    with pytest.raises(ValueError, match="holds no slot"):
        driver.scheduler.relocate({0: 3})
    driver.step()
    with pytest.raises(ValueError, match="not free"):
        driver.scheduler.relocate({0: driver.scheduler.sequence(1).slot})
    driver.scheduler.relocate({0: 3})
    with pytest.raises(ValueError, match="queued already"):
        driver.scheduler.relocate({1: 2})
    driver.run()


def test_statistics_add_up():
    driver = make_driver(**COPY)
    for number in range(6):
        driver.add(number, prompt(100), greedy(8))
    for _ in range(9):
        driver.step()
    statistics = driver.scheduler.statistics()
    parts = statistics.pages_used + statistics.pages_cached + statistics.pages_vacant + statistics.pages_raw
    assert parts == statistics.pages_total == 64
    assert statistics.queue + statistics.running == 6
    assert statistics.images_stored > 0
    driver.run()
    counters = driver.scheduler.counters
    assert counters.finished == 6
    assert counters.output_tokens == 48
    assert counters.rows_scheduled == sum(batch.num_rows for batch in driver.log)
    assert counters.prefill_steps + counters.decode_steps == counters.steps == len(driver.log)

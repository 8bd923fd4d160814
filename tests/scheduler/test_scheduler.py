"""Planning over the stub runner: chunks, prefix hits and replay.

Names carry the numbers of the runtime specification, "Scenarios". Invariants are asserted at every step, unowned memory
is poisoned, and every token is compared with an uninterrupted run's.
"""

import dataclasses
import itertools

import numpy as np
import pytest

from scheduler.batch import Preparation
from scheduler.scheduled_batch import Phase
from scheduler.sequence import ImageSpan
from tests.helpers.driver import MODES
from tests.helpers.stub_engine import (
    COPY,
    OFF,
    PAGE,
    SWITCHES,
    VIEW,
    WINDOW,
    check_tokens,
    greedy,
    make_driver,
    prompt,
    restores,
    spans,
)

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

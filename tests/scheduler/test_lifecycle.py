"""Requests over the stub runner: submission, preemption, cancellation, deferred output and the end.

Names carry the numbers of the runtime specification, "Scenarios". Invariants are asserted at every step, unowned memory
is poisoned, and every token is compared with an uninterrupted run's.
"""

import dataclasses

import numpy as np
import pytest

from scheduler.scheduled_batch import Phase, StepResult
from tests.helpers.driver import MODES
from tests.helpers.stub_engine import (
    COPY,
    PAGE,
    SWITCHES,
    VIEW,
    check_tokens,
    greedy,
    make_driver,
    prompt,
    restores,
    spans,
    steps_until,
)
from tests.helpers.stub_runner import expected_tokens

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


@pytest.mark.parametrize("mode", ["deferred", "plan_ahead"])
def test_a_request_id_used_again_does_not_take_the_old_ones_late_token(mode):
    driver = make_driver(mode=mode)
    driver.checker = None  # it follows requests by their id
    driver.add("a", prompt(30), greedy(9))
    for _ in range(4):
        driver.step()
    driver.scheduler.abort("a")
    driver.scheduler._reap_aborted()
    driver.scheduler.take_outputs()
    driver.add("a", prompt(20, 1), greedy(5))
    driver.run()
    check_tokens(driver, "a", prompt(20, 1), 5)
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


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("steps", range(8))
def test_images_that_were_ready_survive_a_step_that_is_refused(mode, steps):
    """Planned and never run, after other steps whose results are lost; it restores an image, or was to store one."""
    driver = make_driver(**COPY, mode=mode)
    known, new = prompt(100), prompt(100, 1)
    driver.add("cold", known, greedy(2))
    driver.run()
    driver.add("hit", known, greedy(60))
    driver.add("new", new, greedy(60))
    for _ in range(steps):
        driver.step()
    assert driver.scheduler.schedule() is not None
    driver.previous = None
    driver._deliver(None, driver.scheduler.fail_all("no such table", recoverable=True))
    driver.checker.drained()
    assert {driver.finished[name].reason for name in ("hit", "new")} == {"failed: no such table"}
    driver.add("again", known, greedy(60))
    driver.add("new again", new, greedy(60))
    driver.run()
    assert check_tokens(driver, "again", known, 60).cached_tokens == 96
    check_tokens(driver, "new again", new, 60)


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

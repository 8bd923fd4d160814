"""Preempted, relocated and starved requests end with the tokens of uninterrupted runs (scenarios A9-A11, A15, A24)."""

from __future__ import annotations

import pytest

from tests.acceptance.model import PAGE
from tests.acceptance.prompts import random_prompt
from tests.acceptance.serving import OFF, SLOTS

CHUNKED = OFF | {"long_prefill_token_threshold": PAGE, "max_num_batched_tokens": 2 * PAGE}


@pytest.mark.parametrize("chunks", [2, 3])
def test_preempted_in_the_middle_of_prefill(exact, chunks):
    """A9."""
    session = exact.session(**CHUNKED)
    session.add("victim", random_prompt(150, 1), 5)
    session.add("other", random_prompt(40, 2), 5)
    session.until(lambda: session.computed("victim") >= chunks * PAGE)
    assert session.scheduler.preempt("victim")
    session.run()
    assert session.restores >= 1
    assert session.finished["victim"].cached_tokens >= PAGE
    session.assert_expected()


@pytest.mark.parametrize("outputs", [0, 2, 5])
def test_preempted_in_the_middle_of_decode(exact, outputs):
    """A10: a token is in flight and is computed again."""
    session = exact.session(**OFF)
    session.add("victim", random_prompt(45, 3), 9)
    session.add("other", random_prompt(33, 4), 12)
    session.until(lambda: len(session.tokens("victim")) >= outputs and session.computed("victim") >= 45)
    stale = session.scheduler.counters.stale_results
    assert session.scheduler.preempt("victim")
    session.run()
    assert session.scheduler.counters.stale_results > stale
    session.assert_expected()
    assert len(session.finished["victim"].tokens) == 9


def test_preempted_past_the_prompt(exact):
    """A11: what was generated is prefilled again, in more than one chunk."""
    session = exact.session(**CHUNKED, enable_prefix_caching=False)
    session.add("victim", random_prompt(20, 5), 90)
    session.until(lambda: len(session.tokens("victim")) >= 75)
    assert session.scheduler.preempt("victim")
    before = len(session.log)
    session.run()
    ends = [int(batch.ends[0]) for batch in session.log[before:] if batch.phase.value == "prefill"]
    assert len(ends) > 2 and ends[-1] >= 20 + 75
    session.assert_expected()


def test_preempted_at_every_step(exact):
    """Invariant 36, over a shared cache that knows more and more of the prompt."""
    session = exact.session(**CHUNKED)
    prompt = random_prompt(75, 6)
    for point in range(12):
        session.add(point, (*prompt[: 75 - point], *random_prompt(point, point)), 6)
        session.steps(point)
        session.scheduler.preempt(point)
        session.run()
    assert session.scheduler.counters.preemptions >= 8
    session.assert_expected()


def test_preempted_again_and_again(exact):
    session = exact.session(**CHUNKED)
    for name in range(4):
        session.add(name, random_prompt(30 + 25 * name, 20 + name), 20)
    for turn in range(48):
        session.step()
        if turn % 3 == 2 and session.scheduler.running:
            session.scheduler.preempt(session.scheduler.running[turn % len(session.scheduler.running)].request_id)
    session.run()
    assert session.scheduler.counters.preemptions > 10
    session.assert_expected()


def test_slots_are_moved_while_requests_run(exact):
    """Swaps, cycles and moves to free slots; the watch compares every byte with the permutation of the old ones."""
    session = exact.session(**OFF)
    for name in range(3):
        session.add(name, random_prompt(25 + 30 * name, 30 + name), 16)
    session.until(lambda: all(session.tokens(name) for name in range(3)))
    running = {sequence.request_id: sequence.slot for sequence in session.scheduler.running}
    first, second, third = running
    free = next(iter(set(range(SLOTS)) - set(running.values())))
    session.scheduler.relocate({first: running[second], second: running[first]})
    session.steps(2)
    session.scheduler.relocate({first: running[first], second: running[third], third: running[second]})
    session.steps(2)
    session.scheduler.relocate({first: free, second: running[first]})
    session.run()
    assert sum(len(batch.ops.relocations) for batch in session.log) == 2 + 3 + 2
    session.assert_expected()


def test_a_freed_slot_serves_the_next_request(exact):
    """A15."""
    session = exact.session(**OFF, num_slots=1)
    for name in range(6):
        session.add(name, random_prompt(10 + 17 * name, 40 + name), 3)
    session.run()
    assert {int(batch.slots[0]) for batch in session.log} == {0}
    session.assert_expected()


def test_pages_for_fewer_requests_than_run(exact):
    """A24."""
    session = exact.session(**OFF, num_pages=7)
    for name in range(4):
        session.add(name, random_prompt(40, 50 + name), 60)
    session.run()
    assert session.scheduler.counters.preemptions > 0
    session.assert_expected()


def test_200_requests_over_40_pages(exact):
    session = exact.session(**OFF, num_pages=40)
    session.watch.checks = False
    lengths = [(3 + 29 * number % 97, 1 + 7 * number % 23) for number in range(200)]
    for number, (length, count) in enumerate(lengths):
        session.add(number, random_prompt(length, number % 50), count)
    finished = session.run(limit=5_000)
    session.checker.drained()
    assert len(finished) == 200
    assert [len(finished[number].tokens) for number in range(200)] == [count for _, count in lengths]
    statistics = session.scheduler.statistics()
    assert statistics.pages_used == 0 and statistics.slots_free == SLOTS
    session.assert_expected(*range(0, 200, 9))

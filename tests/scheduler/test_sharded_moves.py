"""Which waiting requests change their data shard, and what goes with them."""

from __future__ import annotations

import numpy as np

from scheduler.sequence import SequenceStatus
from tests.helpers.stub_engine import COPY, PAGE, greedy, prompt
from tests.helpers.stub_runner import expected_tokens
from tests.scheduler.test_sharded import make


def running(driver, request_id):
    sequence = driver.scheduler.sequence(request_id)
    return sequence is not None and sequence.status is SequenceStatus.RUNNING and not sequence.is_partial_prefill


def test_a_request_that_fits_thanks_to_a_shared_prefix_stays_with_it():
    driver = make(2, num_pages=10)
    shared = prompt(6 * PAGE)
    driver.add("first", shared, greedy(40))
    while not running(driver, "first"):
        driver.step()
    driver.step()
    driver.step()
    turns = [np.concatenate([shared, prompt(PAGE, seed)]) for seed in (1, 2)]
    for name, turn in zip("ab", turns):
        driver.add(name, turn, greedy(2))
        assert driver.homes[name] == 0, "the pages it shares are in use there: they cost nothing"
        driver.step()
        assert driver.homes[name] == 0
    driver.run()
    assert driver.moves == 0
    for name, turn in zip("ab", turns):
        assert driver.finished[name].cached_tokens == 6 * PAGE
        assert list(driver.finished[name].tokens) == expected_tokens(turn, (), 2)


def test_a_request_whose_image_takes_its_own_pages_goes_where_it_fits():
    driver = make(2, mode="immediate", **COPY)
    manager = driver.scheduler.shards[0].manager
    start = prompt(2 * PAGE + 1)
    driver.add("long", prompt(7 * PAGE + 1, 1), greedy(30))
    while not running(driver, "long"):
        driver.step()
    driver.scheduler.choose = lambda sequence: 0
    driver.add("first", start, greedy(3))
    while "first" not in driver.finished:
        driver.step()
    del driver.scheduler.choose
    turn = np.concatenate([start, prompt(14 * PAGE, 2)])[: 15 * PAGE + 20]
    driver.add("turn", turn, greedy(2))
    assert manager.find_hit(driver.scheduler.sequence("turn"), len(turn)).tokens == 2 * PAGE
    assert driver.homes["turn"] == 0 and manager.available_pages() == manager.geometry.pages_for(len(turn)) == 16
    driver.step()
    assert driver.homes["turn"] == 1, "its own image leaves too few pages beside the long request"
    driver.run()
    assert list(driver.finished["turn"].tokens) == expected_tokens(turn, (), 2)

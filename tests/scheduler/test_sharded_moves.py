"""Which waiting requests change their data shard, and what goes with them."""

from __future__ import annotations

import random

import numpy as np

from scheduler.sequence import Sequence, SequenceStatus
from scheduler.tiers.host import HostTier
from scheduler.tiers.page_tiers import PageTiers
from scheduler.tiers.sharded import ShardedTiers
from scheduler.tiers.store import TierStore
from tests.helpers.stub_engine import COPY, PAGE, greedy, prompt
from tests.helpers.stub_runner import expected_tokens
from tests.helpers.tiered import IDENTITY, LateExecutor, StubMemory
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


def test_a_search_that_goes_on_elsewhere_keeps_its_deadline():
    now = [0.0]
    never = LateExecutor(random.Random(0), 0.0)
    driver = make(2)
    memories = [StubMemory(shard.runner) for shard in driver.shards]
    store = TierStore([HostTier(1 << 20)], memories[0].layout.unit_bytes)
    links = [
        PageTiers(
            store,
            memory.layout,
            IDENTITY,
            memory,
            block_size=PAGE,
            timeout_s=5.0,
            loaders=never,
            saver=never,
            clock=lambda: now[0],
        )
        for memory in memories
    ]
    driver.scheduler.attach(ShardedTiers(links))
    sequence = Sequence("held back", prompt(3 * PAGE), greedy(2))
    home, other = driver.scheduler.shards
    home.add(sequence)
    assert home.plan_prefill_step() is None and links[0].searches
    now[0] = 3.0
    home.hand_over(sequence, other)
    assert other.plan_prefill_step() is None and links[1].searches and not links[0].searches
    now[0] = 5.0
    batch = other.plan_prefill_step()
    assert batch is not None and batch.request_ids == ("held back",)
    assert links[1].counters.timeouts == 1

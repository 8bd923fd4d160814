"""Random serving histories over the stub runner, invariants asserted at every step."""

import dataclasses
import os

import pytest

from scheduler.sequence import SamplingParams
from tests.helpers.driver import MODES
from tests.helpers.scenario import draw, play
from tests.helpers.stub_engine import make_driver, make_stub, prompt
from tests.helpers.stub_runner import compress_ids, expected_tokens

HISTORIES = int(os.environ.get("V41JAX_HISTORIES", "300"))
"""Histories to play; set it higher for a longer search."""
FIRST_SEED = int(os.environ.get("V41JAX_FIRST_SEED", "0"))
GROUPS = 10


def expected(request, count):
    return expected_tokens(request.prompt, request.images, count)


def play_stub(scenario):
    return play(scenario, make_stub, expected, compress_ids=compress_ids)


@pytest.mark.parametrize("group", range(GROUPS))
def test_random_histories_give_the_tokens_of_uninterrupted_runs(group):
    totals = {"preemptions": 0, "hit_tokens": 0, "aborted": 0, "refused": 0, "rows_replayed": 0}
    stores = restores = 0
    for seed in range(FIRST_SEED + group, FIRST_SEED + HISTORIES, GROUPS):
        report = play_stub(draw(seed))
        for name in totals:
            totals[name] += getattr(report.statistics.counters, name)
        stores += report.stores
        restores += report.restores
    if HISTORIES >= 300:  # enough for the generator to visit everything the histories are meant to cover
        assert all(totals.values()), totals
        assert stores and restores


def test_a_seed_gives_the_same_history_twice():
    first, second = play_stub(draw(12)), play_stub(draw(12))
    assert first.finished == second.finished
    assert first.statistics == second.statistics


@pytest.mark.parametrize("mode", MODES)
def test_200_requests_over_40_pages_finish_exactly_once_each(mode):
    driver = make_driver(mode=mode, num_pages=40, max_num_seqs=16, max_num_batched_tokens=128, max_model_len=512)
    counts = {}
    for number in range(200):
        ids = prompt(3 + number % 97, number % 50)
        counts[number] = 1 + (7 * number) % 53
        driver.add(number, ids, SamplingParams(max_tokens=counts[number], ignore_eos=True))
    driver.run()
    for number, count in counts.items():
        ids = prompt(3 + number % 97, number % 50)
        assert list(driver.finished[number].tokens) == expected_tokens(ids, (), count)
    statistics = driver.scheduler.statistics()
    assert statistics.counters.finished == 200
    assert statistics.counters.preemptions > 0
    assert statistics.pages_cached + statistics.pages_vacant == 40
    assert statistics.slots_free == 16


def test_tokens_do_not_depend_on_neighbours_pools_or_output_mode():
    scenario = draw(40, replays=(True, True), mode="immediate")
    scenario = dataclasses.replace(
        scenario, requests=tuple(dataclasses.replace(request, abort=None) for request in scenario.requests)
    )
    together = play_stub(scenario)
    for mode in MODES:
        other = play_stub(dataclasses.replace(scenario, mode=mode, num_pages=60, preempt=0.0, reorder=0.9))
        shared = {
            key: value.tokens
            for key, value in together.finished.items()
            if not value.reason.startswith("unschedulable")
        }
        assert shared == {key: other.finished[key].tokens for key in shared}
    for request in scenario.requests:
        alone = play_stub(dataclasses.replace(scenario, requests=(dataclasses.replace(request, arrival=0),)))
        assert alone.finished[request.request_id].tokens == together.finished[request.request_id].tokens

"""Data shards behind one scheduler: where requests go, which phase runs, and random histories over all of them."""

from __future__ import annotations

import dataclasses
import itertools
import os

import numpy as np
import pytest

from scheduler.runtime_config import EngineConfig
from scheduler.scheduled_batch import Phase, StepResult
from scheduler.scheduler import Scheduler
from scheduler.sharded import ShardedScheduler, make_scheduler
from tests.helpers.scenario import draw, with_drafts
from tests.helpers.sharded_driver import ShardedDriver, make_sharded, play_sharded, sharded
from tests.helpers.stub_engine import PAGE, VIEW, greedy, prompt
from tests.helpers.stub_runner import expected_tokens

HISTORIES = int(os.environ.get("V41JAX_HISTORIES", "60"))
"""Histories to play; set it higher for a longer search."""
FIRST_SEED = int(os.environ.get("V41JAX_FIRST_SEED", "0"))
GROUPS = 6


def make(shards=2, *, num_pages=24, mode="deferred", **options) -> ShardedDriver:
    """Shards in the gate configuration; `max_num_seqs` and `max_num_batched_tokens` are those of each."""
    seqs = options.pop("max_num_seqs", 4)
    rows = options.pop("max_num_batched_tokens", 2 * PAGE)
    config = EngineConfig(
        kv_cache_block_size=PAGE,
        max_model_len=512,
        long_prefill_token_threshold=PAGE,
        state_checkpoint_interval_tokens=PAGE,
        mesh={"data": shards, "model": 1},
        max_num_seqs=shards * seqs,
        max_num_batched_tokens=shards * rows,
        **options,
    )
    scheduler = ShardedScheduler(config, VIEW, config.geometry(VIEW), num_pages, seqs, deferred=mode != "immediate")
    return ShardedDriver(scheduler, mode=mode)


@pytest.mark.parametrize("group", range(GROUPS))
def test_random_histories_give_the_tokens_of_uninterrupted_runs(group):
    totals = {"preemptions": 0, "hit_tokens": 0, "aborted": 0, "rows_replayed": 0}
    moves = stores = restores = idle = 0
    for seed in range(FIRST_SEED + group, FIRST_SEED + HISTORIES, GROUPS):
        report, driver = play_sharded(sharded(draw(seed, max_requests=14), 2 + seed // GROUPS % 2 + seed % 2))
        for name in totals:
            totals[name] += getattr(report.statistics.counters, name)
        moves, stores, restores = moves + driver.moves, stores + report.stores, restores + report.restores
        idle += sum(None in batch.parts for batch in driver.log)
    if HISTORIES >= 60:
        assert all(totals.values()), totals
        assert moves and stores and restores and idle


@pytest.mark.parametrize("group", range(2))
def test_random_histories_with_drafts_give_the_same_tokens(group):
    accepted = 0
    for seed in range(FIRST_SEED + group, FIRST_SEED + HISTORIES // 4, 2):
        scenario = sharded(with_drafts(draw(seed)), 2)

        def drafter(sequence, seed=seed):
            known = sequence.tokens(0, sequence.num_tokens)
            right = expected_tokens(known, sequence.images, 5)
            return [*right[: (seed + sequence.num_tokens) % 6], 7]

        report, _ = play_sharded(scenario, lambda sequence: drafter(sequence)[:5])
        accepted += report.statistics.counters.accepted_tokens
    assert accepted > 0


def test_new_requests_are_spread_over_places_and_pages():
    driver = make(3)
    for number in range(6):
        driver.add(number, prompt(40, number), greedy(4))
    assert [driver.homes[number] for number in range(6)] == [0, 1, 2, 0, 1, 2]
    driver.run()
    for number in range(6):
        assert list(driver.finished[number].tokens) == expected_tokens(prompt(40, number), (), 4)
    statistics = driver.scheduler.statistics()
    assert [part.counters.finished for part in statistics.shards] == [2, 2, 2]
    assert statistics.counters.finished == 6
    assert statistics.pages_total == 72 and statistics.slots_free == 12
    assert statistics.counters.steps == len(driver.log)
    assert statistics.counters.prefill_steps + statistics.counters.decode_steps == len(driver.log)


def test_a_shard_short_of_pages_is_passed_over():
    driver = make(2, num_pages=10)
    driver.add("long", prompt(8 * PAGE), greedy(100))
    for _ in range(12):
        driver.step()
    driver.add("a", prompt(3 * PAGE, 1), greedy(2))
    driver.add("b", prompt(3 * PAGE, 2), greedy(2))
    assert driver.homes == {"long": 0, "a": 1, "b": 1}
    driver.run()


def test_a_prefix_is_reused_on_the_shard_that_holds_it_while_that_has_room():
    driver = make(2, max_num_seqs=2)
    driver.add("other", prompt(50, 9), greedy(2))
    driver.add("first", prompt(4 * PAGE), greedy(2))
    driver.run()
    assert driver.homes == {"other": 0, "first": 1}
    turn = np.concatenate([prompt(4 * PAGE), prompt(20, 3)])
    for name in ("a", "b", "c"):
        driver.add(name, turn, greedy(2))
    assert [driver.homes[name] for name in ("a", "b", "c")] == [1, 1, 0], "the third finds no place there"
    driver.run()
    assert [driver.finished[name].cached_tokens for name in ("a", "b", "c")] == [4 * PAGE, 4 * PAGE, 0]


def test_a_short_prefix_that_all_share_does_not_crowd_one_shard_and_a_long_one_stays():
    driver = make(4, num_pages=60, max_num_seqs=8)
    system = prompt(PAGE, 5)
    driver.add("first", np.concatenate([system, prompt(8, 6)]), greedy(2))
    driver.run()
    for number in range(16):
        driver.add(number, np.concatenate([system, prompt(20, 7 + number)]), greedy(60))
    homes = [driver.homes[number] for number in range(16)]
    assert [homes.count(shard) for shard in range(4)] == [4] * 4
    driver.run()
    assert driver.finished[0].cached_tokens == PAGE, "of equal shards the one with the prefix"
    driver.add("conversation", prompt(14 * PAGE, 40), greedy(2))
    driver.run()
    home = driver.homes["conversation"]
    assert driver.finished["conversation"].cached_tokens == 0
    turn = np.concatenate([prompt(14 * PAGE, 40), prompt(9, 41)])
    for number in range(100, 106):
        driver.scheduler.choose, choose = (lambda _: home), driver.scheduler.choose
        driver.add(number, prompt(9, number), greedy(60))
        driver.scheduler.choose = choose
    driver.add("turn", turn, greedy(60))
    assert driver.homes["turn"] == home, "14 pages are worth six replies of 60 tokens"
    driver.run()
    assert driver.finished["turn"].cached_tokens == 14 * PAGE


def test_a_waiting_request_goes_where_room_appears():
    driver = make(2, max_num_seqs=1)
    driver.add("long", prompt(40), greedy(60))
    driver.add("short", prompt(40, 1), greedy(3))
    driver.add("waits", prompt(40, 2), greedy(3))
    assert driver.homes["waits"] == 0, "of equal queues the first"
    driver.run()
    assert driver.moves == 1 and driver.homes["waits"] == 1
    assert list(driver.finished["waits"].tokens) == expected_tokens(prompt(40, 2), (), 3)


def test_decodes_and_prefills_take_turns_where_shards_disagree():
    driver = make(2, max_num_seqs=2)
    driver.add("decodes", prompt(10), greedy(30))
    for _ in range(3):
        driver.step()
    began = len(driver.log)
    driver.add("prefills", prompt(8 * PAGE, 1), greedy(2))
    assert driver.homes == {"decodes": 0, "prefills": 1}
    while any(sequence.request_id == "prefills" for sequence in driver.scheduler.waiting) or any(
        sequence.is_partial_prefill for sequence in driver.scheduler.running
    ):
        driver.step()
    phases = [batch.phase for batch in driver.log[began:]]
    prefills = [index for index, phase in enumerate(phases) if phase is Phase.PREFILL]
    assert len(prefills) >= 8
    assert all(after - before == 2 for before, after in itertools.pairwise(prefills)), phases
    assert all(driver.log[began + index].parts[0] is None for index in prefills)
    driver.run()


def test_prefills_of_all_shards_run_together():
    driver = make(2)
    for number in range(4):
        driver.add(number, prompt(2 * PAGE, number), greedy(1))
    driver.run()
    prefills = [batch for batch in driver.log if batch.phase is Phase.PREFILL]
    assert all(None not in batch.parts for batch in prefills)


def test_what_can_never_fit_is_refused_with_the_numbers():
    driver = make(2, num_pages=4)
    driver.add("big", prompt(5 * PAGE), greedy(1))
    driver.run()
    assert driver.finished["big"].reason == f"unschedulable: {5 * PAGE} tokens need 5 pages, the pool has 4"
    driver.add("big2", prompt(600), greedy(1))
    driver.run()
    assert driver.finished["big2"].reason == "unschedulable: the prompt has 600 tokens, max_model_len is 512"


def test_ids_are_unique_over_all_shards_and_may_come_again():
    driver = make(2)
    sequence = driver.add("same", prompt(40), greedy(2))
    with pytest.raises(ValueError, match="in use"):
        driver.scheduler.add(sequence)
    driver.run()
    assert driver.scheduler.sequence("same") is None
    assert not driver.scheduler.abort("same")
    with pytest.raises(KeyError):
        driver.scheduler.home("same")


def test_a_cancelled_and_a_preempted_request_end_on_their_shard():
    driver = make(2, mode="immediate")
    for number in range(4):
        driver.add(number, prompt(70, number), greedy(20))
    for _ in range(6):
        driver.step()
    assert driver.scheduler.preempt(1)
    assert driver.scheduler.abort(0)
    driver.run()
    assert driver.finished[0].reason == "aborted"
    for number in (1, 2, 3):
        assert list(driver.finished[number].tokens) == expected_tokens(prompt(70, number), (), 20)
    assert driver.scheduler.statistics().counters.preemptions == 1


def test_every_live_request_fails_with_its_engine():
    driver = make(2)
    for number in range(5):
        driver.add(number, prompt(40, number), greedy(9))
    driver.step()
    outputs = driver.scheduler.fail_all("lost")
    assert sorted(output.request_id for output in outputs) == [0, 1, 2, 3, 4]
    assert all(output.finish_reason == "failed: lost" for output in outputs)
    assert driver.scheduler.statistics().counters.failed == 5
    assert not driver.scheduler.has_work


@pytest.mark.parametrize("recoverable", [False, True])
def test_every_shard_keeps_its_images_unless_its_memory_is_lost(recoverable):
    driver = make(2, encoder_swa_bounded_replay=False)
    for number in range(2):
        driver.add(number, prompt(100, number), greedy(2))
    driver.run()
    kept = [part.images for part in driver.scheduler.statistics().shards]
    assert all(kept)
    driver.scheduler.fail_all("lost", recoverable=recoverable)
    assert [part.images for part in driver.scheduler.statistics().shards] == (kept if recoverable else [0, 0])


def test_results_are_taken_in_order_and_in_full():
    driver = make(2)
    for number in range(2):
        driver.add(number, prompt(10, number), greedy(3))
    batch = driver.scheduler.schedule()
    with pytest.raises(RuntimeError, match="has 2 outputs, the result has 1"):
        driver.scheduler.postprocess(batch, StepResult(np.zeros(1, np.int32)))
    with pytest.raises(RuntimeError, match="got step 7, the oldest outstanding one is 0"):
        driver.scheduler.postprocess(dataclasses.replace(batch, index=7), StepResult(np.zeros(2, np.int32)))


def test_verification_lengths_are_chosen_for_all_shards_at_once():
    asked = []

    def lengths(sequences, limits):
        asked.append([(driver.homes[sequence.request_id], limit) for sequence, limit in zip(sequences, limits)])
        return [min(limit, 1 + driver.homes[sequence.request_id]) for sequence, limit in zip(sequences, limits)]

    driver = make_sharded(sharded(with_drafts(draw(1, mode="immediate")), 2), lambda _: [7, 7, 7])
    driver.scheduler.verify_lengths = lengths
    for number in range(2):
        driver.add(number, prompt(10, number), greedy(9))
    driver.run()
    assert [(0, 3), (1, 3)] in asked
    decodes = [batch for batch in driver.log if batch.phase is Phase.DECODE]
    assert ([2], [3]) in [tuple(part.lengths.tolist() for part in batch.parts if part) for batch in decodes]


def test_the_share_of_a_shard():
    config = EngineConfig(mesh={"data": 3, "model": 2}, max_num_seqs=10, max_num_batched_tokens=1000)
    assert config.of_shard().max_num_seqs == 4
    assert config.of_shard().max_num_batched_tokens == 334
    assert config.of_shard().of_shard() == config.of_shard()
    one = EngineConfig()
    assert one.of_shard() is one


def test_one_shard_gets_the_plain_scheduler():
    config = EngineConfig(kv_cache_block_size=PAGE)
    for mesh, kind in (({"data": 1, "model": 1}, Scheduler), ({"data": 2, "model": 1}, ShardedScheduler)):
        one = dataclasses.replace(config, mesh=mesh, max_num_seqs=4)
        assert type(make_scheduler(one, VIEW, one.geometry(VIEW), 8, 2)) is kind

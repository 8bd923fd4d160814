"""Requests whose pages come from beyond the device, on the stub runner with every invariant asserted."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from scheduler.scheduler import Scheduler
from scheduler.sequence import SamplingParams
from scheduler.tiers.host import HostTier
from scheduler.tiers.keys import CacheIdentity
from scheduler.tiers.page_tiers import LOOK_AHEAD, PageTiers
from tests.helpers.driver import MODES
from tests.helpers.scenario import draw, drive
from tests.helpers.stub_engine import COPY, OFF, PAGE, check_tokens, greedy, make_stub, prompt, spans
from tests.helpers.stub_runner import compress_ids, expected_tokens
from tests.helpers.tiered import FaultyTier, InlineExecutor, LateExecutor, TieredDriver, tiered

TRANSFERS = pytest.mark.parametrize("options", [{}, COPY, OFF], ids=["replay", "copy", "copy, full decoder"])
PLENTY = 1 << 26


def transfers(driver):
    return driver.tiers.counters


@TRANSFERS
@pytest.mark.parametrize("mode", MODES)
def test_a_new_engine_finds_what_another_one_left(mode, options):
    host = HostTier(PLENTY)
    ids = prompt(5 * PAGE + 7, 1)
    first = tiered([host], mode=mode, **options)
    first.add(0, ids, greedy(40))
    first.run()
    reply = first.finished[0].tokens
    second = tiered([host], mode=mode, **options)
    second.add("same", ids, greedy(4))
    second.run()
    assert check_tokens(second, "same", ids, 4).cached_tokens == 5 * PAGE
    turn = [*ids, *reply, *prompt(9, 2)]
    second.add("next turn", turn, greedy(4))
    second.run()
    # The last token's KV is never computed; copy keeps images of decode steps too.
    assert check_tokens(second, "next turn", turn, 4).cached_tokens == 6 * PAGE
    assert transfers(second).pages_adopted == 6
    assert transfers(second).images_adopted == (0 if not options else 2)
    assert spans(second, "same")[0][1] == 5 * PAGE


@TRANSFERS
def test_pages_evicted_from_the_device_come_back(options):
    driver = tiered([HostTier(PLENTY)], num_pages=24, **options)
    prompts = [prompt(6 * PAGE + 1, seed) for seed in range(5)]
    for name, ids in enumerate([*prompts, *prompts]):
        driver.add(name, ids, greedy(2))
        driver.run()
        assert check_tokens(driver, name, ids, 2).cached_tokens == (0 if name < 5 else 6 * PAGE)
    assert transfers(driver).pages_adopted > 0


@TRANSFERS
def test_another_identity_finds_nothing(options):
    host = HostTier(PLENTY)
    ids = prompt(3 * PAGE, 1)
    for number, identity in enumerate([CacheIdentity("a", "t", "l", "c"), CacheIdentity("b", "t", "l", "c")]):
        driver = tiered([host], identity=identity, **options)
        driver.add(number, ids, greedy(3))
        driver.run()
        assert check_tokens(driver, number, ids, 3).cached_tokens == 0


def test_copy_falls_back_to_the_farthest_image_below():
    host = HostTier(PLENTY)
    ids = prompt(6 * PAGE + 3, 1)
    options = {**COPY, "state_checkpoint_interval_tokens": 2 * PAGE}
    first = tiered([host], **options)
    first.add(0, ids[: 5 * PAGE + 3], greedy(1))
    first.run()  # images at 2, 4 and at the prompt's last whole block, 5
    second = tiered([host], **options)
    second.add("whole", ids[: 5 * PAGE + 3], greedy(2))
    second.run()
    assert second.finished["whole"].cached_tokens == 5 * PAGE
    third = tiered([host], **options)
    third.add("shorter", ids[: 3 * PAGE + 3], greedy(2))
    third.run()
    assert third.finished["shorter"].cached_tokens == 2 * PAGE
    assert transfers(third).pages_adopted == 2 and transfers(third).images_adopted == 1


@TRANSFERS
def test_others_pass_a_request_that_waits_for_its_pages(options):
    host = HostTier(PLENTY)
    ids = prompt(4 * PAGE + 1, 1)
    first = tiered([host], **options)
    first.add(0, ids, greedy(1))
    first.run()
    late = LateExecutor(random.Random(0), 0.0)
    driver = tiered([host], loaders=late, timeout_s=50.0, **options)
    driver.executors = (late,)
    driver.add("held", ids, greedy(3))
    driver.add("other", prompt(20, 2), greedy(5))
    for _ in range(12):
        driver.step()
    assert driver.finished["other"].reason == "max_tokens"
    assert [sequence.request_id for sequence in driver.scheduler.waiting] == ["held"]
    assert not spans(driver, "held")
    late._rate = 1.0
    driver.run()
    assert check_tokens(driver, "held", ids, 3).cached_tokens == 4 * PAGE
    assert transfers(driver).wait_seconds > 0 and transfers(driver).timeouts == 0


@TRANSFERS
def test_a_store_that_never_answers_costs_a_recomputation(options):
    late = LateExecutor(random.Random(0), 0.0)
    driver = tiered([HostTier(PLENTY)], loaders=late, timeout_s=7.0, **options)
    driver.add(0, prompt(4 * PAGE + 1, 1), greedy(3))
    driver.run()
    assert check_tokens(driver, 0, prompt(4 * PAGE + 1, 1), 3).cached_tokens == 0
    assert transfers(driver).timeouts == 1


def test_pages_that_came_before_the_deadline_are_used():
    class Blocking(HostTier):
        def get(self, key, length):
            if len(asked) == 2:
                gate.wait(30)
            asked.append(key)
            return super().get(key, length)

    asked, gate = [], threading.Event()
    host = Blocking(PLENTY)
    ids = prompt(4 * PAGE + 1, 1)
    first = tiered([host])
    first.add(0, ids, greedy(1))
    first.run()
    asked.clear()
    loaders = ThreadPoolExecutor(1)
    driver = tiered([host], loaders=loaders, timeout_s=3.0)
    driver.add("slow", ids, greedy(3))
    while len(asked) < 2:
        driver.scheduler.schedule()
    driver.now = 100.0
    driver.run()
    gate.set()
    loaders.shutdown()
    assert check_tokens(driver, "slow", ids, 3).cached_tokens == 2 * PAGE
    assert transfers(driver).timeouts == 1


@TRANSFERS
def test_a_request_that_leaves_the_queue_leaves_its_search(options):
    late = LateExecutor(random.Random(0), 0.0)
    driver = tiered([HostTier(PLENTY)], loaders=late, timeout_s=1e9, **options)
    for name in range(LOOK_AHEAD + 2):
        driver.add(name, prompt(3 * PAGE, name), greedy(2))
    driver.step()
    assert len(driver.tiers._fetches) == LOOK_AHEAD
    for name in range(LOOK_AHEAD):
        driver.scheduler.abort(name)
    driver.step()
    late._rate = 1.0
    driver.executors = (late,)
    driver.run()
    assert {name: result.reason for name, result in driver.finished.items()} == {
        **{name: "aborted" for name in range(LOOK_AHEAD)},
        LOOK_AHEAD: "max_tokens",
        LOOK_AHEAD + 1: "max_tokens",
    }


def test_tiers_that_cannot_follow_keep_less(monkeypatch):
    monkeypatch.setattr("scheduler.tiers.page_tiers.SAVING_BYTES", 1)
    late = LateExecutor(random.Random(0), 0.0)
    driver = tiered([HostTier(PLENTY)], saver=late)
    driver.add(0, prompt(6 * PAGE, 1), greedy(3))
    driver.run()
    counters = transfers(driver)
    assert counters.pages_saved >= 1 and counters.saves_dropped >= 1
    assert counters.pages_saved + counters.saves_dropped == 6
    driver.tiers.close()
    assert driver.tiers.statistics()["tiers"]["host"]["writes"] == counters.pages_saved


def test_closing_ends_searches_and_finishes_writes():
    host = HostTier(PLENTY)
    late = LateExecutor(random.Random(0), 0.0)
    driver = tiered([host], saver=late)
    driver.add(0, prompt(3 * PAGE, 1), greedy(2))
    driver.run()
    assert host.usage()[0] == 0
    written = []
    host.close = lambda: written.append(host.usage()[0])
    driver.tiers.close()
    assert written == [3]
    driver.add(1, prompt(2 * PAGE, 2), greedy(2))
    driver.run()


def play_with_tiers(seed, shared):
    """One random history over a tier that misbehaves, behind one that holds what an earlier history left."""
    scenario = draw(seed)
    rng = random.Random(seed)
    geometry = scenario.config.geometry(scenario.view)
    scheduler = Scheduler(
        scenario.config,
        scenario.view,
        geometry,
        scenario.num_pages,
        scenario.num_slots,
        deferred=scenario.mode != "immediate",
    )
    driver = TieredDriver(scheduler, make_stub(scheduler), mode=scenario.mode, compress_ids=compress_ids)
    rate = rng.choice((0.0, 0.05, 0.4))
    small = rng.random() < 0.2
    faulty = FaultyTier(20_000 if small else PLENTY, rng, rate)
    loaders, saver = LateExecutor(rng, rng.choice((0.1, 0.5, 1.0))), LateExecutor(rng, rng.choice((0.2, 1.0)))
    tiered([shared, faulty], driver=driver, loaders=loaders, saver=saver, timeout_s=rng.choice((1.0, 4.0, 30.0)))
    driver.executors = (loaders, saver)
    drive(scenario, driver, lambda request, count: expected_tokens(request.prompt, request.images, count))
    return driver


def test_random_histories_over_faulty_tiers():
    totals = dict.fromkeys(("pages_adopted", "images_adopted", "timeouts", "pages_saved", "pages_unused"), 0)
    faults = dict.fromkeys(("corrupt", "errors", "skipped", "misses", "hits"), 0)
    for seed in range(48):
        left = HostTier(0)
        for _ in range(2):
            driver = play_with_tiers(seed, left)
            for name in totals:
                totals[name] += getattr(transfers(driver), name)
            for name in faults:
                faults[name] += driver.tiers.store.statistics()["faulty"][name]
            left = driver.tiers.store.tiers[1]
            left.name = "left"
    assert all(totals.values()), totals
    assert all(faults.values()), faults


def test_a_search_is_repeated_once_when_the_device_lost_its_part():
    """Pages on the device when the search began, evicted before the request's turn."""
    host = HostTier(PLENTY)
    driver = tiered([host], num_pages=14, max_num_seqs=1)
    ids = prompt(6 * PAGE + 1, 1)
    driver.add("cold", ids, greedy(1))
    driver.run()
    driver.add("runs", prompt(10 * PAGE, 2), SamplingParams(max_tokens=3 * PAGE, ignore_eos=True))
    driver.add("waits", ids, greedy(2))
    driver.run()
    assert check_tokens(driver, "waits", ids, 2).cached_tokens == 6 * PAGE


def test_links_use_threads_by_default():
    driver = tiered([HostTier(PLENTY)])
    tiers = PageTiers(
        driver.tiers.store, driver.tiers.layout, CacheIdentity("a", "b", "c", "d"), None, block_size=PAGE, timeout_s=1.0
    )
    assert not isinstance(tiers._loaders, InlineExecutor)
    tiers.wait()
    tiers.close()


@pytest.mark.parametrize("end", ["abort", "fail"])
def test_the_search_for_a_request_that_ends_ends_with_it(end):
    driver = tiered([HostTier(PLENTY)], loaders=LateExecutor(random.Random(0), 0.0))
    driver.add(0, prompt(3 * PAGE), greedy(2))
    driver.step()
    assert driver.tiers.searches
    if end == "abort":
        driver.scheduler.abort(0)
        driver.run()
    else:
        driver.scheduler.fail_all("lost")
    assert not driver.tiers.searches

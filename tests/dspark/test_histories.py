"""Random serving histories with drafts over the stub runner: whatever was proposed and accepted, every request ends
with the tokens of an uninterrupted run, and the invariants hold at every step."""

import collections
import dataclasses
import random

import pytest

from scheduler.buckets import verify_ladder
from scheduler.scheduled_batch import Phase
from scheduler.scheduler import Scheduler
from tests.helpers.driver import Driver
from tests.helpers.scenario import draw, drive, with_drafts
from tests.helpers.stub_engine import make_stub
from tests.helpers.stub_runner import VOCAB, compress_ids, expected_tokens

HISTORIES = 100
GROUPS = 5


class Drafter:
    """Proposals of which a random prefix is what will follow."""

    def __init__(self, scenario, width):
        self._rng = random.Random(scenario.seed)
        self._requests = {request.request_id: request for request in scenario.requests}
        self._width = width
        self._truth = {}

    def __call__(self, sequence):
        name = sequence.request_id
        if name not in self._truth:
            request = self._requests[name]
            count = request.sampling.max_tokens + self._width
            self._truth[name] = expected_tokens(request.prompt, request.images, count)
        ahead = self._truth[name][sequence.num_output_tokens :][: self._width]
        tokens = ahead[: self._rng.randint(0, self._width)]
        right = self._rng.randint(0, len(tokens))
        return tokens[:right] + [(token + 1) % VOCAB for token in tokens[right:]]


def play(seed, width=5, **options):
    scenario = with_drafts(draw(seed, **options), width)
    rng = random.Random(seed + 1)
    config = scenario.config
    geometry = config.geometry(scenario.view)
    scheduler = Scheduler(config, scenario.view, geometry, scenario.num_pages, scenario.num_slots)
    driver = Driver(scheduler, make_stub(scheduler), compress_ids=compress_ids, drafter=Drafter(scenario, width))
    if rng.random() < 0.5:
        scheduler.verify_lengths = lambda _, limits: [rng.randint(0, limit) for limit in limits]
        driver.buckets = dataclasses.replace(driver.buckets, verify_rows=verify_ladder(width, True))
        driver._shapes = frozenset(driver.buckets.shapes(scheduler.decoder_replay))

    def expected(request, count):
        return expected_tokens(request.prompt, request.images, count)

    return drive(scenario, driver, expected), driver


@pytest.mark.parametrize("group", range(GROUPS))
def test_random_histories_with_drafts_give_the_tokens_of_uninterrupted_runs(group):
    totals, accepted = collections.Counter(), collections.Counter()
    for seed in range(group, HISTORIES, GROUPS):
        report, driver = play(seed)
        totals += collections.Counter(dataclasses.asdict(report.statistics.counters))
        totals += collections.Counter(stores=report.stores, restores=report.restores)
        for batch in driver.log:
            if batch.phase is Phase.DECODE:
                accepted.update(batch.lengths.tolist())
    names = ("preemptions", "hit_tokens", "aborted", "stale_results", "rows_replayed", "stores", "restores")
    assert all(totals[name] for name in names if name != "stale_results"), totals
    assert set(accepted) == {1, 2, 3, 4, 5, 6}
    assert 0 < totals["accepted_tokens"] < totals["draft_tokens"]


@pytest.mark.parametrize("width", [1, 2, 4])
def test_narrower_drafts(width):
    for seed in range(8):
        play(seed, width)

"""Random serving histories on the real model under every combination of the replay switches.

`pytest tests/acceptance/test_histories.py --histories 300 --seed 7` plays more of them, or others.
"""

from __future__ import annotations

import collections
import dataclasses

import pytest

from tests.acceptance.model import PAGE
from tests.acceptance.prompts import LAST
from tests.acceptance.serving import EXACT, MAX_LEN, ROWS, SLOTS
from tests.helpers.scenario import draw, drive

HISTORIES = 40
LONGEST_REPLY = 24
FOUR = [(False, False), (True, False), (False, True), (True, True)]


def drawn(seed, view, encoder, decoder):
    """A scenario that fits the shapes of the runner."""
    scenario = draw(seed, view=view, vocab=LAST, replays=(encoder, decoder), mode="plan_ahead", with_images=False)
    wanted = scenario.config
    config = dataclasses.replace(
        wanted,
        kv_cache_block_size=PAGE,
        max_num_batched_tokens=min(wanted.max_num_batched_tokens, ROWS),
        max_num_seqs=min(wanted.max_num_seqs, SLOTS),
        max_model_len=min(wanted.max_model_len, MAX_LEN),
        decode_buckets=(),
        **EXACT,
    )
    requests = []
    for request in scenario.requests:
        sampling = dataclasses.replace(request.sampling, max_tokens=min(request.sampling.max_tokens, LONGEST_REPLY))
        prompt = request.prompt[: MAX_LEN + 3]
        requests.append(dataclasses.replace(request, prompt=prompt, sampling=sampling))
    # The oracle of the replays follows slots by number.
    relocate = 0.0 if encoder or decoder else scenario.relocate
    return dataclasses.replace(
        scenario, config=config, num_slots=config.max_num_seqs, requests=tuple(requests), relocate=relocate
    )


def own_tokens(session):
    """Leaves the tokens to the comparisons with noise in mind; `drive` still checks how every request ended."""
    return lambda request, _: session.finished[request.request_id].tokens


@pytest.mark.parametrize(("encoder", "decoder"), FOUR, ids=["both off", "encoder", "decoder", "both on"])
def test_random_histories(exact, oracle_examiner, pytestconfig, encoder, decoder):
    """Both off: tokens and logits of uninterrupted runs. Otherwise: logits of the dense oracle, forward by forward."""
    count = pytestconfig.getoption("histories") or HISTORIES
    first = pytestconfig.getoption("seed") or 0
    seen = collections.Counter()
    worst = 0.0
    for seed in range(first + FOUR.index((encoder, decoder)), first + count, len(FOUR)):
        scenario = drawn(seed, exact.view, encoder, decoder)
        options = {name: getattr(scenario.config, name) for name in exact.changeable if name != "num_pages"}
        session = exact.session(num_pages=scenario.num_pages, num_slots=scenario.num_slots, **options)
        examiner = oracle_examiner()
        if encoder or decoder:
            session.watch.examiners.append(examiner)
        report = drive(
            scenario, session, lambda request, _, session=session: session.finished[request.request_id].tokens
        )
        if encoder or decoder:
            delivered = sum(len(result.tokens) for result in report.finished.values())
            assert examiner.compared >= delivered
            worst = max(worst, examiner.worst)
        else:
            session.assert_expected()
            worst = max(worst, session.watch.worst)
        seen += collections.Counter({"histories": 1, "steps": len(session.log)})
        seen += collections.Counter(dataclasses.asdict(report.statistics.counters))
        seen += collections.Counter(restores=report.restores)
    print(dict(seen), f"worst error {worst:.2g}")
    if count >= HISTORIES:
        for name in ("preemptions", "aborted", "hit_tokens"):
            assert seen[name], f"no history has {name}"

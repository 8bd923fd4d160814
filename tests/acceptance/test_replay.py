"""Bounded replay: every row that gives a token equals the dense oracle's (scenarios A16, A17, A19-A21, A27)."""

from __future__ import annotations

import numpy as np
import pytest

from scheduler.scheduled_batch import Phase
from tests.acceptance.model import BOUNDARY, PAGE, WINDOW
from tests.acceptance.prompts import random_prompt
from tests.acceptance.serving import ROWS


def switches(encoder, decoder):
    return {"encoder_swa_bounded_replay": encoder, "decoder_swa_bounded_replay": decoder}


BOTH = switches(True, True)
DECODER = switches(False, True)
CHUNKED = {"long_prefill_token_threshold": PAGE, "max_num_batched_tokens": 2 * PAGE}
FOUR = pytest.mark.parametrize(
    "options",
    [switches(encoder, decoder) for encoder in (False, True) for decoder in (False, True)],
    ids=["both off", "decoder", "encoder", "both on"],
)


@pytest.fixture
def start(exact, oracle_examiner):
    """Starts a session that the oracle follows."""

    def make(options, **more):
        session = exact.session(**{**options, **more})
        session.watch.examiners.append(oracle_examiner())
        return session

    return make


def assert_followed(session):
    """The oracle saw at least every token that was delivered."""
    delivered = sum(len(result.tokens) for result in session.finished.values())
    assert session.watch.examiners[0].compared >= delivered > 0


@FOUR
def test_the_four_combinations(start, options):
    """A27: chunks, company, a fork, a preemption in prefill and one in decode, a cancellation."""
    session = start(options, **CHUNKED)
    prompt = random_prompt(110, 1)
    session.add("cold", prompt, 4)
    session.add("short", random_prompt(21, 2), 6)
    session.run()
    session.add("fork", prompt, 6)
    session.add("other", (*prompt[:70], *random_prompt(80, 3)), 5)
    session.add("gone", random_prompt(90, 4), 5)
    session.until(lambda: session.computed("other") >= 96)
    session.scheduler.preempt("other")
    session.until(lambda: len(session.tokens("fork")) >= 3)
    session.scheduler.preempt("fork")
    session.scheduler.abort("gone")
    session.run()
    assert session.finished["fork"].cached_tokens == 96
    assert len(session.finished["fork"].tokens) == 6 and len(session.finished["other"].tokens) == 5
    assert_followed(session)
    if not any(options.values()):
        session.assert_expected("cold", "short", "fork", "other")


@pytest.mark.parametrize("options", [BOTH, DECODER], ids=["both on", "decoder"])
@pytest.mark.parametrize("rest", [1, 5, WINDOW - 1])
def test_a_final_chunk_shorter_than_a_window(start, options, rest):
    """A16: it starts one whole block further down, on the grid, and keeps the encoder's rings (the watch compares)."""
    session = start(options, **CHUNKED, state_checkpoint_interval_tokens=0)
    session.add(0, random_prompt(3 * PAGE + rest, 10 + rest), 3)
    session.run()
    assert session.forwards(0)[-3] == (2 * PAGE, 3 * PAGE, 3 * PAGE + rest)
    assert_followed(session)


def test_a_final_chunk_that_resumes_off_the_grid(start):
    """A16, with a pair that straddles the resume point."""
    session = start(BOTH)
    session.add(0, random_prompt(80, 20), 3)
    session.cap(77)
    session.step()
    session.run()
    assert session.forwards(0)[:2] == [(0, 0, 77), (32, 77, 80)]
    assert_followed(session)


@pytest.mark.parametrize("suffix", [1, 2, 7, WINDOW - 1])
def test_a_hit_with_a_short_suffix(start, suffix):
    """A17: the rebuilt block gives the decoder its rows."""
    session = start(BOTH)
    prompt = random_prompt(4 * PAGE, 30)
    session.add("cold", prompt, 1)
    session.run()
    for blocks in (1, 3):
        session.add(blocks, (*prompt[: blocks * PAGE], *random_prompt(suffix, 31)), 3)
        session.run()
        assert session.finished[blocks].cached_tokens == blocks * PAGE
        assert session.forwards(blocks)[0] == ((blocks - 1) * PAGE, blocks * PAGE, blocks * PAGE + suffix)
    assert_followed(session)


def test_a_request_that_the_budget_cannot_carry_waits_and_goes_first(start):
    """A19."""
    session = start(BOTH, max_num_batched_tokens=2 * PAGE)
    prompt = random_prompt(70, 40)
    session.add("cold", prompt, 1)
    session.run()
    session.add("first", random_prompt(2 * PAGE - 10, 41), 2)
    session.add("hit", prompt, 2)
    session.add("last", random_prompt(5, 42), 2)
    before = len(session.log)
    session.run()
    names = [batch.request_ids for batch in session.log[before:] if batch.phase is Phase.PREFILL]
    assert names[:2] == [("first",), ("hit", "last")]
    assert session.forwards("hit")[0] == (PAGE, 2 * PAGE, 70)
    assert_followed(session)


def test_the_cap_counts_from_the_resume_point(start):
    """A20: a back-off of a block does not eat a cap of a block."""
    session = start(BOTH, **CHUNKED)
    session.add(0, random_prompt(6 * PAGE + 3, 50), 2)
    session.run()
    for begin, resume, end in session.forwards(0):
        assert resume < end <= resume + PAGE
        assert begin == resume or begin % PAGE == 0
    assert_followed(session)


def test_chunks_that_do_not_finish_leave_the_decoder_alone(start):
    """A21: no output, no row of the decoder, and its rings keep their bytes (the watch compares)."""
    session = start(BOTH, **CHUNKED)
    session.add(0, random_prompt(5 * PAGE, 60), 2)
    session.steps(4)
    assert [len(batch.output_requests) for batch in session.log] == [0] * 4
    assert {(shape.tail, shape.outputs) for shape in session.watch.shapes} == {(True, 0)}
    rings = np.array(session.serving.runner.pools.window)[BOUNDARY:, int(session.log[0].slots[0])]
    assert np.isnan(rings).all()
    assert not session.tokens(0)
    session.run()
    assert_followed(session)


def test_only_finishing_requests_of_a_batch_have_a_row(start):
    """A22, under replay."""
    session = start(BOTH)
    session.cap(PAGE)
    for name, length in enumerate((20, 60, 90)):
        session.add(name, random_prompt(length, 70 + name), 3)
    session.run()
    assert session.log[0].is_final.tolist() == [True, False, False]
    assert_followed(session)


@pytest.mark.parametrize("lengths", [(ROWS,), (40, 60), (33, 1, 66), (7, 9, 51)])
def test_the_decoders_tail_depends_on_the_end_alone(exact, lengths):
    """Whatever the chunks were, as long as the last one holds a window (8.2, decoder replay without the encoder's)."""
    session = exact.session(**DECODER, state_checkpoint_interval_tokens=0)
    session.add(0, random_prompt(133, 80), 6)
    for length in lengths:
        session.cap(length)
        session.step()
    session.cap(0)
    session.run()
    last = session.forwards(0)[-6]
    assert last[2] - last[0] >= WINDOW and last[0] == last[1]
    session.assert_expected(decoder=True)


def test_neither_company_nor_place_changes_a_replayed_request(exact):
    """The same hit in other company, another slot and on other pages."""
    prompt = random_prompt(101, 90)
    results = []
    for company in (0, 3):
        session = exact.session(**BOTH)
        for name in range(company):
            session.add(name, random_prompt(40 + 30 * name, 91 + name), 12)
        session.add("cold", prompt, 1)
        session.until(lambda session=session: "cold" in session.finished)
        session.add("hit", prompt, 8)
        session.run()
        assert session.finished["hit"].cached_tokens == 96
        results.append((session.finished["hit"].tokens, session.logits["hit", 101]))
    assert results[0][0] == results[1][0]
    np.testing.assert_allclose(results[0][1], results[1][1], atol=1e-4)

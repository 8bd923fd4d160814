"""Requests cancelled at any point free everything and leave the others' tokens alone (scenarios A12-A14)."""

from __future__ import annotations

import pytest

from tests.acceptance.model import PAGE
from tests.acceptance.prompts import random_prompt
from tests.acceptance.serving import OFF

CHUNKED = OFF | {"long_prefill_token_threshold": PAGE, "max_num_batched_tokens": 2 * PAGE}


def test_cancelled_in_a_middle_chunk(exact):
    """A12."""
    session = exact.session(**CHUNKED)
    session.add("victim", random_prompt(150, 1), 5)
    session.until(lambda: 0 < session.computed("victim") < 100)
    assert session.scheduler.abort("victim")
    session.run()
    assert (session.finished["victim"].reason, session.finished["victim"].tokens) == ("aborted", ())
    assert session.forwards("victim")[-1][2] < 150


def test_cancelled_before_the_first_token_arrives(exact):
    """A13: the final chunk ran, its token comes too late."""
    session = exact.session(**OFF)
    session.add("victim", random_prompt(50, 2), 5)
    session.until(lambda: session.forwards("victim") and session.forwards("victim")[-1][2] == 50)
    assert not session.tokens("victim")
    session.scheduler.abort("victim")
    session.run()
    assert (session.finished["victim"].reason, session.finished["victim"].tokens) == ("aborted", ())


def test_cancelled_while_waiting(exact):
    """A14."""
    session = exact.session(**OFF, num_slots=1)
    session.add("survivor", random_prompt(40, 3), 6)
    session.add("victim", random_prompt(40, 4), 6)
    session.steps(2)
    session.scheduler.abort("victim")
    session.run()
    assert session.finished["victim"].reason == "aborted"
    assert not session.forwards("victim")
    session.assert_expected("survivor")
    assert len(session.finished["survivor"].tokens) == 6


@pytest.mark.parametrize("options", [CHUNKED, {}], ids=["copy", "replay"])
def test_cancelled_at_every_step(exact, options):
    """A14: also with pages the victim shares with a survivor."""
    session = exact.session(**options, **({} if options else {"max_num_batched_tokens": 2 * PAGE}))
    shared = random_prompt(70, 5)
    aborted = 0
    for point in range(14):
        victim, survivor = ("victim", point), ("survivor", point)
        session.add(victim, (*shared, *random_prompt(30, 60 + point)), 4)
        session.add(survivor, (*shared, *random_prompt(3, 80 + point)), 4)
        session.steps(point)
        aborted += session.scheduler.abort(victim)
        session.run()
        assert session.finished[victim].reason in ("aborted", "max_tokens")
        assert session.finished[survivor].reason == "max_tokens"
        if options:
            session.assert_expected(victim, survivor)
    assert 6 <= aborted < 14


def test_refused_and_cancelled_requests_end_once(exact):
    session = exact.session(**OFF, num_pages=3)
    session.add("long", random_prompt(321, 6), 2)
    session.add("large", random_prompt(97, 7), 2)
    session.add("fits", random_prompt(90, 8), 2)
    session.run()
    assert "321" in session.finished["long"].reason and "320" in session.finished["long"].reason
    assert "4 pages" in session.finished["large"].reason
    session.assert_expected("fits")

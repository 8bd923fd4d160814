"""Packed pools and both index planes in the released precision (scenario A26: A1-A5 again, replays off).

Every row of a step is computed the same way wherever it stands in its batch, and what a ring or a page gives back is
what went in: tokens and logits are those of uninterrupted runs here too, although a last bit would tip a stored code.
"""

from __future__ import annotations

import pytest

from scheduler.tiers.host import HostTier
from tests.acceptance.model import PAGE, WINDOW
from tests.acceptance.prompts import random_prompt
from tests.acceptance.serving import MAX_LEN, OFF, ROWS, Serving
from tests.acceptance.test_tiers import PLENTY, attach, saved

UNCUT = OFF | {"state_checkpoint_interval_tokens": 0}


@pytest.fixture(
    scope="module",
    params=[("fp4", "fp4"), ("bf16", "fp8")],
    ids=["fp4 rows, fp8 rings, fp4 keys", "bf16 rows, fp8 keys"],
)
def serving(request, checkpoint):
    main, index = request.param
    with Serving(checkpoint, kv_cache_dtype=main, index_cache_dtype=index) as serving:
        geometry = serving.geometry
        assert (geometry.main_format, geometry.index_plane_format) == (main, index)
        assert geometry.window_format == ("fp8" if main == "fp4" else "bf16")
        yield serving


def test_chunked_batched_and_reordered(serving):
    """A1."""
    session = serving.session(**OFF, long_prefill_token_threshold=PAGE, max_num_batched_tokens=2 * PAGE)
    session.add("long", random_prompt(150, 1), 6)
    session.add("short", random_prompt(70, 2), 9)
    while session.core.has_work:
        session.step()
        session.scheduler.running.reverse()
    session.run()
    session.assert_expected()
    assert {len(result.tokens) for result in session.finished.values()} == {6, 9}


@pytest.mark.parametrize("lengths", [(3, 1, WINDOW + 1, 7, WINDOW, WINDOW), (4 * WINDOW + 3,), (5,) * 20, (ROWS,)])
def test_ragged_wide_and_odd_chunks(serving, lengths):
    """A2, A3, A4."""
    session = serving.session(**UNCUT)
    session.add(0, random_prompt(ROWS + 7, 3), 4)
    for length in lengths:
        session.cap(length)
        session.step()
    session.cap(0)
    session.run()
    assert [end - start for start, _, end in session.forwards(0)][: len(lengths)] == list(lengths)
    session.assert_expected()


def test_a_fork_of_a_cached_prompt(serving):
    """A5, with images of packed rings."""
    session = serving.session(**OFF)
    prompt = random_prompt(100, 4)
    session.add("cold", prompt, 3)
    session.run()
    for name in ("left", "right"):
        session.add(name, prompt, 5)
    session.add("diverged", (*prompt[:50], *random_prompt(30, 5)), 5)
    session.run()
    assert [session.finished[name].cached_tokens for name in ("left", "right", "diverged")] == [96, 96, 32]
    assert session.restores == 3
    session.assert_expected()


def test_preempted_cancelled_and_starved(serving):
    """A10, A14, A24."""
    session = serving.session(**OFF, num_pages=9)
    for name in range(4):
        session.add(name, random_prompt(45 + 10 * name, 10 + name), 30)
    session.until(lambda: len(session.tokens(1)) >= 3)
    session.scheduler.preempt(1)
    session.steps(2)
    session.scheduler.abort(2)
    session.run()
    assert session.scheduler.counters.preemptions >= 2
    assert session.finished[2].reason == "aborted"
    session.assert_expected()


def test_a_long_context(serving):
    """A32: selections and candidates of quantized scores."""
    session = serving.session(**UNCUT)
    session.add(0, random_prompt(MAX_LEN - 20, 20), 12)
    for length in (77, 33, 90):
        session.cap(length)
        session.step()
    session.cap(0)
    session.run()
    session.assert_expected()


def test_pages_and_images_from_beyond_the_device(serving):
    """Packed planes travel as they are stored: a restarted engine gives the tokens of an uninterrupted run."""
    kept, prompt = HostTier(PLENTY), random_prompt(140, 30)
    for name, hit in (("cold", 0), ("restarted", 128)):
        session = serving.session(**OFF)
        tiers = attach(session, kept)
        session.add(name, prompt, 6)
        session.run()
        saved(tiers)
        assert session.finished[name].cached_tokens == hit
        assert tiers.counters.images_adopted == (hit > 0)
        session.assert_expected()

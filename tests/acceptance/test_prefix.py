"""Shared prefixes under both kinds of state transfer (scenarios A5-A8)."""

from __future__ import annotations

import numpy as np
import pytest

from scheduler.checkpoint_images import ImageState
from tests.acceptance.model import PAGE
from tests.acceptance.prompts import random_prompt
from tests.acceptance.serving import OFF

REPLAY = {"encoder_swa_bounded_replay": True, "decoder_swa_bounded_replay": False}
TRANSFERS = pytest.mark.parametrize("options", [OFF, REPLAY], ids=["copy", "replay"])


def examined(exact, oracle_examiner, options, **more):
    """A session; under replay every row with logits is compared with the oracle."""
    session = exact.session(**{**options, **more})
    if options["encoder_swa_bounded_replay"]:
        session.watch.examiners.append(oracle_examiner())
    return session


def check(session, options):
    """Copy gives what uninterrupted runs give; under replay the oracle was the judge."""
    if options["encoder_swa_bounded_replay"]:
        assert session.watch.examiners[0].compared >= len(session.finished)
    else:
        session.assert_expected()


@TRANSFERS
def test_a_fork_of_a_cached_prompt(exact, oracle_examiner, options):
    """A5."""
    session = examined(exact, oracle_examiner, options)
    prompt = random_prompt(100, 1)
    session.add("cold", prompt, 3)
    session.run()
    for name in ("left", "right"):
        session.add(name, prompt, 5)
    session.run()
    assert {name: result.cached_tokens for name, result in session.finished.items()} == {
        "cold": 0,
        "left": 96,
        "right": 96,
    }
    first = [session.forwards(name)[0] for name in ("left", "right")]
    if options["encoder_swa_bounded_replay"]:
        assert first == [(96 - PAGE, 96, 100)] * 2
        assert session.stores == session.restores == 0
    else:
        assert first == [(96, 96, 100)] * 2
        assert session.restores == 2
    assert session.finished["left"].tokens == session.finished["right"].tokens
    check(session, options)


@TRANSFERS
def test_a_fork_that_diverges_inside_a_block(exact, oracle_examiner, options):
    """A6: the hit ends with the last block that is equal as a whole."""
    session = examined(exact, oracle_examiner, options)
    prompt = random_prompt(140, 2)
    session.add("first", prompt, 2)
    session.run()
    for place in (97, 70, PAGE, PAGE - 1, 5):
        other = (*prompt[:place], prompt[place] ^ 1, *prompt[place + 1 :])
        session.add(place, other, 3)
        session.run()
        assert session.finished[place].cached_tokens == place // PAGE * PAGE
    check(session, options)


def test_a_hit_whose_image_is_gone(exact):
    """A7: without an image pages alone are no hit; with a lower one the hit is that far."""
    session = exact.session(**OFF)
    prompt = random_prompt(110, 3)
    session.add("cold", prompt, 3)
    session.run()
    images = session.scheduler.manager.images
    assert sorted(image.position for image in images.images()) == [32, 64, 96]
    assert all(image.state is ImageState.READY for image in images.images())
    images.drop(next(image.content_hash for image in images.images() if image.position == 96))
    session.add("lower", prompt, 3)
    session.run()
    assert session.finished["lower"].cached_tokens == 64
    images.drop_all()
    session.add("none", prompt, 3)
    session.run()
    assert session.finished["none"].cached_tokens == 0
    session.assert_expected()


@TRANSFERS
def test_a_hit_at_every_boundary(exact, oracle_examiner, options):
    """A8; the watch compares every published page's bytes at every step."""
    session = examined(exact, oracle_examiner, options)
    prompt = random_prompt(5 * PAGE + 9, 4)
    session.add(0, prompt, 2)
    session.run()
    for blocks in range(1, 6):
        for suffix in (1, 9, PAGE):
            name = blocks, suffix
            session.add(name, (*prompt[: blocks * PAGE], *random_prompt(suffix, 50 + blocks)), 2)
            session.run()
            assert session.finished[name].cached_tokens == blocks * PAGE, name
    check(session, options)


@TRANSFERS
def test_a_hit_survives_unrelated_requests(exact, oracle_examiner, options):
    session = examined(exact, oracle_examiner, options)
    prompt = random_prompt(100, 5)
    session.add("cold", prompt, 4)
    session.run()
    session.watch.examiners.clear()
    lengths = np.random.default_rng(0).integers(1, PAGE - 4, 50).tolist()
    for number, length in enumerate(lengths):
        session.add(number, random_prompt(length, 100 + number), 1 + number % 4)
    session.run()
    session.add("again", prompt, 4)
    session.run()
    assert session.finished["again"].cached_tokens == 96
    assert len(session.finished) == 52
    if options is OFF:
        session.assert_expected()
    else:
        session.assert_expected("cold", *range(50))


def test_generated_pages_are_reused(exact):
    """A conversation's next turn finds the reply's pages too."""
    session = exact.session(**OFF)
    prompt = random_prompt(50, 6)
    session.add("turn", prompt, 60)
    session.run()
    reply = session.finished["turn"].tokens
    session.add("next", (*prompt, *reply, *random_prompt(7, 7)), 4)
    session.run()
    assert session.finished["next"].cached_tokens == 96
    session.assert_expected()


def test_replay_and_copy_report_the_same_hits(exact):
    """Invariant 31, for the same cache content."""
    reported = []
    for options in (OFF, REPLAY):
        session = exact.session(**options)
        prompt = random_prompt(4 * PAGE + 3, 8)
        for name, length in enumerate((131, 131, 33, 64, 65, 97, 131)):
            session.add(name, prompt[:length], 1)
            session.run()
        reported.append([session.finished[name].cached_tokens for name in range(7)])
    assert reported[0] == reported[1] == [0, 128, 32, 32, 64, 96, 128]


def test_caching_off_reuses_nothing(exact):
    session = exact.session(enable_prefix_caching=False)
    for name in range(2):
        session.add(name, random_prompt(80, 9), 3)
        session.run()
    assert [session.finished[name].cached_tokens for name in range(2)] == [0, 0]
    session.assert_expected(decoder=True)

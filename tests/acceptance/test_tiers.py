"""Pages beyond the device on the real model: whatever a tier does, the tokens are those of runs without it.

Every session begins with poisoned pools, as a restarted engine does; the watch poisons what nobody owns at every step.
Under `copy` the comparison is with uninterrupted runs; under `replay`, where a hit changes the computation by design,
with the same hit on the device itself.
"""

from __future__ import annotations

import random
import threading
import time

import numpy as np
import pytest

from scheduler.tiers.disk import DiskTier
from scheduler.tiers.host import HostTier
from scheduler.tiers.keys import CacheIdentity
from scheduler.tiers.page_tiers import PageTiers
from scheduler.tiers.records import HEADER_BYTES
from scheduler.tiers.shared import SharedTier
from scheduler.tiers.store import TierStore
from tests.acceptance.model import PAGE
from tests.acceptance.prompts import random_prompt
from tests.acceptance.serving import OFF, TOLERANCE
from tests.acceptance.test_histories import drawn
from tests.helpers.redis_server import RedisServer
from tests.helpers.scenario import drive
from tests.helpers.tiered import FaultyTier
from v41jax.page_transfer import DevicePages

REPLAY = {"encoder_swa_bounded_replay": True, "decoder_swa_bounded_replay": True}
TRANSFERS = pytest.mark.parametrize("options", [OFF, REPLAY], ids=["copy", "replay"])
IDENTITY = CacheIdentity("model", "tokens", "layout", "computation")
PLENTY = 1 << 30
PROMPT = random_prompt(5 * PAGE + 9, 1)


def attach(session, *tiers, timeout_s=30.0):
    """Connects tiers, with threads of their own, to a session."""
    memory = DevicePages(session.serving.runner, session.serving.geometry)
    store = TierStore(tiers, memory.layout.unit_bytes)
    session.scheduler.attach(PageTiers(store, memory.layout, IDENTITY, memory, block_size=PAGE, timeout_s=timeout_s))
    return session.scheduler.tiers


def saved(tiers):
    """Waits until everything that was read back is written."""
    while tiers.statistics()["transfers"]["saving_bytes"]:
        time.sleep(0.002)


def warm_on_device(exact, options):
    """(tokens, logits) of the prompt after a hit on the device itself."""
    session = exact.session(**options)
    for name in ("cold", "warm"):
        session.add(name, PROMPT, 5)
        session.run()
    assert session.finished["warm"].cached_tokens == 5 * PAGE
    return session.finished["warm"].tokens, [session.logits["warm", len(PROMPT) + index] for index in range(5)]


def check(session, name, options, warm):
    """The request gave the tokens of a run without tiers that had the same hit."""
    if options is OFF:
        session.assert_expected(name)
    elif not session.finished[name].cached_tokens:
        session.assert_expected(name, decoder=True)
    else:
        assert session.finished[name].cached_tokens == 5 * PAGE
        assert session.finished[name].tokens == warm[0]
        for index, logits in enumerate(warm[1]):
            found = session.logits[name, len(PROMPT) + index]
            assert np.linalg.norm(found - logits) <= TOLERANCE * np.linalg.norm(logits)


@pytest.fixture
def open_tier(request, tmp_path):
    """Opens a tier as a new process would: with what the medium keeps."""
    kind, opened = request.param, []
    if kind == "host":
        kept = HostTier(PLENTY)
        yield lambda: kept
    elif kind == "disk":

        def reopen():
            for tier in opened:
                tier.close()
            opened.append(DiskTier(tmp_path, PLENTY, IDENTITY.namespace))
            return opened[-1]

        yield reopen
        opened[-1].close()
    else:
        with RedisServer(tmp_path) as server:
            yield lambda: SharedTier(server.url, 10.0, IDENTITY.namespace)


@pytest.mark.parametrize("open_tier", ["host", "disk", "shared"], indirect=True)
@TRANSFERS
def test_a_restarted_engine_finds_its_pages(exact, open_tier, options):
    warm = warm_on_device(exact, options)
    for name, hit in (("cold", 0), ("restarted", 5 * PAGE)):
        session = exact.session(**options)
        tiers = attach(session, open_tier())
        session.add(name, PROMPT, 5)
        session.run()
        assert session.finished[name].cached_tokens == hit
        check(session, name, options, warm)
        saved(tiers)
        assert tiers.counters.pages_adopted == hit // PAGE
        assert tiers.counters.images_adopted == (hit > 0 and options is OFF)
        if hit:
            assert session.restores == (options is OFF)


@TRANSFERS
def test_flipped_bits_cost_a_recomputation(exact, tmp_path, options):
    """One bit of every file."""
    tier = DiskTier(tmp_path, PLENTY, IDENTITY.namespace)
    session = exact.session(**options)
    tiers = attach(session, tier)
    session.add("cold", PROMPT, 5)
    session.run()
    saved(tiers)
    rng = random.Random(0)
    for path in tmp_path.rglob("*.page"):
        record = bytearray(path.read_bytes())
        record[rng.randrange(len(record))] ^= 1 << rng.randrange(8)
        path.write_bytes(record)
    session = exact.session(**options)
    tiers = attach(session, tier)
    session.add("damaged", PROMPT, 5)
    session.run()
    assert session.finished["damaged"].cached_tokens == 0
    check(session, "damaged", options, None)
    assert tiers.statistics()["tiers"]["disk"]["corrupt"] > 0
    saved(tiers)
    tier.close()


def test_a_store_killed_mid_request(exact, tmp_path):
    """Between the first and the second page of a search, and again while requests decode."""

    class Dying(SharedTier):
        def get(self, key, length):
            page = super().get(key, length)
            if armed:
                armed.pop()
                server.kill()
            return page

    armed = []
    with RedisServer(tmp_path) as server:
        for name in ("cold", "killed while it is read", "dead"):
            session = exact.session(**OFF, state_checkpoint_interval_tokens=PAGE)
            tiers = attach(session, Dying(server.url, 1.0, IDENTITY.namespace))
            if name.startswith("killed"):
                armed.append(True)
            session.add(name, PROMPT, 5)
            session.add("other", random_prompt(40, 3), 20)
            session.run()
            session.assert_expected()
            saved(tiers)
            assert (tiers.statistics()["tiers"]["shared"]["errors"] > 0) == (name != "cold")
            assert session.finished[name].cached_tokens == 0
        server.start()
        session = exact.session(**OFF)
        attach(session, SharedTier(server.url, 1.0, IDENTITY.namespace))
        session.add("decodes", PROMPT, 40)
        session.until(lambda: len(session.tokens("decodes")) > 10)
        server.kill()
        session.run()
        session.assert_expected()


@TRANSFERS
def test_full_tiers(exact, tmp_path, options):
    """A host tier of two pages and a disk tier of three: what is left is used as far as it goes."""
    warm = warm_on_device(exact, options)
    unit = DevicePages(exact.runner, exact.geometry).layout.unit_bytes
    tiers = (
        HostTier(2 * unit),
        DiskTier(tmp_path, 3 * (unit + HEADER_BYTES), IDENTITY.namespace),
    )
    for name in ("cold", "again", "once more"):
        session = exact.session(**options)
        link = attach(session, *tiers)
        session.add(name, PROMPT, 5)
        session.run()
        saved(link)
        assert session.finished[name].cached_tokens in (0, 5 * PAGE)
        check(session, name, options, warm)
    statistics = link.store.statistics()
    assert statistics["host"]["pages"] <= 2 and statistics["disk"]["pages"] <= 3
    assert statistics["host"]["evictions"] + statistics["disk"]["evictions"] > 0
    tiers[1].close()


@TRANSFERS
def test_decoding_goes_on_while_pages_are_fetched(exact, options):
    """A request whose search hangs waits; the one behind it runs to its end meanwhile."""

    class Gated(HostTier):
        def get(self, key, length):
            gate.wait(60)
            return super().get(key, length)

    gate = threading.Event()
    gate.set()
    tier = Gated(PLENTY)
    warm = warm_on_device(exact, options)
    session = exact.session(**options)
    tiers = attach(session, tier)
    session.add("cold", PROMPT, 5)
    session.run()
    saved(tiers)
    gate.clear()
    session = exact.session(**options)
    tiers = attach(session, tier, timeout_s=600.0)
    session.add("held", PROMPT, 5)
    session.add("passes", random_prompt(20, 4), 12)
    session.until(lambda: "passes" in session.finished)
    assert not session.tokens("held") and not session.forwards("held")
    gate.set()
    session.run()
    assert session.finished["held"].cached_tokens == 5 * PAGE
    check(session, "held", options, warm)
    assert tiers.counters.wait_seconds > 0


def test_two_engines_share_a_prefix(exact, tmp_path):
    """Both live at once over one store: what one computes the other finds, generated pages included."""
    with RedisServer(tmp_path) as server:
        left = exact.session(**OFF)
        tiers = attach(left, SharedTier(server.url, 10.0, IDENTITY.namespace))
        left.add("turn", PROMPT, 60)
        left.run()
        reply = left.finished["turn"].tokens
        saved(tiers)
        right = exact.session(**OFF)
        attach(right, HostTier(PLENTY), SharedTier(server.url, 10.0, IDENTITY.namespace))
        right.add("next", (*PROMPT, *reply, *random_prompt(7, 7)), 4)
        right.add("fork", (*PROMPT[: 3 * PAGE], *random_prompt(50, 8)), 4)
        right.run()
        assert right.finished["next"].cached_tokens == (len(PROMPT) + 59) // PAGE * PAGE
        assert right.finished["fork"].cached_tokens == 3 * PAGE
        right.assert_expected()


def test_random_histories_over_a_faulty_tier(exact):
    """Copy, uninterrupted runs as the judge; threads interleave as they like."""
    totals = dict.fromkeys(("pages_adopted", "images_adopted", "pages_saved"), 0)
    for seed in range(0, 24, 4):
        rng = random.Random(seed)
        scenario = drawn(seed, exact.view, False, False)
        options = {name: getattr(scenario.config, name) for name in exact.changeable if name != "num_pages"}
        tier = FaultyTier(PLENTY, rng, 0.05)
        for _ in range(2):
            session = exact.session(num_pages=scenario.num_pages, num_slots=scenario.num_slots, **options)
            tiers = attach(session, tier, timeout_s=0.2)
            drive(scenario, session, lambda request, _, session=session: session.finished[request.request_id].tokens)
            session.assert_expected()
            saved(tiers)
            for name in totals:
                totals[name] += getattr(tiers.counters, name)
    assert all(totals.values()), totals

"""The shared store over the Redis protocol, with a real server."""

import random
import sys
import time

import pytest

from scheduler.tiers.shared import SharedTier
from scheduler.tiers.store import PAUSE_S, TierStore
from tests.helpers.redis_server import RedisServer

SPACE = b"\1" * 32
SIZE = 5_000
TIMEOUT = 0.2


def key(number):
    return number.to_bytes(32, "big")


def page(number):
    return random.Random(number).randbytes(SIZE)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def store(server):
    server.client().flushall()
    now = [0.0]
    store = TierStore([SharedTier(server.url, TIMEOUT, SPACE)], SIZE, clock=lambda: now[0])
    store.now = now
    yield store
    store.close()


def counted(store):
    return store.statistics()["shared"]


def test_replicas_share_pages_and_models_do_not(server, store):
    store.put(key(1), page(1))
    assert store.contains(key(1)) and not store.contains(key(2))
    for space, found in ((SPACE, page(1)), (b"\2" * 32, None)):
        address = server.url.replace("redis://", "valkey://")
        other = TierStore([SharedTier(address, TIMEOUT, space)], SIZE)
        assert other.get(key(1)) == found
        assert other.get(key(2)) is None
        other.close()
    store.put(key(1), page(1))
    assert counted(store)["writes"] == 1
    assert server.client().dbsize() == 1


@pytest.mark.parametrize("damage", ["bit", "cut", "swapped", "other"])
def test_a_damaged_value_is_a_miss_and_is_removed(server, store, damage):
    for number in (1, 2):
        store.put(key(number), page(number))
    client = server.client()
    name, other = (b"v41jax:" + SPACE.hex()[:32].encode() + b":" + key(number) for number in (1, 2))
    value = client.get(name)
    flipped = bytearray(value)
    flipped[random.Random(0).randrange(len(value))] ^= 4
    client.set(name, {"bit": bytes(flipped), "cut": value[:-1], "swapped": client.get(other), "other": b"x"}[damage])
    assert store.get(key(1)) is None
    assert (counted(store)["corrupt"], counted(store)["errors"]) == (1, 0)
    assert not client.exists(name)
    assert store.get(key(2)) == page(2)


def test_a_store_that_dies_is_left_alone_and_used_again_when_it_is_back(tmp_path):
    with RedisServer(tmp_path) as server:
        now = 0.0
        store = TierStore([SharedTier(server.url, TIMEOUT, SPACE)], SIZE, clock=lambda: now)
        store.put(key(1), page(1))
        server.kill()
        assert store.get(key(1)) is None and store.get(key(1)) is None
        store.put(key(2), page(2))
        assert (counted(store)["errors"], counted(store)["skipped"]) == (1, 2)
        server.start()
        now = PAUSE_S + 1
        assert store.get(key(1)) is None and counted(store)["misses"] == 1
        store.put(key(2), page(2))
        assert store.get(key(2)) == page(2)
        store.close()


def test_a_store_that_hangs_costs_its_timeout_once(server, store):
    store.put(key(1), page(1))
    server.freeze()
    try:
        began = time.monotonic()
        assert [store.get(key(1)) for _ in range(50)] == [None] * 50
        assert TIMEOUT <= time.monotonic() - began < 20
        assert (counted(store)["errors"], counted(store)["skipped"]) == (1, 49)
    finally:
        server.freeze(False)
    store.now[0] = PAUSE_S + 1
    assert store.get(key(1)) == page(1)


def test_a_full_store_is_an_error(tmp_path):
    with RedisServer(tmp_path, "--maxmemory", "100kb", "--maxmemory-policy", "noeviction") as server:
        store = TierStore([SharedTier(server.url, 5.0, SPACE)], SIZE)
        store.put(key(1), page(1))
        assert counted(store)["errors"] == 1 and counted(store)["writes"] == 0
        store.close()


def test_no_server_and_no_client(monkeypatch):
    store = TierStore([SharedTier("redis://127.0.0.1:1/0", TIMEOUT, SPACE)], SIZE)
    assert store.get(key(1)) is None and counted(store)["errors"] == 1
    store.close()
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(ValueError, match=r"install v41jax\[tiers\]"):
        SharedTier("redis://127.0.0.1:1/0", TIMEOUT, SPACE)

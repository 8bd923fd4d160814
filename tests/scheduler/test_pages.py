"""Page ids, chained hashes and the order in which pages are taken."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from scheduler.pages import NO_HASH, BlockPool, block_content, block_hash, chained_hash
from scheduler.sequence import ImageSpan, SamplingParams, Sequence

BLOCK = 32


def sequence(tokens, images=(), request_id=0):
    return Sequence(request_id, tokens, SamplingParams(), images)


def hashes(item, blocks):
    return [block_hash(item, block, BLOCK) for block in range(blocks)]


def test_the_hash_of_a_block_depends_on_every_block_before_it():
    tokens = np.arange(96)
    other = tokens.copy()
    other[3] = 77
    first, second = hashes(sequence(tokens), 3), hashes(sequence(other), 3)
    assert all(a != b for a, b in zip(first, second))
    assert len(set(first)) == 3
    changed_late = tokens.copy()
    changed_late[95] = 0
    assert hashes(sequence(changed_late), 3)[:2] == first[:2]


def test_the_first_block_has_no_parent_prefix():
    content = block_content(sequence(np.arange(32)), 0, BLOCK)
    assert content == np.arange(32, dtype="<i4").tobytes()
    assert block_hash(sequence(np.arange(32)), 0, BLOCK) == chained_hash(NO_HASH, content)
    assert chained_hash(NO_HASH, content) != chained_hash(0, content)


def test_a_block_with_a_token_in_flight_cannot_be_hashed():
    item = sequence(np.arange(31))
    item.append_placeholder()
    with pytest.raises(RuntimeError, match="31 finalized tokens"):
        block_hash(item, 0, BLOCK)


def test_images_key_the_blocks_they_meet_and_leave_the_text_before_them_shared():
    tokens = np.full(128, 7)
    one = hashes(sequence(tokens, (ImageSpan(40, 30, b"one"),)), 4)
    two = hashes(sequence(tokens, (ImageSpan(40, 30, b"two"),)), 4)
    again = hashes(sequence(tokens, (ImageSpan(40, 30, b"one"),)), 4)
    moved = hashes(sequence(tokens, (ImageSpan(41, 30, b"one"),)), 4)
    assert one == again
    assert one[0] == two[0] == moved[0]
    assert all(a != b for a, b in zip(one[1:], two[1:]))
    assert all(a != b for a, b in zip(one[1:], moved[1:]))


def test_lookup_verifies_tokens_and_not_only_the_hash():
    pool = BlockPool(2)
    page = pool.take()
    pool.publish(page, 123, b"tokens")
    assert pool.lookup(123, b"tokens") == page
    assert pool.lookup(123, b"others") is None


def test_vacant_pages_go_first_by_id_then_cached_ones_by_age():
    pool = BlockPool(4)
    pages = [pool.take() for _ in range(4)]
    assert pages == [0, 1, 2, 3]
    for page in (1, 3):
        pool.publish(page, 100 + page, bytes([page]))
    pool.release([3, 1, 2, 0])
    assert (pool.num_vacant, pool.num_cached) == (2, 2)
    assert [pool.take() for _ in range(2)] == [0, 2]
    assert pool.lookup(103, b"\x03") == 3
    assert [pool.take() for _ in range(2)] == [3, 1]
    assert pool.lookup(103, b"\x03") is None
    with pytest.raises(RuntimeError, match="no page is free"):
        pool.take()


def test_freeing_keeps_content_and_a_claim_saves_it_from_eviction():
    pool = BlockPool(2)
    page = pool.take()
    pool.publish(page, 5, b"x")
    pool.release([page])
    pool.claim(pool.lookup(5, b"x"))
    assert pool.take() == 1
    assert pool.num_free == 0
    assert pool.lookup(5, b"x") == page


def test_shared_pages_are_freed_with_the_last_reference():
    pool = BlockPool(1)
    page = pool.take()
    pool.publish(page, 5, b"x")
    pool.claim(page)
    pool.release([page])
    assert pool.num_free == 0
    pool.release([page])
    assert pool.num_cached == 1
    with pytest.raises(RuntimeError, match="nobody references"):
        pool.release([page])


def test_a_duplicate_is_annotated_and_worth_nothing_once_free():
    pool = BlockPool(3)
    first, second = pool.take(), pool.take()
    pool.publish(first, 9, b"x")
    pool.publish(second, 9, b"x")
    assert pool.index[9] == first
    assert pool.parent_hash(second) == 9
    pool.release([second])
    assert pool.num_cached == 0
    assert pool.hashes[second] == NO_HASH
    assert pool.lookup(9, b"x") == first


def test_a_duplicate_inherits_the_entry_of_an_evicted_page():
    pool = BlockPool(2)
    first, second = pool.take(), pool.take()
    pool.publish(first, 9, b"x")
    pool.publish(second, 9, b"x")
    pool.release([first])
    assert pool.take() == first  # evicts the entry; the annotated page is still in use
    assert pool.lookup(9, b"x") is None
    pool.release([second])
    assert pool.lookup(9, b"x") == second


def test_evicting_reports_the_hash_exactly_when_the_entry_goes():
    gone = []
    pool = BlockPool(1, gone.append)
    page = pool.take()
    pool.publish(page, 9, b"x")
    pool.release([page])
    assert gone == []
    pool.take()
    assert gone == [9]


def test_a_published_page_never_gets_another_hash():
    pool = BlockPool(1)
    page = pool.take()
    pool.publish(page, 9, b"x")
    with pytest.raises(RuntimeError, match="cannot change"):
        pool.publish(page, 10, b"y")


def test_raw_storage_takes_distinct_pages_and_returns_them_vacant():
    pool = BlockPool(4)
    used = pool.take()
    units = pool.reserve_raw(3)
    assert len(set(units)) == 3
    assert used not in units
    assert pool.raw_pages() == tuple(sorted(units))
    with pytest.raises(RuntimeError, match="3 pages are wanted"):
        pool.reserve_raw(3)
    pool.release_raw(units)
    assert pool.num_vacant == 3
    with pytest.raises(RuntimeError, match="no raw storage"):
        pool.release_raw([units[0]])


class PoolMachine(RuleBasedStateMachine):
    """Random takes, claims, publications and releases against a plain model of who references what."""

    def __init__(self):
        super().__init__()
        self.pool = BlockPool(6)
        self.held = []
        self.raw = []

    @precondition(lambda self: self.pool.num_free)
    @rule()
    def take(self):
        self.held.append(self.pool.take())

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data):
        page = data.draw(st.sampled_from(self.held))
        self.held.remove(page)
        self.pool.release([page])

    @precondition(lambda self: self.held)
    @rule(data=st.data(), key=st.integers(0, 3))
    def publish(self, data, key):
        page = data.draw(st.sampled_from(self.held))
        if self.pool.hashes[page] == NO_HASH:
            self.pool.publish(page, key, bytes([key]))

    @rule(key=st.integers(0, 3))
    def claim(self, key):
        page = self.pool.lookup(key, bytes([key]))
        if page is not None:
            self.pool.claim(page)
            self.held.append(page)

    @precondition(lambda self: self.pool.num_free >= 2)
    @rule()
    def reserve(self):
        self.raw.append(self.pool.reserve_raw(2))

    @precondition(lambda self: self.raw)
    @rule()
    def release_raw(self):
        self.pool.release_raw(self.raw.pop())

    @invariant()
    def every_page_is_in_one_state(self):
        pool = self.pool
        assert all(pool.refs[page] == self.held.count(page) for page in range(6))
        groups = [pool.vacant_pages(), pool.cached_pages(), pool.raw_pages(), tuple(set(self.held))]
        assert sorted(page for group in groups for page in group) == list(range(6))
        assert sorted(pool.raw_pages()) == sorted(page for units in self.raw for page in units)
        for content_hash, page in pool.index.items():
            assert pool.hashes[page] == content_hash
        assert all(pool.index.get(pool.hashes[page]) == page for page in pool.cached_pages())
        assert all(pool.hashes[page] == NO_HASH for page in pool.vacant_pages())


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPoolMachine = PoolMachine.TestCase

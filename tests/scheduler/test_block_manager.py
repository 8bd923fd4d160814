"""Admission, growth, publication and release of one request's memory."""

import pytest

from scheduler.block_manager import BlockManager
from scheduler.pages import NO_HASH
from scheduler.pool_geometry import V41PoolGeometry
from scheduler.sequence import Sequence
from scheduler.states import CheckpointSpec, StateMaintenanceOps, StateTransfer
from tests.helpers.stub_engine import PAGE, prompt

GEOMETRY = V41PoolGeometry(
    layers=12, owners=((2, 2), (4, 2), (6, 1)), block_size=PAGE, window_size=32, head_dim=64, index_dim=32
)
UNITS = 2


def make(num_pages=12, transfer="replay", caching=True):
    kinds = {
        "replay": StateTransfer.replay(),
        "none": StateTransfer.none(),
        "copy": StateTransfer.copy(CheckpointSpec("layout", 1000, UNITS)),
    }
    return BlockManager(GEOMETRY, num_pages, 4, kinds[transfer], caching, 12)


def admit(manager, sequence, length=None):
    """Allocates `length` tokens and returns (hit, restore)."""
    length = length or sequence.num_finalized_tokens
    hit = manager.find_hit(sequence, length)
    assert manager.can_allocate(hit, length)
    restore = manager.allocate(sequence, hit, length)
    sequence.num_hashed_tokens = hit.tokens
    return hit, restore


def warm(manager, ids, images_at=()):
    """Leaves published pages, and READY images at the given boundaries."""
    sequence = Sequence("warm", ids)
    admit(manager, sequence)
    manager.publish(sequence, len(ids))
    for position in images_at:
        op = manager.images.store(sequence.block_hashes[position // PAGE - 1], position, sequence.slot)
        manager.images.complete(StateMaintenanceOps(stores=(op,)))
    manager.free(sequence)


def test_all_pages_of_a_prompt_are_taken_at_once():
    manager = make()
    sequence = Sequence("a", prompt(70))
    hit, restore = admit(manager, sequence)
    assert (hit.tokens, restore) == (0, None)
    assert sequence.block_table == [0, 1, 2]
    assert manager.tables[sequence.slot].tolist() == [0, 1, 2] + [0] * 9
    manager.grow(sequence, 96)
    assert len(sequence.block_table) == 3
    manager.grow(sequence, 97)
    assert sequence.block_table == [0, 1, 2, 3]
    manager.free(sequence)
    assert (manager.pool.num_vacant, manager.slots.num_free) == (12, 4)
    assert not manager.tables.any()


def test_the_end_of_a_prefix_is_evicted_before_its_beginning():
    manager = make(num_pages=4)
    warm(manager, prompt(128))
    other = Sequence("b", prompt(64, 1))
    admit(manager, other)
    manager.free(other)
    assert manager.find_hit(Sequence("again", prompt(128)), 128).tokens == 64


def test_free_pages_of_a_hit_still_count_as_demand():
    manager = make(num_pages=5)
    warm(manager, prompt(70))
    holder = Sequence("holder", prompt(64, 1))
    admit(manager, holder)
    sequence = Sequence("a", prompt(70)[:65])
    hit = manager.find_hit(sequence, 65)
    assert hit.tokens == 64
    assert manager.pool.num_free == 3
    assert manager.can_allocate(hit, 96)
    assert not manager.can_allocate(hit, 97), "two free pages of the hit leave the free list when they are claimed"
    admit(manager, sequence)
    second = Sequence("b", prompt(70)[:65])
    shared = manager.find_hit(second, 65)
    assert not manager.can_allocate(shared, 65), "one fresh page is needed and none is free"
    assert manager.can_allocate(shared, 64)


def test_the_image_to_restore_does_not_count_as_evictable():
    manager = make(num_pages=6, transfer="copy")
    warm(manager, prompt(70), images_at=(64,))
    sequence = Sequence("a", prompt(70))
    hit = manager.find_hit(sequence, 70)
    assert (hit.tokens, manager.pool.num_free) == (64, 4)
    holder = Sequence("holder", prompt(40, 1))
    admit(manager, holder)
    assert manager.pool.num_free == 2
    assert manager.find_hit(sequence, 70).tokens == 64
    assert manager.available_pages() == 4
    assert not manager.can_allocate(manager.find_hit(sequence, 70), 70)
    assert manager.can_allocate(manager.find_hit(Sequence("b", prompt(70, 2)), 70), 70)


def test_the_restore_is_pinned_before_a_fresh_page_could_evict_the_image():
    manager = make(num_pages=7, transfer="copy")
    warm(manager, prompt(70), images_at=(64, 32))
    manager.pool.take()
    assert (manager.pool.num_free, manager.pool.num_raw) == (2, 4)
    # Two of three pages are claimed; the fresh one has to evict an image: not the older one, which is restored.
    sequence = Sequence("a", prompt(70))
    hit, restore = admit(manager, sequence)
    assert hit.tokens == 64
    assert manager.images.is_ready(hit.image_hash)
    assert [image.position for image in manager.images.images()] == [64]
    assert (restore.slot, restore.position) == (sequence.slot, 64)


def test_a_hit_rewinds_to_the_rightmost_lower_image():
    manager = make(transfer="copy")
    warm(manager, prompt(130), images_at=(32, 96))
    assert manager.find_hit(Sequence("a", prompt(130)), 130) == (
        96,
        (0, 1, 2),
        manager.images.images()[1].content_hash,
        128,
    )
    assert manager.find_hit(Sequence("a", prompt(90)), 90).tokens == 32
    manager.images.drop_all()
    hit = manager.find_hit(Sequence("a", prompt(130)), 130)
    assert (hit.tokens, hit.pages, hit.image_hash, hit.demand) == (0, (), NO_HASH, 128)


def test_demand_is_declined_where_request_and_image_cannot_live_together():
    manager = make(num_pages=6, transfer="copy")
    warm(manager, prompt(130))
    assert manager.find_hit(Sequence("a", prompt(128)), 128).demand == 96
    assert manager.find_hit(Sequence("a", prompt(130)), 130).demand == 0


@pytest.mark.parametrize(("transfer", "caching"), [("none", True), ("replay", False), ("copy", False)])
def test_without_caching_nothing_is_published_or_reused(transfer, caching):
    manager = make(transfer=transfer, caching=caching)
    warm(manager, prompt(130))
    assert manager.pool.num_cached == 0
    assert manager.images is None
    assert manager.find_hit(Sequence("a", prompt(130)), 130).tokens == 0


def test_only_full_computed_blocks_are_published():
    manager = make()
    sequence = Sequence("a", prompt(100))
    admit(manager, sequence)
    manager.publish(sequence, 63)
    assert sequence.num_hashed_tokens == 32
    manager.publish(sequence, 64)
    assert sequence.num_hashed_tokens == 64
    sequence.append_placeholder()
    manager.publish(sequence, 101)
    assert sequence.num_hashed_tokens == 96
    assert len(manager.pool.index) == 3


def test_a_missing_parent_stops_publication():
    manager = make()
    sequence = Sequence("a", prompt(100))
    admit(manager, sequence)
    sequence.num_hashed_tokens = 32
    manager.publish(sequence, 100)
    assert manager.pool.index == {}


def test_moved_slots_carry_their_tables():
    manager = make()
    first, second = Sequence("a", prompt(40)), Sequence("b", prompt(70, 1))
    admit(manager, first)
    admit(manager, second)
    manager.move_slots({0: 1, 1: 3})
    assert manager.tables[1, :2].tolist() == first.block_table
    assert manager.tables[3, :3].tolist() == second.block_table
    assert not manager.tables[0].any()
    assert manager.slots.free_slots() == (0, 2)

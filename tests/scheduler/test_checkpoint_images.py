"""Life of checkpoint images: COPYING, READY, EVICTING, pins, unit accounting, and the ladder."""

import pytest

from scheduler.checkpoint_images import CheckpointImages, CheckpointLadder, ImageState
from scheduler.pages import BlockPool
from scheduler.states import CheckpointSpec, StateMaintenanceOps

SPEC = CheckpointSpec("layout", 1000, 2)


def make(pages=6):
    pool = BlockPool(pages)
    images = CheckpointImages(SPEC, pool)
    pool.on_evict = images.drop
    return pool, images


def stored(images, content_hash, position=32, slot=0):
    op = images.store(content_hash, position, slot)
    images.complete(StateMaintenanceOps(stores=(op,)))
    return op


def test_an_image_is_ready_only_when_its_batch_completed():
    pool, images = make()
    op = images.store(7, 64, 1)
    assert (op.slot, op.position, op.layout_id, op.image_bytes, len(op.units)) == (1, 64, "layout", 1000, 2)
    assert not images.is_ready(7)
    assert images.evictable_units() == 0
    images.complete(StateMaintenanceOps(stores=(op,)))
    assert images.is_ready(7)
    assert pool.num_raw == 2


def test_a_second_store_under_one_hash_does_nothing():
    _, images = make()
    op = images.store(7, 64, 1)
    assert images.store(7, 64, 2) is None
    images.complete(StateMaintenanceOps(stores=(op,)))
    assert images.store(7, 64, 2) is None


def test_a_store_evicts_the_least_recently_used_image():
    _, images = make(pages=4)
    stored(images, 1)
    stored(images, 2)
    images.complete(StateMaintenanceOps(restores=(images.pin(1, 0),)))  # 1 is now the most recent
    stored(images, 3)
    assert images.is_ready(1)
    assert not images.is_ready(2)


def test_a_store_is_refused_before_anything_is_destroyed():
    pool, images = make(pages=6)
    stored(images, 1)
    stored(images, 2)
    images.pin(1, 0)
    pool.reserve_raw(1)
    assert (pool.num_free, images.evictable_units()) == (1, 2)
    assert images.store(3, 64, 0) is not None, "one free unit and an evictable image are enough"
    assert not images.is_ready(2)
    pool.take()
    assert images.store(4, 64, 0) is None
    assert images.is_ready(1)
    assert pool.num_free == 0


def test_evicting_the_covering_page_drops_the_image():
    pool, images = make(pages=3)
    page = pool.take()
    pool.publish(page, 7, b"x")
    stored(images, 7)
    pool.release([page])
    assert pool.take() == page
    assert not images.is_ready(7)
    assert pool.num_vacant == 2


def test_units_of_an_evicted_image_wait_for_store_and_pins():
    pool, images = make()
    op = images.store(7, 32, 0)
    images.drop(7)
    assert pool.num_raw == 2, "a store in flight still writes the units"
    images.complete(StateMaintenanceOps(stores=(op,)))
    assert pool.num_raw == 0

    stored(images, 8)
    first, second = images.pin(8, 0), images.pin(8, 1)
    assert first.image == second.image
    images.drop(8)
    images.unpin(first)
    assert pool.num_raw == 2
    images.complete(StateMaintenanceOps(restores=(second,)))
    assert pool.num_raw == 0
    assert images.num_pins == 0


def test_pinned_and_copying_images_are_never_evicted():
    _, images = make()
    stored(images, 1)
    images.pin(1, 0)
    images.store(2, 64, 0)
    assert not images.evict_one()
    assert images.evictable_units() == 0
    stored(images, 3)
    assert images.evictable_units() == 2
    assert images.evictable_units(excluding=3) == 0
    assert images.evict_one()
    left = {image.content_hash: image.state for image in images.images()}
    assert left == {1: ImageState.READY, 2: ImageState.COPYING}


def test_image_rows_are_reused():
    _, images = make(pages=2)
    assert images.capacity == 1
    assert stored(images, 1).image == 0
    assert stored(images, 2).image == 0
    assert not images.is_ready(1)


def test_a_batch_that_never_completes_takes_along_what_it_was_to_store():
    pool, images = make()
    stored(images, 1)
    restore, copying, evicting = images.pin(1, 0), images.store(2, 64, 0), images.store(3, 64, 1)
    images.drop(3)
    images.abandon(StateMaintenanceOps(stores=(copying, evicting), restores=(restore,)))
    assert [(image.content_hash, image.state) for image in images.images()] == [(1, ImageState.READY)]
    assert (images.num_in_flight, images.num_pins, images.stored, pool.num_raw) == (0, 0, 1, 2)
    assert {stored(images, content_hash).image for content_hash in (2, 3)} == {copying.image, evicting.image}


def test_ladder_cuts_at_rungs_demand_and_prompt_end():
    ladder = CheckpointLadder(128, 32)
    assert ladder.next_cut(0, 300) == 128
    assert ladder.next_cut(128, 300) == 256
    assert ladder.next_cut(256, 300) == 288  # last boundary that an equal prompt could hit
    assert ladder.next_cut(288, 300) == 0
    assert ladder.next_cut(0, 300, demand=96) == 96
    assert ladder.next_cut(96, 300, demand=96) == 128


def test_ladder_keeps_exactly_where_it_cuts():
    for interval in (32, 64, 128, -1, 0):
        ladder = CheckpointLadder(interval, 32)
        for goal in (31, 32, 33, 64, 100, 257):
            for demand in (0, 32, 96):
                position, cuts = 0, []
                while (cut := ladder.next_cut(position, goal, demand)) > 0:
                    cuts.append(cut)
                    position = cut
                kept = [end for end in range(1, goal + 1) if ladder.keeps_prefill(end, goal, demand)]
                assert cuts == kept
                assert all(cut % 32 == 0 for cut in cuts)


def test_ladder_off_and_without_rungs():
    assert CheckpointLadder(0, 32).next_cut(0, 300, demand=96) == 0
    assert CheckpointLadder(-1, 32).next_cut(0, 300) == 288
    assert CheckpointLadder(-1, 32).next_cut(0, 300, demand=96) == 96
    assert not CheckpointLadder(-1, 32).keeps_decode(64, 0)
    with pytest.raises(ValueError, match="interval 33"):
        CheckpointLadder(33, 32)


def test_decode_keeps_a_boundary_one_interval_past_the_last():
    ladder = CheckpointLadder(64, 32)
    assert not ladder.keeps_decode(96, 64)
    assert ladder.keeps_decode(128, 64)
    assert ladder.keeps_decode(160, 64)
    assert not ladder.keeps_decode(129, 64)

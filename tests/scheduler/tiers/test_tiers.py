"""Records, the host and the disk tier, and what a store makes of tiers that fail."""

import json
import os
import random

import pytest

from scheduler.pool_geometry import V41PoolGeometry
from scheduler.sequence import ImageSpan, Sequence
from scheduler.tiers.disk import DiskTier
from scheduler.tiers.host import HostTier
from scheduler.tiers.keys import CacheIdentity, image_keys, page_keys
from scheduler.tiers.layout import TransferLayout
from scheduler.tiers.records import HEADER_BYTES, CorruptRecordError, decode_record, encode_record
from scheduler.tiers.store import PAUSE_S, TierStore

SPACE = b"\1" * 32
SIZE = 100


def key(number):
    return number.to_bytes(32, "big")


def page(number):
    return random.Random(number).randbytes(SIZE)


def files(directory):
    return sorted(path for path in directory.rglob("*") if path.is_file() and path.name != "lock")


# Bytes and names -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "unit", "image"),
    [
        ({}, 369_920, 5_242_912),
        ({"index_format": "fp4"}, 349_440, 5_242_912),
        ({"packed": True}, 134_400, 2_703_392),
        ({"packed": True, "index_format": "fp4"}, 113_920, 2_703_392),
        ({"speculative_tokens": 5}, 369_920, 5_856_288),
    ],
)
def test_the_layout_has_the_bytes_of_the_released_pools(options, unit, image):
    """Numbers of the runtime specification, "Geometry declaration (`V41PoolGeometry`)"."""
    geometry = V41PoolGeometry(40, ((2, 2), (8, 2), (14, 2), (20, 1)), 128, 128, 512, 128, **options)
    layout = TransferLayout.of(geometry)
    assert (layout.unit_bytes, layout.image_bytes) == (unit, image)
    names = [span.name for span in layout.page]
    assert names[:4] == [f"main[{index}]" for index in range(4)]
    assert names[4:] == [f"index_{part}[{index}]" for index in range(4) for part in ("values", "scales")]
    assert [span.offset for span in layout.page[1:]] == [span.offset + span.bytes for span in layout.page[:-1]]
    assert layout.image_segments == geometry.units_per_image
    assert geometry.layout_id in layout.layout_id
    published = json.loads(json.dumps(layout.published(copies_state=True)))
    assert published["image_bytes"] == image and len(published["page"]) == 12
    assert layout.published(copies_state=False)["image"] == []


def test_an_image_comes_back_from_its_pieces():
    layout = TransferLayout.of(V41PoolGeometry(4, ((1, 2), (2, 1)), 32, 32, 64, 32))
    image = random.Random(0).randbytes(layout.image_bytes)
    pieces = layout.cut_image(image)
    assert [len(piece) for piece in pieces] == [layout.unit_bytes] * layout.image_segments
    assert layout.join_image(pieces) == image
    with pytest.raises(ValueError, match="bytes is not one of"):
        layout.cut_image(image[1:])


def test_names_depend_on_everything_below_and_on_the_identity():
    identity = CacheIdentity("m", "t", "l", "c")
    ids = list(range(70, 166))
    names = page_keys(identity.namespace, Sequence(0, ids), 3, 32)
    assert len(set(names)) == 3
    assert page_keys(identity.namespace, Sequence(1, [*ids[:64], *reversed(ids[64:])]), 3, 32)[:2] == names[:2]
    changed = page_keys(identity.namespace, Sequence(2, [7, *ids[1:]]), 3, 32)
    assert set(changed).isdisjoint(names)
    for field in ("model", "tokens", "layout_id", "computation"):
        other = CacheIdentity(**{**identity.__dict__, field: "x"})
        assert set(page_keys(other.namespace, Sequence(3, ids), 3, 32)).isdisjoint(names)
    images = [
        page_keys(identity.namespace, Sequence(4, ids, images=(ImageSpan(40, 8, digest),)), 3, 32)
        for digest in (b"one", b"two")
    ]
    assert images[0][0] == images[1][0] == names[0]
    assert images[0][1] != images[1][1] != names[1]
    assert len({*names, *image_keys(names[0], 2), *image_keys(names[1], 2)}) == 7
    with pytest.raises(RuntimeError, match="finalized"):
        page_keys(identity.namespace, Sequence(5, ids), 4, 32)


def test_every_flipped_bit_and_every_cut_of_a_record_is_noticed():
    record = encode_record(key(1), page(1))
    assert decode_record(key(1), record, SIZE) == page(1)
    for bit in range(8 * len(record)):
        damaged = bytearray(record)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptRecordError):
            decode_record(key(1), bytes(damaged), SIZE)
    for length in range(len(record)):
        with pytest.raises(CorruptRecordError):
            decode_record(key(1), record[:length], SIZE)
    with pytest.raises(CorruptRecordError, match="lies under"):
        decode_record(key(2), record, SIZE)
    with pytest.raises(CorruptRecordError, match="bytes"):
        decode_record(key(1), record, SIZE + 1)


# Host ------------------------------------------------------------------------------------------------------------


def test_host_memory_is_bounded_and_keeps_what_was_used_last():
    tier = HostTier(3 * SIZE + 1)
    for number in range(3):
        assert tier.put(key(number), page(number)) == 0
    assert tier.get(key(0), SIZE) == page(0)
    assert tier.put(key(3), page(3)) == 1
    assert [tier.contains(key(number)) for number in range(4)] == [True, False, True, True]
    assert tier.usage() == (3, 3 * SIZE)
    assert tier.put(key(9), bytes(10 * SIZE)) == 0 and tier.usage() == (3, 3 * SIZE)
    assert tier.get(key(2), SIZE - 1) is None
    tier.discard(key(2))
    tier.discard(key(2))
    assert tier.usage() == (2, 2 * SIZE)


# Disk ------------------------------------------------------------------------------------------------------------


def test_files_survive_a_restart_and_are_bounded(tmp_path):
    record = HEADER_BYTES + SIZE
    tier = DiskTier(tmp_path, 3 * record, SPACE)
    for number in range(3):
        tier.put(key(number), page(number))
        os.utime(tier._path(key(number)), (number, number))
    assert tier.put(key(0), page(0)) == 0  # known already
    assert tier.get(key(0), SIZE) == page(0)  # the most recently used one now
    tier.close()
    tier = DiskTier(tmp_path, 3 * record, SPACE)
    assert tier.usage() == (3, 3 * record)
    assert tier.put(key(3), page(3)) == 1
    assert [tier.contains(key(number)) for number in range(4)] == [True, False, True, True]
    assert [tier.get(key(number), SIZE) for number in (0, 1, 2, 3)] == [page(0), None, page(2), page(3)]
    assert len(files(tmp_path)) == 3
    tier.close()
    smaller = DiskTier(tmp_path, record, SPACE)
    assert smaller.usage() == (1, record) and len(files(tmp_path)) == 1
    smaller.close()


def test_one_process_owns_a_directory(tmp_path):
    tier = DiskTier(tmp_path, 1000, SPACE)
    with pytest.raises(ValueError, match="in use by another process"):
        DiskTier(tmp_path, 1000, SPACE)
    tier.close()
    DiskTier(tmp_path, 1000, SPACE).close()
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="cannot be used"):
        DiskTier(tmp_path / "file", 1000, SPACE)


def test_pages_of_another_identity_are_not_found_and_leave_in_time(tmp_path):
    tier = DiskTier(tmp_path, 1000, SPACE)
    tier.put(key(1), page(1))
    tier.close()
    tier = DiskTier(tmp_path, 2 * (HEADER_BYTES + SIZE), b"\2" * 32)
    assert tier.get(key(1), SIZE) is None
    assert tier.usage()[0] == 1
    tier.put(key(2), page(2))
    assert tier.put(key(3), page(3)) == 1
    assert [tier.get(key(number), SIZE) for number in (2, 3)] == [page(2), page(3)]
    tier.close()


def test_a_crash_while_writing_leaves_no_page(tmp_path, monkeypatch):
    tier = DiskTier(tmp_path, 1000, SPACE)
    for step in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(os, step, lambda *_: (_ for _ in ()).throw(SystemExit))  # no handler runs for a real crash
            with pytest.raises(SystemExit):
                tier.put(key(1), page(1))
        assert tier.get(key(1), SIZE) is None
    assert files(tmp_path)
    tier.close()
    tier = DiskTier(tmp_path, 1000, SPACE)
    assert files(tmp_path) == [] and tier.get(key(1), SIZE) is None
    tier.close()


def test_a_full_medium_is_an_error_that_leaves_nothing(tmp_path, monkeypatch):
    tier = DiskTier(tmp_path, 1000, SPACE)
    store = TierStore([tier], SIZE, clock=lambda: now)
    now = 0.0
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        store.put(key(1), page(1))
    assert store.statistics()["disk"]["errors"] == 1 and files(tmp_path) == []
    store.put(key(1), page(1))  # left alone for a while
    assert store.get(key(1)) is None and store.statistics()["disk"]["skipped"] == 2
    now = PAUSE_S + 1
    store.put(key(1), page(1))
    assert store.get(key(1)) == page(1)
    store.close()


# Store -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["bit", "cut", "longer", "empty", "gone", "swapped"])
def test_a_damaged_file_is_a_miss_and_is_removed(tmp_path, damage):
    tier = DiskTier(tmp_path, 10_000, SPACE)
    store = TierStore([tier], SIZE)
    for number in (1, 2):
        store.put(key(number), page(number))
    path = tier._path(key(1))
    record = path.read_bytes()
    if damage == "gone":
        path.unlink()
    elif damage == "swapped":
        path.write_bytes(tier._path(key(2)).read_bytes())
    else:
        flipped = record[:-1] + bytes([record[-1] ^ 16])
        path.write_bytes({"bit": flipped, "cut": record[:-1], "longer": record + b"x", "empty": b""}[damage])
    assert store.get(key(1)) is None
    statistics = store.statistics()["disk"]
    assert (statistics["corrupt"], statistics["misses"], statistics["hits"]) == (damage != "gone", damage == "gone", 0)
    assert not path.exists() and statistics["errors"] == 0
    store.put(key(1), page(1))
    assert [store.get(key(number)) for number in (1, 2)] == [page(1), page(2)]
    store.close()


def test_a_page_found_far_away_moves_near(tmp_path):
    host, disk = HostTier(10 * SIZE), DiskTier(tmp_path, 10_000, SPACE)
    store = TierStore([host, disk], SIZE)
    disk.put(key(1), page(1))
    assert store.contains(key(1)) and not host.contains(key(1))
    assert store.get(key(1)) == page(1) and host.contains(key(1))
    disk.discard(key(1))
    assert store.get(key(1)) == page(1)
    statistics = store.statistics()
    assert (statistics["host"]["hits"], statistics["host"]["misses"], statistics["disk"]["hits"]) == (1, 1, 1)
    assert statistics["host"]["bytes_read"] == statistics["disk"]["bytes_read"] == SIZE
    store.put(key(1), page(1))
    assert store.statistics()["host"]["writes"] == store.statistics()["disk"]["writes"] == 1
    store.close()

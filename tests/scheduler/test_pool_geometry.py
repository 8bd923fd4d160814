"""`V41PoolGeometry` against the byte table of the runtime specification, "Geometry declaration"."""

import dataclasses
import math

import ml_dtypes
import numpy as np
import pytest

from scheduler.pool_geometry import GeometryError, V41PoolGeometry

FLASH = V41PoolGeometry(
    layers=40, owners=((2, 2), (8, 2), (14, 2), (20, 1)), block_size=128, window_size=128, head_dim=512, index_dim=128
)
PICO = V41PoolGeometry(
    layers=12, owners=((2, 2), (4, 2), (6, 1)), block_size=32, window_size=16, head_dim=64, index_dim=32
)


def flash(**changes):
    return dataclasses.replace(FLASH, **changes)


@pytest.mark.parametrize(
    ("changes", "main", "unit", "per_token", "state", "image", "units"),
    [
        ({}, 327_680, 369_920, 2_890, 5_268_480, 5_242_912, 15),
        ({"index_format": "fp4"}, 327_680, 349_440, 2_730, 5_268_480, 5_242_912, 16),
        ({"packed": True}, 92_160, 134_400, 1_050, 2_728_192, 2_703_392, 21),
        ({"packed": True, "index_format": "fp4"}, 92_160, 113_920, 890, 2_728_192, 2_703_392, 24),
        ({"speculative_tokens": 5}, 327_680, 369_920, 2_890, 5_943_296, 5_856_288, 16),
        ({"block_size": 32}, 81_920, 92_480, 2_890, 5_268_480, 5_242_912, 57),
    ],
)
def test_byte_table(changes, main, unit, per_token, state, image, units):
    geometry = flash(**changes)
    assert geometry.main_page_bytes == main
    assert geometry.page_unit_bytes == unit
    assert geometry.bytes_per_token == per_token
    assert geometry.bytes_per_token == (geometry.main_row_bytes + geometry.index_row_bytes) * 2.5
    assert geometry.state_bytes == state
    assert geometry.image_bytes == image
    assert geometry.units_per_image == units


def test_row_bytes_of_every_format():
    assert (FLASH.main_row_bytes, FLASH.index_row_bytes, FLASH.window_row_bytes) == (1024, 132, 1024)
    packed = flash(packed=True, index_format="fp4")
    assert (packed.main_row_bytes, packed.index_row_bytes, packed.window_row_bytes) == (288, 68, 528)
    unquantized = flash(unquantized_dtype="float32")
    assert (unquantized.main_row_bytes, unquantized.index_row_bytes, unquantized.window_row_bytes) == (2048, 512, 2048)
    assert (unquantized.main_format, unquantized.index_plane_format, unquantized.window_format) == ("float",) * 3


def test_rings_and_tails_widen_with_speculation():
    assert (FLASH.ring, FLASH.ring_c, FLASH.window_layers) == (128, 2, 40)
    drafts = flash(speculative_tokens=5)
    assert (drafts.ring, drafts.ring_c, drafts.window_layers) == (133, 7, 43)
    assert FLASH.tail_owners == (0, 1, 2)
    assert FLASH.ratios == (1, 2)


@pytest.mark.parametrize("changes", [{}, {"packed": True}, {"speculative_tokens": 5}, {"block_size": 32}])
def test_offsets_are_aligned_and_never_overlap(changes):
    geometry = flash(**changes)
    for fields, total in (
        (geometry.page_fields, geometry.main_page_bytes),
        (geometry.state_fields, geometry.state_bytes),
    ):
        end = 0
        for span in fields:
            assert span.offset % geometry.alignment == 0
            assert span.offset >= end
            end = span.offset + span.bytes
        assert end <= total
        assert total % geometry.alignment == 0
    offsets = geometry.index_region_offsets(7)
    assert all(offset % 256 == 0 for offset in offsets)
    assert geometry.state_offset(7) % geometry.alignment == 0
    assert geometry.total_bytes(7, 3) >= 7 * geometry.page_unit_bytes + 3 * geometry.state_bytes


@pytest.mark.parametrize("geometry", [FLASH, PICO, flash(packed=True, index_format="fp4"), flash(speculative_tokens=5)])
def test_device_arrays_hold_exactly_the_declared_rows(geometry):
    pages, slots = 5, 3
    arrays = {spec.name: spec for spec in geometry.device_arrays(pages, slots)}
    for spec in arrays.values():
        dtype = np.dtype(ml_dtypes.bfloat16) if spec.dtype == "bfloat16" else np.dtype(spec.dtype)
        assert math.prod(spec.shape) * dtype.itemsize == spec.bytes
    page_bytes = sum(spec.bytes for name, spec in arrays.items() if name.startswith(("main", "index")))
    rows = sum(span.bytes for span in geometry.page_fields) + sum(geometry.index_page_bytes)
    assert page_bytes == pages * rows
    window = next(span for span in geometry.state_fields if span.name == "window")
    assert arrays["window"].bytes == slots * window.bytes


def test_unquantized_planes_have_no_scales():
    names = [spec.name for spec in dataclasses.replace(PICO, unquantized_dtype="float32").device_arrays(2, 1)]
    assert not any("scales" in name for name in names)


def test_an_image_carries_rings_and_cursor_but_no_tail():
    assert [span.name for span in FLASH.image_fields] == ["window", "cursor"]


@pytest.mark.parametrize(
    "changes",
    [
        {"packed": True},
        {"index_format": "fp4"},
        {"layers": 41},
        {"owners": ((2, 2), (8, 2), (14, 2), (21, 1))},
        {"owners": ((2, 2), (8, 2), (14, 1), (20, 1))},
        {"block_size": 64},
        {"window_size": 64},
        {"head_dim": 256},
        {"index_dim": 64},
        {"history_size": 2},
        {"speculative_tokens": 5},
        {"unquantized_dtype": "float32"},
        {"unquantized_dtype": "bfloat16"},
    ],
)
def test_layout_id_changes_with_every_listed_field(changes):
    assert flash(**changes).layout_id != FLASH.layout_id


def test_layout_id_ignores_what_no_stored_byte_depends_on():
    assert flash(index_topk=512, layer_ratios=()).layout_id == FLASH.layout_id


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"block_size": 31}, "block_size 31"),
        ({"block_size": 16}, "not whole tiles of 16"),
        ({"block_size": 48}, "block_size 48"),
        ({"head_dim": 500}, "head_dim 500"),
        ({"index_dim": 100}, "index_dim 100"),
        ({"index_format": "bf16"}, "index_format 'bf16'"),
        ({"speculative_tokens": -1}, "speculative_tokens -1"),
        ({"owners": ((2, 2), (2, 2))}, "each declared once"),
        ({"owners": ((2, 3),)}, "ratio 3"),
        ({"owners": ((40, 1),)}, "owner layer 40"),
        ({"owners": ()}, "owners is empty"),
        ({"window_size": 0}, "window_size 0"),
        ({"unquantized_dtype": "float16"}, "float16"),
        ({"unquantized_dtype": "float32", "packed": True}, "packed"),
        ({"layer_ratios": (0,) * 40}, "layer_ratios says 0"),
        ({"layer_ratios": (0, 0, 2)}, "3 entries for 40 layers"),
    ],
)
def test_faults_name_the_value(changes, words):
    with pytest.raises(GeometryError, match=words):
        flash(**changes)


def test_all_faults_are_reported_together():
    with pytest.raises(GeometryError) as caught:
        flash(block_size=30, head_dim=0, index_format="int4")
    assert len(caught.value.faults) >= 3


def test_budget_pays_slots_first():
    budget = 4 * FLASH.state_bytes + 10 * FLASH.page_unit_bytes + 5
    assert FLASH.pages_for_budget(budget, 4) == 10
    with pytest.raises(GeometryError, match="raise the budget"):
        FLASH.pages_for_budget(4 * FLASH.state_bytes, 4)

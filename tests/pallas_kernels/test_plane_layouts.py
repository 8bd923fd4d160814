"""Wire and TPU layouts of the index plane against the kernel chapter's golden vectors, and as bijections."""

import zlib

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import plane_layouts
from pallas_kernels.plane_layouts import (
    from_blocks,
    from_lanes,
    from_row_groups,
    in_lanes,
    lanes_shapes,
    to_blocks,
    to_lanes,
    to_row_groups,
)
from v41jax.quantization_numpy import pack_nibbles, quantize_index_key_fp8, quantize_q4m

WIDTH = 128


def golden_rows(count):
    """The rows of the kernel chapter, "Golden vectors": [count, 128] bfloat16."""
    row, dim = np.arange(count)[:, None], np.arange(WIDTH)[None, :]
    base = (((37 * dim + 11 * row) % 101) - 50).astype(np.float32) / np.float32(13)
    return (base * np.float32(2) ** (((dim // 16) + row) % 5 - 2).astype(np.float32)).astype(ml_dtypes.bfloat16)


def golden_plane(count, index_format):
    """One page of `count` golden rows."""
    if index_format == "fp8":
        values, scales = quantize_index_key_fp8(golden_rows(count))
    else:
        codes, scales = quantize_q4m(golden_rows(count))
        values = pack_nibbles(codes)
    return np.asarray(values).view(np.uint8)[None], np.asarray(scales)[None]


def crc(*arrays):
    return f"{zlib.crc32(b''.join(np.ascontiguousarray(x).tobytes() for x in arrays)):08x}"


def test_rows_have_the_bytes_of_the_golden_vectors():
    values, scales = golden_plane(8, "fp4")
    assert values[0, 0, :8].tobytes().hex() == "9cb2381aa3c1290b" and scales[0, 0].tobytes().hex() == "7e80817f"
    assert crc(values[0, 0], scales[0, 0]) == "5bd35aa0"
    assert (crc(values), crc(scales)) == ("9695ba4e", "a7c20cd2")
    values, scales = golden_plane(1, "fp8")
    assert values[0, 0, :8].tobytes().hex() == "d7c84fd4b752d141" and scales[0, 0] == 0.0625
    assert crc(values[0, 0], scales[0, 0]) == "bb99ea19"


@pytest.mark.parametrize(
    ("count", "expected"), [(8, ("4e24d6a0", "b66fd3db")), (128, ("83992e7c", "2efba47b"))], ids=["a page", "16 pages"]
)
def test_row_groups_have_the_golden_bytes(count, expected):
    assert tuple(map(crc, to_row_groups(*map(jnp.asarray, golden_plane(count, "fp4"))))) == expected


def test_the_tpu_layout_of_an_fp4_page_has_the_golden_bytes():
    found = to_lanes(*map(jnp.asarray, golden_plane(128, "fp4")), "fp4")
    assert [x.shape for x in found] == [(1, 64, 128), (1, 4, 128)]
    assert tuple(map(crc, found)) == ("d4530d5c", "845293b3")


@pytest.mark.parametrize(("rows", "expected"), [(16, "6d4ccab8"), (8, "dd5927ee")])
def test_fp8_blocks_have_the_golden_bytes(rows, expected):
    assert crc(to_blocks(*map(jnp.asarray, golden_plane(rows, "fp8")), rows)) == expected


@pytest.mark.parametrize("rows", [64, 128])
@pytest.mark.parametrize("index_format", ["fp8", "fp4"])
def test_every_layout_gives_the_rows_back(rows, index_format):
    rng = np.random.default_rng(rows)
    values = jnp.asarray(rng.integers(0, 256, (3, rows, WIDTH if index_format == "fp8" else WIDTH // 2)), jnp.uint8)
    if index_format == "fp8":
        scales = jnp.asarray(2.0 ** rng.integers(-9, 9, (3, rows)), jnp.float32)
        others = [from_blocks(to_blocks(values, scales, block), block, rows) for block in (8, 16, 32)]
    else:
        scales = jnp.asarray(rng.integers(0, 256, (3, rows, 4)), jnp.uint8)
        others = [from_row_groups(*to_row_groups(values, scales), rows)]
    held = to_lanes(values, scales, index_format)
    assert tuple(x.shape for x in held) == lanes_shapes(3, rows, WIDTH, index_format)
    assert in_lanes(WIDTH, *held, index_format) == ((index_format, rows) != ("fp8", 128))
    assert not in_lanes(WIDTH, values, scales, index_format) and plane_layouts.rows_of(*held, index_format) == rows
    for found in [from_lanes(*held, index_format), *others]:
        np.testing.assert_array_equal(found[0], values)
        np.testing.assert_array_equal(found[1], scales)


def test_a_folded_page_keeps_low_bytes_left_and_high_bytes_right():
    values = np.zeros((1, 64, 64), np.uint8)
    values[0, 5, 3], values[0, 5, 40] = 7, 9
    held, _ = to_lanes(jnp.asarray(values), jnp.zeros((1, 64, 4), jnp.uint8), "fp4")
    assert held[0, 3, 5] == 7 and held[0, 8, 69] == 9 and int(held.sum()) == 16


def test_other_page_sizes_have_no_tpu_layout():
    with pytest.raises(ValueError, match="pages of 128 or 64 rows, not 32"):
        lanes_shapes(4, 32, WIDTH, "fp4")

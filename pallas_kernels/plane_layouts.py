"""Layouts of one owner's index plane: logical rows, the wire layouts, and the one a TPU kernel reads.

Operations take logical rows: values [pages, rows, I] (fp8) or [pages, rows, I / 2] (fp4), and their scales. The wire
layouts are what images, transfers and other runtimes hold. A TPU kernel wants an FP4 page with keys on lanes, and
whole vector rows whatever the page's row count. Every function is a bijection of the live bytes on logical arrays;
device bytes are never copied as they lie, because a backend tiles them as it prefers.

Source: kernel chapter, "Index plane, FP8", "Index plane, FP4", "Proposed TPU layouts", "Boundary conversion".
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

Array = jax.Array

GROUP_ROWS = 8
"""Rows of a row-group page, one candidate block."""
SHUFFLE_ROWS, SHUFFLE_DIMS = 16, 16
"""Keys and dimensions whose bytes an FP8 block keeps together."""
LANES = 128
FOLD = 64
"""Rows of the pages that are folded to fill the lanes."""


def to_row_groups(values: Array, scales: Array) -> tuple[Array, Array]:
    """FP4 rows to page-8: values [pages * rows / 8, 512], scales [pages * rows / 8, 32] uint8, for I = 128.

    Byte `b` of group `c` of row `t` is at ((t % 4 * 4 + c) * 2 + t // 4) * 16 + b; its scale at c * 8 + t.
    """
    groups = scales.shape[-1]
    split = values.reshape(-1, 2, 4, groups, values.shape[-1] // groups)
    pages = split.shape[0]
    grouped = scales.reshape(pages, GROUP_ROWS, groups)
    return split.transpose(0, 2, 3, 1, 4).reshape(pages, -1), grouped.transpose(0, 2, 1).reshape(pages, -1)


def from_row_groups(values: Array, scales: Array, rows: int) -> tuple[Array, Array]:
    """The inverse of `to_row_groups` for pages of `rows` rows."""
    pages, count = scales.shape
    groups = count // GROUP_ROWS
    split = values.reshape(pages, 4, groups, 2, -1).transpose(0, 3, 1, 2, 4)
    width = values.shape[1] // GROUP_ROWS
    return (
        split.reshape(-1, rows, width),
        scales.reshape(pages, groups, GROUP_ROWS).transpose(0, 2, 1).reshape(-1, rows, groups),
    )


def to_blocks(values: Array, scales: Array, block_rows: int) -> Array:
    """FP8 rows to blocks [pages * rows / block_rows, block_rows * (I + 4)] uint8: shuffled values, then float32 scales.

    With SH = min(block_rows, 16), value (t, d) is at (t // SH) * SH * I + (d // 16) * SH * 16 + (t % SH) * 16 + d % 16.
    """
    width = values.shape[-1]
    shuffle = min(block_rows, SHUFFLE_ROWS)
    split = values.reshape(-1, block_rows // shuffle, shuffle, width // SHUFFLE_DIMS, SHUFFLE_DIMS)
    blocks = split.shape[0]
    shuffled = split.transpose(0, 1, 3, 2, 4).reshape(blocks, -1)
    raw = jax.lax.bitcast_convert_type(scales.reshape(blocks, block_rows), jnp.uint8)
    return jnp.concatenate([shuffled, raw.reshape(blocks, -1)], axis=1)


def from_blocks(blocks: Array, block_rows: int, rows: int) -> tuple[Array, Array]:
    """The inverse of `to_blocks` for pages of `rows` rows."""
    count, size = blocks.shape
    width = size // block_rows - 4
    shuffle = min(block_rows, SHUFFLE_ROWS)
    shuffled = blocks[:, : block_rows * width]
    split = shuffled.reshape(count, block_rows // shuffle, width // SHUFFLE_DIMS, shuffle, SHUFFLE_DIMS)
    values = split.transpose(0, 1, 3, 2, 4).reshape(-1, rows, width)
    raw = blocks[:, block_rows * width :].reshape(count, block_rows, 4)
    return values, jax.lax.bitcast_convert_type(raw, jnp.float32).reshape(-1, rows)


def lanes_shapes(pages: int, rows: int, width: int, index_format: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of values and scales in the TPU layout, for pages of 128 or 64 rows; see `to_lanes`."""
    if rows not in (LANES, FOLD):
        raise ValueError(f"the TPU layout is for pages of {LANES} or {FOLD} rows, not {rows}")
    if index_format == "fp8":
        return (pages, rows, width), (pages, LANES)
    return (pages, width // 2 * rows // LANES, LANES), (pages, width // 32, LANES)


def to_lanes(values: Array, scales: Array, index_format: str) -> tuple[Array, Array]:
    """Logical rows to the TPU layout.

    fp4, 128 rows a page: byte `b` of key `t` at [b, t], scale of group `c` at [c, t]. fp4, 64 rows: byte `b` at
    [b % 32, t + 64 * (b // 32)]; lanes past 64 of the scales are unused. fp8: values as they are, the matrix unit takes
    keys on sublanes; scales padded to 128 lanes.
    """
    pages, rows = values.shape[:2]
    lanes_shapes(pages, rows, values.shape[2], index_format)
    padding = [(0, 0)] * (scales.ndim - 1) + [(0, LANES - rows)]
    if index_format == "fp8":
        return values, jnp.pad(scales, padding)
    columns = values.transpose(0, 2, 1)
    if rows == FOLD:
        half = columns.shape[1] // 2
        columns = jnp.concatenate([columns[:, :half], columns[:, half:]], axis=2)
    return columns, jnp.pad(scales.transpose(0, 2, 1), padding)


def from_lanes(values: Array, scales: Array, index_format: str) -> tuple[Array, Array]:
    """The inverse of `to_lanes`."""
    if index_format == "fp8":
        return values, scales[:, : values.shape[1]]
    rows = rows_of(values, scales, index_format)
    if rows == FOLD:
        values = jnp.concatenate([values[:, :, :FOLD], values[:, :, FOLD:]], axis=1)
    return values.transpose(0, 2, 1), scales[:, :, :rows].transpose(0, 2, 1)


def in_lanes(width: int, values: Array, scales: Array | None, index_format: str) -> bool:
    """Whether a plane of keys of `width` is in the TPU layout and not in the logical one.

    FP8 pages of 128 rows are in both and count as logical.
    """
    if scales is None or values.ndim != 3:
        return False
    pages = values.shape[0]
    if index_format == "fp8":
        return values.shape[1] == FOLD and scales.shape == (pages, LANES)
    shapes = (values.shape, scales.shape)
    return index_format == "fp4" and any(
        shapes == lanes_shapes(pages, rows, width, index_format) for rows in (LANES, FOLD)
    )


def scale_dtype(index_format: str) -> type:
    """dtype of the scales of an fp8 or fp4 plane."""
    return jnp.float32 if index_format == "fp8" else jnp.uint8


def rows_of(values: Array, scales: Array, index_format: str) -> int:
    """Rows of a page of a plane in the TPU layout."""
    if index_format == "fp8":
        return values.shape[1]
    return values.shape[1] * LANES // (16 * scales.shape[1])

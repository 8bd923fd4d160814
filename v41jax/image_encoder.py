"""The host side of the vision tower: buckets, packing, the arrays of a call, and its rows split by image.

Compiled once a bucket and apart from the language model, so that image work never recompiles a text step.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np

from v41jax.config import VisionConfig
from v41jax.image_planning import ImageGrid
from v41jax.image_processing import ProcessedImage
from v41jax.layers.vision import VisionInputs, VisionParameters, encode_patches
from v41jax.precision import Precision

SMALLEST_STEP = 64
"""Buckets are multiples of this many patches."""

LARGEST_STEP = 256
"""The largest bucket is a multiple of this many patches, as are all buckets over 1,024."""


def largest_patch_count(config: VisionConfig) -> int:
    """Patches no image exceeds: a single row of full cells (vision specification, "Size planning")."""
    return (config.max_image_tokens - 3) * config.downsample_ratio**2


def patch_bucket(patches: int, config: VisionConfig) -> int:
    """The bucket of a call over `patches` patches: four sizes an octave, so at most a fifth of a large call is padding.

    Raises:
      ValueError: more patches than the largest image has.
    """
    largest = math.ceil(largest_patch_count(config) / LARGEST_STEP) * LARGEST_STEP
    if patches > largest:
        raise ValueError(
            f"{patches} patches in one call; the largest bucket has {largest}, encode fewer images at once"
        )
    step = max(SMALLEST_STEP, 2 ** ((patches - 1).bit_length() - 3)) if patches > 1 else SMALLEST_STEP
    return min(largest, math.ceil(patches / step) * step)


def cell_capacity(bucket: int, config: VisionConfig) -> int:
    """Cells a call of that bucket gives rows for; enough for any single image that fits the bucket.

    A grid of `n` patches has at most `ceil(n / r)` cells, reached by a single line of patches.
    """
    return min(math.ceil(bucket / config.downsample_ratio), max(config.max_image_tokens - 3, 1))


def vision_inputs(images: Sequence[ProcessedImage], config: VisionConfig) -> VisionInputs:
    """Packs images into the arrays of one call.

    Args:
      images: at least one; together within the largest bucket and its cell capacity.
      config: the checkpoint's vision configuration.

    Raises:
      ValueError: too many patches or cells for one call.
    """
    bucket = patch_bucket(sum(image.grid.patches for image in images), config)
    capacity = cell_capacity(bucket, config)
    cells = sum(image.grid.cells for image in images)
    if cells > capacity:
        raise ValueError(f"{cells} cells in one call of {bucket} patches, which holds {capacity}; encode fewer images")
    width = images[0].patches.shape[1]
    half_head = config.hidden_size // config.num_attention_heads // 2
    places = config.downsample_ratio**2
    inputs = VisionInputs(
        patches=np.zeros((bucket, width), images[0].patches.dtype),
        cos=np.ones((bucket, half_head), np.float32),
        sin=np.zeros((bucket, half_head), np.float32),
        segments=np.full(bucket, -1, np.int32),
        merge_rows=np.zeros((capacity, places), np.int32),
        merge_valid=np.zeros((capacity, places), bool),
    )
    patch_start = cell_start = 0
    for segment, image in enumerate(images):
        rows = slice(patch_start, patch_start + image.grid.patches)
        cell_rows = slice(cell_start, cell_start + image.grid.cells)
        angles = rotary_angles(image.grid, config)
        merge_rows, merge_valid = _merge_places(image.grid, config.downsample_ratio)
        inputs.patches[rows] = image.patches
        inputs.cos[rows], inputs.sin[rows] = np.cos(angles), np.sin(angles)
        inputs.segments[rows] = segment
        inputs.merge_rows[cell_rows] = merge_rows + patch_start
        inputs.merge_valid[cell_rows] = merge_valid
        patch_start, cell_start = rows.stop, cell_rows.stop
    return inputs


def rotary_angles(grid: ImageGrid, config: VisionConfig) -> np.ndarray:
    """[patches, head width / 2] float32: the row's angles, then the column's.

    Source: vision specification, "2-D rotary embedding"; row 0, column 0 is the top-left patch of the padded canvas.
    """
    quarter = config.hidden_size // config.num_attention_heads // 4
    frequencies = (config.rope_theta ** (-np.arange(quarter) / quarter)).astype(np.float32)
    row, column = np.divmod(np.arange(grid.patches), grid.patch_columns)
    positions = np.stack([row, column], axis=1).astype(np.float32)
    return (positions[:, :, None] * frequencies).reshape(grid.patches, 2 * quarter)


def _merge_places(grid: ImageGrid, ratio: int) -> tuple[np.ndarray, np.ndarray]:
    """([cells, ratio**2] int32 patch index, [cells, ratio**2] bool): the patches of each cell, indices clamped."""
    cell_row, cell_column = np.divmod(np.arange(grid.cells), grid.columns)
    place_row, place_column = np.divmod(np.arange(ratio**2), ratio)
    row = cell_row[:, None] * ratio + place_row
    column = cell_column[:, None] * ratio + place_column
    valid = (row < grid.patch_rows) & (column < grid.patch_columns)
    return np.where(valid, row * grid.patch_columns + column, 0).astype(np.int32), valid


def encode_images(
    parameters: VisionParameters,
    images: Sequence[ProcessedImage],
    config: VisionConfig,
    precision: Precision,
    *,
    packed_patches: int = 2048,
) -> list[np.ndarray]:
    """Encodes images, consecutive small ones packed into one call.

    Args:
      parameters: the vision weights, on the host or on a device.
      images: processed images.
      config: the checkpoint's vision configuration.
      precision: activation dtype; nothing in the vision scope is quantized.
      packed_patches: images are packed while their patches together stay within this many; larger images go alone.

    Returns:
      for each image [grid.cells, D] activation dtype, on the host.
    """
    rows: list[np.ndarray] = []
    for group in pack_images(images, config, packed_patches):
        encoded = np.asarray(
            encode_patches(parameters, vision_inputs(group, config), config=config, precision=precision)
        )
        ends = list(itertools.accumulate(image.grid.cells for image in group))
        # Copies: a view would keep the padding rows of the whole call alive.
        rows.extend(part.copy() for part in np.split(encoded[: ends[-1]], ends[:-1]))
    return rows


def pack_images(
    images: Sequence[ProcessedImage], config: VisionConfig, packed_patches: int
) -> Iterator[list[ProcessedImage]]:
    """Groups consecutive images into calls, in order; see `encode_images`."""
    group: list[ProcessedImage] = []
    for image in images:
        if group and not _fits([*group, image], config, packed_patches):
            yield group
            group = []
        group.append(image)
    if group:
        yield group


def _fits(group: Sequence[ProcessedImage], config: VisionConfig, packed_patches: int) -> bool:
    patches = sum(image.grid.patches for image in group)
    if patches > min(packed_patches, largest_patch_count(config)):
        return False
    return sum(image.grid.cells for image in group) <= cell_capacity(patch_bucket(patches, config), config)

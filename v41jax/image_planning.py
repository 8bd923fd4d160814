"""Sizes of an image before its pixels are read: canvas, grids, token count, by the released rules.

Pure functions of the original width and height; no Pillow and no arrays, so that a server knows what an image costs
before it decodes anything. Pixels are `image_processing`.
"""

from __future__ import annotations

import dataclasses
import math

from v41jax.config import VisionConfig


class ImageError(ValueError):
    """An image that cannot be used; the message names the value, the limit and what to do."""


@dataclasses.dataclass(frozen=True)
class ImageGrid:
    """The two grids of one processed image.

    Attributes:
      patch_rows, patch_columns: the vision tower's patches.
      rows, columns: the language model's cells, each `downsample_ratio` patches square, partial ones kept.
    """

    patch_rows: int
    patch_columns: int
    rows: int
    columns: int

    @classmethod
    def of_patches(cls, patch_rows: int, patch_columns: int, downsample_ratio: int) -> ImageGrid:
        """The grids of a canvas of `patch_rows` by `patch_columns` patches."""
        return cls(
            patch_rows,
            patch_columns,
            math.ceil(patch_rows / downsample_ratio),
            math.ceil(patch_columns / downsample_ratio),
        )

    @property
    def patches(self) -> int:
        """Patches of the tower."""
        return self.patch_rows * self.patch_columns

    @property
    def cells(self) -> int:
        """Rows the aligner gives."""
        return self.rows * self.columns

    @property
    def tokens(self) -> int:
        """Prompt positions of the whole span: start, one newline a row, end (vision specification, "Size planning")."""
        return self.rows * (self.columns + 1) + 2


@dataclasses.dataclass(frozen=True)
class ImagePlan:
    """Where the pixels of an image go, all in pixels of the canvas.

    Attributes:
      canvas_width, canvas_height: multiples of the patch size.
      resized_width, resized_height: size after resampling, inside the canvas.
      left, top: where the resized image is pasted.
      grid: the grids of the canvas.
    """

    canvas_width: int
    canvas_height: int
    resized_width: int
    resized_height: int
    left: int
    top: int
    grid: ImageGrid


def plan_image(width: int, height: int, config: VisionConfig) -> ImagePlan:
    """Plans canvas, grids and paste position from the size alone (vision specification, "Size planning", "Pixels").

    Integer truncation and the order of the floating point operations are the released ones.

    Args:
      width, height: original size in pixels.
      config: the checkpoint's vision configuration.

    Raises:
      ImageError: an empty image, or one so thin that a side of the shrunk image rounds to no pixel.
    """
    if width < 1 or height < 1:
        raise ImageError(f"an image of {width} x {height} pixels is empty; both sides must be at least 1")
    patch, limit = config.patch_size, config.max_image_tokens
    wide = config.max_wh_ratio is not None and width > height * config.max_wh_ratio
    planned_width = height * config.max_wh_ratio if wide else width
    planned_height = height
    if planned_width * planned_height < config.min_pixels:
        enlarge = math.sqrt(config.min_pixels / (planned_width * planned_height))
        planned_width, planned_height = int(planned_width * enlarge), int(planned_height * enlarge)
    canvas_width = math.ceil(planned_width / patch) * patch
    canvas_height = math.ceil(planned_height / patch) * patch
    grid = _grid(canvas_width, canvas_height, config)
    if grid.tokens > limit:
        canvas_width, canvas_height = _shrunk_canvas(planned_width, planned_height, config)
        grid = _grid(canvas_width, canvas_height, config)
    if grid.cells == 0 or grid.tokens > limit:
        raise ImageError(
            f"an image of {width} x {height} pixels has no canvas of at most {limit} tokens with patches of {patch}"
        )
    stretched = config.max_wh_ratio is not None and width >= config.max_wh_ratio * height
    resized_width, resized_height = canvas_width, canvas_height
    if not stretched:
        resized_width, resized_height = _contained(width, height, canvas_width, canvas_height)
    if resized_width == 0 or resized_height == 0:
        raise ImageError(
            f"an image of {width} x {height} pixels is too thin: it would be shrunk to {resized_width} x "
            f"{resized_height} pixels; crop it or split it"
        )
    left, top = round((canvas_width - resized_width) / 2), round((canvas_height - resized_height) / 2)
    return ImagePlan(canvas_width, canvas_height, resized_width, resized_height, left, top, grid)


def image_token_count(width: int, height: int, config: VisionConfig) -> int:
    """Prompt tokens of an image of that size, delimiters included; no pixels are read.

    Raises:
      ImageError: as `plan_image`.
    """
    return plan_image(width, height, config).grid.tokens


def _grid(canvas_width: int, canvas_height: int, config: VisionConfig) -> ImageGrid:
    return ImageGrid.of_patches(
        canvas_height // config.patch_size, canvas_width // config.patch_size, config.downsample_ratio
    )


def _shrunk_canvas(width: float, height: float, config: VisionConfig) -> tuple[int, int]:
    """(width, height) of the canvas of an image that would cost more than `max_image_tokens`."""
    patch, limit = config.patch_size, config.max_image_tokens
    cell = patch * config.downsample_ratio
    aspect = height / width
    # The widest grid whose every row pays one more token for its newline: columns * aspect * (columns + 1) = limit - 2.
    columns = math.sqrt((limit - 2) / aspect + 0.25) - 0.5
    rows = columns * aspect
    if columns < 1:
        return cell, (limit - 2) // 2 * cell
    if rows < 1:
        return (limit - 3) * cell, cell
    shrink = min(math.floor(columns) * cell / width, math.floor(rows) * cell / height)
    return math.floor(width * shrink / patch) * patch, math.floor(height * shrink / patch) * patch


def _contained(width: int, height: int, canvas_width: int, canvas_height: int) -> tuple[int, int]:
    """The size that keeps the aspect and fills one side of the canvas; `round` is half to even."""
    aspect, canvas_aspect = width / height, canvas_width / canvas_height
    if aspect > canvas_aspect:
        return canvas_width, round(height / width * canvas_width)
    if aspect < canvas_aspect:
        return round(width / height * canvas_height), canvas_height
    return canvas_width, canvas_height

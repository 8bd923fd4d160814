"""From the bytes of an image file to the patches the vision tower reads, by the released rules.

Pixel work is Pillow's, because only the same resampler gives the same bits. Hostile files are refused here. Sizes and
token counts are `image_planning`, where an image comes from is `image_sources`, what becomes of it in a prompt is
`image_spans`.
"""

from __future__ import annotations

import dataclasses
import functools
import io
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np

from v41jax.config import VisionConfig
from v41jax.image_planning import ImageError, ImageGrid, plan_image
from v41jax.image_planning import image_token_count as image_token_count

if TYPE_CHECKING:
    from PIL import Image

CHANNELS = 3
PAD_VALUE = 127
"""Grey level of the canvas outside the resized image (vision specification, "Constants")."""

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""File formats that are opened, by content; every other decoder of Pillow stays unreachable for user data."""

MODES = frozenset({"1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr"})
"""Pillow modes of at most 8 bits a channel, the ones `convert("RGB")` keeps the meaning of."""


@dataclasses.dataclass(frozen=True)
class ImageLimits:
    """What an image file may cost before it is decoded.

    Attributes:
      max_bytes: bytes of the encoded file.
      max_pixels: width times height in the file's header; decoding takes about 7 bytes a pixel.
    """

    max_bytes: int = 20 * 2**20
    max_pixels: int = 64_000_000


DEFAULT_LIMITS = ImageLimits()


@dataclasses.dataclass(frozen=True, eq=False)
class ProcessedImage:
    """What the vision tower reads.

    Attributes:
      patches: [grid.patches, CHANNELS * patch_size**2] bfloat16 in reading order, each patch flattened as channel, row,
        column; values in [-1, 1]. Read-only. Comparisons may put float32 here.
      grid: its grids.
    """

    patches: np.ndarray
    grid: ImageGrid

    def __post_init__(self) -> None:
        if self.patches.ndim != 2 or self.patches.shape[0] != self.grid.patches:
            raise ImageError(
                f"patches have shape {self.patches.shape}; a grid of {self.grid.patch_rows} x "
                f"{self.grid.patch_columns} needs [{self.grid.patches}, channels * patch_size**2]"
            )
        self.patches.flags.writeable = False


def image_from_arrays(patches: np.ndarray, grid: Sequence[int], config: VisionConfig) -> ProcessedImage:
    """Takes an image that was processed elsewhere, as comparison files hold it.

    Args:
      patches: [patches, CHANNELS, patch_size, patch_size] float, normalised, in reading order.
      grid: patch rows, patch columns, language rows, language columns.
      config: the checkpoint's vision configuration.

    Raises:
      ImageError: shapes or grids that do not follow from the configuration.
    """
    sizes = [int(size) for size in grid]
    if len(sizes) != 4:
        raise ImageError(
            f"grid {sizes} has {len(sizes)} sizes; it holds patch rows and columns, language rows and columns"
        )
    expected = ImageGrid.of_patches(*sizes[:2], config.downsample_ratio)
    if sizes != [expected.patch_rows, expected.patch_columns, expected.rows, expected.columns]:
        raise ImageError(f"grid {sizes} does not follow from its patches by the ratio {config.downsample_ratio}")
    shape = (expected.patches, CHANNELS, config.patch_size, config.patch_size)
    if patches.shape != shape:
        raise ImageError(f"patches have shape {patches.shape}; grid {sizes} needs {shape}")
    return ProcessedImage(patches.reshape(expected.patches, -1).copy(), expected)


def image_size(data: bytes, limits: ImageLimits = DEFAULT_LIMITS) -> tuple[int, int]:
    """(width, height) from the header of an image file, after every check that needs no pixels.

    Raises:
      ImageError: as `decode_image`, except for faults that only decoding finds.
    """
    with _opened(data, limits) as image:
        return image.size


def decode_image(data: bytes, limits: ImageLimits = DEFAULT_LIMITS) -> Image.Image:
    """Decodes a still image to RGB the way Pillow's `convert` does (vision specification, "Pixels").

    Alpha and palettes are dropped, CMYK and 16-bit colour are converted; EXIF rotation and colour profiles are not
    applied, as released. Of a multi-picture JPEG the first picture is taken.

    Args:
      data: the file's bytes.
      limits: what the file may cost.

    Returns:
      a Pillow image of mode RGB.

    Raises:
      ImageError: file or picture over the limits, not one of `FORMATS`, truncated or damaged, animated, more than 8
        bits of grey, or Pillow is not installed.
    """
    with _opened(data, limits) as image:
        # Only an annotation of palette images; with it `convert("RGB")` gives the same pixels and a warning.
        image.info.pop("transparency", None)
        try:
            return image.convert("RGB")
        except Exception as error:  # decoders of hostile bytes raise anything
            raise ImageError(f"the {image.format} image is truncated or damaged: {error}") from error


def process_image(data: bytes, config: VisionConfig, limits: ImageLimits = DEFAULT_LIMITS) -> ProcessedImage:
    """Decodes an image file and cuts it into patches.

    Raises:
      ImageError: as `decode_image` and `plan_image`.
    """
    # The header decides first: a file that cannot be planned is never decoded.
    plan_image(*image_size(data, limits), config)
    return process_pixels(decode_image(data, limits), config)


def process_pixels(image: Image.Image, config: VisionConfig) -> ProcessedImage:
    """Resizes, pads, normalises and cuts a decoded image (vision specification, "Pixels").

    Args:
      image: a Pillow image of mode RGB.
      config: the checkpoint's vision configuration.

    Raises:
      ImageError: as `plan_image`.
    """
    pillow = _pillow()
    plan = plan_image(*image.size, config)
    canvas = image.resize((plan.resized_width, plan.resized_height), resample=pillow.Resampling.BICUBIC)
    if canvas.size != (plan.canvas_width, plan.canvas_height):
        resized = canvas
        canvas = pillow.new("RGB", (plan.canvas_width, plan.canvas_height), (PAD_VALUE,) * CHANNELS)
        canvas.paste(resized, (plan.left, plan.top))
    patch, grid = config.patch_size, plan.grid
    pixels = np.asarray(canvas).reshape(grid.patch_rows, patch, grid.patch_columns, patch, CHANNELS)
    patches = pixels.transpose(0, 2, 4, 1, 3).reshape(grid.patches, CHANNELS * patch * patch)
    return ProcessedImage(_normalized_levels()[patches].view(ml_dtypes.bfloat16), grid)


@functools.cache
def _normalized_levels() -> np.ndarray:
    """[256] uint16: the bfloat16 bits of every 8-bit level, normalised in float32 and rounded once."""
    levels = np.arange(256, dtype=np.float32)
    half = np.float32(0.5)
    return ((levels / np.float32(255) - half) / half).astype(ml_dtypes.bfloat16).view(np.uint16)


def _opened(data: bytes, limits: ImageLimits) -> Image.Image:
    """Reads the header of an image file and applies every check that needs no pixels."""
    pillow = _pillow()
    if len(data) > limits.max_bytes:
        raise ImageError(f"the image file has {len(data)} bytes; at most {limits.max_bytes} are accepted")
    too_large = f"at most {limits.max_pixels} pixels are accepted; send a smaller one"
    try:
        image = pillow.open(io.BytesIO(data), formats=FORMATS)
    except (pillow.DecompressionBombError, pillow.DecompressionBombWarning) as error:
        raise ImageError(f"the image is too large: {error}; {too_large}") from error
    except Exception as error:  # decoders of hostile bytes raise anything
        raise ImageError(f"the data is no readable image; accepted formats are {', '.join(FORMATS)}") from error
    width, height = image.size
    if width * height > limits.max_pixels:
        raise ImageError(f"the image has {width} x {height} = {width * height} pixels; {too_large}")
    if image.mode not in MODES:
        raise ImageError(
            f"the image has Pillow mode {image.mode!r}, more than 8 bits a channel or no colour; "
            "convert it to 8-bit RGB"
        )
    try:
        # A multi-picture JPEG counts its previews as frames and is no animation.
        animated = image.format != "MPO" and getattr(image, "is_animated", False)
    except Exception as error:  # the scan for a second frame reads hostile bytes too
        raise ImageError(f"the {image.format} image is truncated or damaged: {error}") from error
    if animated:
        raise ImageError(f"the {image.format} image is animated; only still images are accepted, send one frame")
    return image


def _pillow() -> ModuleType:
    try:
        from PIL import Image
    except ImportError as error:
        raise ImageError("images need Pillow, which is not installed; install v41jax[vision]") from error
    return Image

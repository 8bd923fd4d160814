"""Images inside a prompt: spans, token types, content digests, and which embedding row each position takes.

NumPy only. Everything is driven by spans, never by comparing ids with the placeholder, so that a text position can
neither consume an image row nor be routed as an image (vision specification, "Span and token types").
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
from collections.abc import Sequence

import numpy as np

from v41jax.image_planning import ImageError, ImageGrid
from v41jax.image_processing import ProcessedImage

PREPROCESSING_VERSION = b"v41jax image patches 1"
"""Part of every content digest; change it when equal files may give other patches or another layout."""


class TokenType(enum.IntEnum):
    """Role of a prompt position, kept beside the ids because a whole span carries one id."""

    TEXT = -1
    START = 0
    PATCH = 1
    NEWLINE = 2
    END = 3


DELIMITER_ROWS = (TokenType.START, TokenType.NEWLINE, TokenType.END)
"""Order of the learned rows in `VisionParameters.delimiters`."""


@dataclasses.dataclass(frozen=True)
class ImageSpan:
    """One image in a prompt.

    Attributes:
      start: position of the span's first token in the prompt.
      length: positions of the span, delimiters included.
      digest: `content_digest` of the image, 32 bytes.
      grid: its grids.
    """

    start: int
    length: int
    digest: bytes
    grid: ImageGrid

    @property
    def end(self) -> int:
        """Position after the span's last token."""
        return self.start + self.length


@dataclasses.dataclass(frozen=True, eq=False)
class ImagePrompt:
    """A prompt whose placeholders have become spans.

    Attributes:
      token_ids: [n] int32; every span position carries the image token id.
      token_types: [n] int8, a `TokenType` a position.
      spans: ascending, disjoint, one an image in prompt order.
    """

    token_ids: np.ndarray
    token_types: np.ndarray
    spans: tuple[ImageSpan, ...]

    @property
    def image_mask(self) -> np.ndarray:
        """[n] bool: positions that are Engram-dead and routed by `bias_vl`, delimiters included."""
        return self.token_types != TokenType.TEXT


@dataclasses.dataclass(frozen=True, eq=False)
class ChunkRows:
    """The image positions of one chunk.

    Attributes:
      destinations: [I] int32, index inside the chunk.
      sources: [I] int32, index in the rows of all spans concatenated in order.
    """

    destinations: np.ndarray
    sources: np.ndarray


def span_token_types(grid: ImageGrid) -> np.ndarray:
    """[grid.tokens] int8: START, (PATCH x columns, NEWLINE) x rows, END."""
    body = np.full((grid.rows, grid.columns + 1), TokenType.PATCH, np.int8)
    body[:, -1] = TokenType.NEWLINE
    return np.concatenate([[TokenType.START], body.reshape(-1), [TokenType.END]], dtype=np.int8, casting="unsafe")


def content_digest(image: ProcessedImage) -> bytes:
    """Digest of what the model sees of an image (vision specification, "Prefix hashing").

    Covers dtype, shape and bytes of the processed patches, both grids, the type layout and the preprocessing version;
    equal pixels from different containers have one digest.

    Returns:
      32 bytes (SHA-256), safe to compare instead of the pixels.
    """
    grid = image.grid
    header = (
        f"{image.patches.dtype.name} {image.patches.shape} "
        f"{grid.patch_rows} {grid.patch_columns} {grid.rows} {grid.columns}"
    )
    digest = hashlib.sha256()
    for part in (PREPROCESSING_VERSION, header.encode(), span_token_types(grid).tobytes()):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    digest.update(np.ascontiguousarray(image.patches).view(np.uint8))
    return digest.digest()


def expand_placeholders(
    token_ids: Sequence[int] | np.ndarray, images: Sequence[ProcessedImage], image_token_id: int
) -> ImagePrompt:
    """Replaces every placeholder of a tokenized prompt by the span of its image, in order.

    Args:
      token_ids: [m], one `image_token_id` an image.
      images: one a placeholder, in rendered order.
      image_token_id: the placeholder's id, also the id of every span position.

    Raises:
      ImageError: the numbers of placeholders and images differ.
    """
    ids = np.asarray(token_ids, np.int32)
    places = np.flatnonzero(ids == image_token_id)
    if len(places) != len(images):
        raise ImageError(f"the prompt has {len(places)} image placeholders and {len(images)} images; they must match")
    lengths = np.ones(len(ids), np.int64)
    lengths[places] = [image.grid.tokens for image in images]
    starts = np.cumsum(lengths) - lengths
    return _prompt(np.repeat(ids, lengths), starts[places].tolist(), images)


def locate_spans(
    token_ids: Sequence[int] | np.ndarray, images: Sequence[ProcessedImage], image_token_id: int
) -> ImagePrompt:
    """Finds the spans of a prompt whose placeholders are already expanded.

    Args:
      token_ids: [n], every span position `image_token_id`; spans may touch.
      images: the images in prompt order.
      image_token_id: the id of span positions.

    Raises:
      ImageError: the image positions are not exactly the spans of these images.
    """
    ids = np.asarray(token_ids, np.int32)
    is_image = ids == image_token_id
    starts: list[int] = []
    position = 0
    for image in images:
        remaining = np.flatnonzero(is_image[position:])
        start = position + int(remaining[0]) if len(remaining) else len(ids)
        position = start + image.grid.tokens
        if not is_image[start:position].all() or position > len(ids):
            raise ImageError(f"image {len(starts)} needs {image.grid.tokens} consecutive image positions from {start}")
        starts.append(start)
    expected = sum(image.grid.tokens for image in images)
    if int(is_image.sum()) != expected:
        raise ImageError(f"the prompt has {int(is_image.sum())} image positions; its images need {expected}")
    return _prompt(ids, starts, images)


def _prompt(ids: np.ndarray, starts: Sequence[int], images: Sequence[ProcessedImage]) -> ImagePrompt:
    types = np.full(len(ids), TokenType.TEXT, np.int8)
    spans = []
    for start, image in zip(starts, images, strict=True):
        spans.append(ImageSpan(start, image.grid.tokens, content_digest(image), image.grid))
        types[start : start + image.grid.tokens] = span_token_types(image.grid)
    return ImagePrompt(ids, types, tuple(spans))


def image_mask(spans: Sequence[ImageSpan], start: int, end: int) -> np.ndarray:
    """[end - start] bool: which positions of `[start, end)` lie in a span; generated positions never do.

    It marks dead positions for the Engram and the rows that select experts by `bias_vl`.
    """
    mask = np.zeros(end - start, bool)
    for span in spans:
        mask[max(span.start - start, 0) : max(span.end - start, 0)] = True
    return mask


def chunk_rows(spans: Sequence[ImageSpan], start: int, end: int) -> ChunkRows:
    """Intersects the chunk `[start, end)` with the spans.

    Source: vision specification, "Chunked prefill and embedding leases".

    Returns:
      destinations and sources, both empty for a chunk of text.
    """
    destinations: list[np.ndarray] = [np.empty(0, np.int32)]
    sources: list[np.ndarray] = [np.empty(0, np.int32)]
    offset = 0
    for span in spans:
        first, last = max(span.start, start), min(span.end, end)
        if first < last:
            positions = np.arange(first, last, dtype=np.int32)
            destinations.append(positions - start)
            sources.append(positions - span.start + offset)
        offset += span.length
    return ChunkRows(np.concatenate(destinations), np.concatenate(sources))


def block_content(spans: Sequence[ImageSpan], start: int, end: int) -> bytes:
    """What the prefix hash of the block `[start, end)` must cover besides its token ids.

    For each span that meets the block: the image's digest and where the block starts in the span (negative when the
    span starts inside the block). Hash it after the ids and compare it with the ids on every lookup: then equal ids
    with other images, or the same image laid out elsewhere, never match (vision specification, "Prefix hashing").

    Returns:
      40 bytes a span; empty for a block of text, whose hash stays that of a text prompt.
    """
    parts = []
    for span in spans:
        if span.start < end and span.end > start:
            parts.append(span.digest + (start - span.start).to_bytes(8, "little", signed=True))
    return b"".join(parts)


def span_embeddings(aligner_rows: np.ndarray, delimiters: np.ndarray, grid: ImageGrid) -> np.ndarray:
    """Assembles the embedding rows of one span.

    Args:
      aligner_rows: [grid.cells, D] float, the aligner's output in reading order.
      delimiters: [3, D] float, rows in the order of `DELIMITER_ROWS`.
      grid: the image's grids.

    Returns:
      [grid.tokens, D] of the dtype of `aligner_rows`.

    Raises:
      ImageError: the rows do not fit the grid.
    """
    if len(aligner_rows) != grid.cells:
        raise ImageError(
            f"the aligner gave {len(aligner_rows)} rows; a grid of {grid.rows} x {grid.columns} needs {grid.cells}"
        )
    types = span_token_types(grid)
    rows = np.empty((len(types), aligner_rows.shape[1]), aligner_rows.dtype)
    rows[types == TokenType.PATCH] = aligner_rows
    for role, delimiter in zip(DELIMITER_ROWS, np.asarray(delimiters), strict=True):
        rows[types == role] = delimiter.astype(rows.dtype)
    return rows

"""Embedding rows of images, held on the host while any request may still read them.

A request holds a lease on its images from submission until it finishes or is cancelled; preemption keeps it, because
the prefill runs again. Requests with equal images share one entry, encoded once and only when a forward reads it.
Called from the scheduler's thread only. What a chunk reads is `image_spans`, how rows are computed `image_encoder`.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence

import numpy as np

from v41jax.image_planning import ImageError
from v41jax.image_processing import ProcessedImage
from v41jax.image_spans import ImagePrompt, ImageSpan, chunk_rows

SMALLEST_ROW_BUCKET = 64
"""Image rows of a batch are padded to this many, or to a power of two above it."""


class ImageCapacityError(ImageError):
    """No room for the images of a request.

    Attributes:
      permanent: the request alone exceeds the capacity; otherwise it fits once others have finished.
    """

    def __init__(self, message: str, permanent: bool):
        super().__init__(message)
        self.permanent = permanent


@dataclasses.dataclass(frozen=True)
class ImageChunk:
    """Positions `[start, end)` of a request, run as consecutive rows of a batch.

    Attributes:
      request_id: the request.
      start, end: absolute positions the forward runs, recomputed ones of a replay included.
      first_row: batch row of position `start`.
    """

    request_id: Hashable
    start: int
    end: int
    first_row: int


@dataclasses.dataclass(eq=False)
class _Entry:
    """One image: its patches until it is encoded, its rows afterwards."""

    image: ProcessedImage | None
    tokens: int
    cost: int
    rows: np.ndarray | None = None
    users: int = 0


class ImageLeases:
    """Reference-counted rows of the images of live requests.

    Args:
      encode: gives the embedding rows [grid.tokens, D] of each image, delimiters included, in order.
      row_bytes: bytes of one row, for the accounting.
      capacity_bytes: what entries may take together; an entry is charged for its patches or its rows, the larger.
      idle_bytes: of these, how much may hold images no request uses, least recently used dropped first; 0 frees an
        image with its last user.
    """

    def __init__(
        self,
        encode: Callable[[Sequence[ProcessedImage]], Sequence[np.ndarray]],
        *,
        row_bytes: int,
        capacity_bytes: int,
        idle_bytes: int = 0,
    ):
        self._encode = encode
        self._row_bytes = row_bytes
        self._capacity = capacity_bytes
        self._idle_limit = idle_bytes
        self._entries: dict[bytes, _Entry] = {}
        self._idle: OrderedDict[bytes, None] = OrderedDict()
        self._leases: dict[Hashable, tuple[ImageSpan, ...]] = {}

    @property
    def requests(self) -> frozenset[Hashable]:
        """Requests that hold a lease; empty when the engine is idle."""
        return frozenset(self._leases)

    @property
    def held_bytes(self) -> int:
        """Bytes charged for images in use."""
        return sum(entry.cost for entry in self._entries.values() if entry.users)

    @property
    def idle_bytes(self) -> int:
        """Bytes charged for images kept without a user."""
        return sum(self._entries[digest].cost for digest in self._idle)

    def acquire(self, request_id: Hashable, prompt: ImagePrompt, images: Sequence[ProcessedImage]) -> None:
        """Takes a lease for a request at its submission; nothing is encoded yet.

        A prompt without images takes none. Acquiring again with the same prompt changes nothing.

        Raises:
          ImageCapacityError: no room; nothing was taken.
          ImageError: the request already holds a lease on other images.
        """
        if request_id in self._leases:
            if self._leases[request_id] != prompt.spans:
                raise ImageError(f"request {request_id!r} is live with other images; finish or cancel it first")
            return
        if not prompt.spans:
            return
        wanted = {span.digest: image for span, image in zip(prompt.spans, images, strict=True)}
        costs = {digest: self._cost(image) for digest, image in wanted.items()}
        if sum(costs.values()) > self._capacity:
            raise ImageCapacityError(
                f"the images of the request take {sum(costs.values())} bytes; at most {self._capacity} are held, "
                "send fewer or smaller images",
                permanent=True,
            )
        in_use = self.held_bytes
        fresh = sum(cost for digest, cost in costs.items() if not self._in_use(digest))
        if in_use + fresh > self._capacity:
            raise ImageCapacityError(
                f"{in_use} of {self._capacity} bytes for images are in use and the request needs {fresh} more; "
                "retry when a request with images has finished",
                permanent=False,
            )
        for digest, image in wanted.items():
            entry = self._entries.setdefault(digest, _Entry(image, image.grid.tokens, costs[digest]))
            entry.users += 1
            self._idle.pop(digest, None)
        self._leases[request_id] = prompt.spans
        self._evict()

    def fork(self, parent: Hashable, child: Hashable) -> None:
        """Gives `child` a lease on the images of `parent`, if that holds one.

        Raises:
          ImageError: the child already holds a lease.
        """
        if child in self._leases:
            raise ImageError(f"request {child!r} already holds a lease and cannot become a fork of {parent!r}")
        if parent not in self._leases:
            return
        self._leases[child] = self._leases[parent]
        for digest in self._digests(child):
            self._entries[digest].users += 1

    def release(self, request_id: Hashable) -> None:
        """Ends a request's lease at its finish or cancellation; the last user of an image frees it.

        A request without a lease, a text request or one already released, changes nothing. Forwards in flight hold
        copies of what they read.
        """
        if request_id not in self._leases:
            return
        for digest in self._digests(request_id):
            entry = self._entries[digest]
            entry.users -= 1
            if entry.users == 0:
                self._idle[digest] = None
        del self._leases[request_id]
        self._evict()

    def rows(self, request_id: Hashable, start: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """The image rows among positions `[start, end)`, encoding images that are read for the first time.

        Args:
          request_id: a request; one without a lease has no image positions.
          start, end: every position the forward runs, from the start of a replay on, not from the first new token.

        Returns:
          destinations [I] int32, index inside `[start, end)`, and rows [I, D], a copy.

        Raises:
          ImageError: the encoder gave the wrong number of rows; the images stay unencoded.
        """
        spans = [span for span in self._leases.get(request_id, ()) if span.start < end and span.end > start]
        entries = [self._entries[span.digest] for span in spans]
        self._ensure_rows(entries)
        parts = [
            entry.rows[max(start - span.start, 0) : end - span.start]
            for span, entry in zip(spans, entries, strict=True)
            if entry.rows is not None
        ]
        rows = np.concatenate(parts) if parts else np.empty((0, 0), np.float32)
        return chunk_rows(spans, start, end).destinations, rows

    def batch_rows(self, chunks: Sequence[ImageChunk], batch_size: int) -> tuple[np.ndarray, np.ndarray] | None:
        """The image rows of a whole batch, padded to a bucket, as `layers.vision.write_image_rows` reads them.

        Args:
          chunks: the batch's prefill requests.
          batch_size: N, rows of the batch bucket, the destination of padding.

        Returns:
          rows [I, D] and destinations [I] int32, or None when no row of the batch lies in an image.

        Raises:
          ImageError: as `rows`.
        """
        parts = [(chunk, *self.rows(chunk.request_id, chunk.start, chunk.end)) for chunk in chunks]
        parts = [part for part in parts if len(part[1])]
        if not parts:
            return None
        rows = np.concatenate([rows for _, _, rows in parts])
        destinations = np.concatenate([chunk.first_row + places for chunk, places, _ in parts])
        padding = row_bucket(len(rows)) - len(rows)
        return (
            np.pad(rows, ((0, padding), (0, 0))),
            np.pad(destinations, (0, padding), constant_values=batch_size).astype(np.int32),
        )

    def _ensure_rows(self, entries: Sequence[_Entry]) -> None:
        missing = list(dict.fromkeys(entry for entry in entries if entry.rows is None))
        if not missing:
            return
        encoded = self._encode([entry.image for entry in missing if entry.image is not None])
        counts, expected = [len(rows) for rows in encoded], [entry.tokens for entry in missing]
        if counts != expected:
            raise ImageError(f"the image encoder gave {counts} rows for spans of {expected}")
        for entry, rows in zip(missing, encoded, strict=True):
            entry.rows, entry.image = rows, None

    def _evict(self) -> None:
        """Drops idle images until they fit their own limit and what the images in use leave of the capacity."""
        room = min(self._idle_limit, self._capacity - self.held_bytes)
        idle = self.idle_bytes
        while idle > room:
            digest, _ = self._idle.popitem(last=False)
            idle -= self._entries.pop(digest).cost

    def _in_use(self, digest: bytes) -> bool:
        return digest in self._entries and self._entries[digest].users > 0

    def _digests(self, request_id: Hashable) -> set[bytes]:
        return {span.digest for span in self._leases[request_id]}

    def _cost(self, image: ProcessedImage) -> int:
        return max(image.patches.nbytes, image.grid.tokens * self._row_bytes)


def row_bucket(rows: int) -> int:
    """Padded number of image rows of a batch: a power of two."""
    return max(SMALLEST_ROW_BUCKET, 1 << (rows - 1).bit_length())

"""Checkpoint images of the `copy` transfer: which exist, which may be evicted, where they are kept.

The unit accounting is in PAGE units of the block pool whatever array the runner stores images in.
"""

from __future__ import annotations

import dataclasses
import enum
import heapq

from scheduler.pages import BlockPool
from scheduler.states import CheckpointSpec, ImageRestore, ImageStore, StateMaintenanceOps


class ImageState(enum.Enum):
    """Life of a checkpoint image."""

    COPYING = "copying"
    READY = "ready"
    EVICTING = "evicting"


@dataclasses.dataclass(slots=True)
class Image:
    """A checkpoint image filed under the hash of the last block it covers.

    Attributes:
      content_hash: that hash.
      position: tokens it covers.
      image: row of the image array.
      units: PAGE units charged.
      state: see `ImageState`.
      pins: restores that were queued and whose batch has not completed.
      stored: its store's batch has completed.
    """

    content_hash: int
    position: int
    image: int
    units: tuple[int, ...]
    state: ImageState = ImageState.COPYING
    pins: int = 0
    stored: bool = False


class CheckpointImages:
    """Index of checkpoint images and their unit accounting.

    Attributes:
      checkpoint: what one image holds.
      capacity: images that could exist at once, the size of the runner's image array.
      stored, evicted: counters.
    """

    def __init__(self, checkpoint: CheckpointSpec, pool: BlockPool):
        self.checkpoint = checkpoint
        self.capacity = pool.num_pages // checkpoint.units
        self.stored = 0
        self.evicted = 0
        self._pool = pool
        self._rows = list(range(self.capacity))
        self._by_hash: dict[int, Image] = {}  # least recently used first
        self._in_flight: dict[int, Image] = {}  # by image row: stores or restores not completed

    def images(self) -> tuple[Image, ...]:
        """Every image that a hash still names, least recently used first."""
        return tuple(self._by_hash.values())

    def held_units(self) -> tuple[int, ...]:
        """PAGE units of every image, the evicting ones included."""
        held = {image.image: image for image in (*self._by_hash.values(), *self._in_flight.values())}
        return tuple(unit for image in held.values() for unit in image.units)

    def is_ready(self, content_hash: int) -> bool:
        """Whether a restore may read an image under this hash."""
        image = self._by_hash.get(content_hash)
        return image is not None and image.state is ImageState.READY

    def evictable_units(self, excluding: int | None = None) -> int:
        """PAGE units that evicting every READY, unpinned image would free, one hash excepted."""
        units = self.checkpoint.units
        return units * sum(
            1
            for image in self._by_hash.values()
            if image.state is ImageState.READY and not image.pins and image.content_hash != excluding
        )

    def evict_one(self) -> bool:
        """Evicts the least recently used READY, unpinned image; False when there is none."""
        for image in self._by_hash.values():
            if image.state is ImageState.READY and not image.pins:
                self.drop(image.content_hash)
                return True
        return False

    def drop(self, content_hash: int) -> None:
        """Forgets the image under a hash; its units return once nothing in flight uses them."""
        image = self._by_hash.pop(content_hash, None)
        if image is None:
            return
        self.evicted += 1
        image.state = ImageState.EVICTING
        self._release_if_idle(image)

    def drop_all(self) -> None:
        """Forgets every image."""
        for content_hash in list(self._by_hash):
            self.drop(content_hash)

    def store(self, content_hash: int, position: int, slot: int) -> ImageStore | None:
        """Reserves an image for the state in `slot` at `position`.

        Returns:
          The operation for the next batch, or None when an image under this hash exists or is on its way, or when
          not enough units can be freed; nothing was evicted then.
        """
        image = self._reserve(content_hash, position, 0)
        if image is None:
            return None
        self._in_flight[image.image] = image
        return ImageStore(slot, image.image, image.units, position, self.checkpoint.layout_id, image_bytes=self._bytes)

    def adopt(self, content_hash: int, position: int, beside: int) -> int | None:
        """Reserves a READY image whose bytes the caller writes before the next batch.

        Args:
          content_hash, position: as of `store`.
          beside: pages that must stay free.

        Returns:
          Its row, or None under the conditions of `store`.
        """
        image = self._reserve(content_hash, position, beside)
        if image is None:
            return None
        image.state, image.stored = ImageState.READY, True
        return image.image

    def _reserve(self, content_hash: int, position: int, beside: int) -> Image | None:
        if content_hash in self._by_hash:
            return None
        units = self.checkpoint.units
        if self._pool.num_free + self.evictable_units() < units + beside:
            return None
        while self._pool.num_free < units + beside or not self._rows:
            if not self.evict_one():
                return None
        image = Image(content_hash, position, heapq.heappop(self._rows), self._pool.reserve_raw(units))
        self._by_hash[content_hash] = image
        return image

    def pin(self, content_hash: int, slot: int) -> ImageRestore:
        """Pins a READY image and returns the restore of it into `slot`."""
        image = self._by_hash.pop(content_hash)
        self._by_hash[content_hash] = image  # most recently used
        image.pins += 1
        self._in_flight[image.image] = image
        return ImageRestore(
            image.image, slot, image.units, image.position, self.checkpoint.layout_id, image_bytes=self._bytes
        )

    def unpin(self, restore: ImageRestore) -> None:
        """Releases the pin of a restore that completed."""
        image = self._in_flight[restore.image]
        image.pins -= 1
        self._release_if_idle(image)

    def complete(self, ops: StateMaintenanceOps) -> None:
        """The batch that carried `ops` has completed: publishes its stores and releases its pins."""
        for store in ops.stores:
            image = self._in_flight[store.image]
            image.stored = True
            self.stored += 1
            if image.state is ImageState.COPYING:
                image.state = ImageState.READY
            self._release_if_idle(image)
        for restore in ops.restores:
            self.unpin(restore)

    def abandon(self, ops: StateMaintenanceOps) -> None:
        """The batch that carried `ops` did not run, or its results are lost: forgets its stores and releases its pins.

        An image it was to restore stays: a restore only reads it.
        """
        for store in ops.stores:
            image = self._in_flight.pop(store.image)
            if image.state is ImageState.COPYING:
                self.drop(image.content_hash)
            else:
                self._release_if_idle(image)
        for restore in ops.restores:
            self.unpin(restore)

    @property
    def num_in_flight(self) -> int:
        """Images that a store or restore, not completed, still uses."""
        return len(self._in_flight)

    @property
    def num_pins(self) -> int:
        """Pins held by restores that have not completed."""
        return sum(image.pins for image in self._in_flight.values())

    @property
    def _bytes(self) -> int:
        return self.checkpoint.image_bytes

    def _release_if_idle(self, image: Image) -> None:
        if image.pins or (image.image in self._in_flight and not image.stored):
            return
        self._in_flight.pop(image.image, None)
        if image.state is ImageState.EVICTING and image.units:
            self._pool.release_raw(image.units)
            image.units = ()
            heapq.heappush(self._rows, image.image)


class CheckpointLadder:
    """Where images are kept, one grid arithmetic for the planner that cuts and the check that keeps.

    Source: runtime specification, "Where images are kept".

    Attributes:
      interval: distance of the rungs in tokens; 0 keeps nothing, -1 keeps only demanded and prompt-end positions.
      block: hash block in tokens; every kept position is a multiple of it.
    """

    def __init__(self, interval: int, block: int):
        if interval > 0 and interval % block:
            raise ValueError(f"interval {interval} is not on the hash grid of {block} tokens")
        self.interval = interval
        self.block = block

    def next_cut(self, position: int, prefill_end: int, demand: int = 0) -> int:
        """Smallest kept position of a prefill above `position`, at most `prefill_end`; 0 without one."""
        if self.interval == 0:
            return 0
        last = (prefill_end - 1) // self.block * self.block
        cuts = [cut for cut in (demand, last) if position < cut < prefill_end]
        if self.interval > 0:
            rung = (position // self.interval + 1) * self.interval
            if rung <= prefill_end:
                cuts.append(rung)
        return min(cuts, default=0)

    def keeps_prefill(self, end: int, prefill_end: int, demand: int = 0) -> bool:
        """Whether a prefill forward that ended at `end` leaves an image."""
        return end > 0 and self.next_cut(end - 1, prefill_end, demand) == end

    def keeps_decode(self, end: int, last_kept: int) -> bool:
        """Whether a decode forward that ended at `end` leaves an image."""
        return self.interval > 0 and end % self.block == 0 and end - last_kept >= self.interval

"""Pages, slots and images of running requests: admission, growth, publication and release.

The scheduler decides who runs; this file decides what memory that takes and keeps every count consistent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from scheduler.checkpoint_images import CheckpointImages
from scheduler.pages import NO_HASH, BlockPool, block_content, block_hash
from scheduler.pool_geometry import V41PoolGeometry
from scheduler.sequence import Sequence
from scheduler.states import ImageRestore, StateSlotPool, StateTransfer, TransferKind, gate_fixpoint


class PrefixHit(NamedTuple):
    """What an admission may reuse.

    Attributes:
      tokens: reused prefix, a multiple of the hash block.
      pages: its page ids.
      image_hash: hash of the image to restore under `copy`; NO_HASH without one.
      demand: boundary a missing image withheld; 0 without one.
    """

    tokens: int
    pages: tuple[int, ...]
    image_hash: int
    demand: int


class Adopted(NamedTuple):
    """Pages and an image whose contents are to be written to the device before the next forward.

    Attributes:
      pages: page id -> block of the request.
      image: row of the image array; None without one.
    """

    pages: dict[int, int]
    image: int | None


class BlockManager:
    """Memory of running requests.

    Attributes:
      pool: page ids.
      slots: state slots.
      images: checkpoint images under `copy` transfer, else None.
      transfer: how a hit becomes resumable.
      tables: [num_slots, max_pages] int32, block table of the slot's owner, unused entries 0.
      on_publish: told (request, block, page) of every publication.
    """

    def __init__(
        self,
        geometry: V41PoolGeometry,
        num_pages: int,
        num_slots: int,
        transfer: StateTransfer,
        caching: bool,
        max_pages: int,
    ):
        self.geometry = geometry
        self.block = geometry.block_size
        self.pool = BlockPool(num_pages)
        self.slots = StateSlotPool(num_slots)
        self.transfer = transfer
        self.images: CheckpointImages | None = None
        if transfer.kind is TransferKind.COPY and transfer.checkpoint is not None and caching:
            self.images = CheckpointImages(transfer.checkpoint, self.pool)
            self.pool.on_evict = self.images.drop
        self.tables: NDArray[np.int32] = np.zeros((num_slots, max(1, min(max_pages, num_pages))), np.int32)
        self._caching = caching and transfer.kind is not TransferKind.NONE
        self.on_publish: Callable[[Sequence, int, int], None] | None = None

    # Counts --------------------------------------------------------------------------------------------------

    def available_pages(self, excluding_image: int | None = None) -> int:
        """Pages a request could get now: free ones and those of evictable images."""
        images = self.images.evictable_units(excluding_image) if self.images is not None else 0
        return self.pool.num_free + images

    @property
    def images_in_flight(self) -> bool:
        """Some image is held by a store or a restore whose batch has not completed."""
        return self.images is not None and self.images.num_in_flight > 0

    # Admission -----------------------------------------------------------------------------------------------

    def find_hit(self, sequence: Sequence, length: int) -> PrefixHit:
        """Longest reusable prefix of the first `length` tokens; the last block is never reused.

        Source: runtime specification, "Admission (`can_allocate`, `allocate`)", steps 3 and 4.
        """
        if not self._reads_cache(sequence):
            return PrefixHit(0, (), NO_HASH, 0)
        pages = self._device_prefix(sequence, length)
        compressed_hit = len(pages) * self.block
        hit = gate_fixpoint([lambda tokens: self._image_gate(sequence, tokens, length)], compressed_hit)
        image_hash = NO_HASH
        demand = 0
        if self.images is not None and hit:
            image_hash = block_hash(sequence, hit // self.block - 1, self.block)
        if self.images is not None and hit < compressed_hit and self._holds_image_beside(length):
            demand = compressed_hit
        return PrefixHit(hit, tuple(pages[: hit // self.block]), image_hash, demand)

    def _reads_cache(self, sequence: Sequence) -> bool:
        # Log-probabilities of a prompt need all of its rows.
        scores_prompt = sequence.sampling.prompt_logprobs and not sequence.num_output_tokens
        return self._caching and not scores_prompt

    def _device_prefix(self, sequence: Sequence, length: int) -> list[int]:
        """Pages of the leading blocks that the device holds; the last block is left out."""
        pages: list[int] = []
        for block in range((length - 1) // self.block):
            content_hash = block_hash(sequence, block, self.block)
            page = self.pool.lookup(content_hash, block_content(sequence, block, self.block))
            if page is None:
                break
            pages.append(page)
        return pages

    def _holds_image_beside(self, length: int) -> bool:
        """Whether the whole pool could hold `length` tokens and an image at once."""
        units = self.images.checkpoint.units if self.images is not None else 0
        return self.geometry.pages_for(length) + units <= self.pool.num_pages

    def _image_gate(self, sequence: Sequence, tokens: int, length: int) -> int:
        """Rightmost boundary at most `tokens` whose state can be had: any under replay, one with a READY image else.

        A restore pins its image while the request takes all its pages; a request that leaves no room for one never
        gets one, rather than waiting forever for pages that the image itself holds.
        """
        if self.transfer.kind is TransferKind.REPLAY:
            return tokens
        if self.images is None or not self._holds_image_beside(length):
            return 0
        while tokens and not self.images.is_ready(block_hash(sequence, tokens // self.block - 1, self.block)):
            tokens -= self.block
        return tokens

    def may_fit(self, length: int) -> bool:
        """Cheap bound before a prefix walk: False when `length` tokens cannot fit however much they share."""
        used = self.pool.num_pages - self.pool.num_free - self.pool.num_raw
        return self.geometry.pages_for(length) - used <= self.available_pages()

    def can_allocate(self, hit: PrefixHit, length: int) -> bool:
        """Whether `length` tokens with this hit fit now.

        Reused pages that are free still count: claiming them takes them off the free list.
        """
        demand = self.geometry.pages_for(length) - sum(1 for page in hit.pages if self.pool.refs[page])
        return demand <= self.available_pages(hit.image_hash)

    def allocate(self, sequence: Sequence, hit: PrefixHit, length: int) -> ImageRestore | None:
        """Gives a waiting request its slot and every page of its first `length` tokens.

        Returns:
          The restore to carry with the request's first forward, under `copy` with a hit.

        `can_allocate` and a free slot are preconditions.
        """
        for page in hit.pages:
            self.pool.claim(page)
        sequence.slot = self.slots.take()
        restore = None
        if self.images is not None and hit.image_hash != NO_HASH:
            # Before any fresh page is taken: a fresh page may evict an image.
            restore = self.images.pin(hit.image_hash, sequence.slot)
        sequence.block_table = list(hit.pages)
        self.tables[sequence.slot, : len(hit.pages)] = hit.pages
        self.grow(sequence, length)
        return restore

    # Pages from outside --------------------------------------------------------------------------------------

    def may_reuse(self, sequence: Sequence, length: int) -> bool:
        """Whether cached pages of its first `length` tokens could be of any use to a request."""
        return self._reads_cache(sequence) and (self.images is None or self._holds_image_beside(length))

    def device_reach(self, sequence: Sequence, length: int) -> tuple[int, int | None]:
        """(leading blocks on the device, of these the ones that a READY image backs; None under replay)."""
        blocks = len(self._device_prefix(sequence, length))
        if self.images is None:
            return blocks, None
        return blocks, self._image_gate(sequence, blocks * self.block, length) // self.block

    def adopt(self, sequence: Sequence, first: int, count: int, image_blocks: int) -> Adopted:
        """Takes pages for blocks `first .. first + count - 1` of a waiting request and makes them cached pages.

        Nothing is taken for blocks that the device has by now, nor when blocks below `first` are gone. The pages, and
        those of the device's own prefix, become the last ones to be evicted.

        Args:
          sequence: whose blocks they are; finalized as far as they reach.
          first: block of the first page that was brought.
          count: pages that were brought.
          image_blocks: also take a READY image that stands after this many blocks; 0 takes none. Then it is all or
            nothing.
        """
        nothing = Adopted({}, None)
        held = self._device_prefix(sequence, (first + count) * self.block + 1)
        if len(held) < first:
            return nothing
        for page in held:  # so that none of them is evicted for those that follow
            self.pool.claim(page)
        missing = first + count - len(held)
        image = None
        if image_blocks and self.images is not None:
            content_hash = block_hash(sequence, image_blocks - 1, self.block)
            if not self.images.is_ready(content_hash):
                image = self.images.adopt(content_hash, image_blocks * self.block, beside=missing)
                missing = missing if image is not None else 0
        taken = {}
        for block in range(len(held), len(held) + min(missing, self.pool.num_free)):
            page = self.pool.take()
            content_hash = block_hash(sequence, block, self.block)
            self.pool.publish(page, content_hash, block_content(sequence, block, self.block))
            taken[page] = block
        self.pool.release(reversed([*held, *taken]))
        return Adopted(taken, image)

    # Growth and release --------------------------------------------------------------------------------------

    def can_grow(self, sequence: Sequence, length: int) -> bool:
        """Whether pages for the first `length` tokens can be had now."""
        missing = self.geometry.pages_for(length) - len(sequence.block_table)
        return missing <= self.pool.num_free or missing <= self.available_pages()

    def grow(self, sequence: Sequence, length: int) -> None:
        """Appends pages until the first `length` tokens are covered; `can_grow` is a precondition."""
        table = sequence.block_table
        while len(table) * self.block < length:
            if not self.pool.num_free and self.images is not None:
                self.images.evict_one()
            page = self.pool.take()
            self.tables[sequence.slot, len(table)] = page
            table.append(page)

    def free(self, sequence: Sequence) -> None:
        """Releases the request's pages, last first, and its slot; published content stays reusable."""
        self.pool.release(reversed(sequence.block_table))
        self.tables[sequence.slot, : len(sequence.block_table)] = 0
        sequence.block_table = []
        self.slots.release(sequence.slot)
        sequence.slot = -1

    def move_slots(self, moves: dict[int, int]) -> None:
        """Renames slots, source to destination, in the ownership and the block tables.

        Raises:
          ValueError: when a destination is neither free nor a source.
        """
        self.slots.exchange(moves.keys(), moves.values())
        rows = {target: self.tables[source].copy() for source, target in moves.items()}
        for source in moves:
            self.tables[source] = 0
        for target, row in rows.items():
            self.tables[target] = row

    # Publication ---------------------------------------------------------------------------------------------

    def publish(self, sequence: Sequence, computed: int) -> None:
        """Publishes the hash of every full block below `computed`, from the first unhashed one.

        `computed` counts tokens whose KV a completed forward wrote; all of them are finalized. A missing parent stops
        the publication rather than minting a false chain.

        Source: runtime specification, "Block table, hashing, publication".
        """
        if not self._caching:
            return
        computed = min(computed, sequence.num_finalized_tokens)
        while sequence.num_hashed_tokens + self.block <= computed:
            block = sequence.num_hashed_tokens // self.block
            if block and self.pool.parent_hash(sequence.block_table[block - 1]) == NO_HASH:
                return
            content_hash = block_hash(sequence, block, self.block)
            content = block_content(sequence, block, self.block)
            self.pool.publish(sequence.block_table[block], content_hash, content)
            sequence.num_hashed_tokens += self.block
            if self.on_publish is not None:
                self.on_publish(sequence, block, sequence.block_table[block])

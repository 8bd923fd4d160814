"""Page ids: who holds which, which are reusable for a prefix, and in which order they are taken.

Content hashes are chained over full blocks and verified token by token on lookup. Freeing a page keeps its hash and
content; taking it for new content is the eviction. Nothing here knows what a page contains on the device.
"""

from __future__ import annotations

import hashlib
import heapq
import struct
from collections.abc import Callable, Iterable

from scheduler.sequence import Sequence

NO_HASH = -1
"""Hash of a page whose content has no published identity."""


def block_content(sequence: Sequence, block: int, block_size: int) -> bytes:
    """Everything that identifies hash block `block` of a request besides its parent.

    Token ids as little-endian int32, then for every image span that meets the block its digest and the block's
    offset within the span: equal placeholder ids with different images never match, and text before an image stays
    shared (vision specification, "Prefix hashing").
    """
    start, end = block * block_size, (block + 1) * block_size
    content = sequence.tokens(start, end).astype("<i4", copy=False).tobytes()
    for span in sequence.images:
        if span.start < end and start < span.start + span.length:
            content += struct.pack("<qI", start - span.start, len(span.digest)) + span.digest
    return content


def chained_hash(parent: int, content: bytes) -> int:
    """64-bit hash of a block's content under its parent's hash (NO_HASH for a first block)."""
    prefix = b"" if parent == NO_HASH else parent.to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(prefix + content, digest_size=8).digest(), "little")


def block_hash(sequence: Sequence, block: int, block_size: int) -> int:
    """Chained hash of hash block `block`, memoised on the request.

    Raises:
      RuntimeError: when the block holds a token that is not finalized.
    """
    hashes = sequence.block_hashes
    if (block + 1) * block_size > sequence.num_finalized_tokens:
        raise RuntimeError(
            f"request {sequence.request_id!r}: block {block} reaches past its {sequence.num_finalized_tokens} "
            "finalized tokens and cannot be hashed"
        )
    while len(hashes) <= block:
        parent = hashes[-1] if hashes else NO_HASH
        hashes.append(chained_hash(parent, block_content(sequence, len(hashes), block_size)))
    return hashes[block]


class BlockPool:
    """Hands out page ids; the only component that invents them.

    A page is in exactly one of four states: free-vacant (no reference, no hash), free-cached (no reference, hash
    indexed), used (referenced by block tables) or raw-reserved (storage of a checkpoint image).

    Attributes:
      num_pages: pages `0 .. num_pages - 1` exist.
      refs: per page, block-table entries that name it.
      hashes: per page, its content hash or NO_HASH.
      index: hash -> page that a prefix lookup returns.
      on_evict: called with a hash that stops being reusable.
    """

    def __init__(self, num_pages: int, on_evict: Callable[[int], None] | None = None):
        if num_pages < 1:
            raise ValueError(f"a pool of {num_pages} pages cannot serve anything: at least 1 is needed")
        self.num_pages = num_pages
        self.refs = [0] * num_pages
        self.hashes = [NO_HASH] * num_pages
        self.index: dict[int, int] = {}
        self.on_evict = on_evict
        self._contents: list[bytes] = [b""] * num_pages
        self._raw: set[int] = set()
        self._vacant = list(range(num_pages))
        self._cached: dict[int, None] = {}

    # Counts --------------------------------------------------------------------------------------------------

    @property
    def num_vacant(self) -> int:
        """Free pages without reusable content."""
        return len(self._vacant)

    @property
    def num_cached(self) -> int:
        """Free pages whose content a later prefix may reuse."""
        return len(self._cached)

    @property
    def num_free(self) -> int:
        """Pages that can be taken now."""
        return len(self._vacant) + len(self._cached)

    @property
    def num_raw(self) -> int:
        """Pages that hold checkpoint images."""
        return len(self._raw)

    def vacant_pages(self) -> tuple[int, ...]:
        """Ids of the free pages without reusable content."""
        return tuple(self._vacant)

    def cached_pages(self) -> tuple[int, ...]:
        """Ids of the free pages with reusable content, next eviction first."""
        return tuple(self._cached)

    def raw_pages(self) -> tuple[int, ...]:
        """Ids of the pages that hold checkpoint images, ascending."""
        return tuple(sorted(self._raw))

    # Lookup and references -----------------------------------------------------------------------------------

    def lookup(self, block: int, content: bytes) -> int | None:
        """Page indexed under hash `block` whose content really is `content`, or None."""
        page = self.index.get(block)
        return page if page is not None and self._contents[page] == content else None

    def claim(self, page: int) -> None:
        """Adds a reference to a page found by `lookup`."""
        if self.refs[page] == 0:
            del self._cached[page]
        self.refs[page] += 1

    def take(self) -> int:
        """Takes a page for new content: the lowest vacant one, else the least recently freed cached one.

        Raises:
          RuntimeError: when no page is free; callers check `num_free` first.
        """
        page = self._take_free()
        self.refs[page] = 1
        return page

    def release(self, pages: Iterable[int]) -> None:
        """Drops one reference of each page, in the given order; the first one freed is the first one evicted."""
        for page in pages:
            count = self.refs[page] - 1
            if count < 0:
                raise RuntimeError(f"page {page} is released but nobody references it")
            self.refs[page] = count
            if count:
                continue
            content_hash = self.hashes[page]
            if content_hash != NO_HASH and self.index.setdefault(content_hash, page) == page:
                self._cached[page] = None
            else:
                # Never hashed, or a duplicate of an indexed page that no lookup can find.
                self._forget(page)
                heapq.heappush(self._vacant, page)

    # Publication ---------------------------------------------------------------------------------------------

    def publish(self, page: int, content_hash: int, content: bytes) -> None:
        """Files a full page under its hash; an existing entry stays and the page is only annotated."""
        if self.hashes[page] not in (NO_HASH, content_hash):
            raise RuntimeError(f"page {page} is published under {self.hashes[page]:#x} and cannot change")
        self.hashes[page] = content_hash
        self._contents[page] = content
        self.index.setdefault(content_hash, page)

    def parent_hash(self, page: int) -> int:
        """Hash annotated on a page, NO_HASH without one."""
        return self.hashes[page]

    # Raw storage ---------------------------------------------------------------------------------------------

    def reserve_raw(self, count: int) -> tuple[int, ...]:
        """Takes `count` distinct pages as raw storage.

        Raises:
          RuntimeError: when fewer are free; callers check `num_free` first.
        """
        if count > self.num_free:
            raise RuntimeError(f"{count} pages are wanted as raw storage, {self.num_free} are free")
        pages = tuple(self._take_free() for _ in range(count))
        self._raw.update(pages)
        return pages

    def release_raw(self, pages: Iterable[int]) -> None:
        """Returns raw storage to the vacant pages."""
        for page in pages:
            if page not in self._raw:
                raise RuntimeError(f"page {page} is no raw storage")
            self._raw.remove(page)
            heapq.heappush(self._vacant, page)

    # Internal ------------------------------------------------------------------------------------------------

    def _take_free(self) -> int:
        if self._vacant:
            return heapq.heappop(self._vacant)
        if not self._cached:
            raise RuntimeError("no page is free")
        page = next(iter(self._cached))
        del self._cached[page]
        content_hash = self.hashes[page]
        self._forget(page)
        if self.on_evict is not None:
            self.on_evict(content_hash)
        return page

    def _forget(self, page: int) -> None:
        content_hash = self.hashes[page]
        if content_hash != NO_HASH:
            self.hashes[page] = NO_HASH
            self._contents[page] = b""
            if self.index.get(content_hash) == page:
                del self.index[content_hash]

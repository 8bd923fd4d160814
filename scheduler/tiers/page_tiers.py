"""`PageTiers`: what a scheduler does with pages beyond the device. It never blocks the step loop.

Out: a page is read back when it is published (full, computed, hashed) and written to every tier by a worker thread; a
STATE image when its store has completed. In: while requests wait for admission a worker thread looks for the pages
past their device hit; what it brings becomes ordinary cached pages of the pool, claimed by the ordinary prefix hit.
Slow, lost, damaged and missing pages cost a recomputation and a counter.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol

from scheduler.sequence import Sequence as RequestSequence
from scheduler.states import ImageStore
from scheduler.tiers.fetch import Fetch, run_fetch
from scheduler.tiers.keys import CacheIdentity, image_keys, page_keys
from scheduler.tiers.layout import TransferLayout
from scheduler.tiers.store import TierStore

if TYPE_CHECKING:
    from scheduler.block_manager import BlockManager

_log = logging.getLogger(__name__)

LOOK_AHEAD = 4
"""Waiting requests that are looked for at once."""
SEARCHES = 2
"""Times that one wait may begin a search: the device may evict what the first one built on."""
LOADERS = 4
"""Worker threads that bring pages in."""
FETCHED_BYTES = 1 << 30
"""Pages that may lie in host memory for requests that wait; one request may always have its own."""
SAVING_BYTES = 1 << 28
"""Pages read back and not written yet; beyond it new ones are not kept."""
IDLE_WAIT_S = 0.005
"""How long an engine without other work sleeps before it looks again."""


class PageMemory(Protocol):
    """Pages and images where the model computes with them; calls take effect in program order with the steps."""

    def read_pages(self, pages: Sequence[int]) -> Callable[[], Sequence[bytes]]:
        """Starts to read pages as they are now; the result may be waited for on any thread."""
        ...

    def write_pages(self, contents: Mapping[int, bytes]) -> None:
        """Overwrites pages; the next forward sees it."""
        ...

    def read_images(self, images: Sequence[int]) -> Callable[[], Sequence[bytes]]:
        """As `read_pages`, of STATE images by row of the image array."""
        ...

    def write_images(self, contents: Mapping[int, bytes]) -> None:
        """As `write_pages`, of STATE images; the next restore sees it."""
        ...


@dataclasses.dataclass
class TransferCounters:
    """Totals since the start.

    Attributes:
      searches: lookups for waiting requests.
      timeouts: of these, not finished when the request's turn came and its deadline had passed.
      failures: of these, ended by an unexpected error.
      pages_adopted, images_adopted: brought to the device.
      pages_unused: fetched, but the device had them by then or had no room.
      pages_saved, images_saved: read back for the tiers.
      saves_dropped: pages and images that were not kept because the tiers could not follow.
      wait_seconds: between a request's turn and the end of its search, over all requests.
    """

    searches: int = 0
    timeouts: int = 0
    failures: int = 0
    pages_adopted: int = 0
    images_adopted: int = 0
    pages_unused: int = 0
    pages_saved: int = 0
    images_saved: int = 0
    saves_dropped: int = 0
    wait_seconds: float = 0.0


class PageTiers:
    """Ties a scheduler's pages to a store of tiers; see `Lifecycle.attach`.

    All methods but the workers' belong to the step loop's thread.

    Attributes:
      counters: totals.
      layout: of the bytes.
      store: the tiers.
    """

    def __init__(
        self,
        store: TierStore,
        layout: TransferLayout,
        identity: CacheIdentity,
        memory: PageMemory,
        *,
        block_size: int,
        timeout_s: float,
        loaders: Executor | None = None,
        saver: Executor | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        """Makes the link.

        Args:
          store: the tiers.
          layout: of the bytes; its pages are the store's units.
          identity: what the bytes depend on.
          memory: where pages and images are.
          block_size: tokens of a page.
          timeout_s: how long a request may be held back for its pages, from the start of their search.
          loaders, saver: run the searches and the writes; threads by default.
          clock: seconds.
        """
        self.counters = TransferCounters()
        self.layout = layout
        self.store = store
        self._namespace = identity.namespace
        self._memory = memory
        self._block = block_size
        self._timeout_s = timeout_s
        self._loaders = loaders or ThreadPoolExecutor(LOADERS, "v41jax-fetch")
        self._saver = saver or ThreadPoolExecutor(1, "v41jax-save")
        self._clock = clock
        self._fetches: dict[Any, Fetch] = {}
        self._turns: dict[Any, float] = {}  # request -> when it was first held back
        self._limits: dict[Any, float] = {}  # request from another shard -> its deadline there
        self._progress = threading.Event()
        self._lock = threading.Lock()
        self._saving = 0
        self._pages_to_read: list[tuple[int, bytes]] = []
        self._images_to_read: list[tuple[int, bytes]] = []
        self._stores: dict[int, tuple[int, bytes]] = {}  # image row -> content hash, page key
        self._page_writes: dict[int, bytes] = {}
        self._image_writes: dict[int, bytes] = {}
        self._closed = False

    # Out -----------------------------------------------------------------------------------------------------

    def published(self, sequence: RequestSequence, block: int, page: int) -> None:
        """Block `block` of a request was published on a page."""
        key = page_keys(self._namespace, sequence, block + 1, self._block)[block]
        self._pages_to_read.append((page, key))

    def image_queued(self, sequence: RequestSequence, block: int, store: ImageStore) -> None:
        """The next batch stores the state that follows block `block` of a request."""
        key = page_keys(self._namespace, sequence, block + 1, self._block)[block]
        self._stores[store.image] = sequence.block_hashes[block], key

    def images_completed(self, stores: Iterable[ImageStore], is_ready: Callable[[int], bool]) -> None:
        """A batch that stored images has completed; those evicted meanwhile are not kept."""
        for store in stores:
            content_hash, key = self._stores.pop(store.image)
            if is_ready(content_hash):
                self._images_to_read.append((store.image, key))

    def after_results(self) -> None:
        """Reads back what was published since; to be called after every `postprocess`, before pages change owners."""
        pages, self._pages_to_read = self._pages_to_read, []
        images, self._images_to_read = self._images_to_read, []
        unit = self.layout.unit_bytes
        segments = self.layout.image_segments
        if pages and self._reserve(len(pages), unit):
            self.counters.pages_saved += len(pages)
            read = self._memory.read_pages([page for page, _ in pages])
            self._save(read, [key for _, key in pages], unit, None)
        if images and self._reserve(len(images), segments * unit):
            self.counters.images_saved += len(images)
            read = self._memory.read_images([row for row, _ in images])
            self._save(read, [key for _, key in images], segments * unit, segments)

    def _reserve(self, count: int, size: int) -> bool:
        with self._lock:
            fits = not self._saving or self._saving + count * size <= SAVING_BYTES
            room = fits and not self._closed
            if room:
                self._saving += count * size
        if not room:
            self.counters.saves_dropped += count
        return room

    def _save(self, read: Callable[[], Sequence[bytes]], keys: list[bytes], size: int, segments: int | None) -> None:
        def job() -> None:
            try:
                for key, payload in zip(keys, read(), strict=True):
                    if segments is None:
                        self.store.put(key, payload)
                        continue
                    for name, part in zip(image_keys(key, segments), self.layout.cut_image(payload), strict=True):
                        self.store.put(name, part)
            except Exception:  # nothing waits for it: the pages are simply not kept
                _log.exception("saving pages failed")
            finally:
                with self._lock:
                    self._saving -= len(keys) * size

        self._saver.submit(job)

    # In ------------------------------------------------------------------------------------------------------

    def look_ahead(self, waiting: Iterable[RequestSequence], manager: BlockManager) -> None:
        """Begins searches for the requests that are next; to be called before every admission pass."""
        for request_id, fetch in list(self._fetches.items()):
            if not fetch.waits:
                self.forget(request_id)
        if self._limits:
            names = {sequence.request_id for sequence in waiting}
            self._limits = {name: limit for name, limit in self._limits.items() if name in names}
        for sequence in islice(waiting, LOOK_AHEAD):
            if sequence.request_id not in self._fetches and not self._is_crowded():
                self._search(sequence, manager, 1)

    def forget(self, request_id: Any) -> None:
        """Ends the search for a request, if there is one."""
        self._limits.pop(request_id, None)
        if request_id in self._fetches:
            self._fetches.pop(request_id).cancelled = True
            self._turns.pop(request_id, None)

    def hand_over(self, request_id: Any, other: PageTiers) -> None:
        """A waiting request goes to another data shard, which may search for it but not hold it back any longer."""
        fetch = self._fetches.get(request_id)
        limit = self._limits.get(request_id) if fetch is None else fetch.deadline
        if limit is not None:
            other._limits[request_id] = limit
        self.forget(request_id)

    def _is_crowded(self) -> bool:
        held = sum(len(fetch.keys) - fetch.first for fetch in self._fetches.values() if not fetch.adopted)
        return held * self.layout.unit_bytes > FETCHED_BYTES

    def _search(self, sequence: RequestSequence, manager: BlockManager, number: int) -> None:
        length = sequence.num_finalized_tokens
        if self._closed or not manager.may_reuse(sequence, length):
            return
        blocks = (length - 1) // self._block
        found, floor = manager.device_reach(sequence, length)
        fetch = Fetch(
            sequence,
            sequence.generation,
            page_keys(self._namespace, sequence, blocks, self._block),
            first=found,
            floor=floor,
            deadline=min(self._clock() + self._timeout_s, self._limits.pop(sequence.request_id, math.inf)),
            number=number,
        )
        self._fetches[sequence.request_id] = fetch
        if (found if floor is None else floor) == blocks:
            fetch.done = fetch.adopted = True  # everything is on the device
            return
        self.counters.searches += 1
        self._loaders.submit(self._run, fetch)

    def _run(self, fetch: Fetch) -> None:
        try:
            run_fetch(fetch, self.store, self.layout)
        except Exception:
            _log.exception("a search in the tiers failed")
            with self._lock:
                self.counters.failures += 1
        finally:
            fetch.done = True
            self._progress.set()

    def holds_back(self, sequence: RequestSequence, manager: BlockManager) -> bool:
        """Whether a request whose turn it is should wait for its pages; others may pass it meanwhile."""
        fetch = self._fetches.get(sequence.request_id)
        if fetch is None or not fetch.waits:
            return False
        if fetch.done and fetch.number < SEARCHES:
            found, floor = manager.device_reach(sequence, sequence.num_finalized_tokens)
            if found < fetch.first or (floor is not None and fetch.floor is not None and floor < fetch.floor):
                self._search(sequence, manager, fetch.number + 1)
                fetch = self._fetches[sequence.request_id]
        if fetch.adopted:
            return False
        now = self._clock()
        since = self._turns.setdefault(sequence.request_id, now)
        if not fetch.done and now < fetch.deadline:
            return True
        del self._turns[sequence.request_id]
        self.counters.wait_seconds += now - since
        self.counters.timeouts += not fetch.done
        return False

    def adopt(self, sequence: RequestSequence, manager: BlockManager) -> bool:
        """Makes what has come for a request cached pages of the device; True when there is anything new.

        To be called when nothing else keeps the request from being admitted.
        """
        fetch = self._fetches.get(sequence.request_id)
        if fetch is None or not fetch.waits or fetch.adopted:
            return False
        fetch.adopted = True
        whole = fetch.done
        if not whole:
            fetch.cancelled = True  # the worker stops; `pages` may still grow by one, which is not looked at
        pages = list(fetch.pages)
        image = fetch.image if whole else None
        fetch.pages, fetch.image = [], None
        if fetch.floor is not None:
            if image is None:
                self.counters.pages_unused += len(pages)
                return False
            pages = pages[: max(fetch.image_blocks - fetch.first, 0)]
        adopted = manager.adopt(sequence, fetch.first, len(pages), fetch.image_blocks if image is not None else 0)
        for page, block in adopted.pages.items():
            self._page_writes[page] = pages[block - fetch.first]
        if adopted.image is not None and image is not None:
            self._image_writes[adopted.image] = image
            self.counters.images_adopted += 1
        self.counters.pages_adopted += len(adopted.pages)
        self.counters.pages_unused += len(pages) - len(adopted.pages)
        return bool(adopted.pages) or adopted.image is not None

    def before_forward(self) -> None:
        """Writes what was adopted; to be called after `schedule` and before the state operations of its batch."""
        if self._page_writes:
            writes, self._page_writes = self._page_writes, {}
            self._memory.write_pages(writes)
        if self._image_writes:
            writes, self._image_writes = self._image_writes, {}
            self._memory.write_images(writes)

    def wait(self, timeout_s: float = IDLE_WAIT_S) -> None:
        """Sleeps until a search ends, at most `timeout_s`; for an engine that has nothing else to do."""
        if self.searches:
            self._progress.wait(timeout_s)
        self._progress.clear()

    @property
    def searches(self) -> bool:
        """Some search has not ended."""
        return any(not fetch.done for fetch in self._fetches.values())

    # Reports and the end -------------------------------------------------------------------------------------

    def statistics(self) -> dict[str, Any]:
        """Totals of the transfers, and by tier."""
        with self._lock:
            transfers = dataclasses.asdict(self.counters)
            transfers["saving_bytes"] = self._saving
        return {"transfers": transfers, "tiers": self.store.statistics()}

    def close(self) -> None:
        """Ends searches, finishes the writes that were begun, and closes the tiers."""
        self.stop()
        self.store.close()

    def stop(self) -> None:
        """Ends searches and finishes the writes that were begun; the tiers stay open."""
        with self._lock:
            self._closed = True
        for fetch in self._fetches.values():
            fetch.cancelled = True
        self._loaders.shutdown(wait=True, cancel_futures=True)
        self._saver.shutdown(wait=True)

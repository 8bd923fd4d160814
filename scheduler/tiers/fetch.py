"""One request's search in the tiers, run by a worker thread while the step loop goes on."""

from __future__ import annotations

import dataclasses

from scheduler.sequence import Sequence, SequenceStatus
from scheduler.tiers.keys import image_keys
from scheduler.tiers.layout import TransferLayout
from scheduler.tiers.store import TierStore


@dataclasses.dataclass(slots=True, eq=False)
class Fetch:
    """What is looked for and what has come; the worker writes `pages`, `image` and `done`, the step loop reads them.

    Attributes:
      sequence, generation: the request as it waits.
      keys: names of every page the request could reuse, from its first block.
      first: leading blocks that were on the device when the search began; pages from here on are fetched.
      floor: under `copy`, a block boundary at or below which an image is of no use; None under `replay`.
      deadline: clock value after which nobody waits for it.
      number: counts the searches of one wait from 1.
      pages: contents of blocks `first`, `first + 1`, ... as they come.
      image_blocks: boundary of `image`, in blocks.
      image: STATE image of the farthest boundary that has one; only then is anything of use under `copy`.
      done: nothing more will come.
      cancelled: nobody wants more.
      adopted: what came was taken over.
    """

    sequence: Sequence
    generation: int
    keys: list[bytes]
    first: int
    floor: int | None
    deadline: float
    number: int = 1
    pages: list[bytes] = dataclasses.field(default_factory=list)
    image_blocks: int = 0
    image: bytes | None = None
    done: bool = False
    cancelled: bool = False
    adopted: bool = False

    @property
    def waits(self) -> bool:
        """The request still waits as it did when the search began."""
        sequence = self.sequence
        return sequence.status is SequenceStatus.WAITING and sequence.generation == self.generation


def run_fetch(fetch: Fetch, store: TierStore, layout: TransferLayout) -> None:
    """Fills a fetch: pages up to the first one that no tier has, under `copy` up to the farthest image below that."""
    if fetch.floor is None:
        _fetch_pages(fetch, store, len(fetch.keys))
        return
    reach = fetch.first
    while reach < len(fetch.keys) and not fetch.cancelled and store.contains(fetch.keys[reach]):
        reach += 1
    while not fetch.cancelled:
        boundary, image = _nearest_image(fetch, store, layout, reach)
        if image is None:
            return
        reach = _fetch_pages(fetch, store, boundary)
        if reach >= boundary:
            fetch.image_blocks, fetch.image = boundary, image
            return


def _fetch_pages(fetch: Fetch, store: TierStore, end: int) -> int:
    """Fetches the pages that are still missing below block `end`; returns the block it came to."""
    while fetch.first + len(fetch.pages) < end and not fetch.cancelled:
        page = store.get(fetch.keys[fetch.first + len(fetch.pages)])
        if page is None:
            break
        fetch.pages.append(page)
    return fetch.first + len(fetch.pages)


def _nearest_image(fetch: Fetch, store: TierStore, layout: TransferLayout, reach: int) -> tuple[int, bytes | None]:
    """The farthest boundary at or below `reach` blocks, above the floor, whose image is whole."""
    assert fetch.floor is not None
    for boundary in range(reach, fetch.floor, -1):
        if fetch.cancelled:
            break
        segments: list[bytes] = []
        for key in image_keys(fetch.keys[boundary - 1], layout.image_segments):
            segment = store.get(key)
            if segment is None:
                break
            segments.append(segment)
        else:
            return boundary, layout.join_image(segments)
    return 0, None

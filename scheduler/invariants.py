"""Asserts the host-checkable invariants of a scheduler at every step, from outside.

Numbers in messages are those of the runtime specification, "Invariants (each is a test)". A checker reads public state
only and keeps its own record of what was submitted, completed and reported, so that a scheduler cannot vouch for
itself. It is meant for tests and debugging: each step costs time proportional to the pool.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scheduler.checkpoint_images import ImageState
from scheduler.pages import NO_HASH, block_content, block_hash
from scheduler.scheduled_batch import Phase, ScheduledBatch
from scheduler.scheduler import Scheduler
from scheduler.sequence import PLACEHOLDER, RequestId, RequestOutput, Sequence
from scheduler.states import TransferKind


class InvariantError(AssertionError):
    """A scheduler broke one of its invariants."""


class InvariantChecker:
    """Watches one scheduler.

    Call `submitted` for every request, then `scheduled`, `executed` and `returned` for every step, and `drained` last.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        read_cursor: Callable[[int], NDArray[np.int32]] | None = None,
        compress_ids: Callable[[NDArray[np.int32]], NDArray[np.int32]] | None = None,
        page_digest: Callable[[int], Any] | None = None,
    ):
        """Watches `scheduler`.

        Args:
          scheduler: nothing submitted yet.
          read_cursor: slot -> [1 + Hh] int32, the slot's cursor after the latest executed forward.
          compress_ids: raw ids -> compressed ids, to check the cursor's history; with `read_cursor` only.
          page_digest: page -> anything comparable that changes when a byte of the page changes.
        """
        self._scheduler = scheduler
        self._read_cursor = read_cursor
        self._compress_ids = compress_ids
        self._page_digest = page_digest
        self._submitted: set[RequestId] = set()
        self._finished: set[RequestId] = set()
        self._computed: dict[tuple[RequestId, int], int] = {}
        self._hits: dict[tuple[RequestId, int], int] = {}
        self._finalized: dict[RequestId, tuple[int, int]] = {}
        self._digests: dict[int, tuple[int, Any]] = {}
        self._check_geometry()

    # Events --------------------------------------------------------------------------------------------------

    def submitted(self, request_id: RequestId) -> None:
        """A request was handed to the scheduler."""
        _require(request_id not in self._submitted, 33, f"request {request_id!r} is submitted twice")
        self._submitted.add(request_id)

    def handed_over(self, request_id: RequestId) -> None:
        """A waiting request was handed to another scheduler."""
        waits = all(sequence.request_id != request_id for sequence in self._live())
        _require(
            waits and request_id in self._submitted, 33, f"request {request_id!r} was handed over and is still here"
        )
        self._submitted.remove(request_id)
        self._finalized.pop(request_id, None)

    def scheduled(self, batch: ScheduledBatch | None) -> None:
        """`schedule` returned."""
        if batch is not None:
            self._check_batch(batch)
        self.check_memory()

    def executed(self, batch: ScheduledBatch) -> None:
        """The batch's forward ran; every older one ran before."""
        if self._read_cursor is not None and not self._verifies(batch):
            self._check_cursors(batch, batch.ends.tolist())
        self._check_published_bytes()

    def returned(self, batch: ScheduledBatch | None, outputs: Iterable[RequestOutput]) -> None:
        """`postprocess(batch)` returned `outputs`; with None they come from `take_outputs`."""
        outputs = list(outputs)
        for output in outputs:
            known = output.request_id in self._submitted
            _require(known, 33, f"request {output.request_id!r} has an output but was never submitted")
            done = output.request_id in self._finished
            _require(not done, 33, f"request {output.request_id!r} has an output after its last one")
            if output.finished:
                self._finished.add(output.request_id)
        if batch is not None:
            verifies = self._verifies(batch)
            ends = self._check_verified(batch, outputs) if verifies else batch.ends.tolist()
            for request_id, generation, end in zip(batch.request_ids, batch.generations, ends, strict=True):
                self._computed[request_id, generation] = end
            if verifies and self._read_cursor is not None:
                self._check_cursors(batch, ends)
            self._check_stale(batch)
        self._finalized = {
            sequence.request_id: (sequence.generation, sequence.num_finalized_tokens) for sequence in self._live()
        }
        self.check_memory()

    def drained(self) -> None:
        """Every request has ended and the engine is idle."""
        scheduler = self._scheduler
        missing = sorted(map(str, self._submitted - self._finished))
        _require(not missing, 33, f"requests without a finished output: {missing}")
        manager = scheduler.manager
        _require(not scheduler.has_work, 34, "the scheduler still has work")
        _require(not any(manager.pool.refs), 34, "pages are still referenced")
        raw = len(manager.images.held_units()) if manager.images is not None else 0
        _require(manager.pool.num_free + raw == manager.pool.num_pages, 34, "pages are neither free nor an image")
        _require(manager.slots.num_free == manager.slots.num_slots, 34, "slots are still taken")
        _require(scheduler.num_partial == 0, 34, f"partial counter is {scheduler.num_partial}")
        queued = scheduler.queued_relocations or scheduler.store_intents
        _require(not queued, 34, f"state operations are still queued: {queued}")
        pins = manager.images.num_pins if manager.images is not None else 0
        _require(pins == 0, 34, f"{pins} pins are held")

    # Checks --------------------------------------------------------------------------------------------------

    def check_memory(self) -> None:
        """Ownership of pages, slots, images and hashes (invariants 1, 2, 3, 14, 15, 31, 34 in part, 38)."""
        scheduler = self._scheduler
        pool, slots = scheduler.manager.pool, scheduler.manager.slots
        running = scheduler.running
        refs = Counter(page for sequence in running for page in sequence.block_table)
        referenced = {page: count for page, count in enumerate(pool.refs) if count}
        _require(referenced == refs, 1, "page references differ from the block tables' entries")
        states = [
            set(pool.vacant_pages()),
            set(pool.cached_pages()),
            set(refs),
            set(pool.raw_pages()),
        ]
        _require(
            sum(map(len, states)) == pool.num_pages and set().union(*states) == set(range(pool.num_pages)),
            1,
            f"pages are not in exactly one state: {[len(state) for state in states]} of {pool.num_pages}",
        )
        _require(all(0 <= page < pool.num_pages for page in refs), 3, "a block table names a page that does not exist")
        for page in pool.cached_pages():
            _require(pool.index.get(pool.hashes[page]) == page, 1, f"cached page {page} cannot be found by its hash")
        for content_hash, page in pool.index.items():
            _require(pool.hashes[page] == content_hash, 1, f"the index names page {page} under a hash it does not have")
        taken = [sequence.slot for sequence in running]
        _require(len(set(taken)) == len(taken), 2, f"two running requests share a slot: {taken}")
        _require(
            set(taken).isdisjoint(slots.free_slots()) and len(taken) + slots.num_free == slots.num_slots,
            2,
            "a slot is free and taken, or neither",
        )
        partial = sum(sequence.is_partial_prefill for sequence in running)
        _require(partial == scheduler.num_partial, 34, f"partial counter {scheduler.num_partial}, really {partial}")
        for sequence in scheduler.waiting:
            _require(not sequence.block_table and sequence.slot < 0, 34, f"waiting {sequence.request_id!r} owns memory")
        for sequence in running:
            self._check_hit(sequence)
            self._check_hashes(sequence)
            table = scheduler.manager.tables[sequence.slot, : len(sequence.block_table)]
            _require(
                table.tolist() == sequence.block_table, 1, f"table of {sequence.request_id!r} differs from its mirror"
            )
        self._check_images(states[3])
        self._check_drafts()

    def _verifies(self, batch: ScheduledBatch) -> bool:
        return self._scheduler.geometry.speculative_tokens > 0 and batch.phase is Phase.DECODE

    def _check_verified(self, batch: ScheduledBatch, outputs: list[RequestOutput]) -> list[int]:
        """A verification made as many rows real as it emitted tokens, and at least the anchor's (invariants 39, 41).

        Returns:
          One past the last real row of each request; of one that moved on, one past its last row.
        """
        emitted = {output.request_id: output for output in outputs if output.new_tokens}
        ends: list[int] = batch.ends.tolist()
        for row, (request_id, generation, start, length) in enumerate(
            zip(batch.request_ids, batch.generations, batch.starts.tolist(), batch.lengths.tolist(), strict=True)
        ):
            sequence = self._scheduler.sequence(request_id)
            output = emitted.get(request_id)
            if output is not None:
                count = len(output.new_tokens)
                _require(1 <= count <= length, 41, f"request {request_id!r} emits {count} tokens for {length} rows")
            if sequence is None or sequence.generation != generation or output is None:
                continue
            end = start + len(output.new_tokens)
            what = f"request {request_id!r} verified from {start} and emitted {len(output.new_tokens)} tokens"
            _require(sequence.num_computed == end, 39, f"{what}, but has KV for {sequence.num_computed}")
            _require(sequence.num_finalized_tokens == end + 1, 39, f"{what} and has {sequence.num_finalized_tokens}")
            _require(not sequence.num_placeholders, 39, f"{what} with tokens in flight")
            ends[row] = end
        return ends

    def _check_drafts(self) -> None:
        """Drafts belong to decoding requests and are no longer than the pools were laid out for (invariants 39, 41)."""
        width = self._scheduler.geometry.speculative_tokens
        for sequence in self._live():
            drafts = len(sequence.drafts)
            what = f"request {sequence.request_id!r} holds {drafts} proposals"
            _require(drafts <= width, 41, f"{what}, at most {width} are verified")
            decoding = sequence.slot >= 0 and not sequence.is_partial_prefill
            _require(not drafts or decoding, 39, f"{what} and does not decode")

    def _check_geometry(self) -> None:
        geometry = self._scheduler.geometry
        pages, slots = 3, 2
        arrays = geometry.device_arrays(pages, slots)
        page_bytes = sum(spec.bytes for spec in arrays if spec.name.startswith(("main", "index")))
        rows = sum(span.bytes for span in geometry.page_fields) + sum(geometry.index_page_bytes)
        _require(page_bytes == pages * rows, 3, f"page arrays hold {page_bytes} bytes, not {pages} x {rows}")
        planes = [spec.name for spec in arrays if spec.name.startswith("main")]
        _require(len(planes) == len(geometry.owners), 5, f"{planes} are not one array for each of {geometry.owners}")

    def _check_batch(self, batch: ScheduledBatch) -> None:
        scheduler = self._scheduler
        block = scheduler.geometry.block_size
        window = scheduler.geometry.window_size
        _require(
            batch.num_rows <= scheduler.config.max_num_batched_tokens, 30, f"{batch.num_rows} rows exceed the budget"
        )
        for request_id, start, resume, end, final in zip(
            batch.request_ids,
            batch.starts.tolist(),
            batch.resumes.tolist(),
            batch.ends.tolist(),
            batch.is_final.tolist(),
            strict=True,
        ):
            what = f"request {request_id!r} [{start}, {end}) resumed at {resume}"
            _require(start <= resume < end, 30, f"{what} makes no progress")
            _require(start == resume or start % block == 0, 30, f"{what} recomputes from off the grid of {block}")
            if batch.decoder_replay and final:
                _require(end - start >= min(window, end), 30, f"{what} is final with too few rows for the decoder")
        _require(len(set(batch.slots.tolist())) == batch.num_requests, 2, "two requests of a batch share a slot")
        if batch.phase is Phase.DECODE:
            widest, room = int(batch.lengths.max()), 1 + scheduler.geometry.speculative_tokens
            _require(widest <= room, 41, f"a request decodes {widest} rows, at most {room} can be taken back")
            _require(int(batch.starts.min()) > 0, 41, "a verification starts at position 0")
        if scheduler.manager.images is None:
            ops = batch.ops
            _require(not ops.stores and not ops.restores, 14, "images are stored or restored without copy transfer")

    def _check_hit(self, sequence: Sequence) -> None:
        hit = sequence.reported_hit_tokens
        key = (sequence.request_id, sequence.generation)
        first = self._hits.setdefault(key, hit)
        _require(hit == first, 31, f"reported hit of {key} changed from {first} to {hit}")
        block = self._scheduler.geometry.block_size
        _require(
            hit % block == 0 and hit < sequence.prefill_end, 31, f"reported hit {hit} of {key} is off the grid or whole"
        )
        self._computed.setdefault(key, hit)

    def _check_hashes(self, sequence: Sequence) -> None:
        pool = self._scheduler.manager.pool
        block = self._scheduler.geometry.block_size
        computed = self._computed[sequence.request_id, sequence.generation]
        for index, page in enumerate(sequence.block_table):
            if pool.hashes[page] == NO_HASH:
                continue
            end = (index + 1) * block
            what = f"page {page} of request {sequence.request_id!r}, tokens [{end - block}, {end})"
            _require(end <= computed, 38, f"{what} is published, only {computed} tokens have KV")
            _require(end <= sequence.num_finalized_tokens, 38, f"{what} is published with unfinished tokens")
            _require(
                PLACEHOLDER not in sequence.tokens(end - block, end), 38, f"{what} is published with a placeholder"
            )
            same = pool.hashes[page] == block_hash(sequence, index, block)
            found = pool.lookup(pool.hashes[page], block_content(sequence, index, block)) is not None
            _require(same, 38, f"{what} is published under another hash")
            _require(found or pool.hashes[page] not in pool.index, 38, f"{what} is published with other tokens")

    def _check_images(self, raw: set[int]) -> None:
        images = self._scheduler.manager.images
        replay = self._scheduler.manager.transfer.kind is TransferKind.REPLAY
        if images is None or replay:
            _require(not raw, 14, f"pages {sorted(raw)} hold images without copy transfer")
            return
        held = images.held_units()
        _require(len(set(held)) == len(held) and set(held) == raw, 1, "image units differ from the raw-reserved pages")
        in_flight = {store.image for batch in self._scheduler.outstanding for store in batch.ops.stores}
        block = self._scheduler.geometry.block_size
        for image in images.images():
            _require(image.position % block == 0 and image.position > 0, 14, f"an image stands at {image.position}")
            ready = image.state is ImageState.READY
            _require(not (ready and image.image in in_flight), 15, f"image {image.image} is READY before its store ran")

    def _check_cursors(self, batch: ScheduledBatch, ends: list[int]) -> None:
        """Cursors after a forward, of a verification after its commit (invariants 7, 8 and 39)."""
        assert self._read_cursor is not None
        size = self._scheduler.view.history_size
        verifies = self._verifies(batch)
        for request_id, generation, slot, end in zip(
            batch.request_ids, batch.generations, batch.slots.tolist(), ends, strict=True
        ):
            sequence = self._scheduler.sequence(request_id)
            current = sequence is not None and sequence.generation == generation
            if verifies and not current:
                continue  # how much of it became real is known of live requests only
            cursor = np.asarray(self._read_cursor(slot))
            _require(int(cursor[0]) == end, 7, f"cursor of {request_id!r} stands at {int(cursor[0])}, not {end}")
            if self._compress_ids is None or sequence is None or not current or end > sequence.num_finalized_tokens:
                continue
            expected = sequence.history(end, size)
            alive = expected >= 0
            expected[alive] = self._compress_ids(expected[alive])
            same = cursor[1:].tolist() == expected.tolist()
            _require(same, 8, f"history of {request_id!r} is not that of its {end} computed tokens")

    def _check_published_bytes(self) -> None:
        if self._page_digest is None:
            return
        pool = self._scheduler.manager.pool
        seen: dict[int, tuple[int, Any]] = {}
        for content_hash, page in pool.index.items():
            seen[page] = (content_hash, self._page_digest(page))
            before = self._digests.get(page)
            if before is not None and before[0] == content_hash:
                _require(before[1] == seen[page][1], 4, f"bytes of published page {page} changed")
        self._digests = seen

    def _check_stale(self, batch: ScheduledBatch) -> None:
        expected = dict(zip(batch.request_ids, batch.generations, strict=True))
        for sequence in self._live():
            before = self._finalized.get(sequence.request_id)
            if before is None or expected.get(sequence.request_id) == sequence.generation:
                continue
            _require(
                sequence.num_finalized_tokens == before[1],
                37,
                f"request {sequence.request_id!r} gained tokens from a result of another generation",
            )

    def _live(self) -> list[Sequence]:
        return [*self._scheduler.running, *self._scheduler.waiting]


def _require(condition: bool, number: int, message: str) -> None:
    if not condition:
        raise InvariantError(f"invariant {number}: {message}")

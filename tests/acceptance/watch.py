"""What must hold around every step: unowned memory is poisoned before it, and after it no byte has changed that the
step's plan does not name (invariants 4, 7, 8, 10-12, 20, 25, 28 and 29 of the runtime specification, together with all
that `scheduler.invariants` asserts)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from scheduler.batch import BatchStep, Preparation
from scheduler.buckets import StepShape
from scheduler.compression_plans import tail_depth
from scheduler.invariants import InvariantChecker
from scheduler.pages import NO_HASH
from scheduler.pool_geometry import V41PoolGeometry
from scheduler.pools import Pools, poison
from scheduler.scheduled_batch import Phase, ScheduledBatch
from scheduler.scheduler import Scheduler
from scheduler.sequence import Sequence
from scheduler.states import StateMaintenanceOps
from v41jax.logit_edits import first_output_rows


class Watch:
    """Watches the steps of one scheduler and one runner.

    Attributes:
      checker: of the scheduler's invariants.
      checks: poison and assert; otherwise only record.
      logits: (request, tokens before) -> [V], of every row that gave a token.
      log: batches, oldest first.
      shapes: static shapes, one a batch.
      histories: cursor histories compared.
      worst: largest relative error of logits that a comparison saw.
      examiners: called after every step with its batch, its arrays (all tokens known) and its logits.
    """

    def __init__(self, scheduler: Scheduler, runner: Any, compress_ids: Callable, *, check: bool = True):
        self.checks = check
        self.logits: dict[tuple, NDArray[np.float32]] = {}
        self.log: list[ScheduledBatch] = []
        self.shapes: list[StepShape] = []
        self.histories = 0
        self.worst = 0.0
        self.examiners: list[Callable[[ScheduledBatch, BatchStep, NDArray[np.float32]], None]] = []
        self._scheduler = scheduler
        self._runner = runner
        self._geometry: V41PoolGeometry = runner.setup.geometry
        self._boundary = self._geometry.owners[-1][0]
        self._page_owners: dict[int, tuple] = {}
        self._slot_owners: dict[int, tuple] = {}
        self._after: Pools | None = None
        self._cursors: dict[int, list[tuple[Sequence, int, NDArray[np.int32]]]] = {}
        self._compress_ids = compress_ids
        self.checker = InvariantChecker(
            scheduler,
            read_cursor=lambda slot: self._after.cursor[slot],
            compress_ids=compress_ids,
            page_digest=lambda page: hash(tuple(plane[page].tobytes() for plane in _planes(self._after))),
        )

    # Events of the scheduler ---------------------------------------------------------------------------------

    def scheduled(self, batch: ScheduledBatch | None) -> None:
        """`schedule` returned."""
        self.checker.scheduled(batch)

    def returned(self, batch: ScheduledBatch | None, outputs: list) -> None:
        """`postprocess` or `take_outputs` returned."""
        self.checker.returned(batch, outputs)
        if batch is not None:
            self._check_histories(batch)

    def _check_histories(self, batch: ScheduledBatch) -> None:
        """Invariant 8 of a decode step, whose input token was not final when it ran."""
        for sequence, generation, cursor in self._cursors.pop(batch.index, ()):
            position = int(cursor[0])
            if sequence.generation == generation and position <= sequence.num_finalized_tokens:
                expected = sequence.history(position, len(cursor) - 1)
                alive = expected >= 0
                expected[alive] = self._compress_ids(expected[alive])
                what = f"invariant 8: history of {sequence.request_id!r} at {position}"
                assert cursor[1:].tolist() == expected.tolist(), what
                self.histories += 1

    # A step --------------------------------------------------------------------------------------------------

    def around(self, shape: StepShape, arrays: BatchStep, execute: Callable[[], Any]) -> Any:
        """Runs the step of the newest batch."""
        batch = self._scheduler.outstanding[-1]
        self.log.append(batch)
        self.shapes.append(shape)
        if not self.checks:
            output = execute()
            self._record(batch, output)
            return output
        self._poison(batch)
        pools, images = _host(self._runner.pools), _host(self._runner._images)
        output = execute()
        self._after = _host(self._runner.pools)
        expected = _Expectation(self._geometry, pools, images)
        expected.maintain(batch.ops)
        for index in range(batch.num_requests):
            expected.forward(batch, index, self._boundary)
        expected.compare(self._after, _host(self._runner._images))
        logits = np.asarray(output.logits)
        self._record(batch, output)
        for examine in self.examiners:
            examine(batch, arrays, logits)
        self.checker.executed(batch)
        self._cursors[batch.index] = [
            (self._scheduler.sequence(request_id), generation, self._after.cursor[slot])
            for request_id, generation, slot in zip(
                batch.request_ids, batch.generations, batch.slots.tolist(), strict=True
            )
        ]
        return output

    def _record(self, batch: ScheduledBatch, output: Any) -> None:
        logits, tokens = np.asarray(output.logits), np.asarray(output.tokens)
        for place, (first, index) in enumerate(zip(first_output_rows(batch), batch.output_requests.tolist())):
            verifies = tokens.ndim == 2
            start = int(batch.starts[index]) + 1 if verifies else int(batch.ends[index])
            for offset in range(int((tokens[place] >= 0).sum()) if verifies else 1):
                row = logits[first + offset]
                assert np.isfinite(row).all(), f"logits of request {batch.request_ids[index]!r} are not finite"
                self.logits[batch.request_ids[index], start + offset] = row.copy()

    # Poison --------------------------------------------------------------------------------------------------

    def _poison(self, batch: ScheduledBatch) -> None:
        """Fills what nobody owns, what was just taken for new content, and decoder rings that may not be read."""
        manager = self._scheduler.manager
        pool = manager.pool
        pages = np.zeros(self._runner.num_pages, bool)
        pages[pool.num_pages :] = True
        pages[[*pool.vacant_pages(), *pool.raw_pages()]] = True
        slots = np.zeros(self._runner.num_slots, bool)
        slots[manager.slots.num_slots :] = True
        slots[list(manager.slots.free_slots())] = True
        moved = {slot for move in batch.ops.relocations for slot in move}
        owners = {move.destination: self._slot_owners.get(move.source) for move in batch.ops.relocations}
        self._slot_owners.update(owners)
        decoders = np.zeros_like(slots)
        for row, length, slot, *owner in zip(
            batch.block_tables.tolist(),
            batch.table_lengths.tolist(),
            batch.slots.tolist(),
            batch.request_ids,
            batch.generations,
            strict=True,
        ):
            for page in row[:length]:
                if pool.hashes[page] == NO_HASH and self._page_owners.get(page) != tuple(owner):
                    pages[page] = True
                self._page_owners[page] = tuple(owner)
            slots[slot] |= self._slot_owners.get(slot) != tuple(owner)
            self._slot_owners[slot] = tuple(owner)
            decoders[slot] = batch.phase is Phase.PREFILL and batch.decoder_replay
        slots[list(moved)] = False
        self._runner.replace_pools(_spoil(self._runner.pools, pages, slots, decoders, boundary=self._boundary))


@functools.partial(jax.jit, static_argnames="boundary", donate_argnums=0)
def _spoil(pools: Pools, pages: Any, slots: Any, decoders: Any, *, boundary: int) -> Pools:
    """Poison in pages [P] bool, slots [S] bool, and the decoder's rings of slots [S] bool."""
    spoiled = poison(pools)

    def put(mask: Any, axis: int, name: str) -> Any:
        def one(old: Any, new: Any) -> Any:
            return jnp.where(mask.reshape((1,) * axis + (-1,) + (1,) * (old.ndim - axis - 1)), new, old)

        return jax.tree.map(one, getattr(pools, name), getattr(spoiled, name))

    window = put(slots, 1, "window")
    late = put(slots | decoders, 1, "window")
    return pools.replace(
        **{name: put(pages, 0, name) for name in ("main", "index_values", "index_scales")},
        window=jnp.concatenate([window[:boundary], late[boundary:]]),
        **{name: put(slots, 1, name) for name in ("tail_kv", "tail_score")},
        **{name: put(slots, 0, name) for name in ("cursor", "last_token")},
    )


class _Ring(NamedTuple):
    """Positions of one request that a layer's ring, or a tail, receives."""

    first: int
    end: int
    size: int

    @property
    def rows(self) -> NDArray[np.int64]:
        return np.arange(max(self.first, self.end - self.size), self.end) % self.size


class _Expectation:
    """The pools before a step, changed as its plan says, and which rows the forward may write."""

    def __init__(self, geometry: V41PoolGeometry, pools: Pools, images: Any):
        self.geometry = geometry
        self.pools = pools
        self.images = images
        self.pages = [np.zeros(plane.shape[:2], bool) for plane in pools.main]
        self.rings = np.zeros(pools.window.shape[:3], bool)
        self.tails = np.zeros(pools.tail_kv.shape[:3], bool)
        self.cursors = np.zeros(pools.cursor.shape[0], bool)
        self.tokens = np.zeros(pools.cursor.shape[0], bool)

    def maintain(self, ops: StateMaintenanceOps) -> None:
        """Relocations, stores, restores."""
        pools, images = self.pools, self.images
        window, cursor = pools.window, pools.cursor
        sources = [move.source for move in ops.relocations]
        targets = [move.destination for move in ops.relocations]
        for name, axis in (("window", 1), ("tail_kv", 1), ("tail_score", 1), ("cursor", 0), ("last_token", 0)):
            array = getattr(pools, name)
            before = np.take(array, sources, axis).copy()
            array[(slice(None),) * axis + (targets,)] = before
        for store in ops.stores:
            assert int(cursor[store.slot, 0]) == store.position, "an image is taken at another position"
            images.window[:, store.image], images.cursor[store.image] = window[:, store.slot], cursor[store.slot]
        for restore in ops.restores:
            window[:, restore.slot], cursor[restore.slot] = (
                images.window[:, restore.image],
                images.cursor[restore.image],
            )

    def forward(self, batch: ScheduledBatch, index: int, boundary: int) -> None:
        """The rows of one request."""
        geometry = self.geometry
        start, end, slot = (int(field[index]) for field in (batch.starts, batch.ends, batch.slots))
        cached_until, write_from = int(batch.cached_until[index]), int(batch.write_from[index])
        if batch.preparation[index] == Preparation.RESET:
            for array in (self.pools.window, self.pools.tail_kv, self.pools.tail_score):
                array[:, slot] = 0
        table = batch.block_tables[index]
        for owner, (_, ratio) in enumerate(geometry.owners):
            groups = np.arange(-(-(max(start, write_from) + 1) // ratio) - 1, end // ratio)
            per_page = geometry.rows_per_page(ratio)
            self.pages[owner][table[groups // per_page], groups % per_page] = True
        encoder = _Ring(max(start, cached_until), end, geometry.ring)
        decoder = encoder
        if batch.phase is Phase.PREFILL and batch.decoder_replay:
            kept = min(geometry.window_size, end - start) if batch.is_final[index] else 0
            decoder = _Ring(end - kept, end, geometry.ring)
        self.rings[:boundary, slot, encoder.rows] = True
        self.rings[boundary:, slot, decoder.rows] = True
        kept = end - tail_depth(geometry, geometry.max_ratio)
        self.tails[:, slot, _Ring(max(start, cached_until, kept), end, geometry.ring_c).rows] = True
        self.cursors[slot] = True
        self.tokens[slot] = bool(batch.is_final[index])

    def compare(self, after: Pools, images: Any) -> None:
        """Everything else is as it was, and what was written is a number."""
        pools = self.pools
        for owner, written in enumerate(self.pages):
            for name in ("main", "index_values", "index_scales"):
                self._same(f"{name}[{owner}]", getattr(pools, name)[owner], getattr(after, name)[owner], written)
        self._same("window", pools.window, after.window, self.rings)
        self._same("tail_kv", pools.tail_kv, after.tail_kv, self.tails)
        self._same("tail_score", pools.tail_score, after.tail_score, self.tails)
        self._same("cursor", pools.cursor, after.cursor, self.cursors)
        self._same("last_token", pools.last_token, after.last_token, self.tokens)
        for name in ("window", "cursor"):
            before, now = getattr(self.images, name), getattr(images, name)
            assert before.tobytes() == now.tobytes(), f"{name} of an image differs from what was stored"

    @staticmethod
    def _same(what: str, before: Any, after: Any, written: NDArray[np.bool_]) -> None:
        if before is None:
            return
        kept = ~written
        if before[kept].tobytes() != after[kept].tobytes():
            same = before.view(np.uint8).reshape(*written.shape, -1) == after.view(np.uint8).reshape(*written.shape, -1)
            places = np.argwhere(kept & ~same.all(axis=-1))
            raise AssertionError(f"{what} changed outside the step's plan at {places[:8].tolist()}")
        if np.issubdtype(after.dtype, np.floating):
            assert np.isfinite(after[written]).all(), f"{what} holds NaN where the step wrote"


def _planes(pools: Pools) -> tuple:
    return tuple(plane for plane in (*pools.main, *pools.index_values, *pools.index_scales) if plane is not None)


def _host(tree: Any) -> Any:
    """Copies in host memory; a view would keep the pools from being donated."""
    return jax.tree.map(np.array, tree)

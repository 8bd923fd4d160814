"""Executes scheduled batches with the compiled forward and with the replay oracle, and compares everything they leave.

Before each forward every slot that it resets or restores, and every decoder ring that a replayed prefill must not read,
is filled with NaN. After it, logits of finishing requests, compressed rows, index keys, rings, tails and cursors equal
the oracle's, and whatever must not change has the same bytes as before.
"""

from __future__ import annotations

import collections
import dataclasses

import jax
import numpy as np

from scheduler.batch import Preparation
from scheduler.pools import allocate, poison
from scheduler.scheduled_batch import Phase, StepResult
from v41jax.full_forward import step
from v41jax.reference.records import SequenceState
from v41jax.reference.replay_oracle import ReplayForward, reused_prefix

TOLERANCE = 1e-5
ZERO, UNKNOWN = -1, -2
"""Ring rows that hold no position: zeros after a reset, or poison."""


@dataclasses.dataclass
class Live:
    """The oracle's side of one admitted request.

    Attributes:
      slot: of the request.
      state: what the reference model remembers; None before the first forward of a request without a hit.
      rings: [layers, ring] position held by each ring row, or ZERO or UNKNOWN.
    """

    slot: int
    state: SequenceState | None
    rings: np.ndarray


def image_embeddings(spans, start, end, width):
    """[end - start, width]: of image positions, a function of the image's content; zeros elsewhere."""
    out = np.zeros((end, width), np.float32)
    for span in spans:
        rows = np.random.default_rng(list(span.digest)).standard_normal((span.length, width))
        stop = min(end, span.start + span.length)
        out[span.start : stop] = rows[: max(0, stop - span.start)]
    return out[start:]


class OracleRunner:
    """A runner for `tests.helpers.driver.Driver`.

    Attributes:
      pools: NumPy arrays.
      counts: how many forwards of each kind were compared.
      oracle_rows: [layers] rows that the oracle ran.
      logits: request id -> {position: [V] logits of its last forward that gave a token there}.
    """

    def __init__(self, model, oracle, geometry, num_pages, num_slots):
        self.oracle = oracle
        self.geometry = geometry
        self.pools = _host(poison(allocate(geometry, num_pages, num_slots)))
        self.counts = collections.Counter()
        self.oracle_rows = np.zeros(geometry.layers, int)
        self.logits = collections.defaultdict(dict)
        self._model = model
        self._setup = dataclasses.replace(model.setup, geometry=geometry)
        self._images = {}
        self._live: dict[tuple, Live] = {}
        self._in_slot: dict[int, Live] = {}
        self._pages: dict[int, SequenceState] = {}

    # What the driver's checkers read and poison --------------------------------------------------------------

    def read_cursor(self, slot):
        return self.pools.cursor[slot]

    def page_digest(self, page):
        return b"".join(plane[page].tobytes() for plane in self._planes)

    def poison_pages(self, pages):
        pages = list(pages)
        for plane in self._planes:
            plane[pages] = np.nan

    def poison_slots(self, slots):
        slots = list(slots)
        for array in (self.pools.window, self.pools.tail_kv, self.pools.tail_score):
            array[:, slots] = np.nan
        self.pools.cursor[slots] = 0x7F7F7F7F

    @property
    def _planes(self):
        return (*self.pools.main, *self.pools.index_values)

    # One step ------------------------------------------------------------------------------------------------

    def execute(self, batch, arrays, shape):
        """Runs the state operations and the forward; returns the greedy tokens."""
        self._store(batch)
        lives = [self._admitted(batch, row) for row in range(batch.num_requests)]
        self._restore(batch)
        self._poison_what_is_not_read(batch, lives)
        before = jax.tree.map(np.copy, self.pools)
        embeddings = self._embeddings(batch)
        if not shape.tail and not shape.outputs:
            # One program for all full forwards: outputs nobody asked for are padding.
            arrays = arrays._replace(output_rows=np.full(shape.requests, shape.rows, np.int32))
        pools, output = step(
            self._model.params,
            self.pools,
            arrays,
            self._model.lookup.step_rows(arrays),
            setup=self._setup,
            phase=batch.phase.value,
            image_embeddings=_padded(embeddings, shape.rows),
        )
        assert not np.asarray(output.cursor_mismatch).any()
        self.pools = _host(pools)
        logits = np.asarray(output.logits)
        self._count(batch)
        self._untouched(batch, before)
        first, outputs, layers = 0, batch.output_requests.tolist(), range(self.geometry.layers)
        for row, live in enumerate(lives):
            rows = slice(first, first + int(batch.lengths[row]))
            first = rows.stop
            forward = self._forward(batch, row)
            expected = self.oracle.forward(
                batch.token_ids[rows],
                live.state,
                forward,
                batch.image_rows[rows],
                embeddings[rows][batch.image_rows[rows]],
            )
            live.state = expected.state
            self.oracle_rows += [self.oracle.visibility(forward, layer).query_rows.sum() for layer in layers]
            if row in outputs:
                given = logits[outputs.index(row)]
                self._close("logits", given, expected.logits[-1])
                self.logits[batch.request_ids[row]][forward.end - 1] = given
            self._compare_pages(batch, row, forward, live, before)
            self._compare_rings(forward, live, before)
            self._compare_tails(forward, live)
        tokens = logits[: len(outputs)].argmax(axis=1).astype(np.int32)
        return StepResult(tokens)

    def _forward(self, batch, row):
        start, resume, end = (int(field[row]) for field in (batch.starts, batch.resumes, batch.ends))
        return ReplayForward(
            start,
            resume,
            end,
            is_final=bool(batch.is_final[row]),
            rebuild=start < resume and batch.preparation[row] == Preparation.RESET,
            decoder_replay=batch.phase is Phase.PREFILL and batch.decoder_replay,
        )

    def _admitted(self, batch, row):
        """The oracle's side of a request; on its first forward, what its hit lets it reuse."""
        key = batch.request_ids[row], batch.generations[row]
        if key not in self._live:
            resume, block = int(batch.resumes[row]), self.geometry.block_size
            state = None
            if resume:
                pages = [self._pages[page] for page in batch.block_tables[row, : resume // block].tolist()]
                state = SequenceState(
                    length=resume,
                    compressed_ids=np.concatenate([page.compressed_ids for page in pages]),
                    compressed=_joined([page.compressed for page in pages]),
                    index_keys=_joined([page.index_keys for page in pages]),
                )
            slot = int(batch.slots[row])
            rings = np.full((self.geometry.layers, self.geometry.ring), UNKNOWN)
            self._live[key] = self._in_slot[slot] = Live(slot, state, rings)
        return self._live[key]

    def _store(self, batch):
        assert not batch.ops.relocations
        for store in batch.ops.stores:
            live = self._in_slot[store.slot]
            window, cursor = self.pools.window[:, store.slot].copy(), self.pools.cursor[store.slot].copy()
            self._images[store.image] = window, cursor, dict(live.state.window), live.rings.copy()

    def _restore(self, batch):
        for restore in batch.ops.restores:
            live = self._in_slot[restore.slot]
            window, cursor, rows, rings = self._images[restore.image]
            self.poison_slots([restore.slot])
            self.pools.window[:, restore.slot], self.pools.cursor[restore.slot] = window, cursor
            live.state.window, live.rings = dict(rows), rings.copy()
            self.counts["restored"] += 1

    def _poison_what_is_not_read(self, batch, lives):
        for row, live in enumerate(lives):
            if batch.preparation[row] == Preparation.RESET:
                self.poison_slots([live.slot])
                live.rings[:] = ZERO
            elif batch.phase is Phase.PREFILL and batch.decoder_replay:
                self.pools.window[self.oracle.boundary :, live.slot] = np.nan
                live.rings[self.oracle.boundary :] = UNKNOWN

    def _embeddings(self, batch):
        """[n, D] of the rows that lie in an image; zeros elsewhere."""
        width = self._setup.config.text.hidden_size
        spans = zip(batch.images, batch.starts.tolist(), batch.ends.tolist())
        out = np.concatenate([image_embeddings(images, start, end, width) for images, start, end in spans])
        assert ((out != 0).any(axis=1) == batch.image_rows).all()
        return out

    # Comparisons ---------------------------------------------------------------------------------------------

    @staticmethod
    def _close(what, ours, expected):
        """Vectors of the last axis agree to `TOLERANCE` of their length."""
        expected = np.asarray(expected)
        assert not np.isnan(expected).any(), f"the oracle has no {what}"
        error = np.linalg.norm(ours - expected, axis=-1) / np.linalg.norm(expected, axis=-1)
        worst = float(np.max(error, initial=0))
        assert worst <= TOLERANCE, f"{what}: relative error {worst:.2g}"

    def _compare_pages(self, batch, row, forward, live, before):
        """Entries of the request's pages are the oracle's; below the resume point their bytes have not changed."""
        block = self.geometry.block_size
        table = batch.block_tables[row, : -(-forward.end // block)].tolist()
        for index, (owner, ratio) in enumerate(self.geometry.owners):
            for what, planes, old, entries in (
                ("compressed rows", self.pools.main, before.main, live.state.compressed[owner]),
                ("index keys", self.pools.index_values, before.index_values, live.state.index_keys[owner]),
            ):
                held = planes[index][table].reshape(-1, planes[index].shape[-1])
                self._close(what, held[: len(entries)], entries)
                kept = old[index][table].reshape(held.shape)[: forward.resume // ratio]
                assert kept.tobytes() == held[: forward.resume // ratio].tobytes(), "a cached row was rewritten"
        for number in range(forward.resume // block, forward.end // block):
            whole = live.state
            below = reused_prefix(whole, (number + 1) * block, dict(self.geometry.owners))
            self._pages[table[number]] = _from_block(below, number, self.geometry)

    def _compare_rings(self, forward, live, before):
        """Every ring row holds the position it should, and those a back-off keeps have their old bytes."""
        ring, boundary = self.geometry.ring, self.oracle.boundary
        kept = 0 if forward.rebuild or forward.start == forward.resume else forward.resume
        encoder = range(max(forward.end - ring, forward.start, kept), forward.end)
        decoder = range(max(forward.end - ring, forward.tail_start(self.geometry.window_size)), forward.end)
        if not forward.decoder_replay:
            decoder = encoder
        for layer in range(self.geometry.layers):
            written = np.asarray(encoder if layer < boundary else decoder, int)
            live.rings[layer, written % ring] = written
            held = self.pools.window[layer, live.slot]
            same = np.setdiff1d(np.arange(ring), written % ring)
            if not (live.rings[layer, same] == ZERO).any():
                assert held[same].tobytes() == before.window[layer, live.slot, same].tobytes(), (
                    "a kept ring row changed"
                )
            positions = live.rings[layer]
            assert (held[positions == ZERO] == 0).all()
            real = positions >= 0
            self._close("ring rows", held[real], live.state.window[layer][positions[real]])

    def _compare_tails(self, forward, live):
        """The tail holds the projections of the last positions, which a later group may need."""
        for index, tail in enumerate(self.geometry.tail_owners):
            owner, ratio = self.geometry.owners[tail]
            first = max(0, forward.end - max(ratio, 1), forward.resume - 1)
            for array, table in zip((self.pools.tail_kv, self.pools.tail_score), live.state.projections[owner]):
                for position in range(first, forward.end):
                    if not np.isnan(table[position]).any():
                        held = array[index, live.slot, position % self.geometry.ring_c]
                        self._close("tail rows", held, table[position])

    def _untouched(self, batch, before):
        """Slots and pages of nobody in the batch have their old bytes."""
        others = np.setdiff1d(np.arange(self.pools.cursor.shape[0]), batch.slots)
        for name in ("window", "tail_kv", "tail_score"):
            ours, old = getattr(self.pools, name)[:, others], getattr(before, name)[:, others]
            assert ours.tobytes() == old.tobytes(), f"{name} of another slot changed"
        assert (self.pools.cursor[others] == before.cursor[others]).all()
        tables = zip(batch.block_tables.tolist(), batch.table_lengths.tolist())
        mine = {page for table, length in tables for page in table[:length]}
        others = np.setdiff1d(np.arange(self.pools.main[0].shape[0]), sorted(mine))
        for ours, old in zip(self._planes, (*before.main, *before.index_values)):
            assert ours[others].tobytes() == old[others].tobytes(), "a page of nobody in the batch changed"

    def _count(self, batch):
        if batch.phase is Phase.DECODE:
            self.counts["decode"] += 1
            return
        finals = int(batch.is_final.sum())
        self.counts["mixed" if 0 < finals < batch.num_requests else "final" if finals else "non-final"] += 1
        for row in range(batch.num_requests):
            forward = self._forward(batch, row)
            if forward.rebuild:
                self.counts["rebuild"] += 1
            elif forward.start < forward.resume:
                self.counts["odd back-off" if forward.resume % 2 else "even back-off"] += 1
            elif forward.start % 2:
                self.counts["odd resume"] += 1


def _host(pools):
    return jax.tree.map(np.array, pools)


def _padded(embeddings, rows):
    padding = np.zeros((rows - len(embeddings), embeddings.shape[1]), np.float32)
    return np.concatenate([embeddings, padding])


def _joined(parts):
    return {owner: np.concatenate([part[owner] for part in parts]) for owner in parts[0]}


def _from_block(state, number, geometry):
    """The entries of one page of a state that ends with it."""
    block, ratios = geometry.block_size, dict(geometry.owners)
    return SequenceState(
        length=block,
        compressed_ids=state.compressed_ids[number * block :],
        compressed={owner: rows[number * block // ratios[owner] :] for owner, rows in state.compressed.items()},
        index_keys={owner: rows[number * block // ratios[owner] :] for owner, rows in state.index_keys.items()},
    )

"""A runner without a model: what it stores in pages and slots decides the tokens it returns.

Every position has a value mixed from its token, its image content and its Engram lookback. Pages hold values (ratio 1)
and pairs of values (ratio 2), rings hold (position, value), tails and cursors are kept as the runtime specification
asks. A token is a hash of all values below it, read back from the pages, so that a wrong block table, a stale history
or a rewritten page changes it; whatever the hash could not notice (rings, tails, floors, approximated rows) is asserted
while it is read. `expected_tokens` computes the same tokens from the ids alone.
"""

from __future__ import annotations

import numpy as np

from scheduler.batch import DEAD, Preparation
from scheduler.scheduled_batch import Phase, StepResult

POISON = -(2**40)
VOCAB = 499
_MIX = np.uint64(0x9E3779B97F4A7C15)


def compress_ids(ids):
    """A many-to-one map in place of the compressed vocabulary."""
    ids = np.asarray(ids)
    assert (ids >= 0).all(), "a negative id reached the compression map"
    return ((ids * 7 + 3) % 97).astype(np.int32)


def _scramble(x):
    """Mixes the bits of a uint64 array (arrays wrap silently, scalars would warn)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def position_values(tokens, compressed, images, positions):
    """Value of each position.

    Args:
      tokens: [n] raw ids.
      compressed: [Hh + n] compressed ids, the history first.
      images: spans of the request; an image position's value depends on the image's content, not on its id.
      positions: [n] absolute.
    """
    content = tokens.astype(np.int64)
    for span in images:
        inside = (positions >= span.start) & (positions < span.start + span.length)
        seed = int.from_bytes(span.digest[:4].ljust(4, b"\0"), "little")
        content = np.where(inside, 1000 + seed + 31 * (positions - span.start), content)
    count = len(tokens)
    history = len(compressed) - count
    value = content.astype(np.uint64) * _MIX + positions.astype(np.uint64)
    ids = (compressed + 2).astype(np.uint64)
    for shift in range(history + 1):
        value = _scramble(value + ids[history - shift : history - shift + count] * np.uint64(shift + 1))
    return (value >> np.uint64(2)).astype(np.int64)


def pair_value(first, second):
    """Value of a ratio-2 group."""
    mixed = _scramble(first.astype(np.uint64) * np.uint64(3) + second.astype(np.uint64))
    return (mixed >> np.uint64(2)).astype(np.int64)


_POWERS = np.cumprod(np.full(8192, 6364136223846793005, np.uint64))


def next_token(values):
    """Token that follows the positions with these values; at most 8,192 of them."""
    total = (values.astype(np.uint64) * _POWERS[: len(values)]).sum(dtype=np.uint64, keepdims=True)
    return int(_scramble(total)[0] % np.uint64(VOCAB))


def expected_tokens(prompt, images, count, history_size=3):
    """Tokens of an uninterrupted run, from the ids alone."""
    ids = list(int(token) for token in prompt)
    dead = np.zeros(len(ids) + count, bool)
    for span in images:
        dead[span.start : span.start + span.length] = True
    out = []
    values = np.empty(0, np.int64)
    for _ in range(count):
        known = len(values)
        raw = np.asarray(ids, np.int64)
        compressed = np.where(dead[: len(ids)], DEAD, compress_ids(raw))
        padded = np.concatenate([np.full(history_size, DEAD), compressed])[known:]
        fresh = position_values(raw[known:], padded, images, np.arange(known, len(ids)))
        values = np.concatenate([values, fresh])
        token = next_token(values)
        out.append(token)
        ids.append(token)
    return out


class StubRunner:
    """Executes `BatchStep`s over host arrays. One ratio-1 and one ratio-2 plane stand for all owners."""

    def __init__(self, geometry, num_pages, num_slots, num_images=0):
        self.geometry = geometry
        page, ring, slots = geometry.block_size, geometry.ring, num_slots
        self.value = np.full((num_pages, page), POISON, np.int64)
        self.pair = np.full((num_pages, page // 2), POISON, np.int64)
        self.rings = np.full((2, slots, ring, 2), POISON, np.int64)  # encoder, decoder; (position, value)
        self.tails = np.full((slots, geometry.ring_c, 2), POISON, np.int64)
        self.cursor = np.full((slots, 1 + geometry.history_size), POISON, np.int64)
        self.last_token = np.full(slots, POISON, np.int64)
        self.image_rings = np.full((num_images, 2, ring, 2), POISON, np.int64)
        self.image_cursor = np.full((num_images, 1 + geometry.history_size), POISON, np.int64)
        self.decoder_rows = 0
        self.encoder_rows = 0

    # What checkers read and poison ---------------------------------------------------------------------------

    def read_cursor(self, slot):
        return self.cursor[slot]

    def page_digest(self, page):
        return hash((self.value[page].tobytes(), self.pair[page].tobytes()))

    def poison_pages(self, pages):
        pages = list(pages)
        self.value[pages] = POISON
        self.pair[pages] = POISON

    def poison_slots(self, slots):
        slots = list(slots)
        self.rings[:, slots] = POISON
        self.tails[slots] = POISON
        self.cursor[slots] = POISON
        self.last_token[slots] = POISON

    # One step ------------------------------------------------------------------------------------------------

    def execute(self, batch, step, shape):
        """Runs state operations, then the forward; returns the `StepResult`."""
        self._maintain(batch.ops)
        work = [self._prepare(batch, step, request) for request in range(batch.num_requests)]
        for item in work:  # every write to pages comes before any read: other requests see this forward's rows
            self._compress(step, item)
        tokens = []
        for item in work:
            self._attend_encoder(step, shape, item)
            token = self._decode(step, shape, item)
            if token is not None:
                tokens.append(token)
        if shape.verifies:
            return self._verify(step, shape, work)
        for item in work:
            self._commit(step, shape, item, item["length"])
        for item, token in zip([item for item in work if item["final"]], tokens, strict=True):
            self.last_token[item["slot"]] = token
        rows = step.output_rows[step.output_rows < shape.rows]
        assert len(rows) == len(tokens), "output rows differ from the finishing requests"
        assert [item["low"] + item["length"] - 1 for item in work if item["final"]] == rows.tolist()
        return StepResult(np.asarray(tokens, np.int32))

    def _verify(self, step, shape, work):
        """Accepts the leading proposals that the tokens before them give, and commits as many rows."""
        width = self.geometry.speculative_tokens + 1
        emitted = np.full((len(work), width), -1, np.int32)
        for row, item in enumerate(work):
            count, proposals = 0, item["ids"][1:].tolist()
            while True:
                token = next_token(item["history"][: item["start"] + 1 + count])
                emitted[row, count] = token
                count += 1
                if count > len(proposals) or proposals[count - 1] != token:
                    break
            self._commit(step, shape, item, count)
            self.last_token[item["slot"]] = token
        rows = step.output_rows[step.output_rows < shape.rows]
        assert rows.tolist() == list(range(sum(item["length"] for item in work))), "a row gives no logits"
        return StepResult(emitted)

    def _maintain(self, ops):
        if ops.relocations:
            sources = [move.source for move in ops.relocations]
            saved = [array[sources].copy() for array in (self.tails, self.cursor, self.last_token)]
            rings = self.rings[:, sources].copy()
            targets = [move.destination for move in ops.relocations]
            self.rings[:, targets] = rings
            for array, copy in zip((self.tails, self.cursor, self.last_token), saved, strict=True):
                array[targets] = copy
        for store in ops.stores:
            assert self.cursor[store.slot, 0] == store.position, "an image is taken at another position"
            self.image_rings[store.image] = self.rings[:, store.slot]
            self.image_cursor[store.image] = self.cursor[store.slot]
        for restore in ops.restores:
            assert self.image_cursor[restore.image, 0] == restore.position, "an image of another position is restored"
            self.rings[:, restore.slot] = self.image_rings[restore.image]
            self.cursor[restore.slot] = self.image_cursor[restore.image]

    def _prepare(self, batch, step, request):
        low, high = int(step.cu_seqlens[request]), int(step.cu_seqlens[request + 1])
        slot, start = int(step.slots[request]), int(step.forward_start[request])
        positions = step.positions[low:high].astype(np.int64)
        assert (positions == np.arange(start, start + high - low)).all()
        assert (step.batch_ids[low:high] == request).all()
        preparation = step.preparation[request]
        if preparation == Preparation.RESET:
            self.rings[:, slot] = -1
            self.tails[slot] = -1
        if preparation == Preparation.CONTINUE:
            assert self.cursor[slot, 0] == start, (
                f"cursor of slot {slot} stands at {self.cursor[slot, 0]}, the forward starts at {start}"
            )
        else:
            self.cursor[slot] = [start, *step.history[request]]
        ids = step.token_ids[low:high].astype(np.int64)
        compressed = step.compressed_ids[low:high].astype(np.int64)
        if (ids < 0).any():
            assert len(ids) == 1, "only a decode row may wait for its token"
            ids = self.last_token[slot : slot + 1].copy()
            assert ids[0] >= 0, "a decode row reads a token that no step wrote"
            compressed = compress_ids(ids).astype(np.int64)
        image = step.image_rows[low:high]
        assert (compressed == np.where(image, DEAD, compress_ids(ids))).all()
        lookback = np.concatenate([self.cursor[slot, 1:], compressed])
        return {
            "request": request,
            "slot": slot,
            "start": start,
            "low": low,
            "length": high - low,
            "positions": positions,
            "pages": step.block_tables[request],
            "values": position_values(ids, lookback, batch.images[request], positions),
            "ids": ids,
            "lookback": lookback,
            "final": bool(step.is_final[request]),
            "write_from": int(step.write_from[request]),
        }

    def _plan(self, step, ratio):
        return step.plans[self.geometry.ratios.index(ratio)]

    def _compress(self, step, item):
        page = self.geometry.block_size
        for ratio, plane in ((1, self.value), (2, self.pair)):
            plan = self._plan(step, ratio)
            mine = plan.requests == item["request"]
            rows = plan.closing_rows[mine] - item["low"]
            positions = plan.positions[mine].astype(np.int64)
            from_tail = plan.from_tail[mine]
            first = max(item["start"], item["write_from"])
            closing = item["positions"][(item["positions"] + 1) % ratio == 0]
            assert positions.tolist() == closing[closing >= first].tolist(), "groups are not closed exactly once"
            if not len(rows):
                continue
            assert (item["positions"][rows] == positions).all()
            values = item["values"][rows]
            if ratio == 2:
                before = np.empty(len(rows), np.int64)
                inside = from_tail == 0
                assert (positions[inside] - 1 >= item["write_from"]).all(), "a group pools an approximated row"
                assert (rows[inside] >= 1).all()
                before[inside] = item["values"][rows[inside] - 1]
                for index in np.flatnonzero(~inside):
                    position, value = self.tails[item["slot"], (positions[index] - 1) % self.geometry.ring_c]
                    assert position == positions[index] - 1, "the tail does not hold the group's first half"
                    before[index] = value
                values = pair_value(before, values)
            groups = positions // ratio
            per_page = page // ratio
            plane[item["pages"][groups // per_page], groups % per_page] = values

    def _history(self, item, end):
        """Values of `[0, end)` read through the block table, checked against the ratio-2 plane."""
        page = self.geometry.block_size
        pages = item["pages"][: -(-end // page)]
        values = self.value[pages].reshape(-1)[:end]
        assert (values != POISON).all(), "a page row is read that nobody wrote"
        whole = end - end % 2
        pairs = self.pair[pages].reshape(-1)[: whole // 2]
        assert (pairs == pair_value(values[0:whole:2], values[1:whole:2])).all(), "the ratio-2 plane differs"
        return values

    def _attend_encoder(self, step, shape, item):
        end = item["start"] + item["length"]
        item["history"] = self._history(item, end)
        self.encoder_rows += item["length"]
        request = item["request"]
        self._check_window(
            item,
            ring=self.rings[0, item["slot"]],
            positions=item["positions"],
            floor=int(step.swa_replay_start[request]),
            boundary=int(step.swa_cached_until[request]),
            exact_from=item["write_from"],
        )

    def _check_window(self, item, ring, positions, floor, boundary, exact_from):
        """Every window position must be a row of this forward or the ring row of exactly that position."""
        width = self.geometry.window_size
        offsets = np.arange(width)
        window = positions[:, None] - offsets
        low = np.maximum(np.maximum(positions - width + 1, floor), 0)
        visible = window >= low[:, None]
        exact = positions >= exact_from
        assert (low[exact] == np.maximum(positions[exact] - width + 1, 0)).all(), "a floor cuts an exact row's window"
        start = item["start"]
        first = np.where(positions < boundary, start, max(start, boundary))
        from_ring = visible & (window < first[:, None])
        wanted = window[from_ring]
        slots = wanted % self.geometry.ring
        assert (ring[slots, 0] == wanted).all(), "a ring row of another position is read"
        assert (ring[slots, 1] == item["history"][wanted]).all(), "a ring row holds another value"

    def _decode(self, step, shape, item):
        if shape.tail:
            if not item["final"]:
                return None
            width, tail = self.geometry.window_size, step.tail
            real = tail.rows < shape.rows
            mine = np.flatnonzero(real & (step.batch_ids[np.minimum(tail.rows, shape.rows - 1)] == item["request"]))
            length = min(width, item["length"])
            end = item["start"] + item["length"]
            rows = tail.rows[mine] - item["low"]
            assert rows.tolist() == list(range(item["length"] - length, item["length"]))
            assert (np.diff(mine) == 1).all(), "the rows of a tail are apart"
            assert (tail.last == mine[-1]).sum() == 1, "the tail's last row is not named once"
            assert length == min(width, end), "the decoder's tail is short"
            assert (tail.floor[mine] == end - length).all()
            item["tail"] = item["length"] - length
            self.decoder_rows += length
        else:
            self.decoder_rows += item["length"]
            request = item["request"]
            boundary = int(step.swa_cached_until[request])
            floor = int(step.swa_replay_start[request])
            item["tail"] = 0
            ring = self.rings[1, item["slot"]]
            self._check_window(item, ring, item["positions"], floor, boundary, item["write_from"])
            if not item["final"]:
                return None
        return next_token(item["history"])

    def _commit(self, step, shape, item, committed):
        slot, length = item["slot"], item["length"]
        request = item["request"]
        pairs = np.stack([item["positions"], item["values"]], axis=1)
        ring = self.geometry.ring
        first = max(0, length - ring)
        keep = pairs[first:]
        keep = keep[keep[:, 0] >= step.cached_until[request]]
        if step.preparation[request] == Preparation.REWIND:
            assert (keep[:, 0] >= item["write_from"]).all(), "an approximated row overwrites a ring row"
        self.rings[0, slot, keep[:, 0] % ring] = keep
        if "tail" in item:
            keep = pairs[max(item["tail"], first) :]
            self.rings[1, slot, keep[:, 0] % ring] = keep
        plan = self._plan(step, 2)
        mine = plan.tail_requests == request
        rows = plan.tail_rows[mine] - item["low"]
        assert (item["positions"][rows] == plan.tail_positions[mine]).all()
        if step.preparation[request] == Preparation.REWIND:
            assert (plan.tail_positions[mine] >= item["write_from"]).all(), "an approximated row overwrites a tail"
        self.tails[slot, plan.tail_positions[mine] % self.geometry.ring_c] = pairs[rows]
        size = self.geometry.history_size
        self.cursor[slot] = [item["start"] + committed, *item["lookback"][committed : committed + size]]
        assert shape.phase is not Phase.DECODE or length <= 1 + self.geometry.speculative_tokens

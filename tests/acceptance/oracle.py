"""Follows a session with the dense oracle of bounded replay, the only exact check of those modes: every row that gives
a token is compared with what the float64 model makes of the same row sets."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from scheduler.batch import BatchStep, Preparation
from scheduler.pool_geometry import V41PoolGeometry
from scheduler.scheduled_batch import Phase, ScheduledBatch
from tests.acceptance.serving import TOLERANCE
from v41jax.reference.records import SequenceState
from v41jax.reference.replay_oracle import ReplayForward, ReplayOracle, reused_prefix


class OracleExaminer:
    """An examiner for `Watch.examiners`; it must see every batch of a session that keeps its slots where they are.

    Attributes:
      compared: rows compared.
      worst: largest relative error of logits.
    """

    def __init__(self, oracle: ReplayOracle, geometry: V41PoolGeometry):
        self.compared = 0
        self.worst = 0.0
        self._oracle = oracle
        self._geometry = geometry
        self._states: dict[tuple, SequenceState | None] = {}
        self._in_slot: dict[int, tuple] = {}
        self._pages: dict[int, SequenceState] = {}
        self._images: dict[int, dict[int, Any]] = {}

    def __call__(self, batch: ScheduledBatch, arrays: BatchStep, logits: NDArray[np.float32]) -> None:
        assert not batch.ops.relocations
        for store in batch.ops.stores:
            self._images[store.image] = dict(self._states[self._in_slot[store.slot]].window)
        keys = [self._admit(batch, index) for index in range(batch.num_requests)]
        for restore in batch.ops.restores:
            self._states[self._in_slot[restore.slot]].window = dict(self._images[restore.image])
        outputs = batch.output_requests.tolist()
        for index, key in enumerate(keys):
            rows = slice(int(arrays.cu_seqlens[index]), int(arrays.cu_seqlens[index + 1]))
            forward = _forward(batch, index)
            expected = self._oracle.forward(np.asarray(arrays.token_ids[rows]), self._states[key], forward)
            self._states[key] = expected.state
            self._file(batch, index, forward, expected.state)
            if index in outputs:
                wanted = expected.logits[-1]
                error = np.linalg.norm(logits[outputs.index(index)] - wanted) / np.linalg.norm(wanted)
                assert error <= TOLERANCE, f"{key} {forward}: logits are off by {error:.2g}"
                self.worst = max(self.worst, float(error))
                self.compared += 1

    def _admit(self, batch: ScheduledBatch, index: int) -> tuple:
        """Key of a request's state; on its first forward the state is what its hit lets it reuse."""
        key = batch.request_ids[index], batch.generations[index]
        if key not in self._states:
            resume = int(batch.resumes[index])
            state = None
            if resume:
                pages = batch.block_tables[index, : resume // self._geometry.block_size].tolist()
                state = _joined([self._pages[page] for page in pages], resume)
            self._states[key] = state
        self._in_slot[int(batch.slots[index])] = key
        return key

    def _file(self, batch: ScheduledBatch, index: int, forward: ReplayForward, state: SequenceState) -> None:
        """Remembers what the pages that this forward filled hold."""
        block, ratios = self._geometry.block_size, dict(self._geometry.owners)
        for number in range(forward.resume // block, forward.end // block):
            below = reused_prefix(state, (number + 1) * block, ratios)
            first = number * block
            self._pages[int(batch.block_tables[index, number])] = SequenceState(
                length=block,
                compressed_ids=below.compressed_ids[first:],
                compressed={owner: rows[first // ratios[owner] :] for owner, rows in below.compressed.items()},
                index_keys={owner: rows[first // ratios[owner] :] for owner, rows in below.index_keys.items()},
            )


def _forward(batch: ScheduledBatch, index: int) -> ReplayForward:
    start, resume, end = (int(field[index]) for field in (batch.starts, batch.resumes, batch.ends))
    return ReplayForward(
        start,
        resume,
        end,
        is_final=bool(batch.is_final[index]),
        rebuild=start < resume and batch.preparation[index] == Preparation.RESET,
        decoder_replay=batch.phase is Phase.PREFILL and batch.decoder_replay,
    )


def _joined(pages: list[SequenceState], length: int) -> SequenceState:
    def join(name: str) -> dict[int, Any]:
        parts = [getattr(page, name) for page in pages]
        return {owner: np.concatenate([part[owner] for part in parts]) for owner in parts[0]}

    return SequenceState(
        length=length,
        compressed_ids=np.concatenate([page.compressed_ids for page in pages]),
        compressed=join("compressed"),
        index_keys=join("index_keys"),
    )

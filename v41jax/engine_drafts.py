"""`EngineDrafts`: what an engine does besides verifying: has the next block drafted, hands it over, and keeps count.

A block is drafted on the device right after the step that gave its anchor, and read when the next step is planned. It
belongs to (request, generation): of a request that was preempted or ended meanwhile it is dropped. With a calibration
profile the confidences choose how many proposals the next step verifies.
"""

from __future__ import annotations

import bisect
import dataclasses
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from numpy.typing import NDArray

from scheduler.buckets import Buckets
from scheduler.runtime_config import EngineConfig
from scheduler.scheduled_batch import Phase, ScheduledBatch, StepResult
from scheduler.scheduler import Scheduler
from scheduler.sequence import RequestId, Sequence
from scheduler.sharded import ShardedScheduler
from scheduler.sharded_batch import spread
from v41jax.confidence import choose_lengths, confidences_of, survival
from v41jax.confidence_profile import Profile, running_identity
from v41jax.draft_runner import DraftRunner
from v41jax.dspark import DraftBlock
from v41jax.model import ModelSetup
from v41jax.parameters import WeightForm
from v41jax.runner import SamplingRow, sampling_inputs


def matching_profile(config: EngineConfig, directory: Path, setup: ModelSetup, weights: WeightForm) -> Profile | None:
    """The calibration profile an engine was asked to use, checked against the engine; None when it was not.

    Args:
      config: options of the engine.
      directory: of the checkpoint.
      setup: what the engine's steps are specialized on.
      weights: form of the weights.

    Raises:
      ProfileError: the file holds no profile, or one that was not measured with all of these.
    """
    if config.calibration_profile is None:
        return None
    profile = Profile.read(Path(config.calibration_profile))
    profile.check(
        running_identity(
            directory,
            setup,
            device=jax.devices()[0].device_kind,
            mesh=config.mesh,
            weights=weights,
            eager=config.enforce_eager,
        ),
        draft_width=config.num_speculative_tokens,
        max_num_seqs=config.of_shard().max_num_seqs,
    )
    return profile


class VerifiedBlock(NamedTuple):
    """One verified block, for calibration.

    Attributes:
      request_id: of the request.
      confidences: [S] of the proposals, before calibration.
      offered: proposals that were verified.
      accepted: of these.
    """

    request_id: RequestId
    confidences: NDArray[np.float64]
    offered: int
    accepted: int


@dataclasses.dataclass
class DraftCounts:
    """Totals since the start.

    Attributes:
      draft_calls: calls of the draft program.
      verify_steps: decode steps.
      offered: [S] verified proposals by position in their block.
      accepted: [S] accepted proposals by position.
      lengths: [S + 1] verified blocks by the number of accepted proposals.
      verify_seconds: from the dispatch of decode steps to their tokens.
      draft_seconds: from the tokens of a step to the block drafted after it; the host's work in between is part of it.
    """

    draft_calls: int
    verify_steps: int
    offered: NDArray[np.int64]
    accepted: NDArray[np.int64]
    lengths: NDArray[np.int64]
    verify_seconds: float = 0.0
    draft_seconds: float = 0.0

    @classmethod
    def none(cls, width: int) -> DraftCounts:
        """Nothing yet, for blocks of `width` proposals."""
        return cls(0, 0, np.zeros(width, np.int64), np.zeros(width, np.int64), np.zeros(width + 1, np.int64))


class _Drafting(NamedTuple):
    requests: list[tuple[RequestId, int]]
    places: list[int]
    block: DraftBlock


class EngineDrafts:
    """Drafts of one engine.

    Attributes:
      profile: chooses how many proposals are verified; None verifies as many as can be of use.
      counts: totals.
      blocks: every verified block, when asked for.
    """

    def __init__(self, scheduler: Scheduler | ShardedScheduler, runner: DraftRunner, profile: Profile | None = None):
        """Nothing is drafted yet.

        Args:
          scheduler: of the engine; it asks for verification lengths when there is a profile.
          runner: reports confidences when there is a profile.
          profile: checked against the running process.
        """
        self.blocks: list[VerifiedBlock] | None = None
        self._scheduler = scheduler
        self._runner = runner
        self._width = scheduler.geometry.speculative_tokens
        self.counts = DraftCounts.none(self._width)
        self._pending: _Drafting | None = None
        self._confidences: dict[RequestId, NDArray[np.float64]] = {}
        self._tokens_read = 0.0
        self.use_profile(profile)

    def use_profile(self, profile: Profile | None) -> None:
        """Chooses verification lengths by another profile from now on, or verifies all that can be of use."""
        self.profile = profile
        self._scheduler.verify_lengths = None if profile is None else self.verify_lengths

    @property
    def confidence(self) -> bool:
        """Confidences are reported."""
        return self._runner.confidence

    def draft(self, batch: ScheduledBatch, buckets: Buckets) -> None:
        """Dispatches the draft after a step; none follows a step without tokens."""
        outputs = batch.output_requests.tolist()
        if not outputs:
            return
        ladder = buckets.draft_requests
        parts = [() if part is None else part.slots[part.output_requests].tolist() for part in batch.shards]
        counts = [len(part) for part in parts]
        requests = ladder[bisect.bisect_left(ladder, max(counts))]
        places = spread(counts, requests).tolist()
        rows = []
        for index in outputs:
            sampling = batch.sampling[index]
            # The program knows the positions: how much of a block became real is not known here yet.
            rows.append(
                SamplingRow(sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, sampling.seed or 0, 0)
            )
        sampling = sampling_inputs(rows, len(parts) * requests, places)
        block = self._runner.draft(requests, [slot for part in parts for slot in part], sampling, places)
        named = [(batch.request_ids[index], batch.generations[index]) for index in outputs]
        self._pending = _Drafting(named, places, block)
        self.counts.draft_calls += 1

    def deliver(self) -> None:
        """Hands the block that was drafted last to its requests, before the next step is planned."""
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        tokens = np.asarray(pending.block.tokens)[pending.places, : self._width].tolist()
        confidences = None
        if pending.block.confidence is not None:
            confidences = confidences_of(np.asarray(pending.block.confidence)[pending.places, : self._width])
        self.counts.draft_seconds += time.perf_counter() - self._tokens_read
        for row, (request_id, generation) in enumerate(pending.requests):
            taken = self._scheduler.propose(request_id, generation, tokens[row])
            if confidences is not None and taken:
                self._confidences[request_id] = confidences[row]
        if confidences is not None:
            live = self._scheduler.sequence
            self._confidences = {name: row for name, row in self._confidences.items() if live(name) is not None}

    def read(self, batch: ScheduledBatch, result: StepResult, seconds: float) -> None:
        """Counts a step whose tokens are known.

        Args:
          batch: the step.
          result: of it.
          seconds: from its dispatch to its tokens.
        """
        self._tokens_read = time.perf_counter()
        if batch.phase is not Phase.DECODE:
            return
        counts = self.counts
        offered = batch.lengths - 1
        accepted = (np.asarray(result.tokens) >= 0).sum(axis=1) - 1
        places = np.arange(self._width)
        counts.verify_steps += 1
        counts.verify_seconds += seconds
        counts.offered += (offered[:, None] > places).sum(axis=0)
        counts.accepted += (accepted[:, None] > places).sum(axis=0)
        counts.lengths += np.bincount(accepted, minlength=self._width + 1)
        if self.blocks is not None:
            for request_id, *lengths in zip(batch.request_ids, offered.tolist(), accepted.tolist(), strict=True):
                if request_id in self._confidences and lengths[0]:
                    self.blocks.append(VerifiedBlock(request_id, self._confidences[request_id], *lengths))

    def verify_lengths(self, sequences: list[Sequence], limits: list[int]) -> NDArray[np.int64]:
        """How many proposals of each request pay (DSpark specification, "Verification width").

        Args:
          sequences: of the next decode step.
          limits: proposals that can be of use.
        """
        assert self.profile is not None
        if not sequences:
            return np.zeros(0, np.int64)
        nothing = np.full(self._width, 0.5)
        rows = np.stack([self._confidences.get(sequence.request_id, nothing) for sequence in sequences])
        homes = None
        if isinstance(self._scheduler, ShardedScheduler):
            homes = [self._scheduler.home(sequence.request_id) for sequence in sequences]
        survivals = survival(rows, self.profile.sts_temperatures)
        return choose_lengths(survivals, self.profile.sps_table, limits, homes)

    def statistics(self) -> dict[str, Any]:
        """Totals, acceptance by position, accepted lengths and tokens per step, as plain values."""
        counts = self.counts
        blocks = int(counts.lengths.sum())
        emitted = int(counts.lengths @ np.arange(1, self._width + 2))
        return {
            "draft_calls": counts.draft_calls,
            "verify_steps": counts.verify_steps,
            "verified_blocks": blocks,
            "offered_by_position": counts.offered.tolist(),
            "accepted_by_position": counts.accepted.tolist(),
            "acceptance_by_position": (counts.accepted / np.maximum(counts.offered, 1)).round(4).tolist(),
            "accepted_lengths": counts.lengths.tolist(),
            "tokens_per_step": round(emitted / max(blocks, 1), 4),
            "verify_seconds": counts.verify_seconds,
            "draft_seconds": counts.draft_seconds,
        }

"""`ShardedScheduler`: one scheduler for every data shard, behind the interface of one.

Each shard has its own pages, slots and prefix cache; a request belongs to one shard from its submission to its end,
except that it may change while it waits. All shards run one program a step: the same phase in the same shape, and a
shard without work of that phase runs padding.

Which phase runs. Prefills go first, as with one shard, and every shard that can prefill takes part. When a shard had
to stand still meanwhile although it has requests that decode, the next step is a decode step, in which every shard
takes part that can decode. So no shard's decodes wait for two steps of other shards' prefills, and prefills get every
other step at least.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from scheduler.model_view import ModelView
from scheduler.outcomes import Counters, Statistics
from scheduler.pool_geometry import V41PoolGeometry
from scheduler.runtime_config import EngineConfig
from scheduler.scheduled_batch import Phase, ScheduledBatch, StepResult
from scheduler.scheduler import Scheduler, VerifyLengths, cut_drafts
from scheduler.sequence import RequestId, RequestOutput, Sequence
from scheduler.sharded_batch import ShardSizes, join_batches
from scheduler.tiers.sharded import ShardedTiers

REPLY_TOKENS = 256
"""Tokens that a reply is taken to have, unless its request allows fewer, where prefixes are weighed against places."""

Totals = TypeVar("Totals", Counters, Statistics)


class ShardedScheduler:
    """Continuous batching over data shards; the protocol of steps is that of `Scheduler`.

    Attributes:
      shards: the scheduler of each.
      sizes: memory of one.
      config: options of the engine, of all shards together.
      view, geometry, max_model_len, decoder_replay: as of `Scheduler`.
      tiers: pages beyond the device; None without any.
      verify_lengths: as of `Scheduler`, for the requests of all shards at once.
    """

    def __init__(
        self,
        engine_config: EngineConfig,
        model_view: ModelView,
        geometry: V41PoolGeometry,
        num_pages: int,
        num_slots: int,
        *,
        deferred: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ):
        """Makes idle schedulers.

        Args:
          engine_config: of the engine; its mesh says how many shards there are, see `EngineConfig.of_shard`.
          model_view: the model's numbers.
          geometry: of the pools.
          num_pages: PAGE units of one shard.
          num_slots: state slots of one shard.
          deferred: results are read one step late.
          clock: seconds.
        """
        generations = itertools.count(1)
        self.config = engine_config
        self.shards = tuple(
            Scheduler(
                engine_config.of_shard(),
                model_view,
                geometry,
                num_pages,
                num_slots,
                deferred=deferred,
                clock=clock,
                generations=generations,
            )
            for _ in range(engine_config.data_shards)
        )
        first = self.shards[0]
        self.view, self.geometry = model_view, geometry
        self.max_model_len, self.decoder_replay = first.max_model_len, first.decoder_replay
        images = first.manager.images
        self.sizes = ShardSizes(num_pages, num_slots, 0 if images is None else images.capacity)
        self.tiers: ShardedTiers | None = None
        self.verify_lengths: VerifyLengths | None = None
        self._homes: dict[RequestId, int] = {}
        self._outstanding: list[ScheduledBatch] = []
        self._steps, self._prefill_steps = 0, 0
        self._decodes_first = False

    def attach(self, tiers: ShardedTiers) -> None:
        """Connects pages beyond the device; nothing has been submitted yet."""
        self.tiers = tiers
        for shard, part in zip(self.shards, tiers.parts, strict=True):
            shard.attach(part)

    # Submission and cancellation -----------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """Queues a request on the shard that `choose` names; see `Scheduler.add`.

        Raises:
          ValueError: when a live request has the same id.
        """
        request_id = sequence.request_id
        if self.sequence(request_id) is not None:
            raise ValueError(f"request id {request_id!r} is in use: ids must be unique among live requests")
        home = self.choose(sequence)
        self._homes[request_id] = home
        self.shards[home].add(sequence)

    def choose(self, sequence: Sequence) -> int:
        """The shard for a new request.

        Among the shards that could admit it now, or among all if none can, it is the one where the tokens that it need
        not compute, those of its reusable prefix, and those of a reply for every free place (or for a shorter queue)
        are the most: a step takes as long as its largest shard, so that a request on a fuller shard costs a row for
        every token of its reply. Of equal ones it is the one with the longer prefix, then the most free pages, then
        the first.
        """
        length = sequence.num_finalized_tokens
        reply = min(sequence.sampling.max_tokens, REPLY_TOKENS)

        def worth(shard: Scheduler) -> tuple[bool, int, int, int]:
            hit = shard.manager.find_hit(sequence, length)
            room = shard.room_for(sequence, hit)
            return room >= 0, hit.tokens + reply * shard.free_places, hit.tokens, room

        values = [worth(shard) for shard in self.shards]
        return max(range(len(values)), key=lambda index: (values[index], -index))

    def abort(self, request_id: RequestId) -> bool:
        """As of `Scheduler`."""
        home = self._homes.get(request_id)
        return home is not None and self.shards[home].abort(request_id)

    def fail_all(self, reason: str, *, recoverable: bool = False) -> list[RequestOutput]:
        """As of `Scheduler`."""
        self._outstanding.clear()
        return self._deliver(shard.fail_all(reason, recoverable=recoverable) for shard in self.shards)

    # State ---------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """As of `Scheduler`."""
        return any(shard.has_work for shard in self.shards)

    @property
    def waiting(self) -> tuple[Sequence, ...]:
        """Requests without pages, shard by shard."""
        return tuple(itertools.chain.from_iterable(shard.waiting for shard in self.shards))

    @property
    def running(self) -> tuple[Sequence, ...]:
        """Requests with pages and a slot, shard by shard."""
        return tuple(itertools.chain.from_iterable(shard.running for shard in self.shards))

    @property
    def keeps_images(self) -> bool:
        """As of `Scheduler`."""
        return self.shards[0].keeps_images

    def sequence(self, request_id: RequestId) -> Sequence | None:
        """The live request of that id."""
        home = self._homes.get(request_id)
        return None if home is None else self.shards[home].sequence(request_id)

    def home(self, request_id: RequestId) -> int:
        """The shard of a live request.

        Raises:
          KeyError: no such request is live.
        """
        return self._homes[request_id]

    def take_outputs(self) -> list[RequestOutput]:
        """As of `Scheduler`."""
        return self._deliver(shard.take_outputs() for shard in self.shards)

    def statistics(self) -> Statistics:
        """Sums over the shards, and the numbers of each."""
        parts = [shard.statistics() for shard in self.shards]
        counters = dataclasses.replace(
            _sum([part.counters for part in parts]),
            steps=self._steps,
            prefill_steps=self._prefill_steps,
            decode_steps=self._steps - self._prefill_steps,
        )
        return dataclasses.replace(_sum(parts), counters=counters, shards=tuple(parts))

    # Steps ---------------------------------------------------------------------------------------------------

    def schedule(self) -> ScheduledBatch | None:
        """As of `Scheduler`; the batch is joined from those of the shards."""
        for shard in self.shards:
            shard.begin_step()
        self._move_waiting()
        for phase in (Phase.DECODE, Phase.PREFILL) if self._decodes_first else (Phase.PREFILL, Phase.DECODE):
            parts = self._plan(phase)
            if any(part is not None for part in parts):
                return self._hand_out(phase, parts)
        self._decodes_first = False
        return None

    def _plan(self, phase: Phase) -> list[ScheduledBatch | None]:
        if phase is Phase.PREFILL:
            return [shard.plan_prefill_step() for shard in self.shards]
        if self.geometry.speculative_tokens:
            cut_drafts(self.shards, self.verify_lengths)
        return [shard.plan_decode_step() for shard in self.shards]

    def _hand_out(self, phase: Phase, parts: list[ScheduledBatch | None]) -> ScheduledBatch:
        batch = join_batches(self._steps, parts, self.sizes)
        prefill = phase is Phase.PREFILL
        self._decodes_first = prefill and any(
            part is None and len(shard.running) > shard.num_partial
            for shard, part in zip(self.shards, parts, strict=True)
        )
        self._steps += 1
        self._prefill_steps += prefill
        self._outstanding.append(batch)
        return batch

    def _move_waiting(self) -> None:
        """Requests that would have to wait for memory of their shard go to one that has it, with the most places."""
        for home, shard in enumerate(self.shards):
            while (sequence := shard.first_held_up()) is not None:
                rooms = [(other.room_for(sequence), index) for index, other in enumerate(self.shards)]
                fitting = [index for room, index in rooms if room >= 0 and index != home]
                if not fitting:
                    break
                target = max(fitting, key=lambda index: (self.shards[index].free_places, rooms[index][0], -index))
                shard.hand_over(sequence, self.shards[target])
                self._homes[sequence.request_id] = target

    def postprocess(self, batch: ScheduledBatch, result: StepResult) -> list[RequestOutput]:
        """As of `Scheduler`.

        Raises:
          RuntimeError: when `batch` is not the oldest outstanding one, or has another number of results.
        """
        if not self._outstanding or self._outstanding[0].index != batch.index:
            expected = self._outstanding[0].index if self._outstanding else None
            raise RuntimeError(f"postprocess got step {batch.index}, the oldest outstanding one is {expected}")
        tokens, outputs = np.asarray(result.tokens), len(batch.output_requests)
        if len(tokens) != outputs:
            raise RuntimeError(f"step {batch.index} has {outputs} outputs, the result has {len(tokens)}")
        self._outstanding.pop(0)
        return self._deliver(self._postprocess(batch, tokens))

    def _postprocess(self, batch: ScheduledBatch, tokens: NDArray[np.int32]) -> Iterator[list[RequestOutput]]:
        first = 0
        for shard, part in zip(self.shards, batch.parts, strict=True):
            if part is None:
                yield shard.take_outputs()
                continue
            count = len(part.output_requests)
            yield shard.postprocess(part, StepResult(tokens[first : first + count]))
            first += count

    def propose(self, request_id: RequestId, generation: int, tokens: Iterable[int]) -> bool:
        """As of `Scheduler`."""
        home = self._homes.get(request_id)
        return home is not None and self.shards[home].propose(request_id, generation, tokens)

    def preempt(self, request_id: RequestId) -> bool:
        """As of `Scheduler`."""
        home = self._homes.get(request_id)
        return home is not None and self.shards[home].preempt(request_id)

    def _deliver(self, outputs: Iterable[list[RequestOutput]]) -> list[RequestOutput]:
        delivered = [output for part in outputs for output in part]
        for output in delivered:
            # An id that was refused may be live again under another request by now.
            if output.finished and self.sequence(output.request_id) is None:
                self._homes.pop(output.request_id, None)
        return delivered


def _sum(parts: list[Totals]) -> Totals:
    """Integer fields added up; others are those of the first."""
    first = parts[0]
    names = [field.name for field in dataclasses.fields(first) if isinstance(getattr(first, field.name), int)]
    return dataclasses.replace(first, **{name: sum(getattr(part, name) for part in parts) for name in names})


def make_scheduler(
    engine_config: EngineConfig,
    model_view: ModelView,
    geometry: V41PoolGeometry,
    num_pages: int,
    num_slots: int,
    *,
    deferred: bool = False,
) -> Scheduler | ShardedScheduler:
    """The scheduler of an engine; arguments as of `ShardedScheduler`, one shard gets a plain one."""
    kind = ShardedScheduler if engine_config.data_shards > 1 else Scheduler
    return kind(engine_config, model_view, geometry, num_pages, num_slots, deferred=deferred)

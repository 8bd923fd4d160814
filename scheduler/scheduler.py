"""The scheduling loop: which requests the next step runs, and on which rows.

`Scheduler` decides order, admission and preemption. Memory is `BlockManager`'s, the chunk arithmetic is `planning`'s,
the outcomes are `Lifecycle`'s, and the frozen step is a `ScheduledBatch`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator

from scheduler.batch_assembly import PlannedPrefill, assemble_decode, assemble_prefill
from scheduler.buckets import decode_ladder
from scheduler.lifecycle import Lifecycle
from scheduler.model_view import ModelView
from scheduler.outcomes import token_limit
from scheduler.planning import ChunkPlan, ChunkRules, plan_chunk
from scheduler.pool_geometry import V41PoolGeometry
from scheduler.runtime_config import EngineConfig
from scheduler.scheduled_batch import ScheduledBatch
from scheduler.sequence import Sequence, SequenceStatus
from scheduler.speculation import proposal_limit
from scheduler.states import ImageRestore, ImageStore, StateMaintenanceOps, TransferKind

VerifyLengths = Callable[[list[Sequence], list[int]], Iterable[int]]
"""(requests, limits) -> how many of their drafts to verify, none above its limit."""


class Scheduler(Lifecycle):
    """Continuous batching over a fixed pool of pages and slots.

    One step is `schedule`, then the forward, then `postprocess`. With `deferred` the next `schedule` may come before
    the previous `postprocess`: forwards are dispatched in the order their batches were scheduled, and the forward of
    a batch is dispatched before the next but one is scheduled.

    Source: runtime specification, "Request life cycle".

    Attributes:
      rules: what the configuration fixes about every chunk plan.
      verify_lengths: chooses how many proposals are verified; None verifies as many as can be of use.
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
        generations: Iterator[int] | None = None,
    ):
        """Makes an idle scheduler; see `EngineConfig` for the options and `ModelView` for the model's numbers.

        `generations` numbers what the scheduler admits; schedulers that hand requests to each other share one.
        """
        super().__init__(
            engine_config,
            model_view,
            geometry,
            num_pages,
            num_slots,
            deferred=deferred,
            clock=clock,
            generations=generations,
        )
        self.rules = ChunkRules(
            hash_block=geometry.block_size,
            cap=engine_config.long_prefill_token_threshold,
            min_final_rows=model_view.window_size if self.decoder_replay else 0,
            chunked=engine_config.enable_chunked_prefill,
        )
        self._rebuilds = self.manager.transfer.kind is TransferKind.REPLAY
        self._max_running = min(engine_config.max_num_seqs, num_slots)
        widest = (engine_config.decode_buckets or decode_ladder(engine_config.max_num_seqs))[-1]
        self.verify_lengths: VerifyLengths | None = None
        self._max_decode = min(max(self._max_rows // (1 + geometry.speculative_tokens), 1), widest)
        if deferred and geometry.speculative_tokens:
            raise ValueError("with drafts every result is read before the next step is planned: deferred must be off")

    def schedule(self) -> ScheduledBatch | None:
        """Plans the next step: prefills if there are any to run, else decodes.

        Returns:
          The batch to run, or None when nothing can run now: take the outputs, and postprocess what is outstanding.

        Raises:
          RuntimeError: when too many batches are outstanding for the output mode.
        """
        self.begin_step()
        batch = self.plan_prefill_step()
        if batch is None:
            if self.geometry.speculative_tokens:
                cut_drafts([self], self.verify_lengths)
            batch = self.plan_decode_step()
        return batch

    def begin_step(self) -> None:
        """Takes in what is known before a step is planned; comes once before `plan_prefill_step`, `plan_decode_step`.

        Raises:
          RuntimeError: when too many batches are outstanding for the output mode.
        """
        if len(self._outstanding) > (1 if self.deferred else 0):
            raise RuntimeError(
                f"{len(self._outstanding)} batches wait for postprocess: results are read "
                f"{'at most one step late' if self.deferred else 'before the next step is planned'}"
            )
        self._advance_outstanding()
        self._reap_aborted()

    def plan_prefill_step(self) -> ScheduledBatch | None:
        """Plans a step of prefills, new requests admitted; None when there is nothing to prefill now."""
        planned = self._plan_prefills()
        if not planned:
            return None
        ops = self._drain_ops(tuple(item.restore for item in planned if item.restore is not None))
        batch = assemble_prefill(
            self.counters.steps,
            planned,
            self.manager.tables,
            self.geometry.block_size,
            self.view.history_size,
            self.decoder_replay,
            ops,
        )
        self.counters.prefill_steps += 1
        self.counters.rows_replayed += int((batch.resumes - batch.starts).sum())
        return self._hand_out(batch)

    def plan_decode_step(self) -> ScheduledBatch | None:
        """Plans a step of decodes that verify the proposals their requests hold; None when nothing decodes."""
        decoding = self._plan_decodes()
        if not decoding:
            return None
        tables, history = self.manager.tables, self.view.history_size
        batch = assemble_decode(self.counters.steps, decoding, tables, history, self._drain_ops())
        for sequence in decoding:
            sequence.drafts = ()
        self.counters.decode_steps += 1
        return self._hand_out(batch)

    def _hand_out(self, batch: ScheduledBatch) -> ScheduledBatch:
        self.counters.steps += 1
        self.counters.rows_scheduled += batch.num_rows
        self._outstanding.append(batch)
        return batch

    def _plan_prefills(self) -> list[PlannedPrefill]:
        planned: list[PlannedPrefill] = []
        budget = self._max_rows
        if self._partial:
            for sequence in self.running:
                if budget <= 0:
                    break
                if not sequence.is_partial_prefill:
                    continue
                plan = self._plan(sequence, sequence.num_computed, sequence.prefill_end, budget, not planned, False)
                if plan is not None:
                    planned.append(PlannedPrefill(sequence, plan, False, None))
                    budget -= plan.end - plan.start
        if self.waiting and self.tiers is not None:
            self.tiers.look_ahead(self.waiting, self.manager)
        if self.waiting and self._may_admit():
            budget = self._admit(planned, budget)
        if planned:
            self._last_prefill_began = self._clock()
        return planned

    def _plan(
        self, sequence: Sequence, resume: int, goal: int, budget: int, empty: bool, rebuild: bool
    ) -> ChunkPlan | None:
        cut = self.ladder.next_cut(resume, goal, sequence.demand_pos) if self.ladder.interval else 0
        return plan_chunk(resume, goal, budget, empty, rebuild, self.rules, cut)

    def _may_admit(self) -> bool:
        """Admission delay: let requests gather for a multiple of the last prefill's duration."""
        factor = self.config.admission_delay_factor
        if factor <= 0 or not self.running:
            return True
        waited = self._clock() - min(sequence.arrival for sequence in self.waiting)
        return waited > factor * self._last_prefill_seconds

    def _admit(self, planned: list[PlannedPrefill], budget: int) -> int:
        """Admits from the head of the queue while requests and rows fit; a request that must wait stops the rest.

        One that waits for pages from outside the device is passed over instead, at most until its deadline.
        """
        manager, tiers = self.manager, self.tiers
        place = 0
        while place < len(self.waiting) and budget > 0 and len(self.running) < self._max_running:
            if not manager.slots.num_free:
                break
            sequence = self.waiting[place]
            length = sequence.num_finalized_tokens
            refusal = self._page_refusal(length)
            if refusal is not None:
                # A preempted request that outgrew the pool.
                del self.waiting[place]
                del self._sequences[sequence.request_id]
                self._refuse(sequence, refusal)
                continue
            if not manager.may_fit(length):
                break
            if tiers is not None and tiers.holds_back(sequence, manager):
                place += 1
                continue
            hit = manager.find_hit(sequence, length)
            if not manager.can_allocate(hit, length):
                break
            if tiers is not None and tiers.adopt(sequence, manager):
                hit = manager.find_hit(sequence, length)
                if not manager.can_allocate(hit, length):
                    break
            demand, sequence.demand_pos = sequence.demand_pos, sequence.demand_pos or hit.demand
            rebuild = self._rebuilds and hit.tokens > 0
            plan = self._plan(sequence, hit.tokens, length, budget, not planned, rebuild)
            if plan is None:
                sequence.demand_pos = demand
                break
            del self.waiting[place]
            restore = manager.allocate(sequence, hit, length)
            sequence.status = SequenceStatus.RUNNING
            sequence.generation = self._next_generation()
            sequence.prefill_end = length
            sequence.num_computed = sequence.num_hashed_tokens = sequence.reported_hit_tokens = hit.tokens
            sequence.last_checkpoint_pos = hit.tokens
            self.running.append(sequence)
            self._partial += 1
            self.counters.admissions += 1
            self.counters.prompt_tokens += length
            self.counters.hit_tokens += hit.tokens
            self.counters.prompt_images += len(sequence.images)
            self.counters.hit_images += sum(span.start + span.length <= hit.tokens for span in sequence.images)
            planned.append(PlannedPrefill(sequence, plan, rebuild, restore))
            budget -= plan.end - plan.start
        return budget

    def _plan_decodes(self) -> list[Sequence]:
        """Requests that decode now, their pages grown; preempts from the tail on shortage."""
        decoding: list[Sequence] = []
        block = self.geometry.block_size
        max_len = self.max_model_len
        queue = deque(self.running)
        passed: list[Sequence] = []
        postponed: list[Sequence] = []
        while queue and len(decoding) < self._max_decode:
            sequence = queue.popleft()
            if sequence.num_computed < sequence.prefill_end:
                postponed.append(sequence)
            elif sequence.num_placeholders and sequence.num_tokens >= token_limit(sequence, max_len):
                passed.append(sequence)  # its last token is in flight
            elif (
                (sequence.drafts and self._grow_for_drafts(sequence))
                or len(sequence.block_table) * block > sequence.num_computed
                or self._grow(sequence, queue, passed)
            ):
                decoding.append(sequence)
        # What the batch could not hold goes first next time; partial prefills never move ahead of others.
        self.running = [*queue, *decoding, *passed, *postponed]
        return decoding

    def cut_drafts(self) -> list[Sequence]:
        """Keeps of every draft what can be of use in the next decode step.

        Returns:
          The requests that the step will hold, at most.
        """
        decoding = [sequence for sequence in self.running if not sequence.is_partial_prefill]
        for sequence in decoding:
            limit = proposal_limit(sequence, len(sequence.drafts), self.max_model_len)
            sequence.drafts = sequence.drafts[:limit]
        return decoding[: self._max_decode]

    def _grow_for_drafts(self, sequence: Sequence) -> bool:
        """Makes room for the anchor's row and the proposals' without taking anything from others.

        Where pages are short the proposals give way, before any request does. False when there is no room even for the
        anchor: it is then `_grow`'s turn.
        """
        length = sequence.num_computed + 1 + len(sequence.drafts)
        if self.manager.can_grow(sequence, length):
            self.manager.grow(sequence, length)
            return True
        room = len(sequence.block_table) * self.geometry.block_size - sequence.num_computed - 1
        sequence.drafts = sequence.drafts[: max(room, 0)]
        return room >= 0

    def _grow(self, sequence: Sequence, queue: deque[Sequence], passed: list[Sequence]) -> bool:
        """Makes room for the row at `num_computed`; False when the request itself had to give way."""
        length = sequence.num_computed + 1
        while not self.manager.can_grow(sequence, length):
            refusal = self._page_refusal(length)
            if refusal is not None:
                if sequence.num_placeholders:
                    passed.append(sequence)  # the token in flight still belongs to the output
                else:
                    self._end(sequence, f"unschedulable: {refusal}")
                return False
            if not queue and (passed or self.manager.images_in_flight):
                # Results that are still to be read make room: giving up pages now would only repeat the work.
                passed.append(sequence)
                return False
            victim = queue.pop() if queue else sequence
            self._preempt(victim)
            if victim is sequence:
                return False
        self.manager.grow(sequence, length)
        return True

    def _drain_ops(self, restores: tuple[ImageRestore, ...] = ()) -> StateMaintenanceOps:
        """Moves the queued state operations into a batch that will execute, with the restores of its admissions."""
        stores: list[ImageStore] = []
        images = self.manager.images
        if images is not None:
            for request_id, position in self._store_intents.items():
                sequence = self._sequences[request_id]
                block = position // self.geometry.block_size
                store = images.store(sequence.block_hashes[block - 1], position, sequence.slot)
                if store is not None:
                    stores.append(store)
                    if self.tiers is not None:
                        self.tiers.image_queued(sequence, block - 1, store)
        ops = StateMaintenanceOps(self._relocations, tuple(stores), restores)
        self._relocations = ()
        self._store_intents.clear()
        return ops


def cut_drafts(shards: Iterable[Scheduler], verify_lengths: VerifyLengths | None) -> None:
    """Keeps of every draft what can be of use in the next decode step, or what `verify_lengths` chooses for all."""
    sequences = [sequence for shard in shards for sequence in shard.cut_drafts()]
    if verify_lengths is not None:
        limits = [len(sequence.drafts) for sequence in sequences]
        for sequence, length in zip(sequences, verify_lengths(sequences, limits), strict=True):
            sequence.drafts = sequence.drafts[: int(length)]

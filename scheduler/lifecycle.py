"""What happens to a request outside of planning: submission, progress, results, preemption, cancellation, the end.

`Lifecycle` is the half of the scheduler that owns the requests; `scheduler.Scheduler` adds the planning of steps.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping

import numpy as np

from scheduler.block_manager import BlockManager, PrefixHit
from scheduler.checkpoint_images import CheckpointLadder
from scheduler.model_view import ModelView
from scheduler.outcomes import Counters, Statistics, make_output, stop_reason, token_limit
from scheduler.pages import block_hash
from scheduler.pool_geometry import V41PoolGeometry
from scheduler.runtime_config import EngineConfig
from scheduler.scheduled_batch import Phase, ScheduledBatch, StepResult
from scheduler.sequence import RequestId, RequestOutput, Sequence, SequenceStatus
from scheduler.speculation import emitted_blocks, finalize_block
from scheduler.states import Relocation
from scheduler.tiers.page_tiers import PageTiers


class Lifecycle:
    """Requests, their memory and their outcomes.

    Attributes:
      config, view, geometry: what the scheduler was built for.
      deferred: results are read one step late.
      max_model_len: tokens of one request at most.
      decoder_replay: final prefill rows run the decoder on a tail only.
      waiting: requests without pages, first in first out.
      running: requests with pages and a slot, in scheduling order.
      manager: pages, slots and images.
      ladder: where checkpoint images are kept.
      tiers: pages beyond the device; None without any.
      counters: running totals.
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
        self.config = engine_config
        self.view = model_view
        self.geometry = geometry
        self.deferred = deferred
        self.max_model_len = engine_config.model_len(model_view)
        self.decoder_replay = engine_config.decoder_replay(model_view)
        self.manager = BlockManager(
            geometry,
            num_pages,
            num_slots,
            engine_config.transfer(geometry),
            engine_config.enable_prefix_caching,
            geometry.pages_for(self.max_model_len),
        )
        self.ladder = CheckpointLadder(
            engine_config.checkpoint_interval() if self.manager.images is not None else 0, geometry.block_size
        )
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.tiers: PageTiers | None = None
        self.counters = Counters()
        self._sequences: dict[RequestId, Sequence] = {}
        self._max_rows = engine_config.max_num_batched_tokens
        self._clock = clock
        self._last_prefill_began: float | None = None
        self._last_prefill_seconds = 0.0
        self._partial = 0
        self._generations = itertools.count(1) if generations is None else generations
        self._aborted: dict[RequestId, Sequence] = {}
        self._outputs: list[RequestOutput] = []
        self._outstanding: list[ScheduledBatch] = []
        self._advanced = 0  # leading outstanding batches whose progress is counted
        self._relocations: tuple[Relocation, ...] = ()
        self._store_intents: dict[RequestId, int] = {}

    def attach(self, tiers: PageTiers) -> None:
        """Connects pages beyond the device; nothing has been submitted yet."""
        self.tiers = tiers
        self.manager.on_publish = tiers.published

    # Submission and cancellation -----------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """Queues a request; one that can never run is refused through the ordinary outputs.

        Raises:
          ValueError: when a live request has the same id.
        """
        if sequence.request_id in self._sequences:
            raise ValueError(f"request id {sequence.request_id!r} is in use: ids must be unique among live requests")
        sequence.arrival = self._clock()
        refusal = self._refusal(sequence)
        if refusal is not None:
            self._refuse(sequence, refusal)
            return
        self._sequences[sequence.request_id] = sequence
        self.waiting.append(sequence)

    def _refusal(self, sequence: Sequence) -> str | None:
        prompt = sequence.num_prompt_tokens
        if prompt > self.max_model_len:
            return f"the prompt has {prompt} tokens, max_model_len is {self.max_model_len}"
        if not self.config.enable_chunked_prefill and prompt > self._max_rows:
            return (
                f"the prompt has {prompt} tokens, max_num_batched_tokens is {self._max_rows} and chunked prefill is off"
            )
        if sequence.sampling.prompt_logprobs and self.decoder_replay:
            return "prompt log-probabilities need decoder_swa_bounded_replay off"
        return self._page_refusal(prompt)

    def _page_refusal(self, tokens: int) -> str | None:
        pages = self.geometry.pages_for(tokens)
        if pages > self.manager.pool.num_pages:
            return f"{tokens} tokens need {pages} pages, the pool has {self.manager.pool.num_pages}"
        return None

    def _refuse(self, sequence: Sequence, why: str) -> None:
        sequence.status = SequenceStatus.FINISHED
        self.counters.refused += 1
        self._outputs.append(make_output(sequence, reason=f"unschedulable: {why}"))

    def abort(self, request_id: RequestId) -> bool:
        """Cancels a request; its `aborted` output comes with the next step. False when no such request is live."""
        sequence = self._sequences.get(request_id)
        if sequence is None or sequence.status is SequenceStatus.ABORTED:
            return False
        sequence.status = SequenceStatus.ABORTED
        self._aborted[request_id] = sequence
        return True

    def fail_all(self, reason: str, *, recoverable: bool = False) -> list[RequestOutput]:
        """Ends every live request after a step failed.

        Args:
          reason: of the failure.
          recoverable: the device's memory is as the last dispatched step leaves it. Then READY checkpoint images stay;
            else all are forgotten, as their content may be lost.

        Returns:
          Every undelivered output, one `failed: ...` for each live request included.
        """
        if self.manager.images is not None:
            for batch in self._outstanding:
                self.manager.images.abandon(batch.ops)
            if not recoverable:
                self.manager.images.drop_all()
        self._outstanding.clear()
        self._advanced = 0
        for sequence in list(self._sequences.values()):
            self._end(sequence, f"failed: {reason}")
            self.counters.failed += 1
        self._aborted.clear()
        return self.take_outputs()

    # Other schedulers ----------------------------------------------------------------------------------------

    @property
    def free_places(self) -> int:
        """Requests that could be admitted besides those that wait already; negative when some of these cannot."""
        return min(self.config.max_num_seqs, self.manager.slots.num_slots) - len(self.running) - len(self.waiting)

    def room_for(self, sequence: Sequence, hit: PrefixHit | None = None) -> int:
        """Pages left once everything that waits and this request are admitted, or negative when that cannot be now.

        Prefixes that those that wait could reuse are not counted, nor the request's own without a `hit`.
        """
        if self.free_places <= 0:
            return -1
        wanted = sum(self.geometry.pages_for(other.num_finalized_tokens) for other in self.waiting)
        wanted += self.geometry.pages_for(sequence.num_finalized_tokens)
        shared = 0 if hit is None else sum(1 for page in hit.pages if self.manager.pool.refs[page])
        return self.manager.available_pages() + shared - wanted

    def first_held_up(self) -> Sequence | None:
        """The first waiting request for which there is no place or are no pages after those before it.

        Pages in use that it shares count as its own. They are looked for only once pages are short without them.
        """
        if not self.waiting:
            return None
        places = self.free_places + len(self.waiting)
        pages = self.manager.available_pages()
        images = self.manager.images
        margin = 0 if images is None else images.checkpoint.units  # an image that is restored stays
        looks = False
        for index, sequence in enumerate(itertools.islice(self.waiting, places + 1)):
            if index == places:
                return sequence
            pages -= self.geometry.pages_for(sequence.num_finalized_tokens)
            if not looks and pages < margin:
                looks = True
                pages += sum(self._shared_pages(other)[0] for other in itertools.islice(self.waiting, index))
            if looks:
                shared, kept = self._shared_pages(sequence)
                pages += shared
                if pages < kept:
                    return sequence
        return None

    def _shared_pages(self, sequence: Sequence) -> tuple[int, int]:
        """(pages in use that a waiting request would share, pages of evictable images that it would restore from)."""
        manager = self.manager
        hit = manager.find_hit(sequence, sequence.num_finalized_tokens)
        kept = manager.available_pages() - manager.available_pages(hit.image_hash)
        return sum(1 for page in hit.pages if manager.pool.refs[page]), kept

    def hand_over(self, sequence: Sequence, other: Lifecycle) -> None:
        """Moves a waiting request, which holds no memory, to the end of another scheduler's queue."""
        self.waiting.remove(sequence)
        del self._sequences[sequence.request_id]
        if self.tiers is not None and other.tiers is not None:
            self.tiers.hand_over(sequence.request_id, other.tiers)
        other._sequences[sequence.request_id] = sequence
        other.waiting.append(sequence)

    # State ---------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Something waits, runs, is in flight or has an output that nobody took."""
        return bool(self._sequences or self._outputs or self._outstanding)

    @property
    def keeps_images(self) -> bool:
        """A hit is resumed from checkpoint images."""
        return self.manager.images is not None

    @property
    def num_partial(self) -> int:
        """Running requests whose prefill is not complete."""
        return self._partial

    @property
    def outstanding(self) -> tuple[ScheduledBatch, ...]:
        """Batches scheduled and not postprocessed, oldest first."""
        return tuple(self._outstanding)

    @property
    def queued_relocations(self) -> tuple[Relocation, ...]:
        """Slot moves that no batch carries yet."""
        return self._relocations

    @property
    def store_intents(self) -> dict[RequestId, int]:
        """Positions at which a request's state is to be kept by the next batch (a copy)."""
        return dict(self._store_intents)

    def sequence(self, request_id: RequestId) -> Sequence | None:
        """The live request of that id."""
        return self._sequences.get(request_id)

    def take_outputs(self) -> list[RequestOutput]:
        """Outputs that no `postprocess` returned yet: refusals and cancellations while nothing runs."""
        outputs, self._outputs = self._outputs, []
        return outputs

    def statistics(self) -> Statistics:
        """A snapshot of queues, pools and totals."""
        pool, images = self.manager.pool, self.manager.images
        raw = pool.num_raw
        return Statistics(
            queue=len(self.waiting),
            running=len(self.running),
            partial=self._partial,
            pages_total=pool.num_pages,
            pages_used=pool.num_pages - pool.num_free - raw,
            pages_cached=pool.num_cached,
            pages_vacant=pool.num_vacant,
            pages_raw=raw,
            slots_free=self.manager.slots.num_free,
            images=len(images.images()) if images is not None else 0,
            images_stored=images.stored if images is not None else 0,
            images_evicted=images.evicted if images is not None else 0,
            counters=self.counters,
        )

    # Results -------------------------------------------------------------------------------------------------

    def postprocess(self, batch: ScheduledBatch, result: StepResult) -> list[RequestOutput]:
        """Takes in the result of the oldest outstanding batch.

        Cancelled requests end here whether or not the step gave them a token; a result whose request moved on is
        dropped.

        Args:
          batch: the oldest batch that was scheduled and not postprocessed.
          result: what the runner returned for it.

        Returns:
          The outputs of this step, and those that nobody took before.

        Raises:
          RuntimeError: when `batch` is not the oldest outstanding one, or has another number of results.
        """
        if not self._outstanding or self._outstanding[0].index != batch.index:
            expected = self._outstanding[0].index if self._outstanding else None
            raise RuntimeError(f"postprocess got step {batch.index}, the oldest outstanding one is {expected}")
        rows = batch.output_requests.tolist()
        verifies = self.geometry.speculative_tokens > 0 and batch.phase is Phase.DECODE
        blocks = emitted_blocks(batch, result) if verifies else []
        tokens = [] if verifies else np.asarray(result.tokens).reshape(-1).tolist()
        if not verifies and len(tokens) != len(rows):
            raise RuntimeError(f"step {batch.index} has {len(rows)} output rows, the result has {len(tokens)} tokens")
        if not verifies and not self._advanced:
            self._advance(batch)
            self._advanced = 1
        self._outstanding.pop(0)
        self._advanced = max(0, self._advanced - 1)
        if self.manager.images is not None:
            self.manager.images.complete(batch.ops)
            if self.tiers is not None:
                self.tiers.images_completed(batch.ops.stores, self.manager.images.is_ready)
        if batch.phase is Phase.PREFILL and self._last_prefill_began is not None:
            self._last_prefill_seconds = self._clock() - self._last_prefill_began
        self._reap_aborted()
        if verifies:
            self._take_blocks(batch, blocks)
        else:
            self._take_results(batch, dict(zip(rows, tokens, strict=True)))
        return self.take_outputs()

    def _take_results(self, batch: ScheduledBatch, tokens: dict[int, int]) -> None:
        block = self.geometry.block_size
        sequences = self._sequences
        ended = False
        for row, (request_id, generation, end) in enumerate(
            zip(batch.request_ids, batch.generations, batch.ends.tolist(), strict=True)
        ):
            sequence = sequences.get(request_id)
            if sequence is None or sequence.generation != generation:
                self.counters.stale_results += row in tokens
                continue
            if end - sequence.num_hashed_tokens >= block:
                self.manager.publish(sequence, end)
            token = tokens.get(row)
            if token is None:
                continue  # decided by the flag frozen in the batch, never by the request's live state
            sequence.finalize(end, token)
            self.counters.output_tokens += 1
            reason = stop_reason(sequence, self.view.eos_token_ids, self.max_model_len)
            self._outputs.append(make_output(sequence, (token,), reason))
            if reason is not None:
                self._release(sequence)
                self.counters.finished += 1
                ended = True
        if ended:
            self.running = [sequence for sequence in self.running if sequence.status is SequenceStatus.RUNNING]

    def _take_blocks(self, batch: ScheduledBatch, blocks: list[list[int]]) -> None:
        """Progress and outputs of a verification: only what was accepted is computed, hashed and reported."""
        ended = False
        for request_id, generation, start, length, tokens in zip(
            batch.request_ids,
            batch.generations,
            batch.starts.tolist(),
            batch.lengths.tolist(),
            blocks,
            strict=True,
        ):
            self.counters.draft_tokens += length - 1
            self.counters.accepted_tokens += len(tokens) - 1
            sequence = self._sequences.get(request_id)
            if sequence is None or sequence.generation != generation:
                self.counters.stale_results += 1
                continue
            kept, reason = finalize_block(sequence, tokens, self.view.eos_token_ids, self.max_model_len)
            # What was accepted beyond a stop has KV, but is no part of the request.
            sequence.num_computed = min(start + len(tokens), sequence.num_finalized_tokens)
            self.counters.output_tokens += len(kept)
            self.manager.publish(sequence, sequence.num_computed)
            self._outputs.append(make_output(sequence, kept, reason))
            if reason is not None:
                self._release(sequence)
                self.counters.finished += 1
                ended = True
            elif self.manager.images is not None:
                self._intend_store(sequence, sequence.num_computed, False)
        if ended:
            self.running = [sequence for sequence in self.running if sequence.status is SequenceStatus.RUNNING]

    def propose(self, request_id: RequestId, generation: int, tokens: Iterable[int]) -> bool:
        """Hands over what was drafted to follow the newest token of a request; its next decode step verifies them.

        Args:
          request_id: the request.
          generation: of the request when the step ran whose newest token was drafted from.
          tokens: proposals in order.

        Returns:
          False when the request has moved on: the draft is dropped.
        """
        sequence = self._sequences.get(request_id)
        if sequence is None or sequence.generation != generation or sequence.is_partial_prefill:
            return False
        sequence.drafts = tuple(tokens)
        return True

    def _advance(self, batch: ScheduledBatch) -> None:
        """Counts the progress of a batch whose forward was dispatched."""
        sequences = self._sequences
        images = self.manager.images
        for request_id, generation, end, final in zip(
            batch.request_ids, batch.generations, batch.ends.tolist(), batch.is_final.tolist(), strict=True
        ):
            sequence = sequences.get(request_id)
            if sequence is None or sequence.generation != generation:
                continue
            partial = sequence.is_partial_prefill
            sequence.num_computed = end
            if partial and not sequence.is_partial_prefill:
                self._partial -= 1
            if final:
                sequence.append_placeholder()
            if images is not None and sequence.status is SequenceStatus.RUNNING:
                self._intend_store(sequence, end, partial)

    def _advance_outstanding(self) -> None:
        for batch in self._outstanding[self._advanced :]:
            self._advance(batch)
        self._advanced = len(self._outstanding)

    def _intend_store(self, sequence: Sequence, end: int, prefill: bool) -> None:
        """Remembers to keep the state a forward left behind; the next batch carries the store."""
        if prefill:
            keep = self.ladder.keeps_prefill(end, sequence.prefill_end, sequence.demand_pos)
        else:
            keep = self.ladder.keeps_decode(end, sequence.last_checkpoint_pos)
        if keep and sequence.num_tokens < token_limit(sequence, self.max_model_len):
            block_hash(sequence, end // self.geometry.block_size - 1, self.geometry.block_size)
            self._store_intents[sequence.request_id] = end
            sequence.last_checkpoint_pos = end

    # Preemption, relocation and the end ----------------------------------------------------------------------

    def preempt(self, request_id: RequestId) -> bool:
        """Sends a running request back to the head of the queue, to be recomputed. False when it does not run."""
        sequence = self._sequences.get(request_id)
        if sequence is None or sequence.status is not SequenceStatus.RUNNING:
            return False
        self._preempt(sequence)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Recompute preemption: finalized tokens stay, everything else goes (runtime specification, "Preemption")."""
        sequence.strip_placeholders()
        sequence.drafts = ()
        self._give_up_memory(sequence)
        self.running.remove(sequence)
        sequence.num_computed = sequence.num_hashed_tokens = sequence.reported_hit_tokens = 0
        sequence.demand_pos = sequence.last_checkpoint_pos = 0
        sequence.generation = self._next_generation()
        sequence.status = SequenceStatus.WAITING
        self.waiting.appendleft(sequence)
        self.counters.preemptions += 1

    def relocate(self, moves: Mapping[RequestId, int]) -> None:
        """Moves running requests to other slots; the next batch carries the copies.

        Args:
          moves: request -> destination slot, free or vacated by another move.

        Raises:
          ValueError: for a request that does not run, a destination that is taken, or moves still queued.
        """
        if self._relocations:
            raise ValueError("relocations are queued already: schedule a step first")
        sequences = {}
        for request_id in moves:
            sequence = self._sequences.get(request_id)
            if sequence is None or sequence.slot < 0:
                raise ValueError(f"request {request_id!r} holds no slot and cannot be relocated")
            sequences[request_id] = sequence
        pairs = {sequences[request_id].slot: slot for request_id, slot in moves.items()}
        self.manager.move_slots(pairs)
        for request_id, slot in moves.items():
            sequences[request_id].slot = slot
        self._relocations = tuple(Relocation(source, target) for source, target in pairs.items() if source != target)

    def _reap_aborted(self) -> None:
        for sequence in self._aborted.values():
            self._end(sequence, "aborted")
            self.counters.aborted += 1
        self._aborted.clear()

    def _end(self, sequence: Sequence, reason: str) -> None:
        """Ends a live request without a new token."""
        if sequence.slot >= 0:
            self._release(sequence)
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)
            del self._sequences[sequence.request_id]
            sequence.status = SequenceStatus.FINISHED
            if self.tiers is not None:  # nothing else may ever wait here and end the search
                self.tiers.forget(sequence.request_id)
        self._outputs.append(make_output(sequence, reason=reason))

    def _release(self, sequence: Sequence) -> None:
        sequence.strip_placeholders()
        self._give_up_memory(sequence)
        sequence.status = SequenceStatus.FINISHED
        del self._sequences[sequence.request_id]

    def _next_generation(self) -> int:
        """A number no request had before: a request id that is used again must not match a result in flight."""
        return next(self._generations)

    def _give_up_memory(self, sequence: Sequence) -> None:
        """Frees pages and slot and withdraws what was queued for the slot."""
        self._store_intents.pop(sequence.request_id, None)
        self._relocations = tuple(move for move in self._relocations if move.destination != sequence.slot)
        if sequence.is_partial_prefill:
            self._partial -= 1
        self.manager.free(sequence)

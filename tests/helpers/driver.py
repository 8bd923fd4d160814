"""Drives a scheduler and a runner step by step, in any output mode, with invariants checked on the way."""

from __future__ import annotations

import dataclasses

import numpy as np

from scheduler.batch_builder import build_batch_step
from scheduler.buckets import Buckets
from scheduler.invariants import InvariantChecker
from scheduler.pages import NO_HASH
from scheduler.scheduled_batch import resolve_pending
from scheduler.sequence import Sequence
from scheduler.states import validate_ops

MODES = ("immediate", "deferred", "plan_ahead")


@dataclasses.dataclass
class Finished:
    """Everything one request reported."""

    tokens: tuple[int, ...]
    reason: str
    cached_tokens: int


class Driver:
    """One engine loop.

    The runner needs `execute(batch, step, shape) -> StepResult`; `read_cursor`, `page_digest`, `poison_pages` and
    `poison_slots` are used where it has them.

    Modes: `immediate` reads every result before the next plan; `deferred` dispatches one step ahead and lets decode
    rows read their token on the device; `plan_ahead` plans one step ahead but reads the tokens before it dispatches.
    With drafts it is `immediate`, and `drafter(sequence)` gives the proposals for every decoding request before a step.
    """

    def __init__(self, scheduler, runner, *, mode="immediate", compress_ids, check=True, poison=True, drafter=None):
        self.scheduler = scheduler
        self.runner = runner
        self.mode = mode
        self.drafter = drafter
        self.compress_ids = compress_ids
        self.poison = poison and hasattr(runner, "poison_pages")
        manager = scheduler.manager
        self.num_pages, self.num_slots = manager.pool.num_pages, manager.slots.num_slots
        self.buckets = Buckets.default(scheduler.config, scheduler.geometry, self.num_pages, scheduler.max_model_len)
        self._shapes = frozenset(self.buckets.shapes(scheduler.decoder_replay))
        self.checker = None
        if check:
            self.checker = InvariantChecker(
                scheduler,
                read_cursor=getattr(runner, "read_cursor", None),
                compress_ids=compress_ids,
                page_digest=getattr(runner, "page_digest", None),
            )
        self.previous = None  # (batch, result) executed and not postprocessed
        self.finished: dict[object, Finished] = {}
        self.log = []
        self._tokens: dict[object, list[int]] = {}
        self._owners: dict[int, tuple] = {}

    def add(self, request_id, prompt, sampling=None, images=()):
        """Submits a request."""
        sequence = Sequence(request_id, np.asarray(prompt, np.int32), sampling, tuple(images))
        self._tokens[request_id] = []
        if self.checker:
            self.checker.submitted(request_id)
        self.scheduler.add(sequence)
        return sequence

    def step(self):
        """One turn of the engine loop; returns the outputs it delivered."""
        scheduler = self.scheduler
        if self.drafter is not None:
            self._propose()
        batch = scheduler.schedule()
        if self.checker:
            self.checker.scheduled(batch)
        if batch is not None:
            self.log.append(batch)
        outputs = []
        if self.mode == "plan_ahead" and self.previous is not None:
            before, result = self.previous
            outputs += self._postprocess()
            if batch is not None:
                batch = resolve_pending(batch, before, result)
        executed = None
        if batch is not None:
            executed = (batch, self._execute(batch))
        if self.mode == "deferred" and self.previous is not None:
            outputs += self._postprocess()
        self.previous = executed
        if executed is not None and self.mode == "immediate":
            outputs += self._postprocess()
        if batch is None and not outputs:
            outputs += self._deliver(None, scheduler.take_outputs())
        return outputs

    def run(self, max_steps=10_000):
        """Steps until idle; fails when the engine stands still."""
        for _ in range(max_steps):
            if not self.scheduler.has_work:
                if self.checker:
                    self.checker.drained()
                return self.finished
            self.step()
        raise AssertionError(f"still busy after {max_steps} steps: {self.scheduler.statistics()}")

    def _propose(self):
        for sequence in self.scheduler.running:
            if not sequence.is_partial_prefill and not sequence.drafts:
                tokens = self.drafter(sequence)
                assert not self.scheduler.propose(sequence.request_id, sequence.generation - 1, [1]), "a stale draft"
                assert self.scheduler.propose(sequence.request_id, sequence.generation, tokens)

    def _execute(self, batch, shape=None):
        if self.poison:
            self._poison(batch)
        images = self.scheduler.manager.images
        validate_ops(
            batch.ops,
            images.checkpoint if images is not None else None,
            self.num_pages,
            self.num_slots,
            images.capacity if images is not None else 0,
        )
        step, shape = build_batch_step(
            batch,
            self.scheduler.geometry,
            self.buckets,
            self.compress_ids,
            num_pages=self.num_pages,
            num_slots=self.num_slots,
            shape=shape,
        )
        assert shape in self._shapes, f"warm-up would not compile {shape}"
        result = self.runner.execute(batch, step, shape)
        if self.checker:
            self.checker.executed(batch)
        return result

    def _poison(self, batch):
        """Unowned pages and slots, and pages newly taken for fresh content, hold poison before a forward."""
        pool = self.scheduler.manager.pool
        in_flight = {page for item in self.scheduler.outstanding for page in self._pages(item)}
        self.runner.poison_pages(page for page in pool.vacant_pages() if page not in in_flight)
        for row, length, *owner in zip(
            batch.block_tables.tolist(), batch.table_lengths.tolist(), batch.request_ids, batch.generations, strict=True
        ):
            for page in row[:length]:
                if pool.hashes[page] == NO_HASH and self._owners.get(page) != tuple(owner):
                    self.runner.poison_pages([page])
                self._owners[page] = tuple(owner)
        if self.mode == "immediate":
            self.runner.poison_slots(
                slot
                for slot in self.scheduler.manager.slots.free_slots()
                if slot not in {move.source for move in batch.ops.relocations}
            )

    @staticmethod
    def _pages(batch):
        return {
            page
            for row, length in zip(batch.block_tables.tolist(), batch.table_lengths.tolist(), strict=True)
            for page in row[:length]
        }

    def _postprocess(self):
        batch, result = self.previous
        self.previous = None
        return self._deliver(batch, self.scheduler.postprocess(batch, result))

    def _deliver(self, batch, outputs):
        if self.checker:
            self.checker.returned(batch, outputs)
        for output in outputs:
            self._tokens[output.request_id] += output.new_tokens
            if output.finished:
                tokens = tuple(self._tokens[output.request_id])
                assert len(tokens) == output.output_tokens
                self.finished[output.request_id] = Finished(tokens, output.finish_reason, output.cached_tokens)
        return outputs

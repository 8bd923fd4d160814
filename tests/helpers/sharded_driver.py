"""Drives a scheduler of data shards over one stub runner a shard, each watched by its own invariant checker."""

from __future__ import annotations

import dataclasses

import numpy as np

from scheduler.buckets import Buckets
from scheduler.scheduled_batch import StepResult, resolve_pending
from scheduler.sequence import Sequence
from scheduler.sharded import ShardedScheduler
from scheduler.sharded_batch import first_rows, output_places, request_places, row_places
from tests.helpers.driver import Driver, Finished
from tests.helpers.scenario import Report, Scenario, drive
from tests.helpers.stub_engine import make_stub
from tests.helpers.stub_runner import compress_ids, expected_tokens


def sharded(scenario: Scenario, shards: int) -> Scenario:
    """The scenario with every shard as large as its one engine was."""
    config = dataclasses.replace(
        scenario.config,
        mesh={"data": shards, "model": 1},
        max_num_seqs=scenario.config.max_num_seqs * shards,
        max_num_batched_tokens=scenario.config.max_num_batched_tokens * shards,
    )
    return dataclasses.replace(scenario, config=config)


class ShardedDriver:
    """One engine loop over shards; modes as of `Driver`."""

    def __init__(self, scheduler: ShardedScheduler, *, mode="immediate", drafter=None):
        self.scheduler = scheduler
        self.mode = mode
        self.drafter = drafter
        self.shards = [
            Driver(shard, make_stub(shard), mode=mode, compress_ids=compress_ids) for shard in scheduler.shards
        ]
        config, sizes = scheduler.config.of_shard(), scheduler.sizes
        self.buckets = Buckets.default(config, scheduler.geometry, sizes.pages, scheduler.max_model_len)
        self.previous = None
        self.finished: dict[object, Finished] = {}
        self.log = []
        self.moves = 0
        self.homes: dict[object, int] = {}
        self._tokens: dict[object, list[int]] = {}

    def add(self, request_id, prompt, sampling=None, images=()):
        """Submits a request."""
        sequence = Sequence(request_id, np.asarray(prompt, np.int32), sampling, tuple(images))
        self._tokens[request_id] = []
        self.scheduler.add(sequence)
        self.homes[request_id] = self.scheduler.home(request_id)
        self.shards[self.homes[request_id]].checker.submitted(request_id)
        return sequence

    def step(self):
        """One turn of the engine loop; returns the outputs it delivered."""
        if self.drafter is not None:
            self._propose()
        batch = self.scheduler.schedule()
        self._follow_moves()
        for shard, part in zip(self.shards, batch.parts if batch else [None] * len(self.shards), strict=True):
            shard.checker.scheduled(part)
        if batch is not None:
            self.log.append(batch)
        outputs = []
        if self.mode == "plan_ahead" and self.previous is not None:
            before, result = self.previous
            outputs += self._postprocess()
            if batch is not None:
                batch = resolve_pending(batch, before, result)
                assert not batch.has_pending_tokens
        executed = None if batch is None else (batch, self._execute(batch))
        if self.mode == "deferred" and self.previous is not None:
            outputs += self._postprocess()
        self.previous = executed
        if executed is not None and self.mode == "immediate":
            outputs += self._postprocess()
        if batch is None and not outputs:
            outputs += self._deliver(None, self.scheduler.take_outputs())
        return outputs

    def _propose(self):
        for sequence in self.scheduler.running:
            if not sequence.is_partial_prefill and not sequence.drafts:
                assert self.scheduler.propose(sequence.request_id, sequence.generation, self.drafter(sequence))

    def _follow_moves(self):
        for request_id, home in self.homes.items():
            if self.scheduler.sequence(request_id) is None:
                continue
            now = self.scheduler.home(request_id)
            if now != home:
                self.moves += 1
                self.homes[request_id] = now
                self.shards[home].checker.handed_over(request_id)
                self.shards[now].checker.submitted(request_id)

    def _execute(self, batch):
        shape = self.buckets.shape(batch)
        tokens = []
        for shard, part in zip(self.shards, batch.parts, strict=True):
            if part is not None:
                tokens.append(np.asarray(shard._execute(part, shape).tokens))
        self._check_places(batch, shape)
        return StepResult(np.concatenate(tokens))

    def _check_places(self, batch, shape):
        """The joined batch is its parts, and what is said of places agrees with blocks of the shape's sizes."""
        sizes = self.scheduler.sizes
        rows, requests = row_places(batch, shape), request_places(batch, shape)
        assert len(set(rows)) == batch.num_rows and len(set(requests)) == batch.num_requests
        assert (rows // shape.rows == np.repeat(batch.slots // sizes.slots, batch.lengths)).all()
        assert (requests // shape.requests == batch.slots // sizes.slots).all()
        assert (rows[np.cumsum(batch.lengths) - 1] - first_rows(batch, shape) == batch.lengths - 1).all()
        assert len(output_places(batch, shape)) == len(batch.output_requests)
        local = [part.slots for part in batch.parts if part is not None]
        assert (batch.slots % sizes.slots == np.concatenate(local)).all()

    def _postprocess(self):
        batch, result = self.previous
        self.previous = None
        return self._deliver(batch, self.scheduler.postprocess(batch, result))

    def _deliver(self, batch, outputs):
        for index, shard in enumerate(self.shards):
            mine = [output for output in outputs if self.homes[output.request_id] == index]
            shard.checker.returned(None if batch is None else batch.parts[index], mine)
        for output in outputs:
            self._tokens[output.request_id] += output.new_tokens
            if output.finished:
                tokens = tuple(self._tokens[output.request_id])
                assert len(tokens) == output.output_tokens
                self.finished[output.request_id] = Finished(tokens, output.finish_reason, output.cached_tokens)
        return outputs

    def run(self, max_steps=10_000):
        """Steps until idle; fails when the engine stands still."""
        for _ in range(max_steps):
            if not self.scheduler.has_work:
                self.drained()
                return self.finished
            self.step()
        raise AssertionError(f"still busy after {max_steps} steps: {self.scheduler.statistics()}")

    def drained(self):
        """Every shard is as it was."""
        for shard in self.shards:
            shard.checker.drained()


def make_sharded(scenario: Scenario, drafter=None) -> ShardedDriver:
    """An idle engine loop for a scenario of `sharded`."""
    scheduler = ShardedScheduler(
        scenario.config,
        scenario.view,
        scenario.config.geometry(scenario.view),
        scenario.num_pages,
        scenario.num_slots,
        deferred=scenario.mode != "immediate",
    )
    return ShardedDriver(scheduler, mode=scenario.mode, drafter=drafter)


def play_sharded(scenario: Scenario, drafter=None, max_steps=5_000) -> tuple[Report, ShardedDriver]:
    """As `scenario.play`, over the shards of the scenario's mesh."""
    driver = make_sharded(scenario, drafter)
    report = drive(
        scenario,
        driver,
        lambda request, count: expected_tokens(request.prompt, request.images, count),
        max_steps=max_steps,
    )
    return report, driver

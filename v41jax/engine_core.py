"""`EngineCore`: the loop that joins scheduler, host lookup and runner, one step at a time.

Synchronous and single-threaded. Results are read one step late: while a step runs on the device the host plans the
next one, and where the next step's tokens are already known (prefill) its Engram rows are gathered and the step is
dispatched too. With drafts a result is read before the next step is planned, because it says how far that one starts;
the draft runs meanwhile. Threads, streams and text are `engine`'s.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from scheduler.batch import BatchStep, EngramRows
from scheduler.batch_builder import build_batch_step
from scheduler.buckets import Buckets, StepShape
from scheduler.scheduled_batch import Phase, ScheduledBatch, StepResult, resolve_pending
from scheduler.scheduler import Scheduler
from scheduler.sequence import RequestId, RequestOutput
from scheduler.sharded import ShardedScheduler
from scheduler.sharded_batch import first_output_rows, first_rows, output_places, request_places
from v41jax.engine_drafts import EngineDrafts
from v41jax.engine_images import EngineImages
from v41jax.engram_lookup import EngramLookup
from v41jax.host_joining import describe
from v41jax.logit_edits import EditPlanner
from v41jax.row_counts import RowCounts, computed_rows_per_layer, rows_per_layer
from v41jax.runner import (
    ModelRunner,
    SamplingRow,
    StateMismatchError,
    StepOutput,
    empty_edits,
    sampled_rows,
    sampling_inputs,
)
from v41jax.sampling import TokenScores
from v41jax.sharding import join_steps
from v41jax.step_arrays import empty_step
from v41jax.verification import check_committed

RECENT_STEPS = 256
"""Steps whose times `step_times` remembers."""


@dataclasses.dataclass(frozen=True)
class StepTimes:
    """Where the host's time of one step went, in seconds.

    Attributes:
      phase: of the step.
      rows: scheduled rows, of the data shard that has most.
      plan: scheduling and building arrays.
      lookup: hashing and gathering Engram rows.
      vision: encoding images and collecting their rows.
      dispatch: handing the step to the device.
      wait: blocked on the previous step's tokens; with drafts on the step's own.
    """

    phase: Phase
    rows: int
    plan: float
    lookup: float
    vision: float
    dispatch: float
    wait: float


class TokenScore(NamedTuple):
    """Log-probabilities at one generated token, of the model's own logits.

    Attributes:
      logprob: of the token.
      alternatives: (token id, log-probability) of the most likely tokens, best first, as many as were asked for.
    """

    logprob: float
    alternatives: tuple[tuple[int, float], ...]


class PromptScores(NamedTuple):
    """Log-probabilities at consecutive tokens of a prompt.

    Attributes:
      request_id: of the request.
      start: position of the first token.
      scores: one for each token, with as many alternatives as for generated tokens.
    """

    request_id: RequestId
    start: int
    scores: list[TokenScore]


@dataclasses.dataclass
class _InFlight:
    batch: ScheduledBatch
    shape: StepShape
    output: StepOutput
    scored: bool
    prompt_scored: bool
    result: StepResult | None = None


class StepFailedError(RuntimeError):
    """A step failed: every live request is lost.

    Attributes:
      outputs: the last output of each of them, with a reason that begins with `failed:`.
      recoverable: the engine can take requests again. The step was refused before the pools were donated to it, no
        other process was left inside it, and it did not follow too many others (`engine_thread.REFUSED_STEPS`).
    """

    def __init__(self, message: str, outputs: list[RequestOutput], *, recoverable: bool):
        self.outputs = outputs
        self.recoverable = recoverable
        super().__init__(message)


class EngineFailedError(RuntimeError):
    """An earlier step ended the engine: nothing can be submitted or stepped. Its cause is what made that step fail."""


class EngineCore:
    """Runs every request the scheduler holds.

    Attributes:
      scheduler: order, memory and outcomes.
      runner: weights, pools and programs.
      step_times: host times of recent steps, oldest first.
      scheduled_rows: rows run by part of the model since the start, padding not counted.
      computed_rows: same, with the padding of the buckets.
      edits: biases, penalties and constraints.
      scores: log-probabilities of the tokens that the latest `step` returned, for requests that ask for them.
      prompt_scores: of the prompt tokens that the step before the latest computed; tokens computed again come again.
      images: of the requests; None for an engine of text.
      drafts: of the requests; None decodes token by token.
      failure: what ended the engine; None while it works.
    """

    def __init__(
        self,
        scheduler: Scheduler | ShardedScheduler,
        runner: ModelRunner,
        buckets: Buckets,
        lookup: EngramLookup | None,
        images: EngineImages | None = None,
        drafts: EngineDrafts | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.buckets = buckets
        self.step_times: deque[StepTimes] = deque(maxlen=RECENT_STEPS)
        self.scheduled_rows = RowCounts()
        self.computed_rows = RowCounts()
        self.scores: dict[RequestId, tuple[TokenScore, ...]] = {}
        self.prompt_scores: list[PromptScores] = []
        self.edits = EditPlanner(
            runner.num_slots, runner.setup.config.text.vocab_size, empty_edits, runner.load_adjustments
        )
        self.images = images
        self.drafts = drafts
        self.failure: BaseException | None = None
        self._lookup = lookup
        self._in_flight: _InFlight | None = None
        self._preparing = False

    @property
    def has_work(self) -> bool:
        """Some request still owes an output."""
        return self.scheduler.has_work

    def require_working(self) -> None:
        """Raises `EngineFailedError` once something has ended the engine."""
        if self.failure is not None:
            text = f"an earlier step ended the engine, build a new one: {describe(self.failure)}"
            raise EngineFailedError(text) from self.failure

    def end(self, error: BaseException) -> None:
        """Ends the engine because of what left a step, which is not recoverable then; of several the first counts."""
        cause: BaseException | None = error
        if isinstance(error, StepFailedError):
            error.recoverable = False
            cause = error.__cause__
        self.failure = self.failure or cause

    def step(self) -> list[RequestOutput]:
        """Plans and dispatches one step and returns the outputs of the one before.

        Raises:
          StepFailedError: whatever made the step fail is its cause; it has ended this engine, unless it is recoverable.
          EngineFailedError: the engine has ended.
        """
        self.require_working()
        self._preparing = False
        try:
            outputs = self._step()
        except Exception as error:
            self._in_flight = None
            reason = describe(error)
            recoverable = self._preparing and not self.runner.failed
            if not recoverable:
                self.end(error)
            outputs = self.scheduler.fail_all(reason, recoverable=recoverable)
            self._release_images(outputs)
            raise StepFailedError(reason, outputs, recoverable=recoverable) from error
        self._release_images(outputs)
        return outputs

    def _step(self) -> list[RequestOutput]:
        began = time.perf_counter()
        self.scores, self.prompt_scores = {}, []
        if self.drafts is not None:
            self.drafts.deliver()
        batch = self.scheduler.schedule()
        previous = self._in_flight
        tiers = self.scheduler.tiers
        if batch is None:
            self._in_flight = None
            if tiers is not None and previous is None:
                tiers.wait()
            return self._finish(previous)
        planned = time.perf_counter()
        waited = blocked = 0.0
        if batch.has_pending_tokens:
            assert previous is not None
            result = self._read(previous)
            waited = time.perf_counter() - planned
            batch = resolve_pending(batch, previous.batch, result)
        if tiers is not None:
            tiers.before_forward()
        # Up to the dispatch nothing but live requests can be lost: plan and pages in the cache are consistent.
        self._preparing = True
        shape, shards = self.buckets.shape(batch), len(batch.shards)
        arrays = self._arrays(batch, shape)
        built = time.perf_counter()
        engram_rows = self._engram_rows(arrays)
        looked_up = time.perf_counter()
        scored = any(batch.sampling[index].logprobs is not None for index in batch.output_requests.tolist())
        targets = self.runner.no_targets(shape)
        prompt_scored = targets is not None and self._set_targets(batch, shape, targets)
        places, outputs = output_places(batch, shape), shards * shape.outputs
        sampling = self.runner.step_sampling(
            sampling_inputs(_sampling_rows(batch), shards * sampled_rows(shape), places.tolist()),
            self.edits.plan(batch, outputs, self.scheduler.sequence, first_output_rows(batch, shape)),
            outputs=outputs,
            scored=scored,
            targets=targets,
        )
        image_rows = None
        if self.images is not None:
            image_rows = self.images.step_rows(batch, shards * shape.rows, first_rows(batch, shape))
        encoded = time.perf_counter()
        output = self.runner.execute(shape, arrays, engram_rows, sampling, batch.ops, image_rows)
        self._preparing = False
        dispatched = time.perf_counter()
        window = self.runner.setup.geometry.window_size
        self.scheduled_rows = self.scheduled_rows.plus(rows_per_layer(batch, window))
        self.computed_rows = self.computed_rows.plus(computed_rows_per_layer(shape, window).times(shards))
        step = _InFlight(batch, shape, output, scored, prompt_scored)
        if self.drafts is None:
            self._in_flight = step
        else:
            previous = step
            self.drafts.draft(batch, self.buckets)
            result = self._read(step)
            blocked = time.perf_counter() - dispatched
            self.drafts.read(batch, result, time.perf_counter() - encoded)
        self.step_times.append(
            StepTimes(
                phase=batch.phase,
                rows=max(part.num_rows for part in batch.shards if part is not None),
                plan=built - began - waited,
                lookup=looked_up - built,
                vision=encoded - looked_up,
                dispatch=dispatched - encoded,
                wait=waited + blocked,
            )
        )
        return self._finish(previous)

    def _finish(self, step: _InFlight | None) -> list[RequestOutput]:
        """Takes in the results of a dispatched step, if there is one, and returns all outputs."""
        if step is None:
            return self.scheduler.take_outputs()
        outputs = self.scheduler.postprocess(step.batch, self._read(step))
        if self.scheduler.tiers is not None:
            self.scheduler.tiers.after_results()
        if step.scored:
            self.scores = _scores(step, outputs)
        if step.prompt_scored:
            self.prompt_scores = self._prompt_scores(step)
        return [*outputs, *self.scheduler.take_outputs()]

    def _arrays(self, batch: ScheduledBatch, shape: StepShape) -> BatchStep:
        """The arrays of a step; a shard that runs nothing has padding."""
        geometry, shards = self.runner.setup.geometry, len(batch.shards)
        sizes = {"num_pages": self.runner.num_pages // shards, "num_slots": self.runner.num_slots // shards}
        return join_steps(
            [
                empty_step(shape, geometry)
                if part is None
                else build_batch_step(part, geometry, self.buckets, self._compress, shape=shape, **sizes)[0]
                for part in batch.shards
            ]
        )

    def _set_targets(self, batch: ScheduledBatch, shape: StepShape, targets: NDArray[np.int32]) -> bool:
        """Fills in the tokens that follow the rows of scored prompts; False when there are none."""
        found = False
        rows = zip(first_rows(batch, shape).tolist(), batch.lengths.tolist(), strict=True)
        for index, (row, length) in enumerate(rows):
            sequence = self.scheduler.sequence(batch.request_ids[index])
            if sequence is not None and batch.sampling[index].prompt_logprobs:
                start = int(batch.starts[index])
                following = sequence.tokens(start + 1, min(start + 1 + length, sequence.num_prompt_tokens))
                targets[row : row + len(following)] = following
                found = found or len(following) > 0
        return found

    def _prompt_scores(self, step: _InFlight) -> list[PromptScores]:
        assert step.output.prompt_scores is not None
        chosen, top, top_ids = (np.asarray(part) for part in step.output.prompt_scores)
        batch, result = step.batch, []
        firsts = first_rows(batch, step.shape).tolist()
        for index, (first, length) in enumerate(zip(firsts, batch.lengths.tolist(), strict=True)):
            rows = slice(first, first + length)
            if batch.sampling[index].prompt_logprobs:
                count = batch.sampling[index].logprobs or 0
                parts = zip(chosen[rows].tolist(), top_ids[rows, :count].tolist(), top[rows, :count].tolist())
                scores = [TokenScore(logprob, tuple(zip(ids, values))) for logprob, ids, values in parts]
                result.append(PromptScores(batch.request_ids[index], int(batch.starts[index]) + 1, scores))
        return result

    def _release_images(self, outputs: list[RequestOutput]) -> None:
        if self.images is not None:
            for output in outputs:
                if output.finished:
                    self.images.release(output.request_id)

    def _compress(self, token_ids: NDArray[np.int32]) -> NDArray[np.int32]:
        return np.zeros_like(token_ids) if self._lookup is None else self._lookup.hasher.compress(token_ids)

    def _engram_rows(self, arrays: BatchStep) -> EngramRows:
        return EngramRows((), ()) if self._lookup is None else self._lookup.step_rows(arrays)

    def _read(self, step: _InFlight) -> StepResult:
        """The tokens of a dispatched step; blocks until it has run."""
        if step.result is None:
            tokens, mismatch = np.asarray(step.output.tokens), np.asarray(step.output.cursor_mismatch)
            requests = request_places(step.batch, step.shape)
            mismatch = mismatch[requests]
            if mismatch.any():
                names = [step.batch.request_ids[row] for row in np.flatnonzero(mismatch)]
                raise StateMismatchError(
                    f"the slots of requests {names} do not stand where step {step.batch.index} started: their state "
                    "must be rebuilt from a recoverable boundary"
                )
            if tokens.ndim == 2:
                lengths = np.zeros(len(tokens), np.int32)
                lengths[requests] = step.batch.lengths
                check_committed((tokens >= 0).sum(axis=1), lengths)
            step.result = StepResult(tokens[output_places(step.batch, step.shape)])
        return step.result


def _scores(step: _InFlight, outputs: list[RequestOutput]) -> dict[RequestId, tuple[TokenScore, ...]]:
    """Log-probabilities of the tokens in a step's outputs; results that the scheduler dropped have none."""
    chosen, top, top_ids = (np.asarray(part) for part in TokenScores(*step.output.scores))
    delivered = {output.request_id: len(output.new_tokens) for output in outputs}
    first = first_output_rows(step.batch, step.shape)
    scores: dict[RequestId, tuple[TokenScore, ...]] = {}
    for row, index in zip(first.tolist(), step.batch.output_requests.tolist(), strict=True):
        request_id, count = step.batch.request_ids[index], step.batch.sampling[index].logprobs
        tokens = delivered.get(request_id, 0)
        if count is not None and tokens:
            rows = slice(row, row + tokens)
            parts = zip(chosen[rows].tolist(), top_ids[rows, :count].tolist(), top[rows, :count].tolist())
            scores[request_id] = tuple(TokenScore(logprob, tuple(zip(ids, values))) for logprob, ids, values in parts)
    return scores


def _sampling_rows(batch: ScheduledBatch) -> list[SamplingRow]:
    """Parameters of the requests that get a token, in output order; positions are those of their first one."""
    rows = []
    for index in batch.output_requests.tolist():
        sampling = batch.sampling[index]
        rows.append(
            SamplingRow(
                sampling.temperature,
                sampling.top_k,
                sampling.top_p,
                sampling.min_p,
                sampling.seed or 0,
                int(batch.starts[index] + 1 if batch.phase is Phase.DECODE else batch.ends[index]),
            )
        )
    return rows

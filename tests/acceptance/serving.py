"""Runs the engine loop of serving on a small model, scenario after scenario over the same compiled programs.

`Serving` owns the weights and a runner; `Session` is one scenario: a scheduler, an `EngineCore` and pools full of
poison. What an uninterrupted run of a prompt gives is `Serving.expected`.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from checkpoints.load import Checkpoint
from scheduler.buckets import Buckets, StepShape
from scheduler.model_view import ModelView
from scheduler.pools import allocate, poison
from scheduler.runtime_config import EngineConfig, validate_runtime_config
from scheduler.scheduled_batch import Phase, ScheduledBatch
from scheduler.scheduler import Scheduler
from scheduler.sequence import SamplingParams
from scheduler.sequence import Sequence as RequestSequence
from tests.acceptance.model import PAGE
from tests.acceptance.watch import Watch
from tests.helpers.driver import Finished
from v41jax.draft_parameters import load_draft_parameters
from v41jax.draft_runner import DraftRunner
from v41jax.engine_core import EngineCore
from v41jax.engine_drafts import EngineDrafts
from v41jax.full_forward import load_model
from v41jax.parameters import WeightForm
from v41jax.precision import Precision
from v41jax.runner import ModelRunner

MAX_LEN = 10 * PAGE
ROWS = 4 * PAGE + 16
"""Rows of the only prefill shape: more than four windows at once."""
SLOTS = 4
PAGES = 64
REQUESTS = SLOTS

EXACT = {"dtype": "float32", "activation_quantization": False}
"""The numeric profile of the tests: no rounding that could tip over."""
OFF = {"encoder_swa_bounded_replay": False, "decoder_swa_bounded_replay": False}

TOLERANCE = 1e-5
"""Relative error of logits (runtime specification, "Invariants (each is a test)")."""
MARGIN = 1e-3
"""Greedy tokens must be equal where the two best logits lie further apart."""


class OneShape(Buckets):
    """One prefill shape with and one without outputs; every program is shared by all scenarios."""

    def shape(self, batch: ScheduledBatch) -> StepShape:
        """As `Buckets.shape`, with outputs for all requests unless the decoder does not run at all."""
        shape = super().shape(batch)
        if shape.phase is Phase.DECODE:
            return shape
        empty = shape.tail and not shape.outputs
        return shape._replace(outputs=0 if empty else shape.requests)

    @classmethod
    def of(cls, decode: tuple[int, ...] = (REQUESTS,), rows: int = ROWS) -> OneShape:
        """The ladders of the acceptance scenarios."""
        pages = (MAX_LEN // PAGE,)
        return cls(decode, (rows,), (REQUESTS,), pages, pages)


class Watched:
    """A runner whose steps a `Watch` prepares and examines."""

    watch: Watch | None = None

    def execute(self, shape: StepShape, batch: Any, *arguments: Any) -> Any:
        """As `ModelRunner.execute`."""
        if self.watch is None:
            return super().execute(shape, batch, *arguments)
        return self.watch.around(shape, batch, lambda: super(Watched, self).execute(shape, batch, *arguments))

    def reset(self) -> None:
        """Pools and images hold nothing but poison."""
        self.replace_pools(poison(allocate(self.setup.geometry, self.num_pages, self.num_slots)))
        self._images = jax.tree.map(lambda leaf: jnp.full_like(leaf, _poison_of(leaf)), self._images)


class WatchedRunner(Watched, ModelRunner):
    """One that decodes token by token."""


class WatchedDraftRunner(Watched, DraftRunner):
    """One that verifies proposals."""


def _poison_of(leaf: jax.Array) -> float | int:
    if jnp.issubdtype(leaf.dtype, jnp.floating):
        return float("nan")
    return {1: 0x7F, 2: 0x7FC0}.get(leaf.dtype.itemsize, 0x7F7F7F7F)


class WatchedScheduler(Scheduler):
    """A scheduler that tells a checker what it does."""

    watch: Watch | None = None
    proposals: Callable[[RequestSequence], Sequence[int]] | None = None
    _in_postprocess = False

    def propose(self, request_id: Any, generation: int, tokens: Iterable[int]) -> bool:
        """As `Scheduler.propose`, of `proposals` instead of what was drafted where they are given."""
        sequence = self.sequence(request_id)
        if self.proposals is not None and sequence is not None:
            tokens = self.proposals(sequence)
        return super().propose(request_id, generation, tokens)

    def schedule(self) -> ScheduledBatch | None:
        """As `Scheduler.schedule`."""
        batch = super().schedule()
        if self.watch is not None:
            self.watch.scheduled(batch)
        return batch

    def postprocess(self, batch: ScheduledBatch, result: Any) -> list:
        """As `Scheduler.postprocess`."""
        self._in_postprocess = True
        outputs = super().postprocess(batch, result)
        self._in_postprocess = False
        if self.watch is not None:
            self.watch.returned(batch, outputs)
        return outputs

    def take_outputs(self) -> list:
        """As `Scheduler.take_outputs`."""
        outputs = super().take_outputs()
        if self.watch is not None and not self._in_postprocess:
            self.watch.returned(None, outputs)
        return outputs


class Expected(NamedTuple):
    """An uninterrupted run of one prompt.

    Attributes:
      tokens: generated.
      logits: [len(tokens), V], what each was chosen from.
    """

    tokens: tuple[int, ...]
    logits: np.ndarray


class Serving:
    """One checkpoint in one numeric profile and its compiled programs; a context manager.

    Args of the constructor:
      directory: checkpoint.
      decode: batch sizes of the decode programs.
      form: of the weights.
      rows: of the only prefill shape.
      options: of `EngineConfig`, fixed for all scenarios.

    Attributes:
      changeable: names of the options that a session may choose.
    """

    def __init__(
        self,
        directory: Path,
        decode: tuple[int, ...] = (REQUESTS,),
        form: WeightForm = "dequantized",
        rows: int = ROWS,
        **options: Any,
    ):
        self.options = {
            "kv_cache_block_size": PAGE,
            "max_num_batched_tokens": rows,
            "max_num_seqs": SLOTS,
            "max_model_len": MAX_LEN,
            "state_checkpoint_interval_tokens": PAGE,
            **options,
        }
        config = EngineConfig(**self.options)
        self.changeable = tuple(field.name for field in dataclasses.fields(config) if field.name not in options)
        precision = Precision(jnp.dtype(config.dtype), config.activation_quantization)
        drafts = config.num_speculative_tokens
        self.model = load_model(
            directory,
            precision,
            max_model_len=MAX_LEN,
            form=form,
            kernels=config.kernels,
            speculative_tokens=drafts,
        )
        self.view = ModelView.from_config(self.model.setup.config)
        self.geometry = config.geometry(self.view)
        self.buckets = dataclasses.replace(OneShape.of(decode, rows), verify_rows=(drafts + 1,) if drafts else ())
        setup = dataclasses.replace(self.model.setup, geometry=self.geometry)
        pools = {"num_pages": PAGES, "num_slots": SLOTS, "num_images": PAGES // self.geometry.units_per_image}
        if drafts:
            with Checkpoint.open(directory, scopes=("text", "draft")) as opened:
                draft = load_draft_parameters(opened, form=form, dtype=precision.activation_dtype)
            self.runner = WatchedDraftRunner(self.model.params, setup, draft, **pools)
        else:
            self.runner = WatchedRunner(self.model.params, setup, **pools)
        self._expected: dict[tuple, Expected] = {}

    def __enter__(self) -> Serving:
        return self

    def __exit__(self, *details: object) -> None:
        self.model.__exit__(*details)

    def session(self, **options: Any) -> Session:
        """A scenario; see `Session`."""
        return Session(self, **options)

    def expected(self, prompt: Sequence[int], count: int, *, decoder: bool = False, **options: Any) -> Expected:
        """The first `count` tokens of a prompt that runs alone, prefilled in as few chunks as fit and are allowed.

        Args:
          prompt: ids.
          count: tokens.
          decoder: the decoder's switch; the encoder's has no effect without a hit.
          options: of the session, which may limit its chunks.
        """
        key = (tuple(prompt), decoder, *sorted(options.items()))
        known = self._expected.get(key)
        if known is None or len(known.tokens) < count:
            with self.undisturbed():
                session = self.session(
                    check=False,
                    enable_prefix_caching=False,
                    encoder_swa_bounded_replay=False,
                    decoder_swa_bounded_replay=decoder,
                    **options,
                )
                session.add(0, prompt, count)
                tokens = session.run()[0].tokens
            logits = np.stack([session.logits[0, len(prompt) + index] for index in range(len(tokens))])
            known = self._expected[key] = Expected(tokens, logits)
        return Expected(known.tokens[:count], known.logits[:count])

    @contextlib.contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Lets another session run in between: pools, images and watch are put back afterwards."""
        runner = self.runner
        kept = runner.watch, jax.tree.map(jnp.copy, (runner.pools, runner._images))
        yield
        runner.watch, (pools, runner._images) = kept
        runner.replace_pools(pools)


class Session:
    """One scenario on a serving: requests in, tokens out.

    Args of the constructor:
      serving: weights and programs; it runs one session at a time.
      check: poison unowned memory and assert the invariants at every step.
      num_pages, num_slots: what the scheduler may use of the runner's pools.
      options: of `EngineConfig`.

    Attributes:
      finished: outcome of every request that ended.
      logits: (request, tokens before) -> [V], of every row that gave a token.
      log: batches, oldest first.
    """

    def __init__(
        self, serving: Serving, *, check: bool = True, num_pages: int = PAGES, num_slots: int = SLOTS, **options: Any
    ):
        config = EngineConfig(**{**serving.options, "num_pages": num_pages, **options})
        validate_runtime_config(config, serving.view)
        self.serving = serving
        drafts = config.num_speculative_tokens > 0
        self.scheduler = WatchedScheduler(
            config, serving.view, serving.geometry, num_pages, num_slots, deferred=not drafts
        )
        runner = serving.runner
        runner.reset()
        lookup = serving.model.lookup
        drafting = EngineDrafts(self.scheduler, runner) if drafts else None
        self.core = EngineCore(self.scheduler, runner, serving.buckets, lookup, drafts=drafting)
        self.watch = runner.watch = Watch(self.scheduler, runner, lookup.hasher.compress, check=check)
        self.scheduler.watch = self.watch if check else None
        self.checker = self.watch.checker
        self.finished: dict[Any, Finished] = {}
        self._tokens: dict[Any, list[int]] = {}
        self._prompts: dict[Any, tuple[int, ...]] = {}

    @property
    def logits(self) -> dict[tuple, np.ndarray]:
        return self.watch.logits

    @property
    def log(self) -> list[ScheduledBatch]:
        return self.watch.log

    def add(self, request_id: Any, prompt: Sequence[int], sampling: SamplingParams | int, images: tuple = ()) -> None:
        """Submits a request; a number asks for that many greedy tokens."""
        if isinstance(sampling, int):
            sampling = SamplingParams(max_tokens=sampling, ignore_eos=True)
        self._prompts[request_id] = tuple(int(token) for token in prompt)
        self._tokens[request_id] = []
        self.checker.submitted(request_id)
        self.scheduler.add(RequestSequence(request_id, np.asarray(prompt, np.int32), sampling, images))

    def step(self) -> list:
        """One turn of the engine loop."""
        outputs = self.core.step()
        for output in outputs:
            self._tokens[output.request_id] += output.new_tokens
            if output.finished:
                tokens = tuple(self._tokens[output.request_id])
                self.finished[output.request_id] = Finished(tokens, output.finish_reason, output.cached_tokens)
        return outputs

    def cap(self, rows: int) -> None:
        """New tokens that one request may prefill in a step from now on; any number, odd ones included."""
        self.scheduler.rules = dataclasses.replace(self.scheduler.rules, cap=rows)

    def steps(self, count: int) -> None:
        """Several turns."""
        for _ in range(count):
            self.step()

    def until(self, reached: Any, limit: int = 500) -> None:
        """Turns until `reached()`."""
        for _ in range(limit):
            if reached():
                return
            self.step()
        raise AssertionError(f"not reached in {limit} steps: {self.scheduler.statistics()}")

    def run(self, limit: int = 2_000) -> dict[Any, Finished]:
        """Turns until idle, then everything must be free."""
        self.until(lambda: not self.core.has_work, limit)
        if self.watch.checks:
            self.checker.drained()
        return self.finished

    def tokens(self, request_id: Any) -> list[int]:
        """Tokens delivered so far."""
        return self._tokens[request_id]

    def computed(self, request_id: Any) -> int:
        """Tokens of a live request whose KV is valid; 0 of one that is not live."""
        sequence = self.scheduler.sequence(request_id)
        return 0 if sequence is None else sequence.num_computed

    def forwards(self, request_id: Any) -> list[tuple[int, int, int]]:
        """(start, resume, end) of every forward of a request."""
        found = []
        for batch in self.log:
            if request_id in batch.request_ids:
                row = batch.request_ids.index(request_id)
                found.append((int(batch.starts[row]), int(batch.resumes[row]), int(batch.ends[row])))
        return found

    @property
    def stores(self) -> int:
        return sum(len(batch.ops.stores) for batch in self.log)

    @property
    def restores(self) -> int:
        return sum(len(batch.ops.restores) for batch in self.log)

    def assert_expected(self, *request_ids: Any, decoder: bool = False, **options: Any) -> None:
        """The requests ended (all, if none is named) with the tokens and logits of uninterrupted runs.

        Args:
          request_ids: of them.
          decoder, options: of those runs, see `Serving.expected`.
        """
        for request_id in request_ids or self.finished:
            prompt, found = self._prompts[request_id], self.finished[request_id]
            if found.tokens:
                expected = self.serving.expected(prompt, len(found.tokens), decoder=decoder, **options)
                self.assert_equals(request_id, expected)

    def assert_equals(self, request_id: Any, expected: Expected) -> None:
        """Every row of a request that gave a token has these logits, and the tokens are these.

        From a token on whose choice was within the noise nothing more can be said.
        """
        length = len(self._prompts[request_id])
        tokens = self.finished[request_id].tokens
        for index, (token, wanted, logits) in enumerate(zip(tokens, expected.tokens, expected.logits)):
            found = self.logits[request_id, length + index]
            error = np.linalg.norm(found - logits) / np.linalg.norm(logits)
            assert error <= TOLERANCE, f"request {request_id!r}: logits of token {index} are off by {error:.2g}"
            self.watch.worst = max(self.watch.worst, float(error))
            if token != wanted:
                best = np.sort(logits)[-2:]
                assert best[1] - best[0] < MARGIN, f"request {request_id!r}: token {index} is {token}, not {wanted}"
                return
        assert len(tokens) <= len(expected.tokens)

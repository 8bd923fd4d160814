"""`Engine`: a checkpoint directory and options in, generated tokens and text out.

It checks every option before a weight is read, sizes the pools, loads the weights and drives `EngineCore`. Used either
synchronously (`generate`) or through streams that a background thread feeds (`stream`); never both at once.
"""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from checkpoints.engram_tables import EngramTables
from checkpoints.load import Checkpoint, available_scopes
from scheduler.buckets import Buckets, verify_ladder
from scheduler.runtime_config import EngineConfig
from scheduler.sequence import RequestId, SamplingParams
from scheduler.sequence import Sequence as RequestSequence
from scheduler.sharded import make_scheduler
from scheduler.tiers.build import open_store
from scheduler.tiers.layout import TransferLayout
from scheduler.tiers.page_tiers import PageTiers
from scheduler.tiers.sharded import ShardedTiers
from v41jax.cache_identity import cache_identity
from v41jax.draft_parameters import load_draft_parameters
from v41jax.draft_runner import DraftRunner
from v41jax.dspark import check_draft
from v41jax.engine_core import EngineCore, StepFailedError
from v41jax.engine_drafts import EngineDrafts, matching_profile
from v41jax.engine_images import EngineImages
from v41jax.engine_requests import Delta, Generation, LiveRequest, Prompt
from v41jax.engine_thread import EngineThread
from v41jax.engram_device_tables import EngramDeviceTables
from v41jax.engram_lookup import EngramLookup
from v41jax.held_weights import abstract_held, accepts_images, arranges_experts, precision_of
from v41jax.host_joining import describe
from v41jax.host_options import hosts_of, shared_of
from v41jax.image_leases import ImageCapacityError
from v41jax.image_planning import ImageError
from v41jax.image_processing import DEFAULT_LIMITS, ImageLimits, ProcessedImage
from v41jax.leading_runners import LeadingDraftRunner, LeadingRunner
from v41jax.memory_budget import Held, PoolBudget, plan_pools
from v41jax.mesh_draft_runner import MeshDraftRunner, load_draft_on_mesh
from v41jax.mesh_runner import MeshRunner, load_on_mesh
from v41jax.model import ModelSetup
from v41jax.multihost import Followers, lead
from v41jax.page_transfer import DevicePages
from v41jax.parameters import WeightForm, load_parameters
from v41jax.protocol.tokens import IMAGE
from v41jax.runner import ModelRunner
from v41jax.serving_options import begin_serving
from v41jax.sharding import make_mesh
from v41jax.token_map import load_token_map
from v41jax.tokenizer import Tokenizer
from v41jax.vision_parameters import vision_parameters

_SEED_BITS = 32

_TEXT_ONLY = "this engine accepts no images: its checkpoint has no vision tower, or the option vision is off"


class QueueFullError(RuntimeError):
    """As many requests wait as may; try again later."""


class Engine:
    """Serves one checkpoint. A context manager that closes the checkpoint's files.

    Attributes:
      config: the options.
      core: scheduler, runner and buckets.
      tokenizer: of the checkpoint; None when it has none.
      budget: how the pools were sized.
      max_waiting: requests that may wait; more are refused. None is no limit.
      weights: form of the weights.
    """

    def __init__(
        self,
        config: EngineConfig,
        core: EngineCore,
        tokenizer: Tokenizer | None,
        budget: PoolBudget,
        resources: Iterable[Any] = (),
        followers: Followers | None = None,
        weights: WeightForm = "stored",
    ):
        self.config = config
        self.core = core
        self.tokenizer = tokenizer
        self.budget = budget
        self.max_waiting: int | None = None
        self.weights: WeightForm = weights
        self._resources = tuple(resources)
        self._followers = followers
        self._live: dict[RequestId, LiveRequest] = {}
        self._names = 0
        self._thread: EngineThread | None = None

    @classmethod
    def from_checkpoint(
        cls,
        directory: Path,
        config: EngineConfig | None = None,
        *,
        warm_up: bool = True,
        weights: WeightForm | None = None,
        calibrates: bool = False,
    ) -> Engine:
        """Builds an engine.

        Args:
          directory: a checkpoint in the released layout.
          config: options; None takes the defaults.
          warm_up: compile every step the buckets can need before returning; otherwise at first use.
          weights: "stored", "arranged" (on one device) or "dequantized"; None dequantizes on a CPU and keeps the stored
            codes elsewhere, arranged where the GPU kernel of the routed experts reads them.
          calibrates: drafts report confidences and every number of proposals has a program of its own, as with a
            calibration profile but without one: to measure it.

        Raises:
          ConfigError: the checkpoint's config.json is invalid.
          RuntimeConfigError: with every option that cannot be served, alone or on this mesh; nothing was read.
          HostsError: the processes of the service do not agree, or did not come.
          MeshError: there are too few devices.
          GeometryError: the devices do not hold the weights and a page, or not `num_pages`; these are refused unread.
          CheckpointError: with every fault of the weights' files.
          ProfileError: the calibration profile was not measured with this model, device and options.
        """
        directory = Path(directory)
        serving = begin_serving(directory, EngineConfig() if config is None else config)
        config, _, view, parallel = serving
        hosts = hosts_of(config)
        if config.process_id:
            raise ValueError(
                f"process {config.process_id} of {config.num_processes} has no engine: it follows process 0"
            )
        geometry = config.geometry(view)
        precision = precision_of(config)
        # Before any weight is read: a process that is lost while others load must be missed.
        followers = None if hosts is None else lead(hosts, shared_of(config, directory, weights))
        resources: list[Any] = [] if followers is None else [followers]
        try:
            on_mesh = parallel.chips > 1 or hosts is not None
            if weights is None:
                arranges = arranges_experts(config, serving.model.text, on_mesh=on_mesh)
                weights = "dequantized" if jax.default_backend() == "cpu" else "arranged" if arranges else "stored"
            has_tower = config.vision == "auto" and "vision" in available_scopes(directory)
            sees = accepts_images(config, has_tower=has_tower, several_processes=hosts is not None)
            drafts = serving.drafts
            scopes = ("text", *(("draft",) if drafts else ()), *(("vision",) if sees else ()))
            checkpoint = Checkpoint.open(directory, scopes=scopes)
            resources.append(checkpoint)
            setup = ModelSetup(checkpoint.config, geometry, precision, config.kernels, parallel)
            if drafts:
                check_draft(setup)
            profile = matching_profile(config, directory, setup, weights)
            max_model_len = config.model_len(view)
            if config.num_pages is not None:
                # To refuse before the weights are read; they are counted again as they lie there.
                expected = abstract_held(config, checkpoint.config, parallel, max_model_len, sees=sees)
                plan_pools(config.of_shard(), setup, expected)
            lookup, tables_held = None, None
            if checkpoint.config.text.engram_layer_ids:
                token_map = load_token_map(directory, checkpoint.config)
                tables: EngramTables | EngramDeviceTables
                if config.engram_tables == "device":
                    tables = EngramDeviceTables(checkpoint, make_mesh(parallel))
                    tables_held = tables.arrays
                else:
                    tables = EngramTables.open(checkpoint)
                resources.append(tables)
                lookup = EngramLookup(checkpoint.config, token_map, tables)
            load = {"max_model_len": max_model_len, "form": weights, "dtype": precision.activation_dtype}
            mesh = make_mesh(parallel) if on_mesh else None
            if mesh is None:
                params = load_parameters(checkpoint, **load)
            else:
                params = load_on_mesh(checkpoint, mesh, parallel, **load)
            tower = jax.tree.map(jnp.asarray, vision_parameters(checkpoint)) if sees else None
            draft = None
            if drafts:
                stored = {"form": weights, "dtype": precision.activation_dtype}
                if mesh is None:
                    draft = load_draft_parameters(checkpoint, **stored)
                else:
                    draft = load_draft_on_mesh(checkpoint, mesh, parallel, **stored)
            budget = plan_pools(config.of_shard(), setup, Held(params, draft, tower, tables_held))
            pages, slots, shards = budget.num_pages, budget.num_slots, parallel.data
            scheduler = make_scheduler(config, view, geometry, pages, slots, deferred=not drafts)
            place: dict[str, Any] = {} if mesh is None else {"mesh": mesh}
            if draft is not None:
                place |= {"draft_parameters": draft, "confidence": calibrates or profile is not None}
            if followers is not None:
                place["followers"] = followers
            runner = _runner_kind(mesh is not None, draft is not None, followers is not None)(
                params,
                setup,
                num_pages=shards * pages,
                num_slots=shards * slots,
                num_images=shards * budget.num_images,
                execution="EAGER" if config.enforce_eager else config.execution_mode,
                scores_prompts=config.prompt_logprobs,
                **place,
            )
            buckets = Buckets.default(config.of_shard(), geometry, pages, max_model_len)
            engine_drafts = EngineDrafts(scheduler, runner, profile) if isinstance(runner, DraftRunner) else None
            if calibrates:
                buckets = dataclasses.replace(buckets, verify_rows=verify_ladder(geometry.speculative_tokens, True))
            if warm_up:
                shapes = buckets.shapes(scheduler.decoder_replay)
                runner.warm_up(shapes, images=sees, drafts=buckets.draft_requests if drafts else ())
            if config.uses_tiers:
                tiers = _open_tiers(config, runner, checkpoint, lookup)
                resources.append(tiers)
                scheduler.attach(tiers)
            has_tokenizer = (directory / "tokenizer.json").is_file()
            tokenizer = Tokenizer.from_directory(directory) if has_tokenizer else None
            images = None
            if tower is not None:
                images = EngineImages(tower, checkpoint.config, precision, config.vision_cache_bytes)
        except BaseException as error:
            if followers is not None:
                followers.fail(describe(error))
            for resource in reversed(resources):
                resource.close()
            raise
        core = EngineCore(scheduler, runner, buckets, lookup, images, engine_drafts)
        return cls(config, core, tokenizer, budget, resources, followers, weights)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the background thread, if any, and closes the checkpoint's files."""
        if self._thread is not None:
            self._thread.stop()
            self._thread = None
        for resource in reversed(self._resources):
            resource.close()
        self._resources = ()

    # Synchronous use -----------------------------------------------------------------------------------------

    def prompt(self, text_or_tokens: str | Sequence[int], sampling: SamplingParams | None = None) -> Prompt:
        """A request from text (encoded as plain text after the begin token) or from token ids.

        Raises:
          ValueError: text without a tokenizer, an id outside the vocabulary, or the id that stands for an image.
        """
        tokens = self._ids(text_or_tokens)
        self._check_placeholders(np.asarray(tokens, np.int32), False)
        return Prompt(tokens, sampling or SamplingParams())

    def _ids(self, text_or_tokens: str | Sequence[int]) -> tuple[int, ...]:
        if isinstance(text_or_tokens, str):
            if self.tokenizer is None:
                raise ValueError("this checkpoint has no tokenizer.json: give the prompt as token ids")
            begin = self.core.runner.setup.config.bos_token_id
            tokens = (begin, *self.tokenizer.encode(text_or_tokens))
        else:
            tokens = tuple(int(token) for token in text_or_tokens)
        vocabulary = self.core.runner.setup.config.text.vocab_size
        for token in tokens:
            if not 0 <= token < vocabulary:
                raise ValueError(f"token id {token} is outside 0..{vocabulary - 1}")
        return tokens

    def _check_placeholders(self, ids: NDArray[np.int32], spans: NDArray[np.bool_] | bool) -> None:
        """Refuses ids in which the image placeholder lies outside `spans`, or spans that hold another id."""
        placeholder = self.core.runner.setup.config.image_token_id
        if not ((ids == placeholder) == spans).all():
            raise ValueError(
                f"token id {placeholder} stands for an image and must lie in the spans of the prompt's images: use "
                "prompt_with_images"
            )

    def prompt_with_images(
        self,
        text_or_tokens: str | Sequence[int],
        images: Sequence[bytes | ProcessedImage],
        sampling: SamplingParams | None = None,
        limits: ImageLimits = DEFAULT_LIMITS,
    ) -> Prompt:
        """A request with images; touches nothing that a step uses, so that any thread may call it.

        Args:
          text_or_tokens: as for `prompt`, with one placeholder an image: the literal `IMAGE` in text, `image_token_id`
            among ids.
          images: files (their bytes) or processed images, in the order of the placeholders.
          sampling: how tokens are drawn.
          limits: cost of one file.

        Raises:
          ImageError: the engine accepts no images, or some image or their number cannot be used.
          ValueError: as `prompt`.
        """
        if self.core.images is None:
            raise ImageError(_TEXT_ONLY)
        if isinstance(text_or_tokens, str):
            parts = [self._ids(part) for part in text_or_tokens.split(IMAGE)]
            placeholder = self.core.runner.setup.config.image_token_id
            tokens = parts[0] + tuple(token for part in parts[1:] for token in (placeholder, *part[1:]))
        else:
            tokens = self._ids(text_or_tokens)
        expanded = self.core.images.prepare(tokens, images, self.core.scheduler.max_model_len, limits)
        return Prompt(tuple(expanded.prompt.token_ids.tolist()), sampling or SamplingParams(), images=expanded)

    def generate(self, prompts: Sequence[Prompt]) -> list[Generation]:
        """Runs requests to their end, in the caller's thread.

        Args:
          prompts: requests; `arrival_step` delays their submission.

        Returns:
          One result per request, in input order.

        Raises:
          RuntimeError: while streams are open.
          StepFailedError: a step failed; it has ended the engine, unless it is recoverable.
          EngineFailedError: an earlier step ended the engine.
        """
        if self._thread is not None:
            raise RuntimeError("generate cannot be used while streams are open: await `stream` instead")
        arrivals = deque(sorted(enumerate(prompts), key=lambda item: item[1].arrival_step))
        results: dict[int, Generation] = {}
        places: dict[RequestId, int] = {}
        step = 0
        # Requests that a stop text or their time ended still hold pages, until the step after.
        while len(results) < len(prompts) or self.core.has_work:
            idle = not self.core.has_work
            while arrivals and (arrivals[0][1].arrival_step <= step or idle):
                place, prompt = arrivals[0]
                step = max(step, prompt.arrival_step)
                try:
                    places[self.submit(prompt)] = place
                except ImageCapacityError as error:
                    if error.permanent:
                        raise
                    break
                arrivals.popleft()
                idle = False
            for request_id, _, finished in self.step():
                if finished is not None and request_id in places:
                    results[places[request_id]] = finished
            step += 1
        return [results[place] for place in range(len(prompts))]

    def submit(self, prompt: Prompt) -> RequestId:
        """Queues a request for `step`.

        Raises:
          ValueError: stop strings without a tokenizer, or a malformed prompt.
          QueueFullError: `max_waiting` requests wait already.
          ImageCapacityError: no room for its images, now or (`permanent`) ever.
          EngineFailedError: an earlier step ended the engine.
        """
        self.core.require_working()
        sampling = prompt.sampling
        waiting = len(self.core.scheduler.waiting)
        if self.max_waiting is not None and waiting >= self.max_waiting:
            raise QueueFullError(f"{waiting} requests are waiting, at most {self.max_waiting} may: try again later")
        if sampling.seed is None:
            sampling = dataclasses.replace(sampling, seed=secrets.randbits(_SEED_BITS))
        if sampling.prompt_logprobs and not self.config.prompt_logprobs:
            raise ValueError("log-probabilities of a prompt need an engine with the option prompt_logprobs")
        if prompt.stop and self.tokenizer is None:
            raise ValueError("stop strings need a tokenizer: this checkpoint has no tokenizer.json, use stop ids")
        detokenizer = None
        if self.tokenizer is not None:
            detokenizer = self.tokenizer.detokenizer(skip_special=prompt.skip_special, stop=prompt.stop)
        request_id = self._names
        self._names += 1
        ids, spans = np.asarray(prompt.tokens, np.int32), () if prompt.images is None else prompt.images.spans
        sequence = RequestSequence(request_id, ids, sampling, spans)
        self._check_placeholders(ids, sequence.image_mask(0, len(ids)))
        if prompt.images is not None:
            if self.core.images is None:
                raise ImageError(_TEXT_ONLY)
            self.core.images.leases.acquire(request_id, prompt.images.prompt, prompt.images.images)
        self._live[request_id] = LiveRequest(prompt, detokenizer, time.perf_counter())
        if prompt.constraint is not None:
            self.core.edits.constraints[request_id] = prompt.constraint
        self.core.scheduler.add(sequence)
        return request_id

    def step(self) -> list[tuple[RequestId, Delta, Generation | None]]:
        """One step: (request, what it got, the whole of it when it ended).

        Whatever it raises ends the engine, but a `StepFailedError` that is recoverable. Over several processes there is
        none: the others may be left inside the step, so that they end, and this one cannot go on without them.

        Raises:
          StepFailedError: as of `generate`.
          EngineFailedError: an earlier step ended the engine.
        """
        try:
            return self._step()
        except BaseException as error:
            if self._followers is not None:
                self._followers.fail(describe(error))
            if self._followers is not None or not (isinstance(error, StepFailedError) and error.recoverable):
                self.core.end(error)
            raise

    def _step(self) -> list[tuple[RequestId, Delta, Generation | None]]:
        try:
            outputs = self.core.step()
        except StepFailedError:
            for request_id in list(self._live):
                self._forget(request_id)
            raise
        now = time.perf_counter()
        for scored in self.core.prompt_scores:
            if scored.request_id in self._live:
                known = self._live[scored.request_id].prompt_scores
                end = min(scored.start + len(scored.scores), len(known))
                known[scored.start : end] = scored.scores[: max(end - scored.start, 0)]
        deltas = []
        for output in outputs:
            live = self._live.get(output.request_id)
            if live is None:
                continue
            delta = live.take(output, self.core.scores.get(output.request_id, ()), now)
            if delta is None:
                continue
            finished = None
            if delta.finish_reason is not None:
                finished = live.generation(delta, now)
                self._forget(output.request_id)
                if not output.finished:
                    self.core.scheduler.abort(output.request_id)
            deltas.append((output.request_id, delta, finished))
        for request_id, live in list(self._live.items()):
            if live.deadline is not None and now >= live.deadline:
                delta = live.expire()
                deltas.append((request_id, delta, live.generation(delta, now)))
                self._forget(request_id)
                self.core.scheduler.abort(request_id)
        return deltas

    def _forget(self, request_id: RequestId) -> None:
        """Drops what is kept for a live request."""
        del self._live[request_id]
        self.core.edits.constraints.pop(request_id, None)

    # Streams -------------------------------------------------------------------------------------------------

    async def stream(self, prompt: Prompt) -> AsyncIterator[Delta]:
        """Submits a request and yields what each step gives it; closing the iterator aborts it.

        Raises:
          ValueError: the request is malformed.
          QueueFullError: `max_waiting` requests wait already.
          StepFailedError, EngineFailedError: as of `generate`.
        """
        if self._thread is None:
            self._thread = EngineThread(self)
        queue: asyncio.Queue[Delta | Exception] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        accepted = self._thread.submit(prompt, lambda item: loop.call_soon_threadsafe(queue.put_nowait, item))
        try:
            request_id = await asyncio.wrap_future(accepted)
        except asyncio.CancelledError:
            accepted.add_done_callback(self._abort_accepted)
            raise
        finished = False
        try:
            while not finished:
                item = await queue.get()
                if isinstance(item, Exception):
                    finished = True
                    raise item
                finished = item.finish_reason is not None
                yield item
        finally:
            if not finished:
                self.abort(request_id)

    def _abort_accepted(self, accepted: Future[RequestId]) -> None:
        """Cancels a request that was accepted after its listener had gone."""
        if not accepted.cancelled() and accepted.exception() is None:
            self.abort(accepted.result())

    def abort(self, request_id: RequestId) -> None:
        """Cancels a request; unknown and finished ids are ignored."""
        if self._thread is not None:
            self._thread.abort(request_id)
        else:
            self.core.scheduler.abort(request_id)

    @property
    def failure(self) -> BaseException | None:
        """What ended the engine; None while it works."""
        return self.core.failure

    # Reports -------------------------------------------------------------------------------------------------

    def statistics(self) -> dict[str, Any]:
        """Queue, pages, totals, recompiles, recent step times, rows run by part of the model, worth of drafts, and the
        numbers of each data shard where there are several; plain values."""
        scheduler = dataclasses.asdict(self.core.scheduler.statistics())
        if not scheduler["shards"]:
            del scheduler["shards"]
        times = list(self.core.step_times)
        count = max(len(times), 1)
        host = {
            f"mean_{name}_s": sum(getattr(entry, name) for entry in times) / count
            for name in ("plan", "lookup", "vision", "dispatch", "wait")
        }
        return {
            **scheduler.pop("counters"),
            **scheduler,
            "live": len(self._live),
            "recompiles_after_warm_up": self.core.runner.recompiles,
            "steps_timed": len(times),
            **{f"{name}_rows": count for name, count in self.core.scheduled_rows._asdict().items()},
            **{f"computed_{name}_rows": count for name, count in self.core.computed_rows._asdict().items()},
            "rows_saved": self.core.scheduled_rows.encoder - self.core.scheduled_rows.decoder,
            **host,
            **({} if self.core.drafts is None else self.core.drafts.statistics()),
            **({} if self.core.images is None else self.core.images.statistics()),
            **({} if self.core.scheduler.tiers is None else self.core.scheduler.tiers.statistics()),
        }

    def get_kv_transfer_tensors(self) -> dict[str, Any]:
        """The bytes of a page unit, plane by plane in transfer order, and of a STATE image where images are kept."""
        layout = TransferLayout.of(self.core.runner.setup.geometry)
        return layout.published(self.core.scheduler.keeps_images)

    def summary(self) -> dict[str, Any]:
        """What was built: device, memory, buckets, compile times."""
        return {**self.core.runner.summary(), **dataclasses.asdict(self.budget)}


def _runner_kind(mesh: bool, drafts: bool, leads: bool) -> type[ModelRunner]:
    """The runner of an engine on a mesh or on one device, that drafts or not, that leads other processes or not."""
    if leads:
        return LeadingDraftRunner if drafts else LeadingRunner
    if mesh:
        return MeshDraftRunner if drafts else MeshRunner
    return DraftRunner if drafts else ModelRunner


def _open_tiers(
    config: EngineConfig, runner: ModelRunner, checkpoint: Checkpoint, lookup: EngramLookup | None
) -> PageTiers | ShardedTiers:
    """The tiers of the options, tied to a runner's pages; every transfer is compiled."""
    geometry, shards = runner.setup.geometry, runner.setup.parallel.data
    memories = [DevicePages(runner, geometry, shard) for shard in range(shards)]
    layout, identity = memories[0].layout, cache_identity(config, geometry, checkpoint, lookup)
    memories[0].warm_up(images=not config.encoder_swa_bounded_replay)
    store = open_store(config, layout, identity)
    assert store is not None
    parts = [
        PageTiers(
            store,
            layout,
            identity,
            memory,
            block_size=geometry.block_size,
            timeout_s=config.cache_fetch_timeout,
        )
        for memory in memories
    ]
    return parts[0] if shards == 1 else ShardedTiers(parts)

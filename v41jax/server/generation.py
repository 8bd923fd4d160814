"""Runs the choices of a request: a stream each, the first of a prompt ahead so that the others share its pages."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING

from scheduler.sequence import SamplingParams as EngineSampling
from v41jax.engine import QueueFullError
from v41jax.engine_core import EngineFailedError, StepFailedError
from v41jax.engine_images import PromptImages
from v41jax.engine_requests import Delta, Prompt
from v41jax.image_leases import ImageCapacityError
from v41jax.sampling_params import SamplingParams
from v41jax.server.errors import ApiError, engine_failed
from v41jax.server.service import Service

if TYPE_CHECKING:
    from v41jax.server.constraint import GrammarConstraint

_COLDEST = 1e-5
"""Temperatures below it are greedy: logits divided by less overflow."""


def seed_of_choice(seed: int | None, choice: int) -> int | None:
    """32 bits for the random stream of one choice; the first of a small seed is the seed itself, as in `generate`."""
    if seed is None or (choice == 0 and 0 <= seed < 2**32):
        return seed
    return int.from_bytes(hashlib.sha256(f"{seed}:{choice}".encode()).digest()[:4], "little")


def check_length(service: Service, tokens: Sequence[int], param: str = "prompt") -> None:
    """Refuses prompts that can never run; cheap, so that it comes before work on anything else of a request.

    Raises:
      ApiError: no token, or more than the model allows.
    """
    count, limit = len(tokens), service.max_model_len
    if not count:
        raise ApiError(400, "the prompt has no tokens: give at least one", param=param, code="invalid_value")
    if count > limit:
        raise ApiError(
            400,
            f"the prompt has {count} tokens, the model takes at most {limit}: shorten it",
            param=param,
            code="context_length_exceeded",
        )


def make_prompt(
    service: Service,
    tokens: Sequence[int],
    params: SamplingParams,
    choice: int,
    *,
    skip_special: bool,
    prompt_logprobs: bool = False,
    constraint: GrammarConstraint | None = None,
    images: PromptImages | None = None,
) -> Prompt:
    """One choice for the engine.

    Args:
      service: of the server.
      tokens: ids of the prompt.
      params: of the request.
      choice: its number; the first takes the seed as it is.
      skip_special: leave control tokens out of the text.
      prompt_logprobs: log-probabilities of the prompt are wanted.
      constraint: what the reply must look like; every choice follows a copy.
      images: of the prompt.

    Raises:
      ApiError: the prompt is empty, or longer than the model allows.
    """
    check_length(service, tokens)
    room = max(service.max_model_len - len(tokens), 1)
    stops = set(params.stop_token_ids)
    if not params.ignore_eos:
        stops |= service.tokenizer.stop_ids - set(service.engine.core.scheduler.view.eos_token_ids)
    sampling = EngineSampling(
        max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
        temperature=0.0 if params.temperature < _COLDEST else params.temperature,
        top_k=0 if params.top_k < 0 else min(params.top_k, service.vocabulary),
        top_p=params.top_p,
        min_p=params.min_p,
        seed=seed_of_choice(params.seed, choice),
        ignore_eos=params.ignore_eos,
        stop_token_ids=tuple(sorted(stops)),
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=tuple(params.logit_bias.items()),
        logprobs=params.logprobs,
        prompt_logprobs=prompt_logprobs,
    )
    return Prompt(
        tuple(tokens),
        sampling,
        stop=tuple(params.stop),
        skip_special=skip_special,
        timeout_s=service.options.request_timeout_s or None,
        constraint=None if constraint is None else constraint.copy(),
        images=images,
    )


def hit_limit(reason: str) -> bool:
    """Whether a choice ended because it may not be longer."""
    return reason == "max_tokens"


async def run_choices(service: Service, groups: Sequence[Sequence[Prompt]]) -> AsyncGenerator[tuple[int, Delta], None]:
    """What the engine gives the choices of a request, as it comes; closing the generator aborts all of them.

    Args:
      service: of the server.
      groups: the choices of each prompt. The first runs alone until its first token when its prompt fills a page, so
        that the others find the pages instead of computing them again.

    Yields:
      (number of the choice over all groups, what it got).

    Raises:
      ApiError: a choice was refused or failed.
    """
    service.accept()
    queue: asyncio.Queue[tuple[int, Delta | Exception]] = asyncio.Queue()
    began = time.perf_counter()
    page = service.engine.config.kv_cache_block_size

    async def run(index: int, prompt: Prompt, wait: asyncio.Event | None, done: asyncio.Event) -> None:
        watch = _Watch(service, began)
        try:
            if wait is not None:
                await wait.wait()
            async with aclosing(service.engine.stream(prompt)) as stream:
                async for delta in stream:
                    watch.see(delta)
                    if delta.finish_reason is not None:
                        _require_followed_grammar(prompt)
                    queue.put_nowait((index, delta))
                    done.set()
        except Exception as error:
            if isinstance(error, StepFailedError):
                service.metrics.choices.labels("failed").inc()
            queue.put_nowait((index, error))
        finally:
            done.set()

    tasks: list[asyncio.Task[None]] = []
    for prompts in groups:
        first_token = asyncio.Event()
        for place, prompt in enumerate(prompts):
            wait = first_token if place and len(prompt.tokens) > page else None
            tasks.append(asyncio.create_task(run(len(tasks), prompt, wait, first_token)))
    try:
        running = len(tasks)
        while running:
            index, item = await queue.get()
            if isinstance(item, Exception):
                raise _as_answer(item)
            if item.finish_reason is not None:
                running -= 1
                _require_success(item.finish_reason)
            yield index, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _Watch:
    """Times one choice for the metrics."""

    def __init__(self, service: Service, began: float):
        self._metrics = service.metrics
        self._began = began
        self._first: float | None = None
        self._tokens = 0

    def see(self, delta: Delta) -> None:
        now = time.perf_counter()
        self._tokens += len(delta.tokens)
        if self._first is None and delta.tokens:
            self._first = now
            self._metrics.first_token.observe(now - self._began)
        if delta.finish_reason is not None:
            if self._first is not None and self._tokens > 1:
                self._metrics.each_token.observe((now - self._first) / (self._tokens - 1))
            self._metrics.whole.observe(now - self._began)
            self._metrics.choices.labels(_family(delta.finish_reason)).inc()


def _family(reason: str) -> str:
    """A finish reason without its details, so that a metric has few labels."""
    word = reason.partition(":")[0]
    return "stop_token" if word.startswith("stop_") and word != "stop_sequence" else word


def _require_success(reason: str) -> None:
    """Raises an `ApiError` for the reasons that are not an answer."""
    kind, _, detail = reason.partition(": ")
    if kind == "unschedulable":
        raise ApiError(400, f"the request can never run: {detail}", param="prompt", code="unschedulable")
    if kind == "timeout":
        raise ApiError(504, "the request took longer than the server allows", code="timeout")
    if kind == "aborted":
        raise ApiError(503, "the request was cancelled because the server stops", code="draining")
    if kind == "failed":
        raise ApiError(500, "the engine failed while it answered", code="engine_failed")


def _require_followed_grammar(prompt: Prompt) -> None:
    """Raises an `ApiError` when a reply ended because its grammar could not be followed to the end."""
    failure = getattr(prompt.constraint, "failure", None)
    if failure is not None:
        message = f"the reply cannot follow its grammar, which became too large on the way: simplify it ({failure})"
        raise ApiError(400, message, code="grammar_failed")


def _as_answer(error: Exception) -> Exception:
    if isinstance(error, QueueFullError):
        return ApiError(429, str(error), code="queue_full", headers={"Retry-After": "1"})
    if isinstance(error, EngineFailedError):
        return engine_failed()
    if isinstance(error, StepFailedError):
        if error.recoverable:
            message = "a step failed and ended the requests it was for, the engine goes on: send the request again"
            return ApiError(500, message, code="step_refused")
        return ApiError(500, "the engine failed while it answered", code="engine_failed")
    if isinstance(error, ImageCapacityError) and not error.permanent:
        return ApiError(429, str(error), code="images_full", headers={"Retry-After": "1"})
    if isinstance(error, ValueError):
        return ApiError(400, str(error), code="invalid_value")
    return error

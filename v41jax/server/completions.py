"""`/v1/completions`: raw prompts continued, and scored for evaluation harnesses (`echo` with `logprobs`)."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from v41jax.engine_core import TokenScore
from v41jax.engine_requests import Delta
from v41jax.server.completion_request import CompletionRequest, RawPrompt, read_completion_request
from v41jax.server.connection import LAST_EVENT, EventStream, event, while_connected
from v41jax.server.errors import as_api_error
from v41jax.server.generation import hit_limit, run_choices
from v41jax.server.json_body import json_response, parse_object, to_json
from v41jax.server.logprobs import CompletionLogprobs, join
from v41jax.server.service import Service
from v41jax.server.usage import Usage


async def answer_completion(service: Service, request: Request, body: bytes) -> Response:
    """Answers one request."""
    service.accept()
    completion = await service.encode(lambda: read_completion_request(service, parse_object(body)))
    answer = CompletionAnswer(service, completion)
    if completion.stream:
        return await EventStream.begin(request, answer.events())
    return json_response(await while_connected(request, answer.whole()))


class _Choice:
    """One continuation as it arrives."""

    def __init__(self, service: Service, request: CompletionRequest, prompt: RawPrompt):
        self._service = service
        self._request = request
        self._prompt = prompt
        self._logprobs = None
        if request.logprobs is not None:
            self._logprobs = CompletionLogprobs(service.tokenizer, request.logprobs)
        self._echoes = request.echo
        self.text: list[str] = []
        self.logprobs: list[dict[str, Any]] = []
        self.tokens = 0
        self.finish: str | None = None

    def take(self, delta: Delta, prompt_scores: tuple[TokenScore | None, ...]) -> tuple[str, dict[str, Any] | None]:
        """The next text and its log-probabilities; the prompt comes first when it is echoed."""
        text, pieces = "", []
        if self._echoes:
            self._echoes = False
            written = self._prompt.written
            text = self._service.tokenizer.decode(written)
            if self._logprobs is not None:
                pieces.append(self._logprobs.piece(written, prompt_scores[self._prompt.prefix :]))
        self.tokens += len(delta.tokens)
        if not self._request.scoring_only:
            text += delta.text
            if self._logprobs is not None:
                # Stop tokens too: harnesses count on one entry for each generated token.
                pieces.append(self._logprobs.piece(delta.tokens, delta.scores))
        if delta.finish_reason is not None:
            self.finish = "length" if hit_limit(delta.finish_reason) else "stop"
        logprobs = join(pieces) if pieces else None
        self.text.append(text)
        if logprobs is not None:
            self.logprobs.append(logprobs)
        return text, logprobs


class CompletionAnswer:
    """The answer to one request, as a whole or as events.

    Attributes:
      id: of the answer.
    """

    def __init__(self, service: Service, request: CompletionRequest):
        self.id = f"cmpl-{uuid.uuid4().hex}"
        self._service = service
        self._request = request
        self._created = int(time.time())
        self._choices = [
            _Choice(service, request, prompt) for prompt, group in zip(request.prompts, request.groups) for _ in group
        ]
        self._per_prompt = len(request.groups[0])
        self._prompt_scores: dict[int, tuple[TokenScore | None, ...]] = {}
        self._usage = Usage(sum(len(prompt.tokens) for prompt in request.prompts))

    async def whole(self) -> dict[str, Any]:
        """Runs all choices to their end."""
        async with aclosing(self._deltas()) as deltas:
            async for _ in deltas:
                pass
        choices = []
        for index, choice in enumerate(self._choices):
            logprobs = None if self._request.logprobs is None else join(choice.logprobs)
            choices.append(
                {"index": index, "text": "".join(choice.text), "logprobs": logprobs, "finish_reason": choice.finish}
            )
        return {**self._head(), "choices": choices, "usage": self._counted().as_json()}

    async def events(self) -> AsyncGenerator[str, None]:
        """Server-sent events; an error after the first is an event too, and the last one."""
        begun = False
        try:
            async with aclosing(self._deltas()) as deltas:
                async for index, text, logprobs in deltas:
                    finish = self._choices[index].finish
                    if not text and not logprobs and finish is None:
                        continue
                    choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}
                    body = {**self._head(), "choices": [choice]}
                    if self._request.include_usage:
                        body["usage"] = None
                    begun = True
                    yield event(to_json(body))
        except Exception as error:
            if not begun:
                raise
            yield event(to_json(as_api_error(error).body()))
            return
        if self._request.include_usage:
            yield event(to_json({**self._head(), "choices": [], "usage": self._counted().as_json()}))
        yield LAST_EVENT

    async def _deltas(self) -> AsyncGenerator[tuple[int, str, dict[str, Any] | None], None]:
        """(choice, new text, its log-probabilities). Choices of a scored prompt wait for its scores."""
        early: dict[int, list[tuple[int, Delta]]] = {}
        async with aclosing(run_choices(self._service, self._request.groups)) as deltas:
            async for index, delta in deltas:
                prompt, place = divmod(index, self._per_prompt)
                if place == 0:
                    self._usage.saw_cached(prompt, delta.cached_tokens)
                    if delta.prompt_scores:
                        self._prompt_scores[prompt] = delta.prompt_scores
                if self._request.echo and self._request.logprobs is not None and prompt not in self._prompt_scores:
                    early.setdefault(prompt, []).append((index, delta))
                    continue
                for ready, kept in [*early.pop(prompt, ()), (index, delta)]:
                    text, logprobs = self._choices[ready].take(kept, self._prompt_scores.get(prompt, ()))
                    yield ready, text, logprobs

    def _counted(self) -> Usage:
        generated = sum(choice.tokens for choice in self._choices)
        self._usage.completion_tokens = 0 if self._request.scoring_only else generated
        return self._usage

    def _head(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self._created,
            "model": self._service.options.model_name,
        }

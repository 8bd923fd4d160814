"""`/v1/chat/completions`: replies as one message or as a stream of deltas."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from v41jax.engine_requests import Delta
from v41jax.protocol import (
    ArgumentsDelta,
    CallStarted,
    ContentDelta,
    Event,
    OutputParser,
    ReasoningDelta,
    Reply,
    finish_reason,
)
from v41jax.protocol.tokens import THINK_CLOSE, THINK_OPEN
from v41jax.server.chat_request import ChatRequest, read_chat_request
from v41jax.server.connection import LAST_EVENT, EventStream, event, while_connected
from v41jax.server.errors import as_api_error
from v41jax.server.generation import hit_limit, run_choices
from v41jax.server.json_body import json_response, parse_object, to_json
from v41jax.server.logprobs import chat_entry
from v41jax.server.service import Service
from v41jax.server.usage import Usage


async def answer_chat(service: Service, request: Request, body: bytes) -> Response:
    """Answers one request."""
    service.accept()
    chat = await service.encode(lambda: read_chat_request(service, parse_object(body)))
    answer = ChatAnswer(service, chat)
    if chat.stream:
        return await EventStream.begin(request, answer.events())
    return json_response(await while_connected(request, answer.whole()))


class _Choice:
    """One reply as it is read."""

    def __init__(self, service: Service, chat: ChatRequest):
        self.service = service
        self.chat = chat
        self.parser = OutputParser(chat.prompt.starts_in_reasoning, chat.tools)
        self.tokens: list[int] = []
        self.text: list[str] = []
        self.logprobs: list[dict[str, Any]] = []
        self.call_ids: list[str] = []
        self.finish: str | None = None
        self.reasoning_tokens = 0
        self._in_reasoning = chat.prompt.starts_in_reasoning

    def take(self, delta: Delta) -> list[Event]:
        """Reads what the engine gave and returns what the client may see of it."""
        tokenizer = self.service.tokenizer
        if self.chat.logprobs:
            self.logprobs += [
                chat_entry(tokenizer, token, score)
                for token, score in zip(delta.tokens, delta.scores, strict=True)
                if token not in tokenizer.stop_ids
            ]
        self._count_reasoning(delta.tokens)
        self.tokens.extend(delta.tokens)
        self.text.append(delta.text)
        events = self.parser.feed(delta.text)
        if delta.finish_reason is not None:
            events += self.parser.finish()
            shown = self.shown_reply()
            self.finish = finish_reason(shown, hit_limit=hit_limit(delta.finish_reason))
        return [event for event in events if self._is_shown(event)]

    def shown_reply(self) -> Reply:
        """The whole reply without what the client asked not to get."""
        reply = self.parser.reply
        return Reply(
            reply.reasoning if self.chat.thinking else "",
            reply.content,
            reply.calls if self.chat.delivers_calls else (),
            reply.is_truncated,
        )

    def new_call_id(self) -> str:
        """An id for the next call."""
        self.call_ids.append(f"call_{uuid.uuid4().hex[:24]}")
        return self.call_ids[-1]

    def message(self) -> dict[str, Any]:
        """The reply as a message."""
        reply = self.shown_reply()
        while len(self.call_ids) < len(reply.calls):
            self.new_call_id()
        return {**reply.message(tuple(self.call_ids)), "refusal": None}

    def remember(self) -> None:
        """Keeps the generated ids for the turn after this one; runs on the encoding worker."""
        if self.finish in ("stop", "tool_calls") and self.shown_reply() == self.parser.reply:
            generated = self.tokens
            if generated and generated[-1] in self.service.tokenizer.stop_ids:
                generated = generated[:-1]
            self.service.replies.remember(
                self.chat.prompt, generated, "".join(self.text), self.parser.reply, self.service.tokenizer
            )

    def _is_shown(self, event: Event) -> bool:
        if isinstance(event, ReasoningDelta):
            return self.chat.thinking
        return isinstance(event, ContentDelta) or self.chat.delivers_calls

    def _count_reasoning(self, tokens: tuple[int, ...]) -> None:
        opening, closing = (self.service.tokenizer.control_id(token) for token in (THINK_OPEN, THINK_CLOSE))
        for token in tokens:
            if token == opening:
                self._in_reasoning = True
            self.reasoning_tokens += self._in_reasoning
            if token == closing:
                self._in_reasoning = False


class ChatAnswer:
    """The answer to one request, as a whole or as events.

    Attributes:
      id: of the answer.
    """

    def __init__(self, service: Service, chat: ChatRequest):
        self.id = f"chatcmpl-{uuid.uuid4().hex}"
        self._service = service
        self._chat = chat
        self._created = int(time.time())
        self._choices = [_Choice(service, chat) for _ in chat.choices]
        self._usage = Usage(len(chat.choices[0].tokens))

    async def whole(self) -> dict[str, Any]:
        """Runs all choices to their end."""
        async with aclosing(run_choices(self._service, [self._chat.choices])) as deltas:
            async for index, delta in deltas:
                await self._take(index, delta)
        choices = []
        for index, choice in enumerate(self._choices):
            logprobs = {"content": choice.logprobs, "refusal": None} if self._chat.logprobs else None
            choices.append(
                {
                    "index": index,
                    "message": choice.message(),
                    "logprobs": logprobs,
                    "finish_reason": choice.finish,
                }
            )
        return {**self._head("chat.completion"), "choices": choices, "usage": self._counted().as_json()}

    async def events(self) -> AsyncGenerator[str, None]:
        """Server-sent events; an error after the first is an event too, and the last one."""
        begun = False
        try:
            async with aclosing(run_choices(self._service, [self._chat.choices])) as deltas:
                async for index, delta in deltas:
                    if not begun:
                        for place in range(len(self._choices)):
                            yield self._chunk(place, {"role": "assistant", "content": ""})
                        begun = True
                    for chunk in self._chunks(index, await self._take(index, delta)):
                        yield chunk
        except Exception as error:
            if not begun:
                raise
            yield event(to_json(as_api_error(error).body()))
            return
        if self._chat.include_usage:
            body = {**self._head("chat.completion.chunk"), "choices": [], "usage": self._counted().as_json()}
            yield event(to_json(body))
        yield LAST_EVENT

    async def _take(self, index: int, delta: Delta) -> list[Event]:
        choice = self._choices[index]
        if index == 0:
            self._usage.saw_cached(0, delta.cached_tokens)
        events = choice.take(delta)
        if choice.finish is not None:
            await self._service.encode(choice.remember)
        return events

    def _chunks(self, index: int, events: list[Event]) -> list[str]:
        """Chunks of one choice: neighbouring events of a kind in one, the reason to finish in the last."""
        choice = self._choices[index]
        deltas: list[dict[str, Any]] = []
        for item in events:
            if isinstance(item, ReasoningDelta):
                _append(deltas, "reasoning_content", item.text)
            elif isinstance(item, ContentDelta):
                _append(deltas, "content", item.text)
            elif isinstance(item, CallStarted):
                function = {"name": item.name, "arguments": ""}
                call = {"index": item.index, "id": choice.new_call_id(), "type": "function", "function": function}
                deltas.append({"tool_calls": [call]})
            elif isinstance(item, ArgumentsDelta):
                call = {"index": item.index, "function": {"arguments": item.fragment}}
                deltas.append({"tool_calls": [call]})
        chunks = [self._chunk(index, delta) for delta in deltas]
        if choice.finish is not None:
            chunks.append(self._chunk(index, {}, choice.finish))
        return chunks

    def _chunk(self, index: int, delta: dict[str, Any], finish: str | None = None) -> str:
        choice = self._choices[index]
        logprobs = None
        if choice.logprobs:
            logprobs = {"content": choice.logprobs, "refusal": None}
            choice.logprobs = []
        body = self._head("chat.completion.chunk")
        body["choices"] = [{"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}]
        if self._chat.include_usage:
            body["usage"] = None
        return event(to_json(body))

    def _counted(self) -> Usage:
        self._usage.completion_tokens = sum(len(choice.tokens) for choice in self._choices)
        self._usage.reasoning_tokens = sum(choice.reasoning_tokens for choice in self._choices)
        return self._usage

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self._created, "model": self._service.options.model_name}


def _append(deltas: list[dict[str, Any]], key: str, text: str) -> None:
    """Adds text to the last delta when it is of the same kind."""
    if deltas and key in deltas[-1]:
        deltas[-1][key] += text
    else:
        deltas.append({key: text})

"""Sends a load and takes the times of every request as a client sees them."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from collections.abc import Callable
from typing import Any

import httpx

from v41jax.load.workloads import TOOLS, Agent, Workload


@dataclasses.dataclass
class Sample:
    """One request.

    Attributes:
      began: seconds after the start of the load.
      first_s: from sending to the first token; None when there was none.
      whole_s: from sending to the end.
      prompt_tokens, cached_tokens, output_tokens: as the server counts.
      turn: of an agent, from 0.
      error: why it failed; None when it did not.
    """

    began: float
    first_s: float | None = None
    whole_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    turn: int = 0
    error: str | None = None

    @property
    def per_token_s(self) -> float | None:
        """Mean time between tokens after the first."""
        if self.first_s is None or self.output_tokens < 2:
            return None
        return (self.whole_s - self.first_s) / (self.output_tokens - 1)


class LoadClient:
    """Sends one workload to one server.

    Args:
      url: of the server, without `/v1`.
      workload: what to send.
      model: name to ask for; None takes the first that the server lists.
      key: API key, if the server wants one.
      concurrency: requests in flight at most; 0 is no limit.
      finished: called after every request.
    """

    def __init__(
        self,
        url: str,
        workload: Workload,
        *,
        model: str | None = None,
        key: str | None = None,
        concurrency: int = 0,
        finished: Callable[[Sample], None] = lambda _: None,
    ):
        self._workload = workload
        self._model = model
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._http = httpx.AsyncClient(
            base_url=url, headers=headers, timeout=None, limits=httpx.Limits(max_connections=None)
        )
        self._gate = asyncio.Semaphore(concurrency or 2**31 - 1)
        self._finished = finished
        self._start = 0.0

    async def run(self) -> tuple[list[Sample], float]:
        """Sends everything.

        Returns:
          The samples, in order of their beginning, and the seconds the load took.

        Raises:
          httpx.HTTPError: the server cannot be reached at all.
        """
        async with self._http:
            if self._model is None:
                answer = await self._http.get("/v1/models")
                answer.raise_for_status()
                self._model = answer.json()["data"][0]["id"]
            self._start = time.perf_counter()
            one = self._independent if self._workload.kind == "independent" else self._agent
            parts = await asyncio.gather(*(one(number, at) for number, at in enumerate(self._workload.arrivals())))
            seconds = time.perf_counter() - self._start
        return sorted((sample for part in parts for sample in part), key=lambda sample: sample.began), seconds

    async def _independent(self, number: int, at: float) -> list[Sample]:
        await asyncio.sleep(at)
        body = {"prompt": self._workload.prompt(number)}
        sample, _ = await self._send("/v1/completions", body, 0)
        return [sample]

    async def _agent(self, number: int, at: float) -> list[Sample]:
        await asyncio.sleep(at)
        agent = Agent(self._workload, number)
        samples: list[Sample] = []
        while True:
            body = {"messages": agent.messages, "tools": list(TOOLS)}
            sample, reply = await self._send("/v1/chat/completions", body, len(samples))
            samples.append(sample)
            if sample.error is not None or not agent.go_on(reply):
                return samples
            await asyncio.sleep(self._workload.pause_s)

    async def _send(self, path: str, body: dict[str, Any], turn: int) -> tuple[Sample, dict[str, Any]]:
        whole = {
            **body,
            "model": self._model,
            "max_tokens": self._workload.output_tokens,
            "ignore_eos": path == "/v1/completions",
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        reply = _Reply()
        async with self._gate:
            began = time.perf_counter()
            sample = Sample(began - self._start, turn=turn)
            try:
                async with self._http.stream("POST", path, json=whole) as answer:
                    if answer.status_code != 200:
                        await answer.aread()
                        raise RuntimeError(f"HTTP {answer.status_code}: {answer.text[:200]}")
                    async for line in answer.aiter_lines():
                        if line.startswith("data: {"):
                            reply.take(json.loads(line[6:]), sample, time.perf_counter() - began)
            except (httpx.HTTPError, RuntimeError, ValueError) as error:
                sample.error = f"{type(error).__name__}: {error}"
            sample.whole_s = time.perf_counter() - began
        self._finished(sample)
        return sample, reply.message()


class _Reply:
    """Joins a stream into a message."""

    def __init__(self) -> None:
        self._text: dict[str, str] = {}
        self._calls: dict[int, dict[str, Any]] = {}

    def take(self, event: dict[str, Any], sample: Sample, now: float) -> None:
        """Takes one event and notes its time and its counts."""
        if "error" in event:
            raise RuntimeError(event["error"]["message"])
        usage = event.get("usage")
        if usage:
            sample.prompt_tokens, sample.output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
            sample.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        for choice in event["choices"]:
            delta = choice.get("delta") or {"content": choice.get("text")}
            pieces = {name: delta.get(name) for name in ("content", "reasoning_content") if delta.get(name)}
            calls = delta.get("tool_calls") or ()
            if sample.first_s is None and (pieces or calls or choice.get("finish_reason")):
                sample.first_s = now
            for name, piece in pieces.items():
                self._text[name] = self._text.get(name, "") + piece
            for call in calls:
                known = self._calls.setdefault(
                    call["index"], {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}
                )
                known["id"] = call.get("id") or known["id"]
                for name, piece in (call.get("function") or {}).items():
                    known["function"][name] += piece or ""

    def message(self) -> dict[str, Any]:
        """The reply as a message to send back."""
        message: dict[str, Any] = {"role": "assistant", "content": "", **self._text}
        if self._calls:
            message["tool_calls"] = [self._calls[index] for index in sorted(self._calls)]
        return message

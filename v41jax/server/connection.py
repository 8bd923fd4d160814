"""A client's connection while an answer is made: noticing that the client left, and server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

Result = TypeVar("Result")
Receive = Callable[[], Awaitable[Any]]


class ClientGoneError(Exception):
    """The client closed its connection; nobody reads an answer."""


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _race(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Runs work, and cancels it when the client leaves first.

    Raises:
      ClientGoneError: the client left.
    """
    worker = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({worker, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if worker.done():
            return worker.result()
        raise ClientGoneError
    finally:
        worker.cancel()
        watcher.cancel()
        await asyncio.gather(worker, watcher, return_exceptions=True)


async def while_connected(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of work done for a client whose request was read whole; cancelled when the client leaves.

    Raises:
      ClientGoneError: the client left.
    """
    return await _race(request.receive, work)


class EventStream(Response):
    """An answer of server-sent events.

    The generator of events is closed when the last one was sent, when the client leaves, and when the server stops.
    """

    media_type = "text/event-stream"

    def __init__(self, first: str, events: AsyncGenerator[str, None]):
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._first = first
        self._events = events

    @classmethod
    async def begin(cls, request: Request, events: AsyncGenerator[str, None]) -> EventStream:
        """Waits for the first event, so that an error before it still gets its own status.

        Raises:
          ClientGoneError: the client left.
        """

        async def first() -> str:
            return await anext(events)

        try:
            return cls(await while_connected(request, first()), events)
        except BaseException:
            await events.aclose()
            raise

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def send_all() -> None:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": self._first.encode(), "more_body": True})
            async for event in self._events:
                await send({"type": "http.response.body", "body": event.encode(), "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})

        try:
            await _race(receive, send_all())
        except ClientGoneError:
            pass
        finally:
            await self._events.aclose()


def event(data: str) -> str:
    """One server-sent event."""
    return f"data: {data}\n\n"


LAST_EVENT = event("[DONE]")

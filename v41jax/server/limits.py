"""What the server accepts: its options, the key that clients must show, and the checks every request passes first."""

from __future__ import annotations

import dataclasses
import hmac
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from v41jax.image_sources import ImageSources
from v41jax.server.errors import ApiError

OPEN_PATHS = frozenset({"/", "/health", "/metrics", "/docs", "/openapi.json"})
"""Answered without a key: the page, probes, scrapes and the API's description."""

Message = MutableMapping[str, Any]
Application = Callable[
    [Message, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Awaitable[None]
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Settings of the server, apart from the engine's.

    Attributes:
      model_name: the name clients ask for.
      api_keys: any of these must come as `Authorization: Bearer KEY`; empty asks for none.
      max_body_bytes: size of a request body.
      max_waiting: requests that may wait for a slot; more are answered 429.
      max_choices: choices of one request, over all its prompts.
      request_timeout_s: seconds after which a request ends unfinished; 0 never.
      drain_timeout_s: seconds that running requests get to finish when the server is asked to stop.
      image_sources: where the images of a request may come from besides the request itself.
    """

    model_name: str
    api_keys: tuple[str, ...] = ()
    max_body_bytes: int = 32 * 2**20
    max_waiting: int = 1024
    max_choices: int = 128
    request_timeout_s: float = 0.0
    drain_timeout_s: float = 30.0
    image_sources: ImageSources = dataclasses.field(default_factory=ImageSources)

    def __post_init__(self) -> None:
        faults = []
        if not self.model_name:
            faults.append("the model name is empty: give one")
        if any(not key or not key.isascii() for key in self.api_keys):
            faults.append("API keys must be non-empty ASCII text")
        for name in ("max_body_bytes", "max_choices"):
            if getattr(self, name) < 1:
                faults.append(f"{name} {getattr(self, name)} must be at least 1")
        for name in ("max_waiting", "request_timeout_s", "drain_timeout_s"):
            if getattr(self, name) < 0:
                faults.append(f"{name} {getattr(self, name)} must not be negative")
        if faults:
            raise ValueError("; ".join(faults))


class RequireKey:
    """ASGI middleware: refuses requests without a valid key, before their body is read."""

    def __init__(self, app: Application, keys: tuple[str, ...]):
        self._app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Message, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or scope["method"] == "OPTIONS":
            await self._app(scope, receive, send)
            return
        shown = dict(scope["headers"]).get(b"authorization", b"")
        scheme, _, token = shown.partition(b" ")
        matches = [hmac.compare_digest(token.strip(), key) for key in self._keys]
        if scheme.lower() == b"bearer" and any(matches):
            await self._app(scope, receive, send)
            return
        error = ApiError(
            401,
            "a valid API key is needed: send it as `Authorization: Bearer KEY`",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
        await error.response()(scope, receive, send)

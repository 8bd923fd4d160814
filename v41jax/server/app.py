"""The application: routes, the checks in front of them, and what becomes of exceptions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, Response

from v41jax.engine import Engine
from v41jax.server import information, schemas
from v41jax.server.chat import answer_chat
from v41jax.server.completions import answer_completion
from v41jax.server.connection import ClientGoneError
from v41jax.server.errors import ApiError, as_api_error, on_error
from v41jax.server.json_body import BodyTooLargeError, json_response, parse_object, read_bytes
from v41jax.server.limits import RequireKey, ServerOptions
from v41jax.server.metrics import CountOpen
from v41jax.server.page import page_html
from v41jax.server.service import Service

CLIENT_GONE = 499
"""Status in the metrics of a request whose client left; nobody receives it."""

Answer = Callable[[Service, Request, bytes], Awaitable[Response]]


def create_app(engine: Engine, options: ServerOptions) -> FastAPI:
    """Makes the application of one engine; `app.state.service` is its `Service`.

    Args:
      engine: of a checkpoint with a tokenizer; the caller closes it.
      options: of the server.

    Raises:
      ValueError: the checkpoint has no tokenizer.
    """
    service = Service(engine, options)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        service.draining = True
        service.close()

    app = FastAPI(title="v41jax", description="OpenAI-compatible server of DeepSeek-V4.1", lifespan=lifespan)
    app.state.service = service
    app.add_exception_handler(HTTPException, on_error)
    app.add_exception_handler(ApiError, on_error)
    app.add_middleware(CountOpen, gauge=service.metrics.open)
    if options.api_keys:
        app.add_middleware(RequireKey, keys=options.api_keys)
    _add_generation(app, service)
    _add_information(app, service)
    return app


def _add_generation(app: FastAPI, service: Service) -> None:
    @app.post("/v1/chat/completions", **schemas.post("chat.completion", schemas.CHAT))
    async def chat_completions(request: Request) -> Response:
        """Continue a conversation."""
        return await _answer(service, request, answer_chat)

    @app.post("/v1/completions", **schemas.post("text_completion", schemas.COMPLETION))
    async def completions(request: Request) -> Response:
        """Continue raw prompts, or score them."""
        return await _answer(service, request, answer_completion)


def _add_information(app: FastAPI, service: Service) -> None:
    @app.get("/v1/models")
    async def models() -> Response:
        """The served model."""
        return json_response({"object": "list", "data": [information.model_card(service)]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        """The served model by its name."""
        service.require_model(name)
        return json_response(information.model_card(service))

    @app.get("/tokenizer_info")
    async def tokenizer_info() -> Response:
        """Special tokens and sizes of the tokenizer."""
        return json_response(information.tokenizer_info(service))

    @app.post("/tokenize", **schemas.post("tokens", schemas.TOKENIZE))
    async def tokenize(request: Request) -> Response:
        """Ids of a prompt or of a conversation."""
        return await _answer(service, request, _encoded(information.tokenize))

    @app.post("/detokenize", **schemas.post("text", schemas.DETOKENIZE))
    async def detokenize(request: Request) -> Response:
        """Text of ids."""
        return await _answer(service, request, _encoded(information.detokenize))

    @app.head("/health", include_in_schema=False)
    @app.get("/health")
    async def health() -> Response:
        """Whether the server takes requests."""
        status, body = information.health(service)
        return json_response(body, status)

    @app.get("/metrics")
    async def metrics() -> Response:
        """Prometheus metrics."""
        service.metrics.tasks.set(len(asyncio.all_tasks()))
        return Response(service.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return HTMLResponse(page_html(service.options.model_name, needs_key=bool(service.options.api_keys)))


def _encoded(work: Callable[[Service, dict[str, Any]], dict[str, Any]]) -> Answer:
    """An answer that is made on the encoding worker."""

    async def answer(service: Service, _: Request, body: bytes) -> Response:
        return json_response(await service.encode(lambda: work(service, parse_object(body))))

    return answer


async def _answer(service: Service, request: Request, answer: Answer) -> Response:
    """Reads a body, answers it, and counts the answer whatever becomes of it."""
    limit = service.options.max_body_bytes
    try:
        response = await answer(service, request, await read_bytes(request, limit))
    except BodyTooLargeError:
        message = f"the body has more than {limit} bytes: send less, or raise --max-body-bytes"
        response = ApiError(413, message, code="body_too_large").response()
    except (ClientGoneError, ClientDisconnect):
        response = Response(status_code=CLIENT_GONE)
    except Exception as error:
        response = as_api_error(error).response()
    service.metrics.answers.labels(request.url.path, str(response.status_code)).inc()
    return response

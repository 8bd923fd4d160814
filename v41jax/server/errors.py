"""Errors as OpenAI's API reports them: `{"error": {"message", "type", "param", "code"}}` with a matching status."""

from __future__ import annotations

import logging
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from v41jax.image_planning import ImageError
from v41jax.protocol import ProtocolError
from v41jax.server.json_body import json_response
from v41jax.tokenizer import TokenizerError

_log = logging.getLogger(__name__)

_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """An answer other than success.

    Attributes:
      status: HTTP status.
      message: what is wrong and what to do.
      param: the field at fault, as the client would write it.
      code: a word for programs.
      headers: sent along.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ):
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = headers
        super().__init__(message)

    def body(self) -> dict[str, Any]:
        """The JSON body."""
        kind = _TYPES.get(self.status) or ("invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        """The whole answer."""
        return json_response(self.body(), self.status, self.headers)


def engine_failed() -> ApiError:
    """The answer to every request once the engine has ended."""
    return ApiError(503, "the engine failed and must be restarted", code="engine_failed")


def as_api_error(error: Exception) -> ApiError:
    """Any exception as an answer; what is not a client's mistake is logged and shown without its details."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ProtocolError):
        return ApiError(400, str(error), param=error.param, code="invalid_value")
    if isinstance(error, ImageError):
        return ApiError(400, str(error), param="messages", code="invalid_image")
    if isinstance(error, TokenizerError):
        return ApiError(400, str(error), code="invalid_value")
    _log.error("a request failed", exc_info=error)
    return ApiError(500, "the server failed to answer; its log says why", code="internal_error")


async def on_error(request: Request, error: Exception) -> Response:
    """Handler of every exception that leaves a route."""
    if isinstance(error, HTTPException):
        message = f"{request.method} {request.url.path}: {error.detail}"
        error = ApiError(error.status_code, message, headers=dict(error.headers or {}))
    return as_api_error(error).response()

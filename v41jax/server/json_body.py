"""Bodies in and out: a JSON object within the size limit, and JSON that every client can read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from v41jax.protocol import Fault, ProtocolError


def to_json(value: Any) -> str:
    """Compact JSON text without characters that have no UTF-8 form."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def json_response(body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A JSON answer."""
    return Response(to_json(body), status, dict(headers or {}), media_type="application/json")


class BodyTooLargeError(Exception):
    """More bytes than the limit."""


async def read_bytes(request: Request, limit: int) -> bytes:
    """The body; stops reading as soon as it is longer than `limit` bytes.

    Raises:
      BodyTooLargeError: it is.
    """
    announced = request.headers.get("content-length", "")
    if announced.isascii() and announced.isdigit() and int(announced[:20]) > limit:
        raise BodyTooLargeError
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > limit:
            raise BodyTooLargeError
        chunks.append(chunk)
    return b"".join(chunks)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def parse_object(data: bytes) -> dict[str, Any]:
    """Reads a JSON object.

    Raises:
      ProtocolError: not JSON, or another kind of value.
    """
    try:
        value = json.loads(data, parse_constant=_refuse_constant)
    except RecursionError:
        raise ProtocolError([Fault("body", "is nested too deeply")]) from None
    except ValueError as error:
        raise ProtocolError([Fault("body", f"is not JSON: {error}")]) from None
    if not isinstance(value, dict):
        raise ProtocolError([Fault("body", f"must be a JSON object, got {type(value).__name__}")])
    return value

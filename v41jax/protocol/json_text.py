"""JSON as the protocol writes and reads it: one canonical form out, and a strict, never-raising reader in.

Python's reader accepts more than JSON (`NaN`, `Infinity`, lone surrogates, numbers that overflow to infinity) and
raises several kinds of errors on hostile input. Tool-call arguments travel between a model and a client, so both are
closed here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

NESTING_LIMIT = 128
"""Deepest list or object accepted anywhere; far below what makes Python's own reader and writer fail."""


class Decoded(NamedTuple):
    """A JSON text that was read.

    Attributes:
      value: the Python value; None is also the value of `null`, so look at the enclosing None instead.
    """

    value: Any


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} is out of the range of a double")
    return value


def decode_json(text: str) -> Decoded | None:
    """Reads one JSON value.

    Returns:
      None for everything a client could not read back: malformed text, `NaN` and infinities, numbers past a double,
      integers past Python's digit limit, nesting past `NESTING_LIMIT`, and strings with a lone surrogate.
    """
    try:
        value = json.loads(text, parse_constant=_refuse_constant, parse_float=_finite)
    except (ValueError, RecursionError):
        return None
    if text.count("[") + text.count("{") > NESTING_LIMIT and is_nested_too_deeply(value):
        return None
    if "\\u" in text and unencodable(canonical_json(value)) is not None:
        return None
    return Decoded(value)


def is_nested_too_deeply(value: Any) -> bool:
    """Whether lists and objects stand deeper in each other than `NESTING_LIMIT`."""
    level = [value]
    for _ in range(NESTING_LIMIT + 1):
        containers = [item for item in level if isinstance(item, Mapping | list | tuple)]
        if not containers:
            return False
        level = [child for item in containers for child in (item.values() if isinstance(item, Mapping) else item)]
    return True


def canonical_json(value: Any) -> str:
    """Serializes with separators `, ` and `: `, non-ASCII unescaped, keys in the given order.

    Raises:
      ValueError: for NaN or an infinity.
      TypeError: for a value that JSON has no form for.
    """
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def quote_fragment(text: str) -> str:
    """The inside of a JSON string; quoting pieces and joining them equals quoting the whole."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def decode_object(value: Any) -> dict[str, Any] | None:
    """An object given as itself, as JSON text, or as JSON text encoded twice; None for anything else."""
    for _ in range(2):
        if not isinstance(value, str):
            break
        decoded = decode_json(value)
        value = None if decoded is None else decoded.value
    return value if isinstance(value, dict) else None


def unencodable(text: str) -> str | None:
    """The first lone surrogate of a string as `U+D800`, or None when the string has a UTF-8 form."""
    if text.isascii():
        return None
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"U+{ord(text[error.start]):04X}"
    return None

"""A second reading of a finished reply that accepts only what a well-behaved model writes, and says what is wrong.

For tests and for measuring how well a model keeps to the format (chat protocol, "Output parser", strict mode). It
shares no code with the streaming parser.
"""

from __future__ import annotations

import json
import re
from typing import Any

from v41jax.protocol import tokens
from v41jax.protocol.events import Reply, ToolCall

_INVOKE = re.compile(f'<{tokens.DSML} invoke name="([^"]+)">\n(.*?)</{tokens.DSML} invoke>\n', re.DOTALL)
_PARAMETER = re.compile(
    f'<{tokens.DSML} parameter name="([^"]*)" string="(true|false)">(.*?)</{tokens.DSML} parameter>\n', re.DOTALL
)


class FormatError(ValueError):
    """Text that is not in the format; the message names the rule and the place."""


def parse_strictly(text: str, starts_in_reasoning: bool) -> Reply:
    """Parses a complete reply, end token included.

    Raises:
      FormatError: no end token, reasoning not closed, a control token in reasoning or content, a calls block that is
        not written exactly as the protocol writes one, a value that is not JSON, or a parameter given twice.
    """
    if not text.endswith(tokens.END_OF_SENTENCE):
        raise FormatError(f"the reply does not end in {tokens.END_OF_SENTENCE}")
    rest = text[: -len(tokens.END_OF_SENTENCE)]
    reasoning = ""
    if starts_in_reasoning:
        reasoning, closer, rest = rest.partition(tokens.THINK_CLOSE)
        if not closer:
            raise FormatError(f"the reasoning is not closed by {tokens.THINK_CLOSE}")
    content, opener, block = rest.partition(tokens.BLANK_LINE + tokens.CALLS_OPEN)
    for name, part in (("reasoning", reasoning), ("content", content)):
        for token in tokens.CONTROL_TOKENS:
            if token in part:
                raise FormatError(f"the {name} holds the control token {token} at character {part.index(token)}")
    return Reply(reasoning, content, _calls(block) if opener else (), is_truncated=False)


def _calls(block: str) -> tuple[ToolCall, ...]:
    if not block.startswith("\n") or not block.endswith(tokens.CALLS_CLOSE):
        raise FormatError(f"the calls block is not a line feed, calls, and {tokens.CALLS_CLOSE}")
    body = block[1 : -len(tokens.CALLS_CLOSE)]
    calls = []
    position = 0
    while position < len(body):
        match = _INVOKE.match(body, position)
        if match is None:
            raise FormatError(f"no call at character {position} of the calls block: {body[position : position + 60]!r}")
        calls.append(ToolCall(match[1], json.dumps(_arguments(match[1], match[2]), ensure_ascii=False)))
        position = match.end()
    if not calls:
        raise FormatError("the calls block holds no call")
    return tuple(calls)


def _arguments(name: str, body: str) -> dict[str, Any]:
    arguments: dict[str, Any] = {}
    if body == "\n":
        return arguments
    position = 0
    while position < len(body):
        match = _PARAMETER.match(body, position)
        if match is None:
            raise FormatError(
                f"no parameter at character {position} of call {name!r}: {body[position : position + 60]!r}"
            )
        key, is_string, value = match.groups()
        if key in arguments:
            raise FormatError(f"call {name!r} gives parameter {key!r} twice")
        try:
            arguments[key] = value if is_string == "true" else json.loads(value)
        except ValueError as error:
            raise FormatError(f"parameter {key!r} of call {name!r} is not JSON: {error}") from error
        position = match.end()
    if not arguments:
        raise FormatError(f"call {name!r} has no parameters and no empty line")
    return arguments

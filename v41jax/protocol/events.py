"""What comes out of the parser: events while text arrives, and the whole reply at its end."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More reasoning; never empty."""

    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class ContentDelta:
    """More content; never empty."""

    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class CallStarted:
    """The model began call number `index` (from 0) of the tool `name`."""

    index: int
    name: str


@dataclasses.dataclass(frozen=True, slots=True)
class ArgumentsDelta:
    """The next characters of the JSON text of a call's arguments; never empty. Joined they are `ToolCall.arguments`."""

    index: int
    fragment: str


@dataclasses.dataclass(frozen=True, slots=True)
class CallFinished:
    """No more arguments follow for this call.

    Attributes:
      index: number of the call.
      is_truncated: the stream ended inside it; its arguments hold what was complete.
    """

    index: int
    is_truncated: bool


Event = ReasoningDelta | ContentDelta | CallStarted | ArgumentsDelta | CallFinished


@dataclasses.dataclass(frozen=True, slots=True)
class ToolCall:
    """One call of a reply.

    Attributes:
      name: tool identity as the model wrote it.
      arguments: one JSON object, in generation order.
      is_truncated: the stream ended inside the call.
    """

    name: str
    arguments: str
    is_truncated: bool = False


@dataclasses.dataclass(frozen=True)
class Reply:
    """Everything a parser read.

    Attributes:
      reasoning: text of all reasoning.
      content: text of all content.
      calls: in order.
      is_truncated: the stream ended inside tool-call markup, with or without a call to show for it.
    """

    reasoning: str
    content: str
    calls: tuple[ToolCall, ...]
    is_truncated: bool

    def message(self, call_ids: tuple[str, ...] | None = None) -> dict[str, Any]:
        """The reply as an assistant message, in the form a client gets and sends back.

        Args:
          call_ids: one id for each call; `call_0`, `call_1`, .. when absent. They never reach the prompt.
        """
        message: dict[str, Any] = {"role": "assistant", "content": self.content or None}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            ids = call_ids or tuple(f"call_{index}" for index in range(len(self.calls)))
            message["tool_calls"] = [
                {"id": call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call_id, call in zip(ids, self.calls, strict=True)
            ]
        elif not self.content:
            message["content"] = ""
        return message


def finish_reason(reply: Reply, *, hit_limit: bool) -> str:
    """OpenAI's `finish_reason` of a reply that ran to its end.

    A limit that cut a call short is reported as `length`, so that a client does not run half a call.
    """
    if reply.calls and not (hit_limit and reply.is_truncated):
        return "tool_calls"
    return "length" if hit_limit else "stop"

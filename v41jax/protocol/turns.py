"""Messages after reading: typed, normalized, nothing left to check. `messages.py` makes them, `render.py` writes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from v41jax.protocol.tools import Tool

Role = Literal["system", "user", "assistant", "tool", "latest_reminder"]


@dataclasses.dataclass(frozen=True)
class Image:
    """An image part of a message.

    Attributes:
      index: its place among all images of the request, in the order of the request.
      param: the field it stands in, for errors of whoever loads it: `messages[0].content[1]`.
      part: the part as the client sent it.
    """

    index: int
    param: str
    part: Mapping[str, Any]


Content = tuple[str | Image, ...]
"""Pieces of text and images; rendered with a blank line between neighbours."""


@dataclasses.dataclass(frozen=True)
class ToolResult:
    """The answer to one call; `call_id` is None when the client named none."""

    call_id: str | None
    content: Content


@dataclasses.dataclass(frozen=True)
class Call:
    """A call the assistant made earlier; `arguments` keeps the order of its keys."""

    call_id: str | None
    name: str
    arguments: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Turn:
    """One message, or several merged into one turn.

    Attributes:
      role: who speaks. `developer` has become `system`; `tool` exists only before merging.
      content: text and images of every role but `user`.
      blocks: contents and tool results of a `user` turn, in order.
      reasoning: earlier reasoning of an `assistant` turn.
      calls: calls of an `assistant` turn.
      tools: tools declared by a `system` turn.
      response_format: schema declared by a `system` turn, or None.
      task: task name of a `user` turn, or None.
      call_id: the call a `tool` turn answers.
      is_open: an `assistant` turn that generation continues: no end token.
    """

    role: Role
    content: Content = ()
    blocks: tuple[Content | ToolResult, ...] = ()
    reasoning: str = ""
    calls: tuple[Call, ...] = ()
    tools: tuple[Tool, ...] = ()
    response_format: Any = None
    task: str | None = None
    call_id: str | None = None
    is_open: bool = False

    @property
    def is_only_tool_results(self) -> bool:
        """Whether a user turn holds results and no words of a user."""
        return bool(self.blocks) and all(isinstance(block, ToolResult) for block in self.blocks)

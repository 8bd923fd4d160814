"""From a client's messages to `Turn`s: every field checked, every fault collected with its index and name.

Whatever a client sends, the only outcome besides turns is a list of faults. Two severities (chat protocol, "Tool-call
dialect (DSML)" and "HTTP endpoint"): the plain reading accepts whatever the encoder has a rendering for, `strict`
also refuses what a server must answer with 400.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from v41jax.protocol.errors import Fault, shorten
from v41jax.protocol.json_text import decode_object, unencodable
from v41jax.protocol.tokens import IMAGE, TASKS
from v41jax.protocol.tools import Tool, ToolNames, qualified_name, read_tools, schema_text
from v41jax.protocol.turns import Call, Content, Image, Role, ToolResult, Turn

_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "latest_reminder": "latest_reminder",
}
_TEXT_PARTS = ("text", "input_text", "output_text")
_IMAGE_PARTS = ("image_url", "input_image", "image")
_ARGUMENTS = "arguments"


def read_messages(
    messages: Any, *, strict: bool, tools: Sequence[Tool] = (), param: str = "messages"
) -> tuple[list[Turn], list[Fault]]:
    """Reads a list of messages; a message with faults is left out of the turns.

    Args:
      messages: what the client sent.
      strict: also refuse unsupported parts of tool results, calls without id or object arguments, and tool messages
        that answer no call or come late.
      tools: tools declared outside the messages.
      param: name of the list in faults.

    Returns:
      The turns, not yet merged, and every fault.
    """
    reader = _Reader(strict, tools)
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        return [], [Fault(param, f"must be a list of messages, got {type(messages).__name__}")]
    turns = []
    for index, message in enumerate(messages):
        turn = reader.message(message, f"{param}[{index}]")
        if turn is not None:
            turns.append(turn)
    return turns, reader.faults


class _Reader:
    """One pass over a list of messages."""

    def __init__(self, strict: bool, tools: Sequence[Tool]):
        self.strict = strict
        self.faults: list[Fault] = []
        self.images = 0
        self.call_ids: set[str] = set()
        self.unanswered: dict[str, None] = {}  # in the order of the calls
        self.names = ToolNames(tools)

    def fault(self, param: str, message: str) -> None:
        self.faults.append(Fault(param, message))

    def message(self, message: Any, where: str) -> Turn | None:
        before = len(self.faults)
        if not isinstance(message, Mapping):
            self.fault(where, f"must be an object, got {type(message).__name__}")
            return None
        name = message.get("role")
        role = _ROLES.get(name) if isinstance(name, str) else None
        if role is None:
            self.fault(f"{where}.role", f"must be one of {', '.join(_ROLES)}, got {shorten(name)}")
            return None
        read = {
            "system": self.system,
            "user": self.user,
            "assistant": self.assistant,
            "tool": self.tool,
            "latest_reminder": self.reminder,
        }[role]
        turn = read(message, where)
        return turn if len(self.faults) == before else None

    def system(self, message: Mapping[str, Any], where: str) -> Turn:
        self.expect_answered(where)
        tools = read_tools(message.get("tools"), f"{where}.tools", self.faults)
        self.names.add(tools)
        response_format = message.get("response_format")
        if response_format is not None:
            if not isinstance(response_format, Mapping):
                kind = type(response_format).__name__
                self.fault(f"{where}.response_format", f"must be a JSON schema object, got {kind}")
            schema_text(response_format, f"{where}.response_format", self.faults)
        return Turn("system", self.content(message, where), tools=tools, response_format=response_format)

    def reminder(self, message: Mapping[str, Any], where: str) -> Turn:
        self.expect_answered(where)
        return Turn("latest_reminder", self.content(message, where))

    def user(self, message: Mapping[str, Any], where: str) -> Turn:
        blocks: tuple[Content | ToolResult, ...]
        given = message.get("content_blocks")
        if given is None or given == []:
            blocks = (self.content(message, where),)
        else:
            blocks = self.content_blocks(given, f"{where}.content_blocks")
        if not any(isinstance(block, ToolResult) for block in blocks):
            self.expect_answered(where)
        task = message.get("task")
        if task is not None and not (isinstance(task, str) and task in TASKS):
            self.fault(f"{where}.task", f"must be one of {', '.join(TASKS)}, got {shorten(task)}")
        return Turn("user", blocks=blocks, task=task)

    def content_blocks(self, given: Any, where: str) -> tuple[Content | ToolResult, ...]:
        if not isinstance(given, list | tuple):
            self.fault(where, f"must be a list of blocks, got {type(given).__name__}")
            return ()
        blocks: list[Content | ToolResult] = []
        for index, block in enumerate(given):
            param = f"{where}[{index}]"
            if isinstance(block, Mapping) and block.get("type") == "tool_result":
                call_id = self.optional_string(block, "tool_use_id", param)
                self.answer(call_id, f"{param}.tool_use_id")
                blocks.append(ToolResult(call_id, self.content(block, param, tolerant=True)))
            else:
                piece = self.part(block, param, tolerant=True)
                blocks.append(() if piece is None else (piece,))
        return tuple(blocks)

    def tool(self, message: Mapping[str, Any], where: str) -> Turn:
        call_id = self.optional_string(message, "tool_call_id", where)
        self.answer(call_id, f"{where}.tool_call_id")
        return Turn("tool", self.content(message, where, tolerant=True), call_id=call_id)

    def assistant(self, message: Mapping[str, Any], where: str) -> Turn:
        self.expect_answered(where)
        field = "reasoning" if message.get("reasoning_content") is None else "reasoning_content"
        reasoning = self.optional_string(message, field, where) or ""
        is_open = message.get("wo_eos")
        if is_open is not None and not isinstance(is_open, bool):
            self.fault(f"{where}.wo_eos", f"must be true or false, got {shorten(is_open)}")
        calls = self.calls(message.get("tool_calls"), f"{where}.tool_calls")
        if self.strict and message.get("function_call") is not None:
            self.fault(f"{where}.function_call", "is not supported: send the call in `tool_calls`")
        if self.strict and message.get("audio") is not None:
            self.fault(f"{where}.audio", "is not supported: send what was said as `content`")
        return Turn("assistant", self.content(message, where), reasoning=reasoning, calls=calls, is_open=bool(is_open))

    def calls(self, given: Any, where: str) -> tuple[Call, ...]:
        if given is None:
            return ()
        if not isinstance(given, list | tuple):
            self.fault(where, f"must be a list of calls, got {type(given).__name__}")
            return ()
        read = [self.call(call, f"{where}[{index}]") for index, call in enumerate(given)]
        calls = tuple(call for call in read if call is not None)
        self.unanswered = dict.fromkeys(call.call_id for call in calls if call.call_id is not None)
        self.call_ids.update(self.unanswered)
        return calls

    def call(self, call: Any, where: str) -> Call | None:
        if not isinstance(call, Mapping):
            self.fault(where, f"must be an object, got {type(call).__name__}")
            return None
        call_id = self.optional_string(call, "id", where)
        if self.strict and not call_id:
            self.fault(f"{where}.id", f"must be a non-empty string, got {shorten(call.get('id'))}")
        function = call.get("function")
        if not isinstance(function, Mapping):
            self.fault(f"{where}.function", f"must be an object, got {type(function).__name__}")
            return None
        name = qualified_name(call, function, where, self.faults)
        if name is not None:
            self.text(name, f"{where}.function.name")
            reason = self.names.bare_name_fault(name)
            if self.strict and reason is not None:
                self.fault(f"{where}.function.name", reason)
        arguments = self.arguments(function.get(_ARGUMENTS), f"{where}.function.{_ARGUMENTS}")
        return None if name is None or arguments is None else Call(call_id, name, arguments)

    def arguments(self, given: Any, where: str) -> Mapping[str, Any] | None:
        decoded = decode_object(given)
        if decoded is None and self.strict:
            self.fault(where, f"must be a JSON object, or the text of one, got {shorten(given)}")
            return None
        if decoded is None:
            if given is None:
                return {}
            text = given if isinstance(given, str) else schema_text(given, where, self.faults)
            decoded = {_ARGUMENTS: text or ""}
        before = len(self.faults)
        for key, value in decoded.items():
            if not isinstance(key, str):
                self.fault(where, f"keys must be strings, got {shorten(key)}")
                continue
            self.text(key, where)
            if isinstance(value, str):
                self.text(value, f"{where}.{shorten(key)}")
            else:
                schema_text(value, f"{where}.{shorten(key)}", self.faults)
        return decoded if len(self.faults) == before else None

    def content(self, holder: Mapping[str, Any], where: str, *, tolerant: bool = False) -> Content:
        given = holder.get("content")
        where = f"{where}.content"
        if given is None:
            return ("",)
        if isinstance(given, str):
            self.text(given, where)
            return (given,)
        if not isinstance(given, list | tuple):
            self.fault(where, f"must be a string, null or a list of parts, got {type(given).__name__}")
            return ()
        pieces = [self.part(part, f"{where}[{index}]", tolerant) for index, part in enumerate(given)]
        return tuple(piece for piece in pieces if piece is not None)

    def part(self, part: Any, where: str, tolerant: bool) -> str | Image | None:
        """One content part; `tolerant` writes an unsupported type as words instead of refusing it."""
        if not isinstance(part, Mapping):
            self.fault(where, f"must be an object with `type`, got {type(part).__name__}")
            return None
        kind = part.get("type")
        if isinstance(kind, str) and kind in _TEXT_PARTS:
            text = part.get("text")
            if not isinstance(text, str):
                self.fault(f"{where}.text", f"must be a string, got {type(text).__name__}")
                return None
            self.text(text, f"{where}.text")
            return text
        if isinstance(kind, str) and kind in _IMAGE_PARTS:
            self.images += 1
            return Image(self.images - 1, where, part)
        if isinstance(kind, str) and tolerant and not self.strict:
            self.text(kind, f"{where}.type")
            return f"[Unsupported {kind}]"
        allowed = ", ".join(_TEXT_PARTS + _IMAGE_PARTS)
        self.fault(f"{where}.type", f"must be one of {allowed}, got {shorten(kind)}")
        return None

    def optional_string(self, holder: Mapping[str, Any], field: str, where: str) -> str | None:
        value = holder.get(field)
        if value is None:
            return None
        if not isinstance(value, str):
            self.fault(f"{where}.{field}", f"must be a string, got {type(value).__name__}")
            return None
        self.text(value, f"{where}.{field}")
        return value

    def text(self, text: str, where: str) -> None:
        """Refuses what cannot be encoded and what would count as an image."""
        surrogate = unencodable(text)
        if surrogate is not None:
            self.fault(where, f"contains the lone surrogate {surrogate}, which is not text")
        if IMAGE in text:
            self.fault(where, f"must not contain the image placeholder {IMAGE}; send an image part instead")

    def answer(self, call_id: str | None, where: str) -> None:
        """Notes that a tool result answers a call."""
        if call_id is not None:
            self.unanswered.pop(call_id, None)
        if not self.strict:
            return
        if not call_id:
            self.fault(where, "must name the call it answers")
        elif self.call_ids and call_id not in self.call_ids:
            self.fault(where, f"{shorten(call_id)} matches no earlier tool call")

    def expect_answered(self, where: str) -> None:
        """A message that is no tool result ends the time for answers."""
        if self.strict and self.unanswered:
            missing = ", ".join(shorten(call_id) for call_id in list(self.unanswered)[:5])
            self.fault(where, f"comes before the results of the tool calls {missing}; send their tool messages first")
        self.unanswered = {}

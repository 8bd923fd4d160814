"""Turns to prompt: headers, reasoning, the tools section, tool calls and results.

Source: chat protocol, "Rendering", "Tools section" and "Tool-call dialect (DSML)".
"""

from __future__ import annotations

from collections.abc import Sequence

from v41jax.protocol import tokens
from v41jax.protocol.json_text import canonical_json
from v41jax.protocol.prompt import OpenReply, PromptWriter
from v41jax.protocol.thinking import effort_line
from v41jax.protocol.tools import Tool
from v41jax.protocol.turns import Call, Content, ToolResult, Turn

_TOOLS_BEFORE = f"""## Tools

You have access to a set of tools to help answer the user's question. You can invoke tools by writing a \
"{tokens.CALLS_OPEN}" block like the following:

{tokens.CALLS_OPEN}
{tokens.INVOKE_OPEN}$TOOL_NAME{tokens.INVOKE_HEAD_END}
{tokens.PARAMETER_OPEN} name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE{tokens.PARAMETER_CLOSE}
...
{tokens.INVOKE_CLOSE}
{tokens.INVOKE_OPEN}$TOOL_NAME2{tokens.INVOKE_HEAD_END}
...
{tokens.INVOKE_CLOSE}
{tokens.CALLS_CLOSE}

String parameters should be specified as is and set `string="true"`. For all other types (numbers, booleans, arrays, \
objects), pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by {tokens.THINK_OPEN}), you MUST output your complete reasoning inside \
{tokens.THINK_OPEN}...{tokens.THINK_CLOSE} BEFORE any tool calls or final response.

Otherwise, output directly after {tokens.THINK_CLOSE} with tool calls or final response.

### Available Tool Schemas

"""
_TOOLS_AFTER = """

You MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.
"""
_RESPONSE_FORMAT = "## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n"


class Renderer:
    """Writes turns of one conversation.

    Args:
      turns: the whole conversation, preprocessed; `write_turn` is called for some or all of its indices, ascending.
      last_user: index of the last turn that asks something.
      thinking: thinking mode is on.
      effort: 1..100.
      drop_thinking: reasoning before `last_user` leaves the prompt.
    """

    def __init__(self, turns: Sequence[Turn], last_user: int, *, thinking: bool, effort: int, drop_thinking: bool):
        self.writer = PromptWriter()
        self.starts_in_reasoning = False
        self.expects_reply = False
        self.open_reply: OpenReply | None = None
        self._turns = turns
        self._last_user = last_user
        self._thinking = thinking
        self._effort = effort
        self._drop = drop_thinking

    def write_turn(self, index: int) -> None:
        """Writes one turn and, where the assistant speaks next, its header."""
        turn = self._turns[index]
        self.starts_in_reasoning = self.expects_reply = False
        self.open_reply = None
        if index == 0 and (self._thinking or turn.role == "system"):
            self.writer.control(tokens.SYSTEM)
            if self._thinking:
                self.writer.text(effort_line(self._effort))
        if turn.role == "system":
            self._system(turn, index)
        elif turn.role == "user":
            self._user(turn)
        elif turn.role == "latest_reminder":
            self.writer.control(tokens.LATEST_REMINDER)
            write_content(turn.content, self.writer)
        else:
            self._assistant(turn, index)
        is_last = index + 1 == len(self._turns)
        if is_last or self._turns[index + 1].role in ("assistant", "latest_reminder"):
            self._header(turn, index)

    def _system(self, turn: Turn, index: int) -> None:
        if index > 0:
            self.writer.control(tokens.SYSTEM)
        write_content(turn.content, self.writer)
        if turn.tools:
            self.writer.text(tokens.BLANK_LINE)
            write_tools(turn.tools, self.writer)
        if turn.response_format is not None:
            self.writer.text(tokens.BLANK_LINE + _RESPONSE_FORMAT + canonical_json(turn.response_format))

    def _user(self, turn: Turn) -> None:
        self.writer.control(tokens.USER)
        for position, block in enumerate(turn.blocks):
            if position:
                self.writer.text(tokens.BLANK_LINE)
            if isinstance(block, ToolResult):
                self.writer.text("<tool_result>")
                write_content(block.content, self.writer)
                self.writer.text("</tool_result>")
            else:
                write_content(block, self.writer)

    def _assistant(self, turn: Turn, index: int) -> None:
        after_task = index > 0 and self._turns[index - 1].task is not None
        reasons = self._thinking and not after_task and (not self._drop or index > self._last_user)
        first = self.writer.begin_reply()
        write_reply(turn, self.writer, with_reasoning=reasons)
        if turn.is_open:
            self.expects_reply = True
            self.open_reply = OpenReply(turn, first, reasons)
            return
        self.writer.end_reply(first)
        self.writer.control(tokens.END_OF_SENTENCE)

    def _header(self, turn: Turn, index: int) -> None:
        if turn.task is not None and turn.task != "action":
            self.writer.control(tokens.TASKS[turn.task])
            self.expects_reply = True
        elif turn.role == "user" or (turn.role == "system" and index > 0):
            thinks = self._thinking and (turn.task is not None or not self._drop or index >= self._last_user)
            self.writer.control(tokens.ASSISTANT)
            self.writer.control(tokens.THINK_OPEN if thinks else tokens.THINK_CLOSE)
            if turn.task is not None:
                self.writer.control(tokens.TASKS[turn.task])
            self.starts_in_reasoning = thinks
            self.expects_reply = True


def write_content(content: Content, writer: PromptWriter) -> None:
    """Texts and images with a blank line between neighbours."""
    for position, piece in enumerate(content):
        if position:
            writer.text(tokens.BLANK_LINE)
        if isinstance(piece, str):
            writer.text(piece)
        else:
            writer.image(piece)


def write_tools(tools: Sequence[Tool], writer: PromptWriter) -> None:
    """The tools section; everything but the schema lines is fixed."""
    writer.template(_TOOLS_BEFORE)
    writer.text("\n".join(tool.schema for tool in tools))
    writer.template(_TOOLS_AFTER)


def write_reply(turn: Turn, writer: PromptWriter, *, with_reasoning: bool) -> None:
    """The body of an assistant turn: what the model writes between the header and the end token."""
    if with_reasoning:
        writer.text(turn.reasoning)
        writer.control(tokens.THINK_CLOSE)
    write_content(turn.content, writer)
    if turn.calls:
        writer.text(tokens.BLANK_LINE)
        write_calls(turn.calls, writer)


def write_calls(calls: Sequence[Call], writer: PromptWriter) -> None:
    """A calls block. Values given as strings are raw, without any escaping; all others are JSON."""
    writer.template(tokens.CALLS_OPEN + "\n")
    for call in calls:
        writer.template(tokens.INVOKE_OPEN)
        writer.text(call.name + tokens.INVOKE_HEAD_END + "\n")
        for key, value in call.arguments.items():
            is_string = isinstance(value, str)
            writer.template(tokens.PARAMETER_OPEN)
            writer.text(f' name="{key}" string="{"true" if is_string else "false"}">')
            writer.text(value if is_string else canonical_json(value))
            writer.template(tokens.PARAMETER_CLOSE + "\n")
        if not call.arguments:
            writer.text("\n")
        writer.template(tokens.INVOKE_CLOSE + "\n")
    writer.template(tokens.CALLS_CLOSE)

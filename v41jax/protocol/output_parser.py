"""Generated text to reasoning, content and tool calls, as it arrives.

Source: chat protocol, "Output parser". The parser works on text, not on ids: only the marker inside a tag is one token.
Whatever the pieces the text is cut into, the joined events are the same.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable

from v41jax.protocol import tokens
from v41jax.protocol.arguments import CallBuilder
from v41jax.protocol.events import ContentDelta, Event, ReasoningDelta, Reply, ToolCall
from v41jax.protocol.scanner import Markers
from v41jax.protocol.tools import Tool

_SPACED_CALLS_OPEN = tokens.BLANK_LINE + tokens.CALLS_OPEN  # the blank line belongs to the markup
_PARAMETER_OPENERS = tuple(tokens.PARAMETER_OPEN + space for space in " \n\t")
_HEAD = re.compile(r'\s*name\s*=\s*"([^"]*)"\s*(?:string\s*=\s*"([^"]*)"\s*)?')


class _State(enum.Enum):
    """Where in a reply the parser stands; the names are those of the specification, plus HEAD."""

    REASONING = enum.auto()
    CONTENT = enum.auto()
    PREAMBLE = enum.auto()  # after the calls opener
    NAME = enum.auto()
    ARGS = enum.auto()  # inside an invoke, between parameters
    HEAD = enum.auto()  # inside the opening tag of a parameter
    VALUE = enum.auto()
    AFTER = enum.auto()


_MARKERS = {
    _State.REASONING: Markers(tokens.THINK_CLOSE, tokens.THINK_OPEN, tokens.CALLS_OPEN, _SPACED_CALLS_OPEN),
    _State.CONTENT: Markers(
        tokens.THINK_CLOSE, tokens.THINK_OPEN, tokens.CALLS_OPEN, _SPACED_CALLS_OPEN, tokens.INVOKE_OPEN
    ),
    _State.PREAMBLE: Markers(tokens.INVOKE_OPEN, tokens.CALLS_CLOSE),
    _State.NAME: Markers(tokens.INVOKE_HEAD_END),
    _State.ARGS: Markers(*_PARAMETER_OPENERS, tokens.INVOKE_CLOSE, tokens.CALLS_CLOSE, tokens.INVOKE_OPEN),
    _State.HEAD: Markers('"', ">", "<"),
    _State.VALUE: Markers(
        tokens.PARAMETER_CLOSE, *_PARAMETER_OPENERS, tokens.INVOKE_CLOSE, tokens.CALLS_CLOSE, tokens.CALLS_OPEN
    ),
    _State.AFTER: Markers(tokens.INVOKE_OPEN, tokens.CALLS_OPEN),
}


class OutputParser:
    """Parses one reply.

        parser = OutputParser(prompt.starts_in_reasoning, tools)
        for text in pieces:
            for event in parser.feed(text):
                ...
        for event in parser.finish():
            ...
        parser.reply

    Text goes in detokenized, with control tokens as their literals and without the end token.

    Args:
      starts_in_reasoning: the prompt ended in `<think>`; `EncodedPrompt.starts_in_reasoning`.
      tools: the declared tools; None when they are unknown. When known, the types they declare help to read
        parameters, and a call of anything else does not survive a stream that is cut inside it.
    """

    def __init__(self, starts_in_reasoning: bool, tools: Iterable[Tool] | None = None):
        self._state = _State.REASONING if starts_in_reasoning else _State.CONTENT
        self._tools = None if tools is None else {tool.name: tool for tool in tools}
        self._held = ""  # text that may be the beginning of a marker
        self._collected: list[str] = []  # of a call name or a parameter head
        self._in_quotes = False
        self._call: CallBuilder | None = None
        self._events: list[Event] = []
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._calls: list[ToolCall] = []
        self._reply: Reply | None = None

    def feed(self, text: str) -> list[Event]:
        """Takes the next piece of text and returns what became certain by it.

        Raises:
          RuntimeError: after `finish`.
        """
        if self._reply is not None:
            raise RuntimeError("the parser is finished; make a new one for another reply")
        buffer = self._held + text
        position = 0
        while True:
            end, marker = _MARKERS[self._state].scan(buffer, position)
            self._text(buffer[position:end])
            position = end
            if marker is None:
                break
            if not self._is_left_in_place(marker):
                position += len(marker)
            self._marker(marker)
        self._held = buffer[position:]
        return self._take()

    def finish(self) -> list[Event]:
        """Ends the stream: text that waited for more is released, an open call is closed with what is complete."""
        if self._reply is not None:
            return []
        state = self._state
        self._text(self._held)
        self._held = ""
        if self._call is not None:
            if state is _State.VALUE:
                self._events += self._call.close_parameter(is_complete=False)
            self._close_call(is_truncated=True)
        self._reply = Reply(
            "".join(self._reasoning),
            "".join(self._content),
            tuple(self._calls),
            is_truncated=state not in (_State.REASONING, _State.CONTENT, _State.AFTER),
        )
        return self._take()

    @property
    def reply(self) -> Reply:
        """The whole reply.

        Raises:
          RuntimeError: before `finish`.
        """
        if self._reply is None:
            raise RuntimeError("the reply is not complete before finish()")
        return self._reply

    def _take(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def _is_left_in_place(self, marker: str) -> bool:
        """Whether a marker only ends the current state and is then seen by the next one."""
        if self._state is _State.VALUE:
            return marker != tokens.PARAMETER_CLOSE
        return self._state is _State.HEAD and marker == "<" and not self._in_quotes

    def _text(self, text: str) -> None:
        """Text of the current state that is no marker."""
        if not text:
            return
        if self._state is _State.REASONING:
            self._reasoning.append(text)
            self._events.append(ReasoningDelta(text))
        elif self._state is _State.CONTENT:
            self._content.append(text)
            self._events.append(ContentDelta(text))
        elif self._state in (_State.NAME, _State.HEAD):
            self._collected.append(text)
        elif self._state is _State.VALUE and self._call is not None:
            self._events += self._call.add_value(text)

    def _marker(self, marker: str) -> None:
        state = self._state
        if state in (_State.REASONING, _State.CONTENT):
            self._marker_in_text(marker)
        elif state is _State.NAME:
            self._open_call()
        elif state is _State.HEAD:
            self._marker_in_head(marker)
        elif state is _State.VALUE:
            if self._call is not None:
                self._events += self._call.close_parameter(is_complete=True)
            self._state = _State.ARGS
        elif state is _State.ARGS and marker in _PARAMETER_OPENERS:
            self._begin(_State.HEAD)
        else:
            if state is _State.ARGS:
                self._close_call(is_truncated=False)
            self._marker_between_calls(marker)

    def _marker_in_text(self, marker: str) -> None:
        if marker == tokens.THINK_OPEN:
            self._state = _State.REASONING
        elif marker == tokens.THINK_CLOSE:
            self._state = _State.CONTENT
        elif marker == tokens.INVOKE_OPEN:
            self._begin(_State.NAME)
        else:
            self._state = _State.PREAMBLE

    def _marker_between_calls(self, marker: str) -> None:
        if marker == tokens.INVOKE_OPEN:
            self._begin(_State.NAME)
        elif marker == tokens.CALLS_OPEN:
            self._state = _State.PREAMBLE
        else:
            self._state = _State.AFTER

    def _marker_in_head(self, marker: str) -> None:
        """A head ends at the first `>` outside quotes; one that is not well formed is dropped as any text is there."""
        if marker == '"':
            self._in_quotes = not self._in_quotes
        if marker == '"' or self._in_quotes:
            self._collected.append(marker)
            return
        head = _HEAD.fullmatch("".join(self._collected)) if marker == ">" else None
        self._state = _State.ARGS
        if head is not None and self._call is not None:
            attribute = head[2] if head[2] in ("true", "false") else None
            self._events += self._call.open_parameter(head[1], attribute)
            self._state = _State.VALUE

    def _begin(self, state: _State) -> None:
        self._state = state
        self._collected = []
        self._in_quotes = False

    def _open_call(self) -> None:
        self._call = CallBuilder(len(self._calls), "".join(self._collected), self._tools)
        self._events += self._call.start()
        self._state = _State.ARGS

    def _close_call(self, *, is_truncated: bool) -> None:
        if self._call is None:
            return
        events, call = self._call.close(is_truncated=is_truncated)
        self._events += events
        if call is not None:
            self._calls.append(call)
        self._call = None


def parse_reply(text: str, starts_in_reasoning: bool, tools: Iterable[Tool] | None = None) -> Reply:
    """Parses a whole reply at once; see `OutputParser`."""
    parser = OutputParser(starts_in_reasoning, tools)
    parser.feed(text)
    parser.finish()
    return parser.reply

"""From the parameters of one call to the JSON text of its arguments, as they arrive.

Source: chat protocol, "Output parser": coercion, truncation, and what may stream.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from v41jax.protocol.events import ArgumentsDelta, CallFinished, CallStarted, Event, ToolCall
from v41jax.protocol.json_text import canonical_json, decode_json, decode_object, quote_fragment
from v41jax.protocol.tools import Tool

_WRAPPERS = ("arguments", "input")


class CallBuilder:
    """One call under construction. Every method returns the events it makes.

    String values stream; every other value waits for its end. Two kinds of calls are held until they close: a call
    whose first parameter may turn out to wrap all the others, and, where the declared tools are known, a call of an
    undeclared tool, because it must vanish when the stream is cut inside it.

    Args:
      index: number of the call in the reply.
      name: tool identity as generated.
      tools: declared tools by name; None when they are unknown.
    """

    def __init__(self, index: int, name: str, tools: Mapping[str, Tool] | None):
        self.index = index
        self.name = name
        self._tool = None if tools is None else tools.get(name)
        self._is_undeclared = tools is not None and self._tool is None
        self._keys: set[str] = set()
        self._fragments: list[str] = []
        self._wrapped: tuple[str, Any] | None = None  # the only parameter so far, which may hold all arguments
        self._may_be_wrapped = False
        self._key: str | None = None  # parameter being read; None while a duplicate is skipped
        self._attribute: str | None = None
        self._streams = False
        self._value: list[str] = []

    def start(self) -> list[Event]:
        """Announces the call, unless it is held."""
        return [] if self._is_undeclared else [CallStarted(self.index, self.name)]

    def open_parameter(self, key: str, attribute: str | None) -> list[Event]:
        """A parameter head was read. The first parameter of a name counts, later ones are skipped.

        Args:
          key: its name.
          attribute: the value of `string="..."`, `true` or `false`; None when missing.
        """
        if key in self._keys:
            self._key = None
            return []
        declared = {} if self._tool is None else self._tool.parameters
        if not self._keys:
            self._may_be_wrapped = self._tool is not None and key in _WRAPPERS and key not in declared
        self._keys.add(key)
        self._key = key
        self._value = []
        if attribute is None and _declares_string(declared.get(key)):
            attribute = "true"
        self._attribute = attribute
        self._streams = attribute == "true"
        return self._write(self._label(key) + '"') if self._streams else []

    def add_value(self, text: str) -> list[Event]:
        """More text of the open parameter's value."""
        if self._key is None or not text:
            return []
        if self._streams and not self._may_be_wrapped:
            return self._write(quote_fragment(text))
        self._value.append(text)
        return self._write(quote_fragment(text)) if self._streams else []

    def close_parameter(self, *, is_complete: bool) -> list[Event]:
        """The value ended, or the stream did; then a value that must be JSON counts only if it is."""
        key, self._key = self._key, None
        if key is None:
            return []
        text = "".join(self._value)
        if self._streams:
            events = self._write('"')
            value: Any = text
        else:
            decoded = decode_json(text)
            if decoded is None and not is_complete:
                self._keys.discard(key)
                return []
            value = text if decoded is None else decoded.value
            events = self._write(self._label(key) + canonical_json(value))
        if self._may_be_wrapped:
            self._wrapped = (key, value)
        return events

    def close(self, *, is_truncated: bool) -> tuple[list[Event], ToolCall | None]:
        """The call ended, or the stream did inside it. No call is left of a truncated call of an undeclared tool."""
        if is_truncated and self._is_undeclared:
            return [], None
        unwrapped = self._unwrapped()
        if unwrapped is None:
            last = self._write("}" if self._fragments else "{}")
            arguments = "".join(self._fragments)
        else:
            arguments = canonical_json(unwrapped)
            last = []
        events = last
        if self._is_undeclared:
            events = [CallStarted(self.index, self.name), ArgumentsDelta(self.index, arguments)]
        elif self._may_be_wrapped:
            events = [ArgumentsDelta(self.index, arguments)]
        events.append(CallFinished(self.index, is_truncated))
        return events, ToolCall(self.name, arguments, is_truncated)

    def _label(self, key: str) -> str:
        return f"{', ' if self._fragments else '{'}{canonical_json(key)}: "

    def _write(self, fragment: str) -> list[Event]:
        self._fragments.append(fragment)
        if self._is_undeclared or self._may_be_wrapped:
            return []
        return [ArgumentsDelta(self.index, fragment)]

    def _unwrapped(self) -> dict[str, Any] | None:
        """The object inside the only parameter, when that one is not declared and all keys of the object are."""
        if self._wrapped is None or len(self._keys) != 1 or self._tool is None:
            return None
        inner = decode_object(self._wrapped[1])
        if inner is None or any(key not in self._tool.parameters for key in inner):
            return None
        return inner


def _declares_string(schema: Any) -> bool:
    return isinstance(schema, Mapping) and schema.get("type") == "string"

"""Tools a request offers: normalized names, the schema lines of the prompt, and `tool_choice`.

A tool has one identity, `name` or `namespace::name`, used in schemas, prompts, history, `tool_choice` and parsed calls
(chat protocol, "Tool-call dialect (DSML)").
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from v41jax.protocol.errors import Fault, ProtocolError, shorten
from v41jax.protocol.json_text import NESTING_LIMIT, canonical_json, is_nested_too_deeply, unencodable
from v41jax.protocol.tokens import IMAGE

SEPARATOR = "::"
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}(::[A-Za-z0-9_-]{1,64})?")
_NAME_RULE = "1 to 64 of A-Z a-z 0-9 _ -, with at most one namespace in front as `namespace::name`"


@dataclasses.dataclass(frozen=True)
class Tool:
    """One declared tool.

    Attributes:
      name: its identity, with the namespace if it has one.
      function: the caller's `function` object with the qualified name in place; keys and order untouched.
      schema: `function` as one line of canonical JSON, as the prompt shows it.
    """

    name: str
    function: Mapping[str, Any]
    schema: str

    @property
    def parameters(self) -> Mapping[str, Any]:
        """Schema of each declared parameter by name; empty when none are declared."""
        parameters = self.function.get("parameters")
        properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
        return properties if isinstance(properties, Mapping) else {}


@dataclasses.dataclass(frozen=True)
class ToolChoice:
    """What the client wants of the tools it offers.

    `required` and a named tool are best effort unless decoding is constrained: `name` only narrows what is offered.

    Attributes:
      mode: `auto`, `none`, `required`, or `named`.
      name: the tool's identity in mode `named`.
    """

    mode: Literal["auto", "none", "required", "named"] = "auto"
    name: str | None = None

    def offered(self, tools: Sequence[Tool]) -> tuple[Tool, ...]:
        """The tools the prompt should show: none of them, the named one, or all."""
        if self.mode == "none":
            return ()
        return tuple(tool for tool in tools if self.mode != "named" or tool.name == self.name)


def read_tools(tools: Any, param: str, faults: list[Fault]) -> tuple[Tool, ...]:
    """Reads an OpenAI tool list; null and the empty list declare nothing.

    Every entry must be a function with a unique name and, if it has `parameters`, an object there. Faults go to
    `faults`; entries with one are left out.
    """
    if tools is None:
        return ()
    if not isinstance(tools, Sequence) or isinstance(tools, str | bytes):
        faults.append(Fault(param, f"must be a list of tools, got {type(tools).__name__}"))
        return ()
    found: dict[str, Tool] = {}
    for index, entry in enumerate(tools):
        where = f"{param}[{index}]"
        if isinstance(entry, Tool):
            tool: Tool | None = entry
        else:
            tool = _read_tool(entry, where, faults)
        if tool is None:
            continue
        if tool.name in found:
            faults.append(Fault(f"{where}.function.name", f"{tool.name!r} is declared twice; names must be unique"))
        found.setdefault(tool.name, tool)
    return tuple(found.values())


def normalize_tools(tools: Any, param: str = "tools") -> tuple[Tool, ...]:
    """`read_tools` for a whole request field.

    Raises:
      ProtocolError: with every fault.
    """
    faults: list[Fault] = []
    result = read_tools(tools, param, faults)
    if faults:
        raise ProtocolError(faults)
    return result


def _read_tool(entry: Any, where: str, faults: list[Fault]) -> Tool | None:
    if not isinstance(entry, Mapping):
        faults.append(Fault(where, f"must be an object, got {type(entry).__name__}"))
        return None
    if entry.get("type", "function") != "function":
        faults.append(Fault(f"{where}.type", f"must be 'function', got {shorten(entry['type'])}"))
        return None
    function = entry.get("function")
    if not isinstance(function, Mapping):
        faults.append(Fault(f"{where}.function", f"must be an object, got {type(function).__name__}"))
        return None
    before = len(faults)
    name = qualified_name(entry, function, where, faults)
    if name is not None and not _NAME.fullmatch(name):
        faults.append(Fault(f"{where}.function.name", f"must be {_NAME_RULE}, got {shorten(name)}"))
    if not isinstance(function.get("parameters", {}), Mapping):
        kind = type(function["parameters"]).__name__
        faults.append(Fault(f"{where}.function.parameters", f"must be a JSON schema object, got {kind}"))
    rendered = {key: name if key == "name" else value for key, value in function.items() if key != "namespace"}
    schema = schema_text(rendered, f"{where}.function", faults)
    if name is None or schema is None or len(faults) > before:
        return None
    return Tool(name, rendered, schema)


def qualified_name(
    holder: Mapping[str, Any], function: Mapping[str, Any], where: str, faults: list[Fault]
) -> str | None:
    """The identity of a tool or call: its name, with a namespace named next to or inside `function` in front.

    Returns:
      None after adding a fault: no name, namespaces that disagree, or more than one level.
    """
    name = function.get("name")
    if not isinstance(name, str) or not name:
        faults.append(Fault(f"{where}.function.name", f"must be a non-empty string, got {shorten(name)}"))
        return None
    namespaces = set()
    head, separator, rest = name.partition(SEPARATOR)
    if separator:
        if not head or not rest or SEPARATOR in rest:
            faults.append(Fault(f"{where}.function.name", f"{shorten(name)} must be one `namespace::name`"))
            return None
        namespaces.add(head)
    for source, label in ((holder, "namespace"), (function, "function.namespace")):
        value = source.get("namespace")
        if value is None:
            continue
        namespace = value.get("name") if isinstance(value, Mapping) else value
        if not isinstance(namespace, str) or not namespace or SEPARATOR in namespace:
            rule = "must be a name without `::`, or an object with such a name"
            faults.append(Fault(f"{where}.{label}", f"{rule}, got {shorten(value)}"))
            return None
        namespaces.add(namespace)
    if len(namespaces) > 1:
        listed = ", ".join(sorted(namespaces))
        faults.append(Fault(f"{where}.namespace", f"conflicting namespaces {listed}; a tool has one"))
        return None
    return name if separator or not namespaces else f"{namespaces.pop()}{SEPARATOR}{name}"


def schema_text(value: Any, param: str, faults: list[Fault]) -> str | None:
    """Canonical JSON of a caller's schema, or None after adding a fault for what cannot be shown to the model."""
    if is_nested_too_deeply(value):
        faults.append(Fault(param, f"is nested more than {NESTING_LIMIT} levels deep"))
        return None
    try:
        text = canonical_json(value)
    except (ValueError, TypeError) as error:
        faults.append(Fault(param, f"is not JSON: {error}"))
        return None
    surrogate = unencodable(text)
    if surrogate is not None:
        faults.append(Fault(param, f"contains the lone surrogate {surrogate}, which is not text"))
        return None
    if IMAGE in text:
        faults.append(Fault(param, f"must not contain the image placeholder {IMAGE}"))
        return None
    return text


class ToolNames:
    """The declared identities, asked whether a name without namespace may be used."""

    def __init__(self, tools: Iterable[Tool] = ()):
        self._names: set[str] = set()
        self._qualified: dict[str, list[str]] = {}
        self.add(tools)

    def add(self, tools: Iterable[Tool]) -> None:
        """Declares more tools."""
        for tool in tools:
            self._names.add(tool.name)
            if SEPARATOR in tool.name:
                self._qualified.setdefault(tool.name.partition(SEPARATOR)[2], []).append(tool.name)

    def bare_name_fault(self, name: str) -> str | None:
        """Why a name may not be used: it has no namespace and means a tool that has. None when it is fine."""
        if name in self._names or name not in self._qualified:
            return None
        return f"{name!r} is only declared as {', '.join(self._qualified[name][:5])}; use the qualified name"


def read_tool_choice(choice: Any, tools: Sequence[Tool], param: str = "tool_choice") -> ToolChoice:
    """Reads `tool_choice`; null means `auto` (or `none` when no tools are offered).

    Raises:
      ProtocolError: malformed, an undeclared tool, or tools required when none are offered.
    """
    if choice is None:
        return ToolChoice("auto" if tools else "none")
    faults: list[Fault] = []
    result = _read_tool_choice(choice, tools, param, faults)
    if result is None:
        raise ProtocolError(faults)
    return result


def _read_tool_choice(choice: Any, tools: Sequence[Tool], param: str, faults: list[Fault]) -> ToolChoice | None:
    if isinstance(choice, str) and choice in ("auto", "none", "required"):
        if choice == "required" and not tools:
            faults.append(Fault(param, "'required' needs `tools`, and none are given"))
            return None
        return ToolChoice(choice)  # type: ignore[arg-type]
    if not isinstance(choice, Mapping) or choice.get("type") != "function":
        rule = "must be 'auto', 'none', 'required' or {'type': 'function', 'function': {'name': ...}}"
        faults.append(Fault(param, f"{rule}, got {shorten(choice)}"))
        return None
    function = choice.get("function")
    if not isinstance(function, Mapping):
        faults.append(Fault(f"{param}.function", f"must be an object, got {type(function).__name__}"))
        return None
    name = qualified_name(choice, function, param, faults)
    if name is None:
        return None
    if all(tool.name != name for tool in tools):
        declared = ", ".join(tool.name for tool in tools[:20]) or "none"
        reason = (
            ToolNames(tools).bare_name_fault(name) or f"{shorten(name)} is not a declared tool (declared: {declared})"
        )
        faults.append(Fault(f"{param}.function.name", reason))
        return None
    return ToolChoice("named", name)

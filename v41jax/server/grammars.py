"""What a reply must look like, as grammars: a JSON schema, a regular expression, choices, and calls of declared tools.

Only texts are made here, in the Lark dialect of the `llguidance` library; `constraint` compiles them. A reply is
content or tool calls; the calls follow the markup of the chat protocol, "Tool-call dialect (DSML)", whose marker is one
control token that no text can spell.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from v41jax.protocol import ProtocolError, Tool, ToolChoice
from v41jax.protocol.errors import Fault, shorten
from v41jax.protocol.json_text import unencodable
from v41jax.protocol.tools import schema_text

FORMS = ("json", "regex", "choice", "grammar")
"""Keys of `structured_outputs`; one is given."""

_JSON_OPTIONS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_ANY_TEXT = r"/(.|\n)*/"
_ROOT = "v41jax_root"
"""Definition under which references into the whole schema of a tool's arguments find it."""

_DEFINITIONS = ("$defs", "definitions")


@dataclasses.dataclass(frozen=True)
class ReplyGrammar:
    """A grammar and the field of the request it came from.

    Attributes:
      lark: the grammar.
      param: field to name when it does not compile.
    """

    lark: str
    param: str


def json_rule(schema: Any) -> str:
    """A rule body for JSON of a schema, written as the model was trained to: `, ` and `: ` and no other space."""
    guided = {**schema, "x-guidance": _JSON_OPTIONS} if isinstance(schema, Mapping) else schema
    return f"%json {json.dumps(guided, ensure_ascii=False)}"


def read_structured_outputs(value: Any) -> tuple[str, Any] | None:
    """Reads the extension field: an object with one of `json`, `regex`, `choice` and `grammar`.

    Raises:
      ProtocolError: anything else.
    """
    if value is None:
        return None
    param = "structured_outputs"
    given = [form for form in FORMS if isinstance(value, Mapping) and value.get(form) is not None]
    if not isinstance(value, Mapping) or len(given) != 1:
        rule = f"must be an object with one of {', '.join(FORMS)}"
        raise ProtocolError([Fault(param, f"{rule}, got {shorten(value)}")])
    form = given[0]
    content = value[form]
    kinds: dict[str, Any] = {"json": (dict, bool), "regex": str, "choice": list, "grammar": str}
    if not isinstance(content, kinds[form]):
        raise ProtocolError([Fault(f"{param}.{form}", f"has the wrong type: {shorten(content)}")])
    if content == "":
        raise ProtocolError([Fault(f"{param}.{form}", "is empty: give at least one character")])
    if form == "choice" and (not content or not all(isinstance(text, str) and text for text in content)):
        raise ProtocolError([Fault(f"{param}.choice", "must be a list of non-empty strings")])
    faults: list[Fault] = []
    if form == "json":
        schema_text(content, f"{param}.json", faults)
    for text in [content] if isinstance(content, str) else content if form == "choice" else ():
        surrogate = unencodable(text)
        if surrogate is not None:
            faults.append(Fault(f"{param}.{form}", f"contains the lone surrogate {surrogate}, which is not text"))
    if faults:
        raise ProtocolError(faults)
    return form, content


def content_grammar(form: str, content: Any) -> ReplyGrammar:
    """Grammar of a whole reply in one of `FORMS`."""
    param = f"structured_outputs.{form}"
    if form == "grammar":
        return ReplyGrammar(content, param)
    if form == "json":
        return ReplyGrammar(f"start: {json_rule(content)}\n", param)
    if form == "choice":
        return ReplyGrammar("start: " + " | ".join(map(_literal, content)) + "\n", param)
    return ReplyGrammar(f"start: {_regex_literal(content)}\n", param)


def schema_grammar(schema: Any) -> ReplyGrammar:
    """Grammar of a reply to a request with a `response_format`."""
    return ReplyGrammar(f"start: {json_rule(schema)}\n", "response_format")


def constrains_calls(tools: Sequence[Tool], choice: ToolChoice) -> bool:
    """Whether calls must follow a grammar: one is required, or a tool is strict."""
    if choice.mode in ("required", "named"):
        return True
    return choice.mode == "auto" and any(tool.function.get("strict") is True for tool in tools)


def call_grammar(
    tools: Sequence[Tool], choice: ToolChoice, marker: int, *, parallel: bool, schema: Any = None
) -> ReplyGrammar:
    """Grammar of replies that may call tools.

    Args:
      tools: the offered ones. Arguments of strict tools follow their schema, in its order; of others only the markup is
        fixed.
      choice: a call is required, or content is an alternative.
      marker: id of the markup's control token.
      parallel: more than one call may be made.
      schema: what content must look like; None leaves it free.

    Raises:
      ProtocolError: a strict tool whose parameters have names that the markup cannot carry.
    """
    mark = f"<[{marker}]>"
    content = _ANY_TEXT if schema is None else json_rule(schema)
    required = choice.mode in ("required", "named")
    # The blank line belongs to the markup; text before it is content, where content is free.
    opening = r"/(\n\n)?</" if required or schema is not None else r"/((.|\n)*\n\n)?</"
    rules = ["start: calls" if required else f"start: content | calls\ncontent: {content}"]
    names = [f"call{index}" for index in range(len(tools))]
    repeated = f"({' | '.join(names)})" + ("+" if parallel else "")
    rules.append(f'calls: {opening} {mark} " calls>\\n" {repeated} "</" {mark} " calls>"')
    for name, tool in zip(names, tools):
        rules += _call_rules(name, tool, mark)
    rules.append(f'any_parameter: "<" {mark} /( parameter name="[^"\\n]+" string=")/ (any_text | any_json)')
    rules.append(f'any_text: "true\\">" /(.|\\n)*<\\// {mark} " parameter>\\n"')
    rules.append(f'any_json: "false\\">" {json_rule({})} "</" {mark} " parameter>\\n"')
    return ReplyGrammar("\n".join(rules) + "\n", "tools")


def _call_rules(name: str, tool: Tool, mark: str) -> list[str]:
    head = _literal(f' invoke name="{tool.name}">\n')
    end = f'"</" {mark} " invoke>\\n"'
    if tool.function.get("strict") is not True:
        return [f'{name}: "<" {mark} {head} (any_parameter+ | "\\n") {end}']
    if not tool.parameters:
        return [f'{name}: "<" {mark} {head} "\\n" {end}']
    parameters = tool.function["parameters"]
    required = parameters.get("required", [])
    if not isinstance(required, list) or not all(
        isinstance(name, str) and name in tool.parameters for name in required
    ):
        rule = f"of the strict tool {tool.name} must be a list of declared parameters"
        raise ProtocolError([Fault("tools", f"`required` {rule}, got {shorten(required)}")])
    rules, parts = [], []
    for index, parameter in enumerate(tool.parameters):
        if '"' in parameter or "\n" in parameter:
            raise ProtocolError(
                [Fault("tools", f"parameter {shorten(parameter)} of {tool.name} has a quote in its name")]
            )
        rule = f"{name}_{index}"
        parts.append(rule if parameter in required else f"{rule}?")
        rules.append(f"{rule}: {_parameter(parameter, tool, mark)}")
    if not any(part[-1] != "?" for part in parts):
        return [f'{name}: "<" {mark} {head} ({_some(parts)} | "\\n") {end}', *rules]
    return [f'{name}: "<" {mark} {head} {" ".join(parts)} {end}', *rules]


def _some(parts: Sequence[str]) -> str:
    """At least one of optional parts, in order."""
    needed = [part[:-1] for part in parts]
    ways = [" ".join([needed[first], *parts[first + 1 :]]) for first in range(len(parts))]
    return " | ".join(f"({way})" for way in ways)


def _parameter(name: str, tool: Tool, mark: str) -> str:
    """One parameter with its value: plain strings as they are, everything else as JSON."""
    schema = tool.parameters[name]
    end = f'{mark} " parameter>\\n"'
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    plain = kind == "string" and not set(schema) - {"type", "description", "title", "enum", "default", "examples"}
    head = _literal(f' parameter name="{name}" string="{"true" if plain else "false"}">')
    if not plain:
        return f'"<" {mark} {head} {json_rule(_standalone(schema, tool.function["parameters"]))} "</" {end}'
    if "enum" not in schema:
        return f'"<" {mark} {head} /(.|\\n)*<\\// {end}'
    values = schema["enum"] if isinstance(schema["enum"], list) else []
    texts = [value for value in values if isinstance(value, str)]
    if not texts:
        rule = f"of parameter {shorten(name)} of the strict tool {tool.name} must be a list with a string"
        raise ProtocolError([Fault("tools", f"`enum` {rule}, got {shorten(schema['enum'])}")])
    options = " | ".join(_literal(text) for text in texts if text)
    chosen = "" if not options else f"({options}){'?' if '' in texts else ''}"
    return f'"<" {mark} {head} {chosen} "</" {end}'


def _standalone(schema: Any, parameters: Mapping[str, Any]) -> Any:
    """The schema of one parameter with whatever its references need of the schema of all arguments."""
    if not isinstance(schema, Mapping):
        return schema
    whole = {**schema, **{key: parameters[key] for key in _DEFINITIONS if key in parameters}}
    moved = _with_moved_references(whole)
    if moved == whole:
        return whole
    root = {key: value for key, value in parameters.items() if key not in _DEFINITIONS}
    definitions = moved.get("$defs")
    known = definitions if isinstance(definitions, Mapping) else {}
    return {**moved, "$defs": {**known, _ROOT: _with_moved_references(root)}}


def _with_moved_references(value: Any) -> Any:
    """`value` with references to the root of the document pointing to the definition that holds it."""
    if isinstance(value, Mapping):
        moved = {key: _with_moved_references(child) for key, child in value.items()}
        target = moved.get("$ref")
        if isinstance(target, str) and re.match(r"#(/(?!\$defs/|definitions/)|$)", target):
            moved["$ref"] = f"#/$defs/{_ROOT}{target[1:]}"
        return moved
    return [_with_moved_references(child) for child in value] if isinstance(value, list) else value


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _regex_literal(regex: str) -> str:
    """A regular expression between slashes, which end it, on one line, which ends it too."""
    escapes = {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}
    pieces = re.findall(r"\\.|.", regex, re.DOTALL)
    return f"/{''.join(escapes.get(piece, piece) for piece in pieces)}/"

"""`encode_chat`: a client's messages to the prompt the model was trained on.

Source: chat protocol, "Preprocessing, in order" to "Tools section". Equal, byte for byte, to its worked prompts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from v41jax.protocol import tokens
from v41jax.protocol.errors import Fault, ProtocolError, shorten
from v41jax.protocol.messages import read_messages
from v41jax.protocol.preprocess import last_user, merge, sort_tool_results
from v41jax.protocol.prompt import EncodedPrompt, ReplySource, TextEncoder
from v41jax.protocol.render import Renderer
from v41jax.protocol.thinking import DEFAULT_EFFORT, read_effort, read_mode
from v41jax.protocol.tools import Tool, read_tools, schema_text
from v41jax.protocol.turns import Turn


def encode_chat(
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any] | Tool] | None = None,
    response_format: Mapping[str, Any] | None = None,
    thinking_mode: str = "thinking",
    reasoning_effort: int | str = DEFAULT_EFFORT,
    drop_thinking: bool = True,
    context: Sequence[Mapping[str, Any]] = (),
    strict: bool = False,
    tokenizer: TextEncoder | None = None,
    replies: ReplySource | None = None,
) -> EncodedPrompt:
    """Renders a conversation up to the place where the model writes next.

    Args:
      messages: OpenAI messages, with the extensions of the chat protocol, "Message model". Unknown fields and fields
        that are null are ignored.
      tools: tools of the request, an OpenAI list or `normalize_tools`' result. They go to the opening system turn,
        which is made when there is none.
      response_format: of the request, in OpenAI's form; goes to the opening system turn too.
      thinking_mode: `thinking` or `chat`.
      reasoning_effort: 1..100 or a name; checked in both modes.
      drop_thinking: reasoning before the last question leaves the prompt. Ignored, as false, when any message
        carries tools.
      context: earlier messages that are already encoded: only `messages` are rendered, without the begin token, while
        sorting and dropping see both. The two lists are merged apart.
      strict: also refuse what a server answers with 400 (see `read_messages`).
      tokenizer: when given, the result has `token_ids`.
      replies: used with `tokenizer`, see `EncodedPrompt.encode`.

    Raises:
      ProtocolError: with every fault of the request.
    """
    faults: list[Fault] = []
    mode = read_mode(thinking_mode, "thinking_mode", faults)
    effort = read_effort(reasoning_effort, "reasoning_effort", faults)
    if not isinstance(drop_thinking, bool):
        faults.append(Fault("drop_thinking", f"must be true or false, got {shorten(drop_thinking)}"))
    offered = read_tools(tools, "tools", faults)
    schema = read_response_format(response_format, "response_format", faults)
    earlier, earlier_faults = read_messages(context, strict=strict, tools=offered, param="context")
    new, new_faults = read_messages(messages, strict=strict, tools=offered)
    faults += earlier_faults + new_faults
    if isinstance(messages, Sequence) and len(messages) == 0:
        faults.append(Fault("messages", "must hold at least one message"))
    if not faults:
        _attach(earlier or new, offered, schema, faults)
    if faults:
        raise ProtocolError(faults)

    earlier, new = merge(earlier), merge(new)
    turns = sort_tool_results(earlier + new)
    drop = drop_thinking and not any(turn.tools for turn in turns)
    renderer = Renderer(turns, last_user(turns), thinking=mode == "thinking", effort=effort, drop_thinking=drop)
    if not earlier:
        renderer.writer.control(tokens.BEGIN_OF_SENTENCE)
    for index in range(len(earlier), len(turns)):
        renderer.write_turn(index)
    prompt = EncodedPrompt(
        segments=renderer.writer.segments(),
        images=tuple(renderer.writer.images),
        starts_in_reasoning=renderer.starts_in_reasoning,
        expects_reply=renderer.expects_reply,
        reply_spans=tuple(renderer.writer.reply_spans),
        open_reply=renderer.open_reply,
    )
    if tokenizer is None:
        return prompt
    return dataclasses.replace(prompt, token_ids=prompt.encode(tokenizer, replies))


def read_response_format(value: Any, param: str, faults: list[Fault]) -> Any:
    """The schema a request's `response_format` asks for.

    Returns:
      The schema of `json_schema`; the schema of any object for `json_object`; None for `text` or null. None also
      after adding a fault.
    """
    if value is None:
        return None
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    if kind != "json_schema":
        shown = shorten(kind if isinstance(value, Mapping) else value)
        faults.append(Fault(f"{param}.type", f"must be 'text', 'json_object' or 'json_schema', got {shown}"))
        return None
    holder = value.get("json_schema")
    schema = holder.get("schema") if isinstance(holder, Mapping) else None
    if not isinstance(schema, Mapping):
        faults.append(Fault(f"{param}.json_schema.schema", f"must be a JSON schema object, got {shorten(schema)}"))
        return None
    schema_text(schema, f"{param}.json_schema.schema", faults)
    return schema


def _attach(turns: list[Turn], tools: tuple[Tool, ...], schema: Any, faults: list[Fault]) -> None:
    """Gives the request's tools and schema to the opening system turn, which is inserted when missing."""
    if not tools and schema is None:
        return
    if turns[0].role != "system":
        turns.insert(0, Turn("system", ("",)))
    opening = turns[0]
    if tools and opening.tools:
        faults.append(Fault("tools", "are given in the request and in its first message; give them once"))
    if schema is not None and opening.response_format is not None:
        faults.append(Fault("response_format", "is given in the request and in its first message; give it once"))
    turns[0] = dataclasses.replace(
        opening,
        tools=tools or opening.tools,
        response_format=opening.response_format if schema is None else schema,
    )

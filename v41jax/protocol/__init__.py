"""The chat protocol: messages to prompts, generated text to replies. No jax and no model code in here.

A server needs these, in this order:

    options = resolve_thinking(body.thinking, body.reasoning_effort, body.chat_template_kwargs)
    tools = normalize_tools(body.tools)
    choice = read_tool_choice(body.tool_choice, tools)
    prompt = encode_chat(body.messages, tools=choice.offered(tools), response_format=body.response_format,
                         strict=True, tokenizer=tokenizer, replies=memory, **options._asdict())

    detokenizer = tokenizer.detokenizer(stop=stop_strings)
    parser = OutputParser(prompt.starts_in_reasoning, tools)
    for ids in generation:
        for event in parser.feed(detokenizer.feed(ids)): ...
    for event in parser.feed(detokenizer.finish()) + parser.finish(): ...
    memory.remember(prompt, generated_ids, text, parser.reply, tokenizer)

Everything a client may get wrong raises `ProtocolError`, whose `faults` name field and rule (for an HTTP 400). Events
of a reply come as reasoning, content, calls; the joined fragments of a call are its arguments. `ReplyMemory` is what
keeps prefix hits alive when a model did not write its text in the tokenizer's own pieces.
"""

from v41jax.protocol.chat import encode_chat
from v41jax.protocol.errors import Fault, ProtocolError
from v41jax.protocol.events import (
    ArgumentsDelta,
    CallFinished,
    CallStarted,
    ContentDelta,
    Event,
    ReasoningDelta,
    Reply,
    ToolCall,
    finish_reason,
)
from v41jax.protocol.output_parser import OutputParser, parse_reply
from v41jax.protocol.prompt import EncodedPrompt, Segment
from v41jax.protocol.reply_memory import ReplyMemory
from v41jax.protocol.thinking import ThinkingOptions, resolve_thinking
from v41jax.protocol.tools import Tool, ToolChoice, normalize_tools, read_tool_choice

__all__ = [
    "ArgumentsDelta",
    "CallFinished",
    "CallStarted",
    "ContentDelta",
    "EncodedPrompt",
    "Event",
    "Fault",
    "OutputParser",
    "ProtocolError",
    "ReasoningDelta",
    "Reply",
    "ReplyMemory",
    "Segment",
    "ThinkingOptions",
    "Tool",
    "ToolCall",
    "ToolChoice",
    "encode_chat",
    "finish_reason",
    "normalize_tools",
    "parse_reply",
    "read_tool_choice",
    "resolve_thinking",
]

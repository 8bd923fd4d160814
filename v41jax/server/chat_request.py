"""From the body of `/v1/chat/completions` to prompts for the engine; every fault of a body is reported at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from v41jax.engine_images import PromptImages
from v41jax.engine_requests import Prompt
from v41jax.image_sources import load_images
from v41jax.protocol import (
    EncodedPrompt,
    Fault,
    ProtocolError,
    ThinkingOptions,
    Tool,
    ToolChoice,
    encode_chat,
    normalize_tools,
    read_tool_choice,
    resolve_thinking,
)
from v41jax.protocol.chat import read_response_format
from v41jax.protocol.errors import shorten
from v41jax.protocol.tokens import DSML
from v41jax.sampling_params import SamplingParams
from v41jax.server.errors import ApiError
from v41jax.server.fields import Fields
from v41jax.server.generation import check_length, make_prompt
from v41jax.server.grammars import (
    ReplyGrammar,
    call_grammar,
    constrains_calls,
    content_grammar,
    read_structured_outputs,
    schema_grammar,
)
from v41jax.server.service import Service

_UNSUPPORTED = {
    "functions": "declare them in `tools`",
    "function_call": "choose with `tool_choice`",
    "audio": "this model writes text only",
    "web_search_options": "declare a tool that searches and answer its calls",
}
"""Fields of OpenAI's API that would change the answer: a client that sends one is told, not given another answer."""


@dataclasses.dataclass(frozen=True)
class ChatRequest:
    """A checked request.

    Attributes:
      prompt: the encoded conversation.
      choices: one prompt for the engine per choice.
      tools: declared tools.
      tool_choice: what the client wants of them.
      thinking: whether reasoning is part of the answer.
      logprobs: log-probabilities are wanted.
      stream: the answer is a stream of events.
      include_usage: a stream ends with the usage.
    """

    prompt: EncodedPrompt
    choices: tuple[Prompt, ...]
    tools: tuple[Tool, ...]
    tool_choice: ToolChoice
    thinking: bool
    logprobs: bool
    stream: bool
    include_usage: bool

    @property
    def delivers_calls(self) -> bool:
        """Tool calls that the model writes reach the client."""
        return self.tool_choice.mode != "none"


def read_chat_request(service: Service, body: Mapping[str, Any]) -> ChatRequest:
    """Checks and encodes a request.

    Raises:
      ProtocolError: with every fault.
      ApiError: the conversation does not fit, or ends where no assistant may write.
      ImageError: an image that cannot be used, or an engine without vision.
    """
    fields = Fields(body)
    fields.attempt(lambda: service.check_model(dict(body)))
    fields.refuse(_UNSUPPORTED)
    if body.get("modalities") not in (None, [], ["text"]):
        fields.fault(
            "modalities", f'must be ["text"], which is all this model writes, got {shorten(body["modalities"])}'
        )
    params = fields.attempt(lambda: SamplingParams.from_chat_request(body))
    if params is not None:
        fields.attempt(lambda: params.check_ids(service.vocabulary))
        if params.n > service.options.max_choices:
            fields.fault("n", f"must be at most {service.options.max_choices} here, got {params.n}")
    stream = fields.boolean("stream", False)
    skip_special = fields.boolean("skip_special_tokens", False)
    include_usage = fields.includes_usage(stream=stream)
    prompt, tools, choice, thinking = _read_conversation(service, body, fields)
    grammar = None if fields.faults else fields.attempt(lambda: _reply_grammar(service, fields, tools, choice))
    fields.check()
    assert params is not None and prompt is not None and prompt.token_ids is not None
    if not prompt.expects_reply:
        raise ApiError(
            400,
            "the conversation ends where no assistant may write: end it with a user or tool message",
            param="messages",
            code="invalid_value",
        )
    check_length(service, prompt.token_ids, "messages")
    tokens, images = _with_images(service, prompt)
    constraint = service.constraint(grammar, starts_in_reasoning=prompt.starts_in_reasoning)
    choices = tuple(
        make_prompt(service, tokens, params, index, skip_special=skip_special, constraint=constraint, images=images)
        for index in range(params.n)
    )
    return ChatRequest(
        prompt=prompt,
        choices=choices,
        tools=tools,
        tool_choice=choice,
        thinking=thinking,
        logprobs=params.logprobs is not None,
        stream=stream,
        include_usage=include_usage,
    )


def _reply_grammar(service: Service, fields: Fields, tools: Sequence[Tool], choice: ToolChoice) -> ReplyGrammar | None:
    """What the reply must look like; None leaves it free.

    Raises:
      ProtocolError: fields that cannot be enforced together.
    """
    body = fields.body
    schema = read_response_format(body.get("response_format"), "response_format", fields.faults)
    outputs = read_structured_outputs(body.get("structured_outputs"))
    parallel = fields.boolean("parallel_tool_calls", True)
    offered = choice.offered(tools)
    calls = bool(offered) and (schema is not None or not parallel or constrains_calls(offered, choice))
    if outputs is not None and (calls or schema is not None):
        raise ProtocolError(
            [Fault("structured_outputs", "cannot be combined with `response_format` or with tools that are enforced")]
        )
    if calls:
        marker = service.tokenizer.control_id(DSML)
        return call_grammar(offered, choice, marker, parallel=parallel, schema=schema)
    if schema is not None:
        return schema_grammar(schema)
    return None if outputs is None else content_grammar(*outputs)


def _read_conversation(
    service: Service, body: Mapping[str, Any], fields: Fields
) -> tuple[EncodedPrompt | None, tuple[Tool, ...], ToolChoice, bool]:
    """Messages, tools and thinking; the prompt is None after a fault."""
    options = fields.attempt(
        lambda: resolve_thinking(body.get("thinking"), body.get("reasoning_effort"), body.get("chat_template_kwargs"))
    )
    tools = fields.attempt(lambda: normalize_tools(body.get("tools")))
    choice = None
    if tools is not None:
        choice = fields.attempt(lambda: read_tool_choice(body.get("tool_choice"), tools))
    chosen, offered = choice or ToolChoice(), tools or ()
    messages = body.get("messages")
    prompt = fields.attempt(
        lambda: encode_chat(
            [] if messages is None else messages,
            tools=chosen.offered(offered),
            response_format=body.get("response_format"),
            strict=True,
            tokenizer=service.tokenizer,
            replies=service.replies,
            **(options or ThinkingOptions())._asdict(),
        )
    )
    return prompt, offered, chosen, options is not None and options.thinking_mode == "thinking"


def read_prompt_only(service: Service, body: Mapping[str, Any], fields: Fields) -> list[int] | None:
    """Ids of a conversation as a request with this body would send it to the model; None after a fault.

    Raises:
      ImageError: an image that cannot be used, or an engine without vision.
    """
    prompt, *_ = _read_conversation(service, body, fields)
    if prompt is None or fields.faults:
        return None
    return _with_images(service, prompt)[0]


def _with_images(service: Service, prompt: EncodedPrompt) -> tuple[list[int], PromptImages | None]:
    """Ids with one placeholder for each position of an image, and the images.

    Raises:
      ImageError: an image that cannot be used, or an engine without vision.
    """
    assert prompt.token_ids is not None
    if not prompt.images:
        return prompt.token_ids, None
    sources = service.options.image_sources
    files = load_images([image.part for image in prompt.images], sources)
    seen = service.engine.prompt_with_images(prompt.token_ids, files, limits=sources.limits)
    return list(seen.tokens), seen.images

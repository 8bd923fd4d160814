"""The published description of request bodies. It tells clients what may be sent; the checks are in the readers."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

_ERROR: Schema = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}

_FAILURES = {
    "400": "a field is wrong; `param` names the first",
    "401": "the API key is missing or wrong",
    "404": "another model",
    "413": "the body is too large",
    "429": "too many requests wait",
    "500": "a step failed: send the request again (`step_refused`), or the engine has ended (`engine_failed`)",
    "503": "the server is stopping, or its engine has ended",
    "504": "the request took too long",
}


def _optional(kind: str, **rules: Any) -> Schema:
    return {"type": [kind, "null"], **rules}


_SAMPLING: Schema = {
    "model": _optional("string"),
    "temperature": _optional("number", minimum=0, maximum=2),
    "top_p": _optional("number", exclusiveMinimum=0, maximum=1),
    "top_k": _optional("integer", minimum=-1),
    "min_p": _optional("number", minimum=0, maximum=1),
    "presence_penalty": _optional("number", minimum=-2, maximum=2),
    "frequency_penalty": _optional("number", minimum=-2, maximum=2),
    "logit_bias": _optional("object", additionalProperties={"type": "number", "minimum": -100, "maximum": 100}),
    "seed": _optional("integer"),
    "max_tokens": _optional("integer", minimum=1),
    "stop": {"type": ["string", "array", "null"], "items": {"type": "string"}, "maxItems": 16},
    "stop_token_ids": _optional("array", items={"type": "integer", "minimum": 0}),
    "ignore_eos": _optional("boolean"),
    "skip_special_tokens": _optional("boolean"),
    "structured_outputs": _optional("object"),
    "n": _optional("integer", minimum=1, maximum=128),
    "stream": _optional("boolean"),
    "stream_options": _optional("object", properties={"include_usage": _optional("boolean")}),
}

_CONVERSATION: Schema = {
    "messages": {
        "type": "array",
        "minItems": 1,
        "items": {
            "type": "object",
            "required": ["role"],
            "properties": {
                "role": {"enum": ["system", "developer", "user", "assistant", "tool", "latest_reminder"]},
                "content": {"type": ["string", "array", "null"]},
                "reasoning_content": _optional("string"),
                "tool_calls": _optional("array", items={"type": "object"}),
                "tool_call_id": _optional("string"),
            },
        },
    },
    "tools": _optional("array", items={"type": "object"}),
    "tool_choice": {"type": ["string", "object", "null"]},
    "parallel_tool_calls": _optional("boolean"),
    "response_format": _optional("object"),
    "reasoning_effort": {"type": ["string", "integer", "null"]},
    "thinking": _optional("object"),
    "chat_template_kwargs": _optional("object"),
}

_IDS: Schema = {"type": "array", "items": {"type": "integer", "minimum": 0}}

CHAT: Schema = {
    "type": "object",
    "required": ["messages"],
    "properties": {
        **_SAMPLING,
        **_CONVERSATION,
        "max_completion_tokens": _optional("integer", minimum=1),
        "logprobs": _optional("boolean"),
        "top_logprobs": _optional("integer", minimum=0, maximum=20),
    },
}

COMPLETION: Schema = {
    "type": "object",
    "required": ["prompt"],
    "properties": {
        **_SAMPLING,
        "prompt": {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}, "minItems": 1},
                {**_IDS, "minItems": 1},
                {"type": "array", "items": {**_IDS, "minItems": 1}, "minItems": 1},
            ]
        },
        "max_tokens": _optional("integer", minimum=0),
        "echo": _optional("boolean"),
        "logprobs": _optional("integer", minimum=0, maximum=20),
        "add_special_tokens": _optional("boolean"),
        "parse_special_tokens": _optional("boolean"),
    },
}

TOKENIZE: Schema = {
    "type": "object",
    "properties": {
        **_CONVERSATION,
        "prompt": _optional("string"),
        "add_special_tokens": _optional("boolean"),
        "parse_special_tokens": _optional("boolean"),
    },
}

DETOKENIZE: Schema = {"type": "object", "required": ["tokens"], "properties": {"tokens": _IDS}}


def post(kind: str, body: Schema) -> dict[str, Any]:
    """Arguments of a route that takes a JSON body: its description and that of its errors."""
    error = {"application/json": {"schema": _ERROR}}
    return {
        "responses": {
            "200": {"description": f"a {kind}"},
            **{status: {"description": text, "content": error} for status, text in _FAILURES.items()},
        },
        "openapi_extra": {"requestBody": {"required": True, "content": {"application/json": {"schema": body}}}},
    }

"""What a server tells about itself and its tokenizer: models, health, tokens of a text and text of tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from v41jax.protocol import ProtocolError, tokens
from v41jax.protocol.errors import Fault, shorten
from v41jax.server.chat_request import read_prompt_only
from v41jax.server.completion_request import read_prompts
from v41jax.server.fields import Fields
from v41jax.server.service import Service


def model_card(service: Service) -> dict[str, Any]:
    """The served model, as `/v1/models` lists it."""
    return {
        "id": service.options.model_name,
        "object": "model",
        "created": service.started,
        "owned_by": "v41jax",
        "max_model_len": service.max_model_len,
    }


def tokenizer_info(service: Service) -> dict[str, Any]:
    """The tokenizer's special tokens, which evaluation harnesses with a remote tokenizer ask for."""
    names = {"bos_token": tokens.BEGIN_OF_SENTENCE, "eos_token": tokens.END_OF_SENTENCE, "pad_token": tokens.PADDING}
    ids = {f"{name}_id": service.tokenizer.control_id(token) for name, token in names.items()}
    return {**names, **ids, "vocab_size": service.tokenizer.vocab_size, "model_max_length": service.max_model_len}


def health(service: Service) -> tuple[int, dict[str, Any]]:
    """HTTP status and body of `/health`; only a server that takes requests is healthy.

    Of an error only its kind: the call needs no key, and a text may name files.
    """
    if service.engine.failure is not None:
        return 503, {"status": "failed", "error": type(service.engine.failure).__name__}
    if service.draining:
        return 503, {"status": "draining"}
    return 200, {"status": "ok"}


def tokenize(service: Service, body: Mapping[str, Any]) -> dict[str, Any]:
    """Ids of a raw prompt, or of a conversation with the prompt around it.

    Raises:
      ProtocolError: with every fault.
    """
    fields = Fields(body)
    fields.attempt(lambda: service.check_model(dict(body)))
    with_begin = fields.boolean("add_special_tokens", True)
    with_control = fields.boolean("parse_special_tokens", False)
    ids: list[int] | None = None
    if (body.get("prompt") is None) == (body.get("messages") is None):
        fields.fault("prompt", "either `prompt` or `messages` must be given")
    elif body.get("messages") is not None:
        ids = read_prompt_only(service, body, fields)
    elif not isinstance(body["prompt"], str):
        fields.fault("prompt", f"must be a string, got {shorten(body['prompt'])}")
    else:
        read = fields.attempt(
            lambda: read_prompts(service, body["prompt"], with_begin=with_begin, with_control=with_control)
        )
        ids = None if read is None else list(read[0].tokens)
    fields.check()
    assert ids is not None
    return {"count": len(ids), "max_model_len": service.max_model_len, "tokens": ids}


def detokenize(service: Service, body: Mapping[str, Any]) -> dict[str, Any]:
    """Text of ids, control tokens as their literals.

    Raises:
      ProtocolError: with every fault.
    """
    service.check_model(dict(body))
    ids = body.get("tokens")
    if not isinstance(ids, list):
        raise ProtocolError([Fault("tokens", f"must be a list of token ids, got {shorten(ids)}")])
    faults = [
        Fault(f"tokens[{place}]", f"must be a token id below {service.tokenizer.vocab_size}, got {shorten(token)}")
        for place, token in enumerate(ids)
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < service.tokenizer.vocab_size
    ]
    if faults:
        raise ProtocolError(faults)
    return {"prompt": service.tokenizer.decode(ids)}

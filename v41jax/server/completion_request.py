"""From the body of `/v1/completions` to prompts for the engine; every fault of a body is reported at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from v41jax.engine import Prompt
from v41jax.protocol import ProtocolError
from v41jax.protocol.errors import Fault, shorten
from v41jax.protocol.json_text import unencodable
from v41jax.protocol.tokens import IMAGE
from v41jax.sampling_params import SamplingParams
from v41jax.server.fields import Fields
from v41jax.server.generation import check_length, make_prompt
from v41jax.server.grammars import content_grammar, read_structured_outputs
from v41jax.server.service import Service

MAX_PROMPTS = 256
_KINDS = "a string, a list of strings, a list of token ids, or a list of such lists"


@dataclasses.dataclass(frozen=True)
class RawPrompt:
    """One prompt of a request.

    Attributes:
      tokens: ids for the model.
      prefix: leading ids that the client did not write (the begin token).
    """

    tokens: tuple[int, ...]
    prefix: int

    @property
    def written(self) -> tuple[int, ...]:
        """The ids of what the client wrote."""
        return self.tokens[self.prefix :]


@dataclasses.dataclass(frozen=True)
class CompletionRequest:
    """A checked request.

    Attributes:
      prompts: as the client gave them.
      groups: the choices of each prompt.
      echo: answers begin with the prompt.
      logprobs: alternatives reported with every token; None reports nothing.
      scoring_only: nothing is generated; the answer is the prompt with its log-probabilities.
      stream: the answer is a stream of events.
      include_usage: a stream ends with the usage.
    """

    prompts: tuple[RawPrompt, ...]
    groups: tuple[tuple[Prompt, ...], ...]
    echo: bool
    logprobs: int | None
    scoring_only: bool
    stream: bool
    include_usage: bool


def read_completion_request(service: Service, body: Mapping[str, Any]) -> CompletionRequest:
    """Checks and encodes a request.

    Raises:
      ProtocolError: with every fault.
      ApiError: a prompt does not fit.
    """
    fields = Fields(body)
    fields.attempt(lambda: service.check_model(dict(body)))
    echo = fields.boolean("echo", False)
    zero = body.get("max_tokens")
    scoring_only = echo and isinstance(zero, int) and not isinstance(zero, bool) and zero == 0
    sampled = {**body, "max_tokens": 1} if scoring_only else body
    params = fields.attempt(lambda: SamplingParams.from_completion_request(sampled))
    if params is not None:
        fields.attempt(lambda: params.check_ids(service.vocabulary))
    stream = fields.boolean("stream", False)
    include_usage = fields.includes_usage(stream=stream)
    skip_special = fields.boolean("skip_special_tokens", True)
    with_begin = fields.boolean("add_special_tokens", True)
    with_control = fields.boolean("parse_special_tokens", False)
    if body.get("suffix") not in (None, ""):
        fields.fault("suffix", "is not supported: this model completes to the right only")
    if params is not None and body.get("best_of") not in (None, params.n):
        fields.fault("best_of", f"is not supported beyond `n` ({params.n}), got {shorten(body['best_of'])}")
    prompts = fields.attempt(
        lambda: read_prompts(service, body.get("prompt"), with_begin=with_begin, with_control=with_control)
    )
    if params is not None and prompts is not None and len(prompts) * params.n > service.options.max_choices:
        fields.fault(
            "n",
            f"{len(prompts)} prompts of {params.n} choices are more than the {service.options.max_choices} choices "
            "that one request may have",
        )
    scores_prompt = echo and params is not None and params.logprobs is not None
    if scores_prompt and not service.engine.config.prompt_logprobs:
        fields.fault("echo", _no_prompt_logprobs(service))
    outputs = fields.attempt(lambda: read_structured_outputs(body.get("structured_outputs")))
    fields.check()
    assert params is not None and prompts is not None
    for prompt in prompts:
        check_length(service, prompt.tokens)
    constraint = service.constraint(None if outputs is None else content_grammar(*outputs))
    groups = tuple(
        tuple(
            make_prompt(
                service,
                prompt.tokens,
                params,
                index,
                skip_special=skip_special,
                prompt_logprobs=scores_prompt and index == 0,
                constraint=constraint,
            )
            for index in range(params.n)
        )
        for prompt in prompts
    )
    return CompletionRequest(
        prompts=prompts,
        groups=groups,
        echo=echo,
        logprobs=params.logprobs,
        scoring_only=scoring_only,
        stream=stream,
        include_usage=include_usage,
    )


def _no_prompt_logprobs(service: Service) -> str:
    """Why a server cannot score prompts, and how one that can is started."""
    if service.engine.config.decoder_swa_bounded_replay:
        return (
            "with `logprobs` needs every prompt row, and bounded decoder replay computes only the last ones: start the "
            "server with --no-decoder-swa-bounded-replay --prompt-logprobs"
        )
    return "with `logprobs` needs a server that was started with --prompt-logprobs"


def read_prompts(
    service: Service, value: Any, *, with_begin: bool, with_control: bool, param: str = "prompt"
) -> tuple[RawPrompt, ...]:
    """Reads one prompt or several, as text or as ids.

    Args:
      service: of the server.
      value: the field.
      with_begin: text is preceded by the begin token; ids are taken as they are.
      with_control: literals of control tokens in text mean those tokens; otherwise they are text.
      param: the field's name.

    Raises:
      ProtocolError: with every fault.
    """
    single = isinstance(value, str) or (_is_list(value) and bool(value) and _is_id(value[0]))
    entries = [value] if single else value
    if not _is_list(entries) or not entries:
        raise ProtocolError([Fault(param, f"must be {_KINDS}, got {shorten(value)}")])
    if len(entries) > MAX_PROMPTS:
        raise ProtocolError([Fault(param, f"must hold at most {MAX_PROMPTS} prompts, got {len(entries)}")])
    faults: list[Fault] = []
    prompts = []
    for index, entry in enumerate(entries):
        where = param if single else f"{param}[{index}]"
        if isinstance(entry, str):
            prompt = _from_text(service, entry, where, faults, with_begin=with_begin, with_control=with_control)
        else:
            prompt = _from_ids(service, entry, where, faults)
        if prompt is not None:
            prompts.append(prompt)
    if faults:
        raise ProtocolError(faults)
    return tuple(prompts)


def _from_text(
    service: Service, text: str, where: str, faults: list[Fault], *, with_begin: bool, with_control: bool
) -> RawPrompt | None:
    surrogate = unencodable(text)
    if surrogate is not None:
        faults.append(Fault(where, f"contains the lone surrogate {surrogate}, which is not text"))
        return None
    tokenizer = service.tokenizer
    ids = tokenizer.encode_with_control(text) if with_control else tokenizer.encode(text)
    if with_control and IMAGE in text:
        faults.append(Fault(where, f"contains {IMAGE}: send images to the chat endpoint"))
        return None
    begin = (service.engine.core.runner.setup.config.bos_token_id,) if with_begin else ()
    return RawPrompt((*begin, *ids), len(begin))


def _from_ids(service: Service, ids: Any, where: str, faults: list[Fault]) -> RawPrompt | None:
    if not _is_list(ids) or not ids:
        faults.append(Fault(where, f"must be text or a non-empty list of token ids, got {shorten(ids)}"))
        return None
    image = service.engine.core.runner.setup.config.image_token_id
    for place, token in enumerate(ids):
        if not _is_id(token) or not 0 <= token < service.vocabulary:
            rule = f"must be a token id below {service.vocabulary}"
            faults.append(Fault(f"{where}[{place}]", f"{rule}, got {shorten(token)}"))
            return None
        if token == image:
            faults.append(Fault(f"{where}[{place}]", f"{token} stands for an image: send images to the chat endpoint"))
            return None
    return RawPrompt(tuple(ids), 0)


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)

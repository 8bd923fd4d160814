"""How tokens of one request are chosen and when its generation ends: fields, limits, and how requests name them.

Checked once, here; the engine and the sampler trust a `SamplingParams`. No jax. Limits: chat protocol,
"HTTP endpoint", and OpenAI's API where that is silent.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from v41jax.protocol.errors import Fault, ProtocolError, shorten
from v41jax.protocol.json_text import unencodable

MAX_CHOICES = 128
MAX_LOGPROBS = 20
MAX_BIASES = 1024
MAX_BIAS = 100.0
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 1024
MAX_STOP_IDS = 256
_INT64 = 2**63


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Valid once constructed; lists and mappings are copied, numbers have their declared type.

    Attributes:
      temperature: 0..2; 0 takes the most likely token and makes `top_k`, `top_p`, `min_p` and `seed` irrelevant.
      top_k: tokens kept, at least 1; -1 keeps all. May exceed the vocabulary.
      top_p: (0, 1], probability mass kept.
      min_p: 0..1, tokens kept have at least this share of the largest probability.
      presence_penalty: -2..2, subtracted from the logit of every token generated before.
      frequency_penalty: -2..2, subtracted once for each time the token was generated.
      logit_bias: token id -> -100..100, added to its logit; at most 1,024.
      seed: int64; None draws one.
      max_tokens: generated tokens, at least 1; None means as many as the model's length allows.
      stop: up to 16 strings of 1..1,024 characters; a single string may be given.
      stop_token_ids: up to 256 ids that end generation besides the tokenizer's own.
      ignore_eos: go on after the tokenizer's stop tokens; for benchmarks.
      n: choices, 1..128.
      logprobs: alternatives reported with each token, 0..20; None reports nothing, 0 only the chosen token.

    Raises:
      ProtocolError: with every field outside its limits.
    """

    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict, hash=False)
    seed: int | None = None
    max_tokens: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    n: int = 1
    logprobs: int | None = None

    def __post_init__(self) -> None:
        self._check({})

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken without drawing."""
        return self.temperature == 0

    @classmethod
    def from_chat_request(cls, body: Mapping[str, Any]) -> SamplingParams:
        """Reads the body of `/v1/chat/completions`: other fields are ignored, null is absent.

        `max_completion_tokens` goes before `max_tokens`; `top_logprobs` needs `logprobs` true.

        Raises:
          ProtocolError: with every fault, under the names of the request.
        """
        fields = _present(body)
        faults: list[Fault] = []
        names = {}
        if body.get("max_completion_tokens") is not None:
            fields["max_tokens"] = body["max_completion_tokens"]
            names["max_tokens"] = "max_completion_tokens"
        wanted = fields.pop("logprobs", False)
        alternatives = body.get("top_logprobs")
        if not isinstance(wanted, bool):
            faults.append(Fault("logprobs", f"must be true or false, got {shorten(wanted)}"))
        elif wanted:
            fields["logprobs"] = 0 if alternatives is None else alternatives
            names["logprobs"] = "top_logprobs"
        elif alternatives is not None and not _is_zero(alternatives):
            faults.append(Fault("top_logprobs", f"needs `logprobs` true, got {shorten(alternatives)} without it"))
        return cls._create(fields, faults, names)

    @classmethod
    def from_completion_request(cls, body: Mapping[str, Any]) -> SamplingParams:
        """Reads the body of `/v1/completions`, where `logprobs` is the number of alternatives.

        `max_tokens` is 16 when absent, as OpenAI's API has it.

        Raises:
          ProtocolError: with every fault.
        """
        return cls._create({"max_tokens": 16, **_present(body)}, [], {})

    def check_ids(self, vocab_size: int) -> None:
        """Refuses token ids that the model does not have.

        Raises:
          ProtocolError: with every such id.
        """
        faults = [
            Fault(field, f"token id {token} is not below the vocabulary size {vocab_size}")
            for field, ids in (("logit_bias", self.logit_bias), ("stop_token_ids", self.stop_token_ids))
            for token in ids
            if token >= vocab_size
        ]
        if faults:
            raise ProtocolError(faults)

    @classmethod
    def _create(cls, fields: Mapping[str, Any], faults: list[Fault], names: Mapping[str, str]) -> SamplingParams:
        made = object.__new__(cls)
        for field in dataclasses.fields(cls):
            default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
            object.__setattr__(made, field.name, fields.get(field.name, default))
        made._check(names, faults)
        return made

    def _check(self, names: Mapping[str, str], faults: Sequence[Fault] = ()) -> None:
        """Checks every field and puts it into its declared type; `names` are the fields' names in a request."""
        reader = _Reader(self, names, list(faults))
        checked = {
            "temperature": reader.number("temperature", 0, 2),
            "top_k": reader.integer("top_k", 1, None, also=-1),
            "top_p": reader.number("top_p", 0, 1, above=True),
            "min_p": reader.number("min_p", 0, 1),
            "presence_penalty": reader.number("presence_penalty", -2, 2),
            "frequency_penalty": reader.number("frequency_penalty", -2, 2),
            "logit_bias": reader.biases(),
            "seed": reader.integer("seed", -_INT64, _INT64 - 1, optional=True),
            "max_tokens": reader.integer("max_tokens", 1, None, optional=True),
            "stop": reader.stop_strings(),
            "stop_token_ids": reader.stop_ids(),
            "ignore_eos": reader.boolean("ignore_eos"),
            "n": reader.integer("n", 1, MAX_CHOICES),
            "logprobs": reader.integer("logprobs", 0, MAX_LOGPROBS, optional=True),
        }
        if reader.faults:
            raise ProtocolError(reader.faults)
        for name, value in checked.items():
            object.__setattr__(self, name, value)


def _present(body: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a request that are sampling fields by the same name and not null."""
    names = [field.name for field in dataclasses.fields(SamplingParams)]
    return {name: body[name] for name in names if body.get(name) is not None}


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_zero(value: Any) -> bool:
    return _is_integer(value) and value == 0


class _Reader:
    """Reads fields one by one and collects faults; a field with one reads as None."""

    def __init__(self, params: SamplingParams, names: Mapping[str, str], faults: list[Fault]):
        self.params = params
        self.names = names
        self.faults = faults

    def fault(self, name: str, message: str, place: str = "") -> None:
        self.faults.append(Fault(self.names.get(name, name) + place, message))

    def number(self, name: str, low: float, high: float, *, above: bool = False) -> float | None:
        value = getattr(self.params, name)
        if not isinstance(value, int | float) or isinstance(value, bool) or value != value:  # NaN
            self.fault(name, f"must be a number, got {shorten(value)}")
        elif not low <= value <= high or (above and value == low):
            span = f"above {low} and at most {high}" if above else f"from {low} to {high}"
            self.fault(name, f"must be {span}, got {shorten(value)}")
        else:
            return float(value)
        return None

    def integer(
        self, name: str, low: int, high: int | None, *, also: int | None = None, optional: bool = False
    ) -> int | None:
        value = getattr(self.params, name)
        if value is None and optional:
            return None
        span = f"at least {low}" if high is None else f"from {low} to {high}"
        other = "" if also is None else f" or {also}"
        if not _is_integer(value):
            self.fault(name, f"must be an integer, got {shorten(value)}")
        elif value != also and (value < low or (high is not None and value > high)):
            self.fault(name, f"must be {span}{other}, got {shorten(value)}")
        else:
            return int(value)
        return None

    def boolean(self, name: str) -> bool | None:
        value = getattr(self.params, name)
        if isinstance(value, bool):
            return value
        self.fault(name, f"must be true or false, got {shorten(value)}")
        return None

    def stop_strings(self) -> tuple[str, ...]:
        value = self.params.stop
        listed = (value,) if isinstance(value, str) else self._listed("stop", MAX_STOP_STRINGS, "a string or a list")
        for index, text in enumerate(listed):
            place = "" if isinstance(value, str) else f"[{index}]"
            if not isinstance(text, str):
                self.fault("stop", f"must be a string, got {shorten(text)}", place)
            elif not 1 <= len(text) <= MAX_STOP_CHARACTERS:
                self.fault("stop", f"must have 1 to {MAX_STOP_CHARACTERS} characters, got {len(text)}", place)
            elif unencodable(text) is not None:
                self.fault("stop", f"contains the lone surrogate {unencodable(text)}, which is not text", place)
        return tuple(listed)

    def stop_ids(self) -> tuple[int, ...]:
        listed = self._listed("stop_token_ids", MAX_STOP_IDS, "a list")
        for index, token in enumerate(listed):
            if not _is_integer(token) or token < 0:
                self.fault("stop_token_ids", f"must be a token id, got {shorten(token)}", f"[{index}]")
        return tuple(listed)

    def biases(self) -> dict[int, float]:
        """Ids may be given as decimal text, since keys of a JSON object are text."""
        value = self.params.logit_bias
        if not isinstance(value, Mapping):
            self.fault("logit_bias", f"must be an object of token ids, got {shorten(value)}")
            return {}
        if len(value) > MAX_BIASES:
            self.fault("logit_bias", f"must have at most {MAX_BIASES} entries, got {len(value)}")
            return {}
        result = {}
        for key, bias in value.items():
            token = int(key) if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 12 else key
            if not _is_integer(token) or token < 0:
                self.fault("logit_bias", f"keys must be token ids, got {shorten(key)}")
            elif token in result:
                self.fault("logit_bias", f"token id {token} is given twice")
            elif not isinstance(bias, int | float) or isinstance(bias, bool) or not abs(bias) <= MAX_BIAS:
                limit = f"{-MAX_BIAS:g} to {MAX_BIAS:g}"
                self.fault("logit_bias", f"must be a number from {limit}, got {shorten(bias)}", f".{token}")
            else:
                result[token] = float(bias)
        return result

    def _listed(self, name: str, most: int, kind: str) -> Sequence[Any]:
        value = getattr(self.params, name)
        if not isinstance(value, Sequence) or isinstance(value, str | bytes):
            self.fault(name, f"must be {kind}, got {shorten(value)}")
            return ()
        if len(value) > most:
            self.fault(name, f"must have at most {most} entries, got {len(value)}")
            return ()
        return value

"""What goes into an engine and comes out of it: prompts, the deltas of a stream, finished generations."""

from __future__ import annotations

import dataclasses

from scheduler.sequence import RequestOutput, SamplingParams
from v41jax.detokenizer import Detokenizer
from v41jax.engine_core import TokenScore
from v41jax.engine_images import PromptImages
from v41jax.logit_edits import TokenConstraint


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One request.

    Attributes:
      tokens: prompt ids.
      sampling: how tokens are drawn and when the request stops.
      stop: texts that end the generation and are not part of it; they need a tokenizer.
      arrival_step: `generate` submits it before this step of its run.
      skip_special: leave control tokens other than the reply's own markup out of the text.
      timeout_s: seconds after submission at which the request ends with reason `timeout`; None never does.
      constraint: which tokens may follow which; of this request alone.
      images: of the placeholders in `tokens`, which are expanded; see `Engine.prompt_with_images`.
    """

    tokens: tuple[int, ...]
    sampling: SamplingParams = SamplingParams()
    stop: tuple[str, ...] = ()
    arrival_step: int = 0
    skip_special: bool = True
    timeout_s: float | None = None
    constraint: TokenConstraint | None = None
    images: PromptImages | None = None


@dataclasses.dataclass(frozen=True)
class Delta:
    """What one step gave a request.

    Attributes:
      tokens: new ids.
      text: text that is certain by now; empty without a tokenizer.
      finish_reason: None while the request runs.
      cached_tokens: prefix tokens reused.
      scores: one for each of `tokens` when the request asks for log-probabilities, else empty.
      prompt_scores: one for each token of the prompt, None for the first, with the request's first token when it asks
        for them; else empty.
    """

    tokens: tuple[int, ...]
    text: str
    finish_reason: str | None
    cached_tokens: int
    scores: tuple[TokenScore, ...] = ()
    prompt_scores: tuple[TokenScore | None, ...] = ()


@dataclasses.dataclass(frozen=True)
class Generation:
    """A finished request.

    Attributes:
      tokens: generated ids, the stop token included.
      text: their text, without control tokens and stop strings; empty without a tokenizer.
      finish_reason: `eos`, `stop_<id>`, `stop_sequence`, `max_tokens`, `timeout`, `aborted`, `unschedulable: ...`.
      prompt_tokens: length of the prompt.
      cached_tokens: prefix tokens reused.
      time_to_first_token_s: from submission; 0 when no token was generated.
      time_s: from submission to the end.
    """

    tokens: tuple[int, ...]
    text: str
    finish_reason: str
    prompt_tokens: int
    cached_tokens: int
    time_to_first_token_s: float
    time_s: float


class LiveRequest:
    """A request the engine follows: its text, its times, and who listens."""

    def __init__(self, prompt: Prompt, detokenizer: Detokenizer | None, submitted: float):
        self.prompt = prompt
        self.detokenizer = detokenizer
        self.submitted = submitted
        self.first: float | None = None
        self.tokens: list[int] = []
        self.text: list[str] = []
        self.stopped = False
        self.cached_tokens = 0
        self.prompt_scores: list[TokenScore | None] = []
        if prompt.sampling.prompt_logprobs:
            self.prompt_scores = [None] * len(prompt.tokens)
        self.deadline = None if prompt.timeout_s is None else submitted + prompt.timeout_s

    def expire(self) -> Delta:
        """Ends the request because its time is over."""
        self.stopped = True
        text = "" if self.detokenizer is None else self.detokenizer.finish()
        self.text.append(text)
        return Delta((), text, "timeout", self.cached_tokens)

    def take(self, output: RequestOutput, scores: tuple[TokenScore, ...], now: float) -> Delta | None:
        """The part of an output that belongs to the request; None after a stop string ended it."""
        if self.stopped:
            return None
        self.cached_tokens = output.cached_tokens
        tokens, reason, text = output.new_tokens, output.finish_reason, ""
        prompt_scores: tuple[TokenScore | None, ...] = ()
        if tokens and self.first is None:
            prompt_scores = tuple(self.prompt_scores)
        if tokens and self.first is None:
            self.first = now
        if self.detokenizer is not None:
            before = self.detokenizer.tokens
            ends_by_id = reason is not None and reason.startswith("stop_") and reason != "stop_sequence"
            text = self.detokenizer.feed(tokens[:-1] if ends_by_id else tokens)
            if reason is not None:
                text += self.detokenizer.finish()
            if self.detokenizer.stop is not None:
                tokens = tokens[: self.detokenizer.tokens - before]
                reason, self.stopped = "stop_sequence", True
        self.tokens.extend(tokens)
        self.text.append(text)
        return Delta(tokens, text, reason, output.cached_tokens, scores[: len(tokens)], prompt_scores)

    def generation(self, delta: Delta, now: float) -> Generation:
        """The whole of a finished request."""
        return Generation(
            tokens=tuple(self.tokens),
            text="".join(self.text),
            finish_reason=delta.finish_reason or "",
            prompt_tokens=len(self.prompt.tokens),
            cached_tokens=delta.cached_tokens,
            time_to_first_token_s=0.0 if self.first is None else self.first - self.submitted,
            time_s=now - self.submitted,
        )

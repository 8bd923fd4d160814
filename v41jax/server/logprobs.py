"""Log-probabilities in the two forms of OpenAI's API: lists of tokens for chat, parallel lists for completions."""

from __future__ import annotations

import codecs
import math
from collections.abc import Iterable, Sequence
from typing import Any

from v41jax.engine_core import TokenScore
from v41jax.tokenizer import Tokenizer

_LEAST = -9999.0
"""Stands for minus infinity, which JSON does not have."""


def finite(value: float) -> float:
    """A log-probability that JSON can carry."""
    return max(value, _LEAST) if math.isfinite(value) else _LEAST


def chat_entry(tokenizer: Tokenizer, token: int, score: TokenScore) -> dict[str, Any]:
    """One token with its alternatives, as `choices[].logprobs.content[]`."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        return {
            "token": tokenizer.token_text(token),
            "logprob": finite(logprob),
            "bytes": list(tokenizer.token_bytes(token)),
        }

    alternatives = [entry(other, logprob) for other, logprob in score.alternatives]
    return {**entry(token, score.logprob), "top_logprobs": alternatives}


def token_label(tokenizer: Tokenizer, token: int) -> str:
    """Text of a token; its bytes, spelled out, when they are only a part of a character."""
    data = tokenizer.token_bytes(token)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class CompletionLogprobs:
    """Builds `choices[].logprobs` of a completion, piece by piece; offsets count characters of the whole text."""

    def __init__(self, tokenizer: Tokenizer, alternatives: int):
        self._tokenizer = tokenizer
        self._alternatives = alternatives
        self._characters = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._offset = 0

    def piece(self, tokens: Iterable[int], scores: Sequence[TokenScore | None]) -> dict[str, Any]:
        """The lists for the next tokens; a token without a score is the first of a prompt."""
        labels, logprobs, tops, offsets = [], [], [], []
        for token, score in zip(tokens, scores, strict=True):
            label = token_label(self._tokenizer, token)
            text = self._characters.decode(self._tokenizer.token_bytes(token))
            # What stands for a broken character of the tokens before comes first, and is not this token's.
            own = len(label) if text.endswith(label) else len(text)
            labels.append(label)
            offsets.append(self._offset + len(text) - own)
            self._offset += len(text)
            if score is None:
                logprobs.append(None)
                tops.append(None)
                continue
            logprobs.append(finite(score.logprob))
            chosen = {labels[-1]: finite(score.logprob)} if self._alternatives else {}
            best = score.alternatives[: self._alternatives]
            tops.append(chosen | {token_label(self._tokenizer, other): finite(value) for other, value in best})
        return {"tokens": labels, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}


def join(pieces: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The pieces of one choice as a whole."""
    return {key: [entry for piece in pieces for entry in piece[key]] for key in pieces[0]} if pieces else {}

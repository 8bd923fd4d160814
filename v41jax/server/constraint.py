"""Which tokens may follow under a grammar: the `llguidance` library, one matcher per choice, masks of packed bits."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import numpy as np
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from llguidance.numpy import fill_next_token_bitmask
from numpy.typing import NDArray

from v41jax.logit_edits import GeneratedTokens
from v41jax.protocol import ProtocolError
from v41jax.protocol.errors import Fault
from v41jax.protocol.tokens import END_OF_SENTENCE
from v41jax.server.grammars import ReplyGrammar
from v41jax.tokenizer import Tokenizer

_log = logging.getLogger(__name__)
_SHOWN = 300

MAX_CHARACTERS = 2**18
MAX_PARTS = 2000
MAX_SCHEMA_OBJECTS = 1000
MAX_ALL_OBJECTS = 5000
"""Bounds of a grammar. The library reads rules and schemas recursively on the stack of the thread: a chain of some
thousand references ends the process, and long alternatives take seconds a token. These stay well below both."""


class _LibraryTokenizer:
    """What the library asks of a tokenizer."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self.eos_token_id = tokenizer.control_id(END_OF_SENTENCE)
        self.bos_token_id = None
        self.tokens = [tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)]
        self.special_token_ids = [token for token in range(tokenizer.vocab_size) if tokenizer.is_control(token)]

    def __call__(self, text: str | bytes) -> list[int]:
        return self._tokenizer.encode(text.decode(errors="replace") if isinstance(text, bytes) else text)


class Grammars:
    """Compiles grammars for one tokenizer; making it takes about a second.

    Args:
      tokenizer: of the checkpoint.
      vocabulary: of the model; masks have a bit for each.
    """

    def __init__(self, tokenizer: Tokenizer, vocabulary: int):
        library = _LibraryTokenizer(tokenizer)
        self._end = library.eos_token_id
        self._tokenizer = LLTokenizer(TokenizerWrapper(library), n_vocab=vocabulary, eos_token=self._end)

    def compile(self, grammar: ReplyGrammar, *, after: int | None, kept_out: Iterable[int]) -> GrammarConstraint:
        """A constraint at the start of a reply; `copy` it for further choices.

        Args:
          grammar: of the reply.
          after: the reply follows this token and is free before it, except for `kept_out`; None begins at once.
          kept_out: tokens that may not come before `after`.

        Raises:
          ProtocolError: the grammar does not compile.
        """
        fault = size_fault(grammar.lark)
        if fault is not None:
            raise ProtocolError([Fault(grammar.param, fault)])
        matcher = LLMatcher(self._tokenizer, grammar.lark, log_level=0)
        if matcher.is_error():
            raise ProtocolError([Fault(grammar.param, f"cannot be enforced: {_reason(matcher)}")])
        return GrammarConstraint(matcher, self._end, after, tuple(kept_out))


def _reason(matcher: LLMatcher) -> str:
    return " ".join(matcher.get_error().split())[:_SHOWN]


def size_fault(lark: str) -> str | None:
    """Why a grammar is too large to be given to the library; None when it is not."""
    if len(lark) > MAX_CHARACTERS:
        return f"makes a grammar of {len(lark)} characters; at most {MAX_CHARACTERS} are accepted"
    parts = lark.count("\n") + lark.count("|")
    if parts > MAX_PARTS:
        return f"makes a grammar of {parts} rules and alternatives; at most {MAX_PARTS} are accepted"
    objects = [line.count("{") for line in lark.splitlines()]
    if max(objects, default=0) > MAX_SCHEMA_OBJECTS:
        return f"has a schema of {max(objects)} objects; at most {MAX_SCHEMA_OBJECTS} are accepted"
    if sum(objects) > MAX_ALL_OBJECTS:
        return f"has schemas of {sum(objects)} objects in all; at most {MAX_ALL_OBJECTS} are accepted"
    return None


_TAKEN_BACK = 16
"""Newest tokens that may turn out otherwise; more than a draft and what is in flight. What lies further back stays."""


class GrammarConstraint:
    """A `TokenConstraint`. Follows what was generated, also when a preempted request comes back with less of it or when
    proposals of a draft that it followed were rejected."""

    def __init__(self, matcher: LLMatcher, end: int, after: int | None, kept_out: tuple[int, ...]):
        self._matcher = matcher
        self._end = end
        self._after = after
        self._kept_out = kept_out
        self._seen: list[int] = []
        self._begun = after is None
        self._begun_at = 0  # tokens seen before the grammar begins
        self._fed = 0  # tokens from there on that the matcher has taken in

    def copy(self) -> GrammarConstraint:
        """The same constraint for another choice; of one that has seen nothing."""
        return GrammarConstraint(self._matcher.deep_copy(), self._end, self._after, self._kept_out)

    @property
    def failure(self) -> str | None:
        """Why the library gave up in the middle of the reply, which then ended unfinished; None if it did not."""
        return _reason(self._matcher) if self._matcher.is_error() else None

    def write_mask(self, generated: GeneratedTokens, words: NDArray[np.uint32]) -> bool:
        """See `TokenConstraint`."""
        self._follow(generated)
        if not self._begun:
            for token in self._kept_out:
                words[token // 32] &= ~(np.uint32(1) << np.uint32(token % 32))
            return True
        if self._matcher.is_error():
            _log.warning("a grammar failed in the middle of a reply: %s", _reason(self._matcher))
            words[:] = 0
            words[self._end // 32] = np.uint32(1) << np.uint32(self._end % 32)
            return True
        fill_next_token_bitmask(self._matcher, words.view(np.int32)[None, :], 0)
        return True

    def _follow(self, generated: GeneratedTokens) -> None:
        """Takes back what was seen and not generated, and takes in what is new."""
        count, before = generated.count, generated.before
        first = max(0, min(count, len(self._seen)) - _TAKEN_BACK)
        kept = first
        while kept < min(count, len(self._seen)):
            token = generated.newest if kept == len(before) else int(before[kept])
            if token != self._seen[kept]:
                break
            kept += 1
        if first and kept == first:
            kept = 0
        self._take_back(kept)
        for token in before[len(self._seen) :].tolist():
            self._take(token)
        if generated.newest is not None and len(self._seen) < count:
            self._take(generated.newest)

    def _take_back(self, kept: int) -> None:
        """Forgets all but the first `kept` tokens seen."""
        if kept == len(self._seen):
            return
        fed = max(0, min(self._fed, kept - self._begun_at)) if self._begun else 0
        if not self._matcher.is_error() and (fed == self._fed or self._matcher.rollback(self._fed - fed)):
            del self._seen[kept:]
            self._fed = fed
            self._begun = self._begun and kept >= self._begun_at
            return
        seen = self._seen[:kept]
        self._matcher.reset()
        self._seen, self._fed, self._begun, self._begun_at = [], 0, self._after is None, 0
        for token in seen:
            self._take(token)

    def _take(self, token: int) -> None:
        self._seen.append(token)
        if self._begun:
            # A matcher that has stopped counts no token, and could not take it back.
            if not self._matcher.is_stopped():
                self._matcher.consume_token(token)
                self._fed += 1
        elif token == self._after:
            self._begun, self._begun_at = True, len(self._seen)

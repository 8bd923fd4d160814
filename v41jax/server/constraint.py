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
        matcher = LLMatcher(self._tokenizer, grammar.lark, log_level=0)
        if matcher.is_error():
            reason = " ".join(matcher.get_error().split())[:_SHOWN]
            raise ProtocolError([Fault(grammar.param, f"cannot be enforced: {reason}")])
        return GrammarConstraint(matcher, self._end, after, tuple(kept_out))


class GrammarConstraint:
    """A `TokenConstraint`. Follows what was generated, also when a preempted request comes back with less of it."""

    def __init__(self, matcher: LLMatcher, end: int, after: int | None, kept_out: tuple[int, ...]):
        self._matcher = matcher
        self._end = end
        self._after = after
        self._kept_out = kept_out
        self._seen: list[int] = []
        self._begun = after is None

    def copy(self) -> GrammarConstraint:
        """The same constraint for another choice; of one that has seen nothing."""
        return GrammarConstraint(self._matcher.deep_copy(), self._end, self._after, self._kept_out)

    def write_mask(self, generated: GeneratedTokens, words: NDArray[np.uint32]) -> bool:
        """See `TokenConstraint`."""
        self._follow(generated)
        if not self._begun:
            for token in self._kept_out:
                words[token // 32] &= ~(np.uint32(1) << np.uint32(token % 32))
            return True
        if self._matcher.is_error():
            _log.warning("a grammar failed in the middle of a reply: %s", self._matcher.get_error())
            words[:] = 0
            words[self._end // 32] = np.uint32(1) << np.uint32(self._end % 32)
            return True
        fill_next_token_bitmask(self._matcher, words.view(np.int32)[None, :], 0)
        return True

    def _follow(self, generated: GeneratedTokens) -> None:
        """Takes in the newest token, or starts over when the tokens before it are not those seen."""
        count = generated.count
        newest_only = len(self._seen) == count - 1 and (count < 2 or self._seen[-1] == int(generated.before[-1]))
        if newest_only and generated.newest is not None:
            self._take(generated.newest)
        elif count != len(self._seen) or (count and self._seen[-1] != generated.newest):
            self._matcher.reset()
            self._seen, self._begun = [], self._after is None
            for token in generated.before.tolist():
                self._take(token)
            if generated.newest is not None:
                self._take(generated.newest)

    def _take(self, token: int) -> None:
        self._seen.append(token)
        if self._begun:
            self._matcher.consume_token(token)
        elif token == self._after:
            self._begun = True

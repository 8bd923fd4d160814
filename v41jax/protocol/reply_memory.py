"""Remembers replies whose generated ids are not the ids their text encodes to.

A model may write a word in other pieces than the tokenizer would, leave out the blank line before its calls, or write
JSON without spaces. A client sends such a reply back as text and arguments; encoding those gives other ids than the
cache holds, and the prefix hit would end there. The memory gives such a reply its generated ids back, in the
conversation it was generated in and nowhere else.
"""

from __future__ import annotations

import collections
from array import array
from collections.abc import Sequence
from typing import Protocol

from v41jax.protocol import tokens
from v41jax.protocol.events import Reply
from v41jax.protocol.json_text import decode_object
from v41jax.protocol.prompt import EncodedPrompt, PrefixHash, PromptWriter, TextEncoder, encode_segments
from v41jax.protocol.render import write_reply
from v41jax.protocol.turns import Call, Turn


class ReplyTokenizer(TextEncoder, Protocol):
    """What remembering needs of a tokenizer besides encoding."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, control tokens as their literals."""
        ...

    def is_control(self, token_id: int) -> bool:
        """Whether an id is a control or added token rather than a piece of text."""
        ...


class ReplyMemory:
    """Bounded memory of replies, least recently used out first. Give it to `encode_chat` as `replies`.

    Args:
      max_tokens: generated ids kept in total, 4 bytes each.
    """

    def __init__(self, max_tokens: int = 4_000_000):
        self._max_tokens = max_tokens
        self._tokens = 0
        self._replies: collections.OrderedDict[bytes, array[int]] = collections.OrderedDict()

    def __len__(self) -> int:
        return len(self._replies)

    def recall(self, key: bytes) -> Sequence[int] | None:
        """The generated ids of the reply with this key; None when they are its canonical ids, or unknown."""
        if key not in self._replies:
            return None
        self._replies.move_to_end(key)
        return self._replies[key]

    def remember(
        self, prompt: EncodedPrompt, generated: Sequence[int], text: str, reply: Reply, tokenizer: ReplyTokenizer
    ) -> bool:
        """Notes one finished reply.

        Args:
          prompt: what was answered, encoded with a tokenizer and with this memory.
          generated: the generated ids, without the end token.
          text: the text that `reply` was parsed from. When it is not all of the ids' text, because a stop string cut
            it, the reply is not remembered.
          reply: what the client got.
          tokenizer: of the checkpoint.

        Returns:
          Whether the reply, sent back by a client, now encodes to the generated ids.

        Raises:
          ValueError: the prompt has no token ids.
        """
        if prompt.token_ids is None:
            raise ValueError("only replies to a prompt with token ids can be remembered; give encode_chat a tokenizer")
        before_body = prompt.token_ids
        body = list(generated)
        writer = PromptWriter()
        if prompt.open_reply is None:
            with_reasoning = prompt.starts_in_reasoning
            turn = Turn("assistant", (reply.content,), reasoning=reply.reasoning, calls=_calls(reply))
        else:
            before, first, with_reasoning = prompt.open_reply
            if first is None or before.calls or any(not isinstance(piece, str) for piece in before.content):
                return False
            said = tokens.BLANK_LINE.join(piece for piece in before.content if isinstance(piece, str))
            turn = Turn("assistant", (said + reply.content,), reasoning=before.reasoning, calls=_calls(reply))
            opened = encode_segments(prompt.segments[first:], tokenizer)
            before_body = before_body[: len(before_body) - len(opened)]
            body = opened + body
        if reply.is_truncated or tokenizer.decode(generated) != text:
            return False
        markup = {tokenizer.control_id(token) for token in tokens.MARKUP_TOKENS}
        if any(tokenizer.is_control(token) and token not in markup for token in body):
            return False
        if with_reasoning and tokenizer.control_id(tokens.THINK_CLOSE) not in body:
            return False
        write_reply(turn, writer, with_reasoning=with_reasoning)
        canonical = encode_segments(writer.segments(), tokenizer)
        prefix = PrefixHash()
        prefix.add(before_body)
        self._store(prefix.key(canonical), array("i", body) if canonical != body else None)
        return True

    def _store(self, key: bytes, body: array[int] | None) -> None:
        """Puts a reply in place of an earlier one with this key; None only forgets that one."""
        replaced = self._replies.pop(key, None)
        self._tokens -= 0 if replaced is None else len(replaced)
        if body is None:
            return
        self._tokens += len(body)
        self._replies[key] = body
        while self._tokens > self._max_tokens:
            self._tokens -= len(self._replies.popitem(last=False)[1])


def _calls(reply: Reply) -> tuple[Call, ...]:
    return tuple(Call(None, call.name, decode_object(call.arguments) or {}) for call in reply.calls)

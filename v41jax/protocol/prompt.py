"""The finished prompt: control tokens and text kept apart until they are token ids.

A caller's text never becomes a control token because it is never parsed for one: the encoder says which pieces are
control, and everything between two of them is encoded as plain text in one go, exactly as a tokenizer that splits at
control tokens would.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from array import array
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from v41jax.protocol.tokens import CONTROL_TOKENS, IMAGE
from v41jax.protocol.turns import Image, Turn

_CONTROL = re.compile("(" + "|".join(re.escape(token) for token in CONTROL_TOKENS) + ")")


class Segment(NamedTuple):
    """A piece of a prompt: one control token, or text in which nothing is a control token."""

    text: str
    is_control: bool


class TextEncoder(Protocol):
    """What encoding needs of a tokenizer; `v41jax.tokenizer.Tokenizer` has it."""

    def encode(self, text: str) -> list[int]:
        """Ids of plain text; protocol literals inside it stay text."""
        ...

    def control_id(self, token: str) -> int:
        """Id of a control token."""
        ...


class ReplySource(Protocol):
    """What encoding needs of a memory of earlier replies; `ReplyMemory` has it."""

    def recall(self, key: bytes) -> Sequence[int] | None:
        """The ids that were generated for the reply body of this `PrefixHash.key`; None if unknown."""
        ...


class PrefixHash:
    """Running hash of a prompt's ids, which gives each reply in it a key of its own.

    A key covers everything before the reply. So what was generated in one conversation is never used in another,
    where it would change nothing but how a text is cut into ids, and would miss the cache.
    """

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def add(self, ids: Sequence[int]) -> None:
        """Ids that follow."""
        self._hash.update(array("i", ids).tobytes())

    def key(self, body: Sequence[int]) -> bytes:
        """Key of a reply that stands here and whose text encodes to `body`."""
        return hashlib.sha256(self._hash.digest() + array("i", body).tobytes()).digest()


class OpenReply(NamedTuple):
    """An assistant turn left open at the end of a prompt.

    Attributes:
      turn: what has been said so far.
      first_segment: the segment its body starts with; None when the body is not set apart by a control token.
      with_reasoning: its reasoning is part of the prompt.
    """

    turn: Turn
    first_segment: int | None
    with_reasoning: bool


@dataclasses.dataclass(frozen=True)
class EncodedPrompt:
    """What `encode_chat` returns.

    Attributes:
      segments: the prompt, control and text apart; neighbours are never both text.
      images: the images in the order of their placeholders; `images[k].index` is the place in the request.
      starts_in_reasoning: the model's first token continues `<think>`; give it to `OutputParser`.
      expects_reply: the prompt ends where an assistant may write; False after a closed assistant turn, for example.
      reply_spans: ranges `[first, end)` of segments that hold one whole earlier reply, end token excluded.
      open_reply: the assistant turn that generation continues (`wo_eos`), or None.
      token_ids: the ids, when `encode_chat` was given a tokenizer; else None.
    """

    segments: tuple[Segment, ...]
    images: tuple[Image, ...]
    starts_in_reasoning: bool
    expects_reply: bool
    reply_spans: tuple[tuple[int, int], ...]
    open_reply: OpenReply | None
    token_ids: list[int] | None = None

    @property
    def text(self) -> str:
        """The prompt as one string. For reading: which literals are control is no longer visible in it."""
        return "".join(segment.text for segment in self.segments)

    def encode(self, tokenizer: TextEncoder, replies: ReplySource | None = None) -> list[int]:
        """Token ids of the prompt; each image is one placeholder id.

        Args:
          tokenizer: of the checkpoint.
          replies: earlier replies whose generated ids differ from what their text encodes to. With it, a reply sent
            back by a client gets the ids that are in the cache.
        """
        if replies is None:
            return encode_segments(self.segments, tokenizer)
        ids: list[int] = []
        prefix = PrefixHash()
        done = hashed = 0
        for first, end in self.reply_spans:
            ids += encode_segments(self.segments[done:first], tokenizer)
            prefix.add(ids[hashed:])
            hashed = len(ids)
            body = encode_segments(self.segments[first:end], tokenizer)
            recalled = replies.recall(prefix.key(body))
            ids += body if recalled is None else recalled
            done = end
        return ids + encode_segments(self.segments[done:], tokenizer)


def encode_segments(segments: Sequence[Segment], tokenizer: TextEncoder) -> list[int]:
    """Ids of consecutive segments."""
    ids: list[int] = []
    for text, is_control in segments:
        if is_control:
            ids.append(tokenizer.control_id(text))
        else:
            ids += tokenizer.encode(text)
    return ids


class PromptWriter:
    """Collects segments; neighbouring text becomes one segment."""

    def __init__(self) -> None:
        self.images: list[Image] = []
        self.reply_spans: list[tuple[int, int]] = []
        self._segments: list[Segment] = []
        self._text: list[str] = []

    def control(self, token: str) -> None:
        """Writes one control token."""
        self._flush()
        self._segments.append(Segment(token, True))

    def text(self, text: str) -> None:
        """Writes text of a caller or of the protocol in which nothing is control."""
        if text:
            self._text.append(text)

    def template(self, text: str) -> None:
        """Writes a fixed text of the protocol, whose control literals are control tokens."""
        for index, piece in enumerate(_CONTROL.split(text)):
            if index % 2:
                self.control(piece)
            else:
                self.text(piece)

    def image(self, image: Image) -> None:
        """Writes the placeholder of an image."""
        self.control(IMAGE)
        self.images.append(image)

    def begin_reply(self) -> int | None:
        """The body of an assistant turn starts here.

        Returns:
          Its first segment; None when it continues text, so that its ids depend on what came before.
        """
        return None if self._text else len(self._segments)

    def end_reply(self, first: int | None) -> None:
        """The body that began at `first` ended; a control token must follow."""
        self._flush()
        if first is not None and first < len(self._segments):
            self.reply_spans.append((first, len(self._segments)))

    def segments(self) -> tuple[Segment, ...]:
        """Everything written."""
        self._flush()
        return tuple(self._segments)

    def _flush(self) -> None:
        if self._text:
            self._segments.append(Segment("".join(self._text), False))
            self._text = []

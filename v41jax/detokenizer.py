"""Ids to text as they are generated: whole characters only, stop strings found across token borders."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol


class TokenBytes(Protocol):
    """What detokenizing needs of a tokenizer."""

    def token_bytes(self, token_id: int) -> bytes:
        """UTF-8 bytes of one id."""
        ...

    def is_hidden(self, token_id: int) -> bool:
        """Whether `skip_special` leaves the id out."""
        ...


class StopMatch(NamedTuple):
    """Text before the stop string, and the stop string, or None while none was found."""

    text: str
    stop: str | None


class StopStrings:
    """Finds the stop string that is complete first; of those that end together, the longest.

    So the result does not depend on how the text is cut into pieces. Text that may be the beginning of a stop string is
    held back.

    Args:
      stop: strings, none of them empty.
    """

    def __init__(self, stop: Sequence[str]):
        self._stop = tuple(stop)
        self._held = ""

    def feed(self, text: str) -> StopMatch:
        """Takes a piece of text, returns what is certain. Nothing may be fed after a stop string was found."""
        buffer = self._held + text
        found = [(at + len(stop), at, stop) for stop in self._stop if (at := buffer.find(stop)) >= 0]
        if found:
            _, start, stop = min(found)
            self._held = ""
            return StopMatch(buffer[:start], stop)
        keep = len(buffer) - max((_overlap(buffer, stop) for stop in self._stop), default=0)
        self._held = buffer[keep:]
        return StopMatch(buffer[:keep], None)

    def release(self) -> str:
        """The text held back, when nothing follows."""
        held, self._held = self._held, ""
        return held


def _overlap(buffer: str, stop: str) -> int:
    """Length of the longest end of `buffer` that is a proper beginning of `stop`."""
    start = max(len(buffer) - len(stop) + 1, 0)
    while (start := buffer.find(stop[0], start)) >= 0:
        if stop.startswith(buffer[start:]):
            return len(buffer) - start
        start += 1
    return 0


class Detokenizer:
    """Text of one generation.

    Joined, what `feed` and `finish` return is the text of all ids up to the stop string. A piece never ends inside a
    character; bytes that cannot become one come out as U+FFFD as soon as that is certain.

    Attributes:
      stop: the stop string that was found, or None. After it, ids are ignored.
      tokens: ids taken, the one that completed the stop string included.

    Args:
      tokenizer: of the checkpoint.
      skip_special: leave out what the tokenizer hides; otherwise such tokens come out as their literals.
      stop: stop strings; they are matched on the text and are not part of it.
      dropped: ids that never have text, such as the end token.
    """

    def __init__(
        self,
        tokenizer: TokenBytes,
        *,
        skip_special: bool = False,
        stop: Sequence[str] = (),
        dropped: frozenset[int] = frozenset(),
    ):
        self.stop: str | None = None
        self.tokens = 0
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._dropped = dropped
        self._stops = StopStrings(stop)
        self._characters = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, ids: Iterable[int]) -> str:
        """Takes the next ids, returns the text that is certain by now; often empty."""
        pieces = []
        for token_id in ids:
            if self.stop is not None:
                break
            self.tokens += 1
            if token_id in self._dropped or (self._skip_special and self._tokenizer.is_hidden(token_id)):
                continue
            pieces.append(self._add(self._characters.decode(self._tokenizer.token_bytes(token_id))))
        return "".join(pieces)

    def finish(self) -> str:
        """Ends the stream and returns what was held back."""
        if self.stop is not None:
            return ""
        text = self._add(self._characters.decode(b"", final=True))
        return text if self.stop is not None else text + self._stops.release()

    def _add(self, text: str) -> str:
        if not text:
            return ""
        match = self._stops.feed(text)
        self.stop = match.stop
        return match.text

"""Finding markers in a stream: which text is surely no marker yet, and which must wait for more."""

from __future__ import annotations

import re
from typing import NamedTuple


class Scan(NamedTuple):
    """One look at a buffer.

    Attributes:
      end: the text up to here can be part of no marker.
      marker: the complete marker that starts at `end`, or None.
    """

    end: int
    marker: str | None


class Markers:
    """A fixed set of markers. None is empty, and none contains another one except at its end.

    The earliest complete marker wins, then the longest. While none is complete, the longest end of the buffer that
    could grow into one is held back. The cost of a look is linear in the buffer, and what is held is shorter than a
    marker.
    """

    def __init__(self, *markers: str):
        ordered = sorted(markers, key=len, reverse=True)
        self._pattern = re.compile("|".join(re.escape(marker) for marker in ordered))
        self._prefixes = frozenset(marker[:length] for marker in markers for length in range(1, len(marker)))
        self._longest = max(len(prefix) for prefix in self._prefixes) if self._prefixes else 0

    def scan(self, buffer: str, start: int = 0) -> Scan:
        """Looks at a buffer from `start`, where text begins."""
        match = self._pattern.search(buffer, start)
        if match is not None:
            return Scan(match.start(), match.group())
        return Scan(len(buffer) - self._held(buffer, start), None)

    def _held(self, buffer: str, start: int) -> int:
        """Length of the longest end of the buffer that is a proper prefix of a marker."""
        for length in range(min(self._longest, len(buffer) - start), 0, -1):
            if buffer[-length:] in self._prefixes:
                return length
        return 0

"""Faults of a request: where they are and what is wrong, collected and reported together."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable
from typing import NamedTuple

_SHOWN = 20


class Fault(NamedTuple):
    """One broken rule.

    Attributes:
      param: the field, as a client would write it: `messages[2].tool_calls[0].id`.
      message: what is wrong with its value, and what is allowed.
    """

    param: str
    message: str

    def __str__(self) -> str:
        return f"{self.param}: {self.message}"


class ProtocolError(ValueError):
    """A request that breaks one or more rules; an HTTP server answers 400.

    Attributes:
      faults: every fault found, in the order of the request. The text of the exception shows the first 20.
    """

    def __init__(self, faults: Iterable[Fault]):
        self.faults = tuple(faults)
        lines = [str(fault) for fault in self.faults[:_SHOWN]]
        if len(self.faults) > _SHOWN:
            lines.append(f"and {len(self.faults) - _SHOWN} more faults")
        super().__init__("; ".join(lines))

    @property
    def param(self) -> str:
        """The field of the first fault, for OpenAI's `error.param`."""
        return self.faults[0].param


_short = reprlib.Repr()
_short.maxlevel = 2
_short.maxstring = _short.maxother = _short.maxlong = 60
_short.maxdict = _short.maxlist = _short.maxtuple = 3


def shorten(value: object) -> str:
    """`repr` of a value from a request, cut in length and depth so that an error stays one readable line."""
    try:
        return _short.repr(value)
    except ValueError:  # an integer with more digits than Python writes
        return f"a huge {type(value).__name__}"

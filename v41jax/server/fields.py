"""Reads the fields of a request that are the server's own and collects faults; `sampling_params` reads the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from v41jax.protocol.errors import Fault, ProtocolError, shorten

Result = TypeVar("Result")


class Fields:
    """One request's body.

    Attributes:
      faults: found so far.
    """

    def __init__(self, body: Mapping[str, Any]):
        self.body = body
        self.faults: list[Fault] = []

    def attempt(self, read: Callable[[], Result]) -> Result | None:
        """The result of a reader, or None after noting its faults."""
        try:
            return read()
        except ProtocolError as error:
            self.faults += error.faults
            return None

    def fault(self, name: str, message: str) -> None:
        """Notes a fault."""
        self.faults.append(Fault(name, message))

    def boolean(self, name: str, default: bool) -> bool:
        """A truth value; null is the default."""
        value = self.body.get(name)
        if value is None or isinstance(value, bool):
            return default if value is None else value
        self.fault(name, f"must be true or false, got {shorten(value)}")
        return default

    def includes_usage(self, *, stream: bool) -> bool:
        """`stream_options.include_usage`."""
        options = self.body.get("stream_options")
        if options is None:
            return False
        if not isinstance(options, Mapping):
            self.fault("stream_options", f"must be an object, got {shorten(options)}")
            return False
        if not stream:
            self.fault("stream_options", "needs `stream` true")
        wanted = options.get("include_usage")
        if wanted is not None and not isinstance(wanted, bool):
            self.fault("stream_options.include_usage", f"must be true or false, got {shorten(wanted)}")
        return wanted is True

    def refuse(self, advice: Mapping[str, str]) -> None:
        """Notes a fault for each field that asks for what this server cannot do; null and an empty list ask nothing.

        Args:
          advice: what to do instead, by name of the field.
        """
        for name, instead in advice.items():
            if self.body.get(name) not in (None, []):
                self.fault(name, f"is not supported: {instead}")

    def check(self) -> None:
        """Raises `ProtocolError` with every fault, if there is one."""
        if self.faults:
            raise ProtocolError(self.faults)

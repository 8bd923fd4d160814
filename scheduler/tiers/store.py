"""Several tiers as one store, nearest first: what fails is counted, paused and passed over, never raised.

Called from worker threads only. A page that cannot be had is simply absent; the caller computes it again.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from scheduler.tiers.records import CorruptRecordError

_log = logging.getLogger(__name__)

PAUSE_S = 1.0
"""Seconds for which a tier that failed is left alone."""


class Tier(Protocol):
    """A place for pages; every method may be called from any thread.

    `get` raises `CorruptRecordError` for a page that is not what was written; every method may raise `OSError`.
    """

    name: str

    def contains(self, key: bytes) -> bool:
        """Whether `get` would probably find the page."""
        ...

    def get(self, key: bytes, length: int) -> bytes | None:
        """The page of `length` bytes, or None."""
        ...

    def put(self, key: bytes, payload: bytes) -> int:
        """Keeps a page; returns how many others had to go."""
        ...

    def discard(self, key: bytes) -> None:
        """Forgets a page."""
        ...

    def usage(self) -> tuple[int, int]:
        """(pages, bytes) kept, as far as known."""
        ...

    def close(self) -> None:
        """Ends the use of the tier."""
        ...


@dataclasses.dataclass
class TierCounters:
    """Totals of one tier since the start.

    Attributes:
      hits, misses: lookups by outcome; a failed one is neither.
      writes: pages written.
      evictions: pages that had to go for others.
      corrupt: pages that were not what was written, removed.
      errors: operations that failed.
      skipped: operations left out while the tier was paused after a failure.
      bytes_read, bytes_written: of pages.
      read_seconds, write_seconds: spent in lookups and writes, failed ones included.
    """

    hits: int = 0
    misses: int = 0
    writes: int = 0
    evictions: int = 0
    corrupt: int = 0
    errors: int = 0
    skipped: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    read_seconds: float = 0.0
    write_seconds: float = 0.0


class TierStore:
    """Tiers in order of nearness.

    A page found in a farther tier is also put into the host tier, if there is one. New pages go to every tier.

    Attributes:
      tiers: nearest first.
      unit_bytes: bytes of every page.
    """

    def __init__(self, tiers: Sequence[Tier], unit_bytes: int, *, clock: Callable[[], float] = time.monotonic):
        self.tiers = tuple(tiers)
        self.unit_bytes = unit_bytes
        self._clock = clock
        self._lock = threading.Lock()
        self._counters = {tier.name: TierCounters() for tier in self.tiers}
        self._paused_until = {tier.name: 0.0 for tier in self.tiers}

    def contains(self, key: bytes) -> bool:
        """Whether some tier that works says it has the page."""
        return any(self._attempt(tier, lambda tier=tier: tier.contains(key)) for tier in self.tiers)  # type: ignore[misc]

    def get(self, key: bytes) -> bytes | None:
        """The page from the nearest tier that has it whole, or None."""
        for place, tier in enumerate(self.tiers):
            payload = self._read(tier, key)
            if payload is not None:
                if place and self.tiers[0].name == "host":
                    self._write(self.tiers[0], key, payload)
                return payload
        return None

    def put(self, key: bytes, payload: bytes) -> None:
        """Writes a page to every tier that does not hold it."""
        for tier in self.tiers:
            if self._attempt(tier, lambda tier=tier: not tier.contains(key)):  # type: ignore[misc]
                self._write(tier, key, payload)

    def statistics(self) -> dict[str, dict[str, float]]:
        """Totals and current usage by tier."""
        found = {}
        for tier in self.tiers:
            pages, size = tier.usage()
            with self._lock:
                counters = dataclasses.asdict(self._counters[tier.name])
            found[tier.name] = {**counters, "pages": pages, "bytes": size}
        return found

    def close(self) -> None:
        """Closes every tier."""
        for tier in self.tiers:
            try:
                tier.close()
            except OSError as error:
                _log.warning("closing the %s tier: %s", tier.name, error)

    # Internal ------------------------------------------------------------------------------------------------

    def _count(self, tier: Tier, **amounts: float) -> None:
        with self._lock:
            counters = self._counters[tier.name]
            for name, amount in amounts.items():
                setattr(counters, name, getattr(counters, name) + amount)

    def _attempt(self, tier: Tier, operation: Callable[[], Any], seconds: str | None = None) -> Any:
        """The result of an operation; None when it failed or the tier is paused."""
        began = self._clock()
        if began < self._paused_until[tier.name]:
            self._count(tier, skipped=1)
            return None
        try:
            return operation()
        except OSError as error:
            self._paused_until[tier.name] = self._clock() + PAUSE_S
            self._count(tier, errors=1)
            _log.warning("the %s tier failed and is left alone for %g s: %s", tier.name, PAUSE_S, error)
            return None
        finally:
            if seconds is not None:
                self._count(tier, **{seconds: self._clock() - began})

    def _read(self, tier: Tier, key: bytes) -> bytes | None:
        def read() -> bytes | None:
            try:
                payload = tier.get(key, self.unit_bytes)
            except CorruptRecordError as error:
                self._count(tier, corrupt=1)
                _log.warning("the %s tier held a damaged page, which is removed: %s", tier.name, error)
                tier.discard(key)
                return None
            except FileNotFoundError:
                payload = None
            if payload is None:
                self._count(tier, misses=1)
            else:
                self._count(tier, hits=1, bytes_read=len(payload))
            return payload

        found: bytes | None = self._attempt(tier, read, "read_seconds")
        return found

    def _write(self, tier: Tier, key: bytes, payload: bytes) -> None:
        def write() -> None:
            evicted = tier.put(key, payload)
            self._count(tier, writes=1, evictions=evicted, bytes_written=len(payload))

        self._attempt(tier, write, "write_seconds")

"""Pages in host memory: a bounded number of bytes, least recently used out first."""

from __future__ import annotations

import threading
from collections import OrderedDict


class HostTier:
    """Thread-safe.

    Attributes:
      name: "host".
      capacity: bytes of pages kept at most.
    """

    name = "host"

    def __init__(self, capacity: int):
        self.capacity = capacity
        self._pages: OrderedDict[bytes, bytes] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def contains(self, key: bytes) -> bool:
        """Whether `get` would find the page."""
        with self._lock:
            return key in self._pages

    def get(self, key: bytes, length: int) -> bytes | None:
        """The page, which becomes the most recently used one; None without it."""
        with self._lock:
            page = self._pages.get(key)
            if page is None or len(page) != length:
                return None
            self._pages.move_to_end(key)
            return page

    def put(self, key: bytes, payload: bytes) -> int:
        """Keeps a page; returns how many others had to go."""
        with self._lock:
            if key in self._pages or len(payload) > self.capacity:
                return 0
            evicted = 0
            while self._bytes + len(payload) > self.capacity:
                _, old = self._pages.popitem(last=False)
                self._bytes -= len(old)
                evicted += 1
            self._pages[key] = payload
            self._bytes += len(payload)
            return evicted

    def discard(self, key: bytes) -> None:
        """Forgets a page."""
        with self._lock:
            page = self._pages.pop(key, None)
            self._bytes -= 0 if page is None else len(page)

    def usage(self) -> tuple[int, int]:
        """(pages, bytes) kept."""
        with self._lock:
            return len(self._pages), self._bytes

    def close(self) -> None:
        """Forgets everything."""
        with self._lock:
            self._pages.clear()
            self._bytes = 0

"""Pages in files of one directory: checksummed, crash-safe, bounded, and still there after a restart.

A page is written to a temporary file, flushed to the medium and renamed, so that a name never stands for half a page;
what a crash leaves behind is removed at the next start. One process owns a directory at a time.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
from collections import OrderedDict
from pathlib import Path

from scheduler.tiers.records import decode_record, encode_record

_SUFFIX = ".page"
_TEMPORARY = ".tmp"


class DiskTier:
    """Thread-safe.

    The files of one identity lie in a directory of that name below `directory`; those of other identities count
    towards the capacity and are evicted like any, so that a model that is not served any more leaves the disk in time.

    Attributes:
      name: "disk".
      directory: of all files.
      capacity: bytes of files kept at most.
    """

    name = "disk"

    def __init__(self, directory: Path | str, capacity: int, namespace: bytes):
        """Takes the directory over and reads which pages it holds, the least recently used first.

        Raises:
          ValueError: it cannot be used, or another process uses it.
        """
        self.directory = Path(directory)
        self.capacity = capacity
        self._home = self.directory / namespace.hex()[:32]
        self._lock = threading.Lock()
        self._files: OrderedDict[Path, int] = OrderedDict()
        self._bytes = 0
        self._serial = 0
        try:
            self._home.mkdir(parents=True, exist_ok=True)
            self._owner = open(self.directory / "lock", "ab")  # noqa: SIM115 (held until close)
        except OSError as error:
            raise ValueError(f"disk_cache_dir {str(directory)!r} cannot be used: {error}") from error
        try:
            fcntl.flock(self._owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._owner.close()
            raise ValueError(
                f"disk_cache_dir {str(directory)!r} is in use by another process: give every server its own directory"
            ) from None
        self._scan()

    def _scan(self) -> None:
        found: list[tuple[float, Path, int]] = []
        for path in self.directory.glob("*/*/*"):
            if path.suffix == _TEMPORARY:
                path.unlink(missing_ok=True)
            elif path.suffix == _SUFFIX:
                status = path.stat()
                found.append((status.st_mtime, path, status.st_size))
        for _, path, size in sorted(found):
            self._files[path] = size
            self._bytes += size
        with self._lock:
            self._make_room(0)

    def _path(self, key: bytes) -> Path:
        name = key.hex()
        return self._home / name[:2] / f"{name}{_SUFFIX}"

    def contains(self, key: bytes) -> bool:
        """Whether a file of that name is known."""
        with self._lock:
            return self._path(key) in self._files

    def get(self, key: bytes, length: int) -> bytes | None:
        """The page; None without one.

        Raises:
          CorruptRecordError: the file does not hold what was written.
          OSError: it cannot be read.
        """
        path = self._path(key)
        with self._lock:
            if path not in self._files:
                return None
            self._files.move_to_end(path)
        try:
            record = path.read_bytes()
        except FileNotFoundError:
            self._forget(path)
            raise
        payload = decode_record(key, record, length)
        with contextlib.suppress(OSError):  # recency after a restart is a nicety
            os.utime(path)
        return payload

    def put(self, key: bytes, payload: bytes) -> int:
        """Writes a page; returns how many files had to go.

        Raises:
          OSError: it cannot be written; nothing of it stays.
        """
        record = encode_record(key, payload)
        path = self._path(key)
        with self._lock:
            if path in self._files or len(record) > self.capacity:
                return 0
            evicted = self._make_room(len(record))
            self._serial += 1
            temporary = path.with_name(f"{path.stem}-{self._serial}{_TEMPORARY}")
        try:
            path.parent.mkdir(exist_ok=True)
            with open(temporary, "wb") as file:
                file.write(record)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
            _flush_directory(path.parent)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        with self._lock:
            self._bytes += len(record) - self._files.get(path, 0)
            self._files[path] = len(record)
            return evicted + self._make_room(0)

    def discard(self, key: bytes) -> None:
        """Removes a page."""
        path = self._path(key)
        path.unlink(missing_ok=True)
        self._forget(path)

    def usage(self) -> tuple[int, int]:
        """(files, bytes) kept."""
        with self._lock:
            return len(self._files), self._bytes

    def close(self) -> None:
        """Gives the directory to the next process; the files stay."""
        self._owner.close()

    def _forget(self, path: Path) -> None:
        with self._lock:
            self._bytes -= self._files.pop(path, 0)

    def _make_room(self, coming: int) -> int:
        """Removes the least recently used files until `coming` bytes fit; the lock is held."""
        evicted = 0
        while self._files and self._bytes + coming > self.capacity:
            path, size = self._files.popitem(last=False)
            self._bytes -= size
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
            evicted += 1
        return evicted


def _flush_directory(directory: Path) -> None:
    """Makes a rename survive a power failure."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

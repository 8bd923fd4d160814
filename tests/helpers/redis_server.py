"""A real Redis or Valkey server for tests, on a free port of this machine and without files."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

PROGRAMS = ("valkey-server", "redis-server")
REASON = f"NO SHARED STORE SERVER: none of {', '.join(PROGRAMS)} is installed (apt-get install redis-server)"


class RedisServer:
    """A server process; a context manager that ends it.

    Attributes:
      url: of it.
    """

    def __init__(self, directory: Path, *options: str):
        program = next(filter(None, map(shutil.which, PROGRAMS)), None)
        if program is None:
            pytest.skip(REASON)
        pytest.importorskip("redis", reason="NO SHARED STORE CLIENT: the package redis is not installed")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        self.url = f"redis://127.0.0.1:{self._port}/0"
        self._command = [program, "--port", str(self._port), "--bind", "127.0.0.1", "--save", "", *options]
        self._directory = directory
        self.start()

    def start(self) -> None:
        """Starts it (again), empty."""
        self._process = subprocess.Popen(
            self._command, cwd=self._directory, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        end = time.monotonic() + 60
        while True:
            try:
                socket.create_connection(("127.0.0.1", self._port), 1).close()
                return
            except OSError:
                assert self._process.poll() is None and time.monotonic() < end, "the store does not start"
                time.sleep(0.02)

    def client(self):
        """A plain client."""
        import redis

        return redis.Redis.from_url(self.url)

    def kill(self) -> None:
        """Ends it at once."""
        self._process.kill()
        self._process.wait()

    def freeze(self, frozen: bool = True) -> None:
        """It accepts connections and answers nothing, until thawed."""
        self._process.send_signal(signal.SIGSTOP if frozen else signal.SIGCONT)

    def __enter__(self) -> RedisServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

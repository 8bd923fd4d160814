"""A server that answers two requests and stops, in place of one that runs until it is stopped.

`python -m tests.docs.brief serve --model ...` is `v41jax serve ...` with it, for what needs a process of its own.
"""

from __future__ import annotations

import threading
import time

import httpx

from v41jax import cli
from v41jax.server import running

make_server = running.make_server
listed: list[str] = []
"""Models that the servers of this process named, in order."""


class BriefServer:
    """What `make_server` gives; `run` returns after the answers."""

    def __init__(self, *given: object, **options: object):
        self._server = make_server(*given, **options)

    def run(self) -> None:
        """Serves, asks, and stops."""
        thread = threading.Thread(target=self._server.run)
        thread.start()
        try:
            while not self._server.started:
                assert thread.is_alive()
                time.sleep(0.01)
            url = f"http://127.0.0.1:{self._server.servers[0].sockets[0].getsockname()[1]}"
            assert httpx.get(f"{url}/health").json() == {"status": "ok"}
            listed.extend(model["id"] for model in httpx.get(f"{url}/v1/models").json()["data"])
        finally:
            self._server.stop()
            thread.join()


if __name__ == "__main__":
    running.make_server = BriefServer
    cli.main()

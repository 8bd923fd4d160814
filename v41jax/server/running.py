"""Runs the application under uvicorn and stops it without losing what it is answering."""

from __future__ import annotations

import math
import socket
import sys
from types import FrameType

import uvicorn
from fastapi import FastAPI

from v41jax.server.service import Service


class DrainingServer(uvicorn.Server):
    """On the first signal refuses new requests and lets running ones finish, up to the drain time; on a second ends.

    Args:
      app: made by `create_app`.
      config: of uvicorn.
      announce: print the address once it listens.
    """

    def __init__(self, app: FastAPI, config: uvicorn.Config, *, announce: bool = False):
        super().__init__(config)
        self._announce = announce
        self._service: Service = app.state.service

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begins to listen and says where."""
        await super().startup(sockets)
        if self._announce and self.started:
            address = self.servers[0].sockets[0].getsockname()
            host = f"[{address[0]}]" if ":" in address[0] else address[0]
            name = self._service.options.model_name
            print(f"serving {name} on http://{host}:{address[1]}", file=sys.stderr, flush=True)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Takes a signal."""
        self._service.draining = True
        super().handle_exit(sig, frame)

    def stop(self) -> None:
        """Stops as a signal would; safe to call from another thread."""
        self._service.draining = True
        self.should_exit = True


def make_server(app: FastAPI, host: str, port: int, *, announce: bool = False) -> DrainingServer:
    """A server that is not running yet; call `run`."""
    drain = app.state.service.options.drain_timeout_s
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        log_level="warning",
        timeout_graceful_shutdown=max(math.ceil(drain), 1),
        server_header=False,
    )
    return DrainingServer(app, config, announce=announce)

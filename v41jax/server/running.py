"""Runs the application under uvicorn and stops it without losing what it is answering."""

from __future__ import annotations

import math
from types import FrameType

import uvicorn
from fastapi import FastAPI

from v41jax.server.service import Service


class DrainingServer(uvicorn.Server):
    """On the first signal refuses new requests and lets running ones finish, up to the drain time; on a second ends.

    Args:
      app: made by `create_app`.
      config: of uvicorn.
    """

    def __init__(self, app: FastAPI, config: uvicorn.Config):
        super().__init__(config)
        self._service: Service = app.state.service

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Takes a signal."""
        self._service.draining = True
        super().handle_exit(sig, frame)

    def stop(self) -> None:
        """Stops as a signal would; safe to call from another thread."""
        self._service.draining = True
        self.should_exit = True


def make_server(app: FastAPI, host: str, port: int) -> DrainingServer:
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
    return DrainingServer(app, config)

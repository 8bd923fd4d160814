"""The thread that steps an engine while streams listen; the only thread that touches the engine meanwhile."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING

from scheduler.sequence import RequestId
from v41jax.engine_core import StepFailedError
from v41jax.host_joining import describe

if TYPE_CHECKING:
    from v41jax.engine import Engine
    from v41jax.engine_requests import Delta, Prompt

_log = logging.getLogger(__name__)

REFUSED_STEPS = 3
REFUSED_SECONDS = 30.0
"""So many refused steps in a row, with no token for any request in between, end the engine if the first is at least so
many seconds ago.

A refused step ends its requests, so that each of them was made for others: one may be due to a request, which a client
perhaps sends again at once, or to a disk that comes back; what refuses steps for longer will refuse the next. Only an
engine that says it has failed is replaced.
"""

_CLOSED = "the engine is closed"

Listener = Callable[["Delta | Exception"], None]
"""Called on the engine's thread with each part of a request; it must not block."""


class EngineThread:
    """Runs steps while there is work and sleeps otherwise. Submissions and aborts cross over as commands."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self._commands: list[Callable[[], None]] = []
        self._listeners: dict[RequestId, Listener] = {}
        self._wake = threading.Condition()
        self._stopping = False
        self._refused: list[float] = []
        self._thread = threading.Thread(target=self._run, name="v41jax-engine", daemon=True)
        self._thread.start()

    def submit(self, prompt: Prompt, listener: Listener) -> Future[RequestId]:
        """Queues a request; the future gives its id, or the error that refused it."""
        accepted: Future[RequestId] = Future()

        def command() -> None:
            if not accepted.set_running_or_notify_cancel():
                return
            try:
                if self._stopping:
                    raise RuntimeError(_CLOSED)
                request_id = self._engine.submit(prompt)
            except Exception as error:
                accepted.set_exception(error)
                return
            self._listeners[request_id] = listener
            accepted.set_result(request_id)

        if not self._send(command):
            accepted.set_exception(RuntimeError(_CLOSED))
        return accepted

    def abort(self, request_id: RequestId) -> None:
        """Cancels a request; its listener hears nothing more."""

        def command() -> None:
            self._listeners.pop(request_id, None)
            self._engine.core.scheduler.abort(request_id)

        self._send(command)

    def stop(self) -> None:
        """Ends the thread after the step in progress; open streams hear of it."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join()

    def _send(self, command: Callable[[], None]) -> bool:
        """Hands a command over; False when the engine is closed and nothing will run it."""
        with self._wake:
            if self._stopping:
                return False
            self._commands.append(command)
            self._wake.notify()
        return True

    def _run(self) -> None:
        while True:
            with self._wake:
                while not (self._commands or self._stopping or self._has_work()):
                    self._wake.wait()
                if self._stopping:
                    break
                commands, self._commands = self._commands, []
            for command in commands:
                command()
            if self._has_work():
                self._step()
        for command in self._commands:  # nothing is added any more
            command()
        self._tell_all(RuntimeError(_CLOSED))

    def _has_work(self) -> bool:
        return self._engine.failure is None and self._engine.core.has_work

    def _step(self) -> None:
        try:
            deltas = self._engine.step()
        except Exception as error:
            self._refused.append(time.monotonic())
            if len(self._refused) >= REFUSED_STEPS and self._refused[-1] - self._refused[0] >= REFUSED_SECONDS:
                self._engine.core.end(error)
            _log.exception("a step was refused" if self._engine.failure is None else "the engine failed")
            self._tell_all(_as_failed_step(error))
            return
        if any(delta.tokens for _, delta, _ in deltas):
            self._refused.clear()
        for request_id, delta, finished in deltas:
            self._tell(request_id, delta)
            if finished is not None:
                self._listeners.pop(request_id, None)

    def _tell(self, request_id: RequestId, item: Delta | Exception) -> None:
        listener = self._listeners.get(request_id)
        if listener is None:
            return
        try:
            listener(item)
        except Exception:  # its event loop is closed: nobody listens any more
            _log.warning("the listener of request %r is gone", request_id, exc_info=True)
            del self._listeners[request_id]
            self._engine.core.scheduler.abort(request_id)

    def _tell_all(self, error: Exception) -> None:
        for request_id in list(self._listeners):
            self._tell(request_id, error)
        self._listeners.clear()


def _as_failed_step(error: Exception) -> Exception:
    """What streams hear of an error of `Engine.step`: whatever its type, it is not a fault of their requests."""
    if isinstance(error, StepFailedError):
        return error
    failed = StepFailedError(f"the engine failed behind a step: {describe(error)}", [], recoverable=False)
    failed.__cause__ = error
    return failed

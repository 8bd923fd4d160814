"""One engine over several processes: process 0 schedules and serves, the others run the same steps.

JAX joins the devices (`jax.distributed`); every process then runs the same programs in the same order. What varies
between steps are host arrays, and those travel from process 0 to the followers over a connection of their own.

The same connections tell who is alive. A process that ends, or is silent for `SILENCE_S`, ends the others: a
collective cannot be left once a participant is gone, so the survivor says which process was lost and exits.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
import pickle
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

import jax

from scheduler.batch import EngramRows
from scheduler.runtime_config import EngineConfig
from v41jax.engram_lookup import EngramLookup

_log = logging.getLogger(__name__)

BEAT_S = 1.0
"""Seconds between signs of life."""
SILENCE_S = 15.0
"""Seconds of silence after which a process counts as lost."""
JOIN_S = 600.0
"""Seconds that process 0 waits for the others."""
SECRET_VARIABLE = "V41JAX_HOSTS_SECRET"
"""Environment variable with what the processes prove to each other; a coordinator on another machine needs it."""
LOST_EXIT_CODE = 75
"""Exit code of a process that lost another one."""


@dataclasses.dataclass(frozen=True)
class Hosts:
    """Which process this is.

    Attributes:
      coordinator: `host:port` of process 0 for JAX; steps travel over the port after it.
      processes: of the service.
      process: this one, from 0.
      secret: known to all processes; others cannot connect.
    """

    coordinator: str
    processes: int
    process: int
    secret: bytes = b"v41jax"

    @property
    def address(self) -> tuple[str, int]:
        """Where steps are sent from."""
        host, _, port = self.coordinator.rpartition(":")
        return host, int(port) + 1


def hosts_faults(hosts: Hosts) -> list[str]:
    """Everything wrong with the flags, one line each."""
    faults = []
    host, _, port = hosts.coordinator.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65535:
        faults.append(f"coordinator {hosts.coordinator!r} must read HOST:PORT with a port from 1 to 65534")
    if hosts.processes < 1:
        faults.append(f"num_processes {hosts.processes} must be at least 1")
    if not 0 <= hosts.process < max(hosts.processes, 1):
        faults.append(f"process_id {hosts.process} must lie in 0..{hosts.processes - 1}")
    return faults


def hosts_of(config: EngineConfig) -> Hosts | None:
    """The processes that the engine's options name; None is this one alone.

    Raises:
      ValueError: flags that make no sense, all faults together.
    """
    if config.coordinator is None:
        if config.num_processes != 1 or config.process_id:
            given = f"num_processes {config.num_processes}, process_id {config.process_id}"
            raise ValueError(f"{given} needs a coordinator: give --coordinator HOST:PORT")
        return None
    secret = os.environ.get(SECRET_VARIABLE) or None  # an empty one is known to everybody
    hosts = Hosts(config.coordinator, config.num_processes, config.process_id)
    hosts = hosts if secret is None else dataclasses.replace(hosts, secret=secret.encode())
    faults = hosts_faults(hosts)
    if secret is None and hosts.coordinator.rpartition(":")[0] not in ("127.0.0.1", "localhost"):
        # What travels is unpickled: whoever can connect could run anything.
        faults.append(f"coordinator {hosts.coordinator!r} is not this machine: set {SECRET_VARIABLE} on all processes")
    if math.prod(config.mesh.values()) < hosts.processes:
        faults.append(f"mesh {dict(config.mesh)} has fewer chips than num_processes {hosts.processes}")
    if config.vision == "on":
        faults.append("vision 'on' is not supported over several processes: use 'off'")
    if faults:
        raise ValueError("; ".join(faults))
    return hosts


def join(hosts: Hosts) -> None:
    """Joins the devices of all processes; before anything else of JAX is used."""
    if os.environ.get("JAX_PLATFORMS", "").startswith("cpu"):
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_preemption_service", False)  # it would swallow SIGTERM
    jax.distributed.initialize(hosts.coordinator, num_processes=hosts.processes, process_id=hosts.process)


def _end(lost: str) -> None:
    """Ends this process: its own thread may be inside a collective that never returns."""
    print(f"error: HostLostError: {lost}; this process ends, restart all of them", file=sys.stderr, flush=True)
    os._exit(LOST_EXIT_CODE)


class _Link:
    """One connection: messages in order, and a thread that watches the other end."""

    def __init__(self, connection: Connection, other: str, on_lost: Callable[[str], None]):
        self._connection = connection
        self._other = other
        self._on_lost = on_lost
        self._send_lock = threading.Lock()
        self._heard: float | None = None  # silence counts from the first message: process 0 may wait for others
        self._closing = False

    def send(self, message: Any) -> None:
        """Sends one message; a broken connection is a lost process."""
        data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        try:
            with self._send_lock:
                self._connection.send_bytes(data)
        except OSError as error:
            self._lose(str(error))

    def receive(self) -> Any:
        """The next message that is no sign of life."""
        while True:
            try:
                message = pickle.loads(self._connection.recv_bytes())
            except (EOFError, OSError) as error:
                self._lose(str(error) or "its connection closed")
                return None
            self._heard = time.monotonic()
            if message is not None:
                return message

    def expect_end(self) -> None:
        """From now on the end of the connection is no loss."""
        self._closing = True

    def close(self) -> None:
        """Ends the connection without taking it for a loss."""
        self._closing = True
        self._connection.close()

    def cut(self) -> None:
        """As `close`, while a thread may be receiving."""
        self._closing = True
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self._connection.fileno())) as end:
            end.shutdown(socket.SHUT_RDWR)

    def beat(self) -> None:
        """Starts the thread that sends signs of life and watches for silence."""

        def run() -> None:
            while not self._closing:
                self.send(None)
                time.sleep(BEAT_S)
                silent = 0.0 if self._heard is None else time.monotonic() - self._heard
                if silent > SILENCE_S and not self._closing:
                    self._lose(f"silent for {silent:.0f} s")

        threading.Thread(target=run, name="v41jax-beat", daemon=True).start()

    def _lose(self, reason: str) -> None:
        if not self._closing:
            self._on_lost(f"{self._other} was lost ({reason})")


class Followers:
    """The connections of process 0."""

    def __init__(self, hosts: Hosts, on_lost: Callable[[str], None] = _end):
        """Waits for every follower.

        Raises:
          TimeoutError: not all came within `JOIN_S`.
        """
        self._links: list[_Link] = []
        self._watches: list[threading.Thread] = []
        accepted: list[Connection] = []
        with Listener(hosts.address, authkey=hosts.secret) as listener:

            def accept() -> None:
                while len(accepted) < hosts.processes - 1:
                    try:
                        accepted.append(listener.accept())
                    except (AuthenticationError, EOFError, ConnectionError) as error:
                        # Whoever else tries the port, such as a probe, must not end the wait for the others.
                        _log.warning("a connection without the secret was refused: %s", error or "it closed")

            waiting = threading.Thread(target=accept, daemon=True)
            waiting.start()
            waiting.join(JOIN_S)
        if len(accepted) < hosts.processes - 1:
            raise TimeoutError(f"{len(accepted) + 1} of {hosts.processes} processes came within {JOIN_S:.0f} s")
        for connection in accepted:
            number = pickle.loads(connection.recv_bytes())
            link = _Link(connection, f"process {number}", on_lost)
            link.beat()
            # Followers only ever send signs of life; receiving notices the end of the connection at once.
            watch = threading.Thread(target=link.receive, name=f"v41jax-watch-{number}", daemon=True)
            watch.start()
            self._watches.append(watch)
            self._links.append(link)

    def send(self, *message: Any) -> None:
        """Sends one message to all."""
        for link in self._links:
            link.send(message)

    def close(self) -> None:
        """Lets the followers go."""
        for link in self._links:
            link.expect_end()
        self.send("stop")
        for link, watch in zip(self._links, self._watches):
            # They close first: a connection closed with signs of life unread would be reset, the stop with it.
            watch.join(SILENCE_S)
            link.close()


def follow(
    hosts: Hosts,
    build: Callable[[dict[str, Any]], Any],
    lookup: EngramLookup | None,
    on_lost: Callable[[str], None] = _end,
) -> None:
    """Runs what process 0 runs, until it stops.

    Args:
      hosts: of this process.
      build: makes the runner with the options that process 0 chose; its methods are what process 0 orders.
      lookup: Engram rows of this host; None without Engram layers.
      on_lost: called when process 0 is gone.
    """
    connection = _connect(hosts)
    connection.send_bytes(pickle.dumps(hosts.process))
    link = _Link(connection, "process 0", on_lost)
    link.beat()
    # Signs of life must be heard while a step compiles or runs, which takes longer than the silence that is a loss.
    messages: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def listen() -> None:
        message: Any = ()
        while message is not None and message[:1] != ("stop",):
            message = link.receive()
            if message == ("stop",):
                link.expect_end()  # process 0 may close its end before the last step is through
            messages.put(message)

    threading.Thread(target=listen, name="v41jax-listen", daemon=True).start()
    try:
        _repeat(messages.get, build, lookup)
    except BaseException:
        # At once: before this process ends JAX waits for process 0, and process 0 for this one's part of a step.
        link.cut()
        raise
    link.close()


def _repeat(
    next_message: Callable[[], Any], build: Callable[[dict[str, Any]], Any], lookup: EngramLookup | None
) -> None:
    """Does what the messages say until one says stop, or there are no more."""
    runner: Any = None
    while (message := next_message()) is not None and message[0] != "stop":
        command, *arguments = message
        if command == "build":
            runner = build(arguments[0])
        elif command == "warm_up":
            runner.warm_up(arguments[0], images=arguments[1])
        elif command == "execute":
            shape, batch, sampling, ops, image_rows = arguments
            engram_rows = EngramRows((), ()) if lookup is None else lookup.step_rows(batch)
            runner.execute(shape, batch, engram_rows, sampling, ops, image_rows)
        else:
            getattr(runner, command)(*arguments)


def _connect(hosts: Hosts) -> Connection:
    end = time.monotonic() + JOIN_S
    while True:
        try:
            return Client(hosts.address, authkey=hosts.secret)
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.2)

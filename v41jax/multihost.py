"""One engine over several processes: process 0 schedules and serves, the others run the same steps.

JAX joins the devices (`jax.distributed`); every process then runs the same programs in the same order. What varies
between steps are host arrays, and those travel from process 0 to the followers over connections of their own
(`v41jax.host_channel`).

The same connections tell who is alive, from before any weight is read. A process that fails, ends, or is silent too
long, ends the others: a collective cannot be left once a participant is gone, so the survivor says which process was
lost and exits.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pickle
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from scheduler.batch import EngramRows
from v41jax.engram_lookup import EngramLookup
from v41jax.host_channel import Channel, SecretError, admit, reach
from v41jax.host_joining import Meeting, announce, describe, join, listen, meeting_of
from v41jax.host_options import Hosts, HostsError, Shared, differences

_log = logging.getLogger(__name__)

BEAT_S = 1.0
"""Seconds between signs of life."""
SILENCE_S = 15.0
"""Seconds of silence after which a process counts as lost."""
LOADING_SILENCE_S = 120.0
"""The same while it loads: one read of a weight may keep every thread from running."""
JOIN_S = 600.0
"""Seconds that process 0 waits for the others, and they for it."""
REFUSAL_S = 5.0
"""Seconds that process 0 waits for the others once it knows that it will refuse."""
LAST_WORDS_S = 3.0
"""Seconds that a process has to say what failed, before it ends."""
LOST_EXIT_CODE = 75
"""Exit code of a process that lost another one."""


def _end(lost: str) -> None:
    """Ends this process: its own thread may be inside a collective that never returns."""
    print(f"error: HostLostError: {lost}; this process ends, restart all of them", file=sys.stderr, flush=True)
    os._exit(LOST_EXIT_CODE)


class _Link:
    """One connection: messages in order, signs of life, and a watch on the other end."""

    def __init__(self, channel: Channel, other: str, on_lost: Callable[[str], None]):
        channel.patient()
        self._channel = channel
        self._other = other
        self._on_lost = on_lost
        self._send_lock = threading.Lock()
        self._heard = time.monotonic()
        self._working = False
        self._closing = False

    def start(self) -> None:
        """Starts the threads that send signs of life and watch for silence."""
        for run in (self._beat, self._watch):
            threading.Thread(target=run, name=f"v41jax{run.__name__}", daemon=True).start()

    def send(self, message: Any) -> None:
        """Sends one message; a broken connection is a lost process."""
        data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        try:
            with self._send_lock:
                self._channel.send(data)
        except OSError as error:
            self._lose(f"was lost ({error})")

    def receive(self) -> Any:
        """The next message that is no sign of life; None when there are no more."""
        while True:
            try:
                message = pickle.loads(self._channel.receive())
            except (EOFError, OSError, SecretError) as error:
                self._lose(f"was lost ({error or 'its connection closed'})")
                return None
            self._heard = time.monotonic()
            if message is None:
                continue
            self._working = self._working or message[0] not in ("welcome", "refused")
            if message[0] != "failed":
                return message
            self._lose(f"failed ({message[1]})")
            return None

    def expect_end(self) -> None:
        """From now on the end of the connection is no loss."""
        self._closing = True

    def close(self) -> None:
        """Ends the connection without taking it for a loss."""
        self._closing = True
        self._channel.close()

    def cut(self) -> None:
        """As `close`, while a thread may be receiving."""
        self._closing = True
        self._channel.cut()

    def _beat(self) -> None:
        while not self._closing:
            self.send(None)
            time.sleep(BEAT_S)

    def _watch(self) -> None:
        while not self._closing:
            time.sleep(BEAT_S)
            silent = time.monotonic() - self._heard
            if silent > (SILENCE_S if self._working else LOADING_SILENCE_S):
                self._lose(f"was lost (silent for {silent:.0f} s)")
                return

    def _lose(self, what: str) -> None:
        if not self._closing:
            self._on_lost(f"{self._other} {what}")


class Followers:
    """The connections of process 0."""

    def __init__(
        self,
        hosts: Hosts,
        shared: Shared,
        listener: socket.socket,
        secret: bytes,
        on_lost: Callable[[str], None] = _end,
        faults: Sequence[str] = (),
    ):
        """Waits for every follower; those that came are watched meanwhile.

        Args:
          hosts: of this process.
          shared: what the others must have in common with this process.
          listener: where they come; it is closed.
          secret: that they know.
          on_lost: called when a process is gone.
          faults: why this process cannot serve; it waits for `REFUSAL_S`, tells those who came and compares nothing.

        Raises:
          HostsError: some process cannot serve, or has another model or other options, or not all came within
            `JOIN_S`; the followers that came raise it too.
        """
        self._secret = secret
        self._on_lost = on_lost
        self._failed = False
        self._links: list[_Link] = []
        self._watches: list[threading.Thread] = []
        self._processes = hosts.processes
        self._theirs: dict[int, Shared] = {}
        self._refuses = bool(faults)
        self._refusals = [f"process 0: {fault}" for fault in faults]
        self._shared = shared
        self._came = threading.Condition()
        self._waiting = True
        listener.settimeout(0.2)
        accepting = threading.Thread(target=self._accept, args=(listener,), name="v41jax-accept", daemon=True)
        accepting.start()
        with self._came:
            self._came.wait_for(lambda: self._complete() or self._faults(), JOIN_S)
            if self._faults():
                self._came.wait_for(self._complete, REFUSAL_S)
            self._waiting = False
            faults = self._faults()
            if not faults and not self._complete():
                faults = [f"{len(self._theirs) + 1} of {hosts.processes} processes came within {JOIN_S:.0f} s"]
        accepting.join()
        if faults:
            self._finish("refused", faults)
            raise HostsError(faults)
        self.send("welcome")

    def _complete(self) -> bool:
        return len(self._theirs) >= self._processes - 1

    def _faults(self) -> list[str]:
        return [*self._refusals, *differences(self._shared, self._theirs)]

    def _accept(self, listener: socket.socket) -> None:
        with listener:
            while self._waiting:
                try:
                    connection, _ = listener.accept()
                except TimeoutError:
                    continue
                # Each in a thread of its own: who connects and says nothing must not keep the others waiting.
                threading.Thread(target=self._admit, args=(connection,), name="v41jax-admit", daemon=True).start()

    def _admit(self, connection: socket.socket) -> None:
        try:
            channel = admit(connection, self._secret)
            number, theirs, reasons = json.loads(channel.receive())
        except (EOFError, OSError, ValueError) as error:
            # Whoever else tries the port, such as a probe, must not end the wait for the others.
            _log.warning("a connection to the port of the followers was refused: %s", error)
            connection.close()
            return
        link = _Link(channel, f"process {number}", self._on_lost)
        # Followers only send signs of life and why they end; receiving notices the end of a connection at once.
        watch = threading.Thread(target=_drain, args=(link,), name=f"v41jax-watch-{number}", daemon=True)
        with self._came:
            if not self._waiting:
                connection.close()
                return
            self._links.append(link)
            self._watches.append(watch)
            link.start()
            watch.start()
            if number in self._theirs or number == 0:
                self._refusals.append(f"two processes have process_id {number}: give each of them its own")
            else:
                self._refusals += [f"process {number}: {reason}" for reason in reasons]
                self._theirs[number] = self._shared if reasons or self._refuses else theirs
            self._came.notify_all()

    def send(self, *message: Any) -> None:
        """Sends one message to all."""
        for link in self._links:
            link.send(message)

    def fail(self, reason: str) -> None:
        """Says that process 0 cannot go on, and why; the followers end at once, process 0 in `LAST_WORDS_S`.

        They may be inside a collective that never ends, and JAX waits for them before this process may end.
        """
        if self._failed:
            return
        self._failed = True
        for link in self._links:
            link.expect_end()
        threading.Thread(target=self.send, args=("failed", reason), name="v41jax-failed", daemon=True).start()
        ending = threading.Timer(LAST_WORDS_S, self._on_lost, [f"process 0 failed ({reason})"])
        ending.daemon = True
        ending.start()

    def close(self) -> None:
        """Lets the followers go."""
        if not self._failed:
            self._finish("stop")

    def _finish(self, *message: Any) -> None:
        for link in self._links:
            link.expect_end()
        # Not from here: who reads no more may leave no room for another message, and is not watched any more.
        last = threading.Thread(target=self.send, args=message, name="v41jax-last", daemon=True)
        last.start()
        last.join(SILENCE_S)
        for link, watch in zip(self._links, self._watches):
            # They close first: a connection closed with signs of life unread would be reset, the message with it.
            watch.join(SILENCE_S)
            link.close()


def _drain(link: _Link) -> None:
    while link.receive() is not None:
        pass


def lead(hosts: Hosts, shared: Shared, on_lost: Callable[[str], None] = _end) -> Followers:
    """Waits for the followers and joins their devices.

    Args:
      hosts: of this process, which is process 0.
      shared: as of `shared_of`.
      on_lost: called when a process is gone.

    Raises:
      HostsError: as of `Followers`.
      OSError: nobody can connect to the port.
    """
    listener = listen(hosts)
    if hosts.automatic:
        return Followers(hosts, shared, listener, announce(hosts, listener).secret, on_lost)
    followers = Followers(hosts, shared, listener, meeting_of(hosts).secret, on_lost)
    try:
        join(hosts)
    except BaseException as error:
        followers.fail(describe(error))
        raise
    return followers


def refuse(hosts: Hosts, faults: Sequence[str]) -> None:
    """Tells the other processes that this one cannot serve, so that they end too; those not there yet are not told.

    Args:
      hosts: of this process.
      faults: why, one line each.
    """
    with contextlib.suppress(EOFError, OSError, ValueError):
        meeting = meeting_of(hosts)
        if hosts.process == 0:
            # A process that ends meanwhile must not take the place of what this one has to say.
            Followers(hosts, {}, listen(hosts), meeting.secret, lambda _: None, faults)
            return
        channel = _connect(meeting, REFUSAL_S)
        channel.send(json.dumps((hosts.process, {}, list(faults))).encode())
        link = _Link(channel, "process 0", lambda _: None)
        link.receive()  # what process 0 then says to all
        link.close()


class Model(NamedTuple):
    """What a follower runs steps with.

    Attributes:
      build: makes the runner with the options that process 0 chose; its methods are what process 0 orders.
      lookup: Engram rows of this host; None without Engram layers.
    """

    build: Callable[[dict[str, Any]], Any]
    lookup: EngramLookup | None = None


def follow(
    hosts: Hosts,
    shared: Shared,
    load: Callable[[], Model],
    meeting: Meeting,
    on_lost: Callable[[str], None] = _end,
) -> None:
    """Runs what process 0 runs, until it stops.

    Args:
      hosts: of this process.
      shared: as of `shared_of`.
      load: joins the devices and reads the weights; called once this process and process 0 watch each other and agree.
      meeting: where process 0 is.
      on_lost: called when process 0 is gone.

    Raises:
      HostsError: the processes do not agree.
      SecretError: process 0 does not know this process's secret.
      OSError: process 0 could not be reached for `JOIN_S`.
    """
    channel = _connect(meeting, JOIN_S)
    channel.send(json.dumps((hosts.process, shared, ())).encode())
    link = _Link(channel, "process 0", on_lost)
    link.start()
    # Signs of life must be heard while a step compiles or runs, which takes longer than the silence that is a loss.
    messages: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def hear() -> None:
        message: Any = ()
        while message is not None and message[:1] not in (("stop",), ("refused",)):
            message = link.receive()
            if message is not None and message[0] in ("stop", "refused"):
                link.expect_end()  # process 0 may close its end before the last step is through
            messages.put(message)

    threading.Thread(target=hear, name="v41jax-listen", daemon=True).start()
    first = messages.get()
    if first is not None and first[0] == "refused":
        link.close()
        raise HostsError(first[1])
    try:
        if first is not None:
            model = load()
            link.send(("loaded",))
            _repeat(messages.get, model)
    except BaseException as error:
        # At once: before this process ends JAX waits for process 0, and process 0 for this one's part of a step.
        link.send(("failed", describe(error)))
        link.cut()
        raise
    link.close()


def _repeat(next_message: Callable[[], Any], model: Model) -> None:
    """Does what the messages say until one says stop, or there are no more."""
    runner: Any = None
    while (message := next_message()) is not None and message[0] != "stop":
        command, *arguments = message
        if command == "build":
            runner = model.build(arguments[0])
        elif command == "warm_up":
            runner.warm_up(arguments[0], images=arguments[1], drafts=arguments[2])
        elif command == "execute":
            shape, batch, sampling, ops, image_rows = arguments
            engram_rows = EngramRows((), ()) if model.lookup is None else model.lookup.step_rows(batch)
            runner.execute(shape, batch, engram_rows, sampling, ops, image_rows)
        else:
            getattr(runner, command)(*arguments)


def _connect(meeting: Meeting, seconds: float) -> Channel:
    """A channel to process 0; raises what the last attempt did when the time is over."""
    end = time.monotonic() + seconds
    while True:
        failures: list[Exception] = []
        for place in meeting.places:
            try:
                return reach(place, meeting.secret)
            except (EOFError, OSError, SecretError) as error:
                failures.append(error)
        # Of several places some may be others'. Whoever has another secret and is at the only place will stay there.
        strangers = [error for error in failures if isinstance(error, SecretError)]
        if len(strangers) == len(failures) or time.monotonic() > end:
            raise [*strangers, *failures][0]
        time.sleep(0.2)


def follow_at(hosts: Hosts, shared: Shared, load: Callable[[], Model]) -> None:
    """`follow` process 0 where the options or the cluster say; joins the devices first, or before `load`.

    Args:
      hosts, shared: as of `follow`.
      load: reads the weights, devices joined.
    """
    if hosts.automatic:
        follow(hosts, shared, load, announce(hosts, None))
        return

    def joined() -> Model:
        join(hosts)
        return load()

    follow(hosts, shared, joined, meeting_of(hosts))

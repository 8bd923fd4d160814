"""Messages between the processes of a service: TCP, and nothing is read as a message that its secret did not sign.

Both ends first prove to each other that they know the secret, without sending it; every message then carries a code
made with a key of this connection and its place in it. What is sent can be read by whoever sees the network.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import socket
import struct
import time
from pathlib import Path

MAGIC = b"v41jax hosts 1\r\n"
"""What the leading end says first; other services say something else."""
HANDSHAKE_S = 10.0
"""Seconds that the other end has for what it says in a handshake."""
_NONCE = 32
_SECRET = 32
_CODE = hashlib.sha256().digest_size
_LENGTH = struct.Struct(">Q")


class SecretError(ValueError):
    """The other end does not know the secret, or is no process of this service."""


def _code(key: bytes, *parts: bytes) -> bytes:
    return hmac.new(key, b"".join(parts), hashlib.sha256).digest()


def _read(connection: socket.socket, size: int, seconds: float | None = None) -> bytes:
    """Exactly `size` bytes.

    Args:
      connection: where they come.
      size: of what is read.
      seconds: for all of them together; None leaves each part the connection's time.

    Raises:
      EOFError: the connection ended before.
      OSError: it broke, or its time is over.
    """
    data = bytearray()
    end = None if seconds is None else time.monotonic() + seconds
    while len(data) < size:
        if end is not None:
            # Who sends a byte now and then must not have more time than who sends nothing.
            connection.settimeout(max(end - time.monotonic(), 1e-3))
        part = connection.recv(min(size - len(data), 1 << 20))
        if not part:
            raise EOFError("its connection closed")
        data += part
    return bytes(data)


class Channel:
    """One connection whose ends know each other. One thread may send while another receives."""

    def __init__(self, connection: socket.socket, sends: bytes, receives: bytes):
        """Args:
        connection: after the handshake.
        sends, receives: keys of the two directions.
        """
        self._connection = connection
        self._sends, self._receives = sends, receives
        self._sent = self._received = 0

    def send(self, data: bytes) -> None:
        """Sends one message.

        Raises:
          OSError: the connection is broken.
        """
        code = _code(self._sends, _LENGTH.pack(self._sent), data)
        self._sent += 1
        self._connection.sendall(_LENGTH.pack(len(data)) + code + data)

    def receive(self) -> bytes:
        """The next message.

        Raises:
          EOFError: the other end closed.
          OSError: the connection is broken.
          SecretError: what came was not sent by the other end, or not at this place.
        """
        header = _read(self._connection, _LENGTH.size + _CODE)
        data = _read(self._connection, _LENGTH.unpack_from(header)[0])
        if not hmac.compare_digest(header[_LENGTH.size :], _code(self._receives, _LENGTH.pack(self._received), data)):
            raise SecretError("a message was changed on its way")
        self._received += 1
        return data

    def patient(self) -> None:
        """From now on reads wait as long as it takes."""
        self._connection.settimeout(None)

    def cut(self) -> None:
        """Ends both directions; a thread that receives notices."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Frees the socket."""
        self._connection.close()


def _prepare(connection: socket.socket) -> None:
    connection.settimeout(HANDSHAKE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def admit(connection: socket.socket, secret: bytes) -> Channel:
    """The leading end of a handshake; reads of the channel take `HANDSHAKE_S` at most until it is `patient`.

    Raises:
      SecretError: the other end does not know the secret.
      EOFError, OSError: it left, or said nothing.
    """
    _prepare(connection)
    mine = os.urandom(_NONCE)
    connection.sendall(MAGIC + mine)
    answer = _read(connection, _NONCE + _CODE, HANDSHAKE_S)
    connection.settimeout(HANDSHAKE_S)
    nonces = mine + answer[:_NONCE]
    if not hmac.compare_digest(answer[_NONCE:], _code(secret, b"follows", nonces)):
        raise SecretError("it does not know the secret")
    connection.sendall(_code(secret, b"leads", nonces))
    return Channel(connection, _code(secret, b"from leader", nonces), _code(secret, b"from follower", nonces))


def reach(address: tuple[str, int], secret: bytes) -> Channel:
    """The following end of a handshake with whoever listens at an address; otherwise as `admit`."""
    connection = socket.create_connection(address, HANDSHAKE_S)
    place = f"{address[0]}:{address[1]}"
    try:
        _prepare(connection)
        greeting = _read(connection, len(MAGIC) + _NONCE, HANDSHAKE_S)
        if not greeting.startswith(MAGIC):
            raise SecretError(f"what listens at {place} is no process of this service")
        mine = os.urandom(_NONCE)
        nonces = greeting[len(MAGIC) :] + mine
        connection.sendall(mine + _code(secret, b"follows", nonces))
        try:
            proof = _read(connection, _CODE, HANDSHAKE_S)
        except (EOFError, ConnectionError):
            proof = b""
        if not hmac.compare_digest(proof, _code(secret, b"leads", nonces)):
            raise SecretError(f"{place} and this process do not have the same secret")
    except BaseException:
        connection.close()
        raise
    return Channel(connection, _code(secret, b"from follower", nonces), _code(secret, b"from leader", nonces))


def user_secret() -> bytes:
    """A secret that the processes of one user on one machine share: drawn once, in a file that only the user can read.

    Raises:
      OSError: there can be no such file, or it holds no secret.
      PermissionError: others may read it.
    """
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    path = Path(cache) / "v41jax" / "hosts_secret"
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    drawn = path.with_name(f"{path.name}.{os.getpid()}.{os.urandom(4).hex()}")
    if not path.exists():
        try:
            with open(os.open(drawn, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(os.urandom(_SECRET))
                file.flush()
                os.fsync(file.fileno())
            # A link, and not a rename: whoever is second takes the file of the first.
            with contextlib.suppress(FileExistsError):
                os.link(drawn, path)
        finally:
            drawn.unlink(missing_ok=True)
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        if status.st_uid != os.getuid() or status.st_mode & 0o077:
            raise PermissionError(13, "others than this user may read or write it: remove it", str(path))
        secret = file.read(_SECRET + 1)
    if len(secret) != _SECRET:
        # An empty secret is known to everybody.
        raise OSError(22, f"does not hold {_SECRET} bytes: remove it", str(path))
    return secret

"""Who is taken for a process of the service, and what is taken for a message."""

from __future__ import annotations

import os
import socket
import stat
import threading

import pytest

from v41jax import host_channel
from v41jax.host_channel import Channel, SecretError, admit, reach, user_secret


def served(listener, secret, result):
    """Admits one connection; the channel or the error is put into `result`."""
    connection, _ = listener.accept()
    try:
        result.append(admit(connection, secret))
    except Exception as error:
        result.append(error)
        connection.close()


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield made


def both(listener, secret=b"a", other=b"a"):
    result = []
    thread = threading.Thread(target=served, args=(listener, secret, result))
    thread.start()
    try:
        return reach(listener.getsockname(), other), result, thread
    except SecretError as error:
        return error, result, thread


def test_messages_arrive_whole_and_in_order_in_both_directions(listener):
    follower, result, thread = both(listener)
    thread.join(10)
    leader = result[0]
    large = os.urandom(3 << 20)
    sender = threading.Thread(target=lambda: [leader.send(part) for part in (b"", b"one", large)])
    sender.start()
    assert [follower.receive() for _ in range(3)] == [b"", b"one", large]
    sender.join(10)
    follower.send(b"back")
    assert leader.receive() == b"back"
    follower.close()
    with pytest.raises(EOFError):
        leader.receive()


def test_another_secret_is_refused_at_both_ends(listener):
    refused, result, thread = both(listener, b"a", b"b")
    thread.join(10)
    assert isinstance(refused, SecretError) and "do not have the same secret" in str(refused)
    assert isinstance(result[0], SecretError)


def test_what_listens_and_is_no_process_is_refused(listener):
    def other():
        connection, _ = listener.accept()
        connection.sendall(b"HTTP/1.1 400 Bad Request\r\n" * 4)
        connection.close()

    thread = threading.Thread(target=other)
    thread.start()
    with pytest.raises(SecretError, match="is no process of this service"):
        reach(listener.getsockname(), b"a")
    thread.join(10)


def test_who_connects_and_says_nothing_is_left_after_a_while(listener, monkeypatch):
    monkeypatch.setattr(host_channel, "HANDSHAKE_S", 0.2)
    result = []
    with socket.create_connection(listener.getsockname()):
        served(listener, b"a", result)
    assert isinstance(result[0], TimeoutError)


def test_who_says_little_at_a_time_is_left_as_soon(listener, monkeypatch):
    monkeypatch.setattr(host_channel, "HANDSHAKE_S", 0.3)
    result = []
    thread = threading.Thread(target=served, args=(listener, b"a", result))
    with socket.create_connection(listener.getsockname()) as stranger:
        thread.start()
        for _ in range(12):
            if thread.is_alive():
                stranger.sendall(b"x")
            thread.join(0.1)
        assert not thread.is_alive()
    assert isinstance(result[0], TimeoutError)


@pytest.mark.parametrize("change", ["content", "again", "length"])
def test_a_message_that_was_changed_or_repeated_is_refused(change):
    near, far = socket.socketpair()
    sender = Channel(near, b"key", b"other")
    captured = []
    sender._connection = type("Wire", (), {"sendall": lambda _, data: captured.append(data)})()
    sender.send(b"order")
    receiver = Channel(far, b"other", b"key")
    data = captured[0]
    if change == "content":
        data = data[:-1] + b"!"
    elif change == "again":
        near.sendall(data)
        assert receiver.receive() == b"order"
    else:
        data = data[:7] + b"\x04" + data[8:]
    near.sendall(data)
    with pytest.raises(SecretError, match="changed on its way"):
        receiver.receive()
    near.close()
    far.close()


def test_the_secret_of_a_user_is_drawn_once_and_only_theirs(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = []
    threads = [threading.Thread(target=lambda: found.append(user_secret())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len(set(found)) == 1 and len(found) == 8 and len(found[0]) == 32
    files = list((tmp_path / "v41jax").iterdir())
    assert [file.name for file in files] == ["hosts_secret"]
    assert stat.S_IMODE(files[0].stat().st_mode) == 0o600
    files[0].chmod(0o644)
    with pytest.raises(PermissionError, match="others than this user may read"):
        user_secret()


@pytest.mark.parametrize("content", [b"", b"short", b"x" * 33])
def test_a_file_that_holds_no_secret_is_refused(tmp_path, monkeypatch, content):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = tmp_path / "v41jax" / "hosts_secret"
    path.parent.mkdir()
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(OSError, match="does not hold 32 bytes: remove it"):
        user_secret()


def test_a_secret_that_cannot_be_kept_leaves_no_file(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def refused(*_):
        raise PermissionError(1, "no links here")

    monkeypatch.setattr(os, "link", refused)
    with pytest.raises(PermissionError, match="no links here"):
        user_secret()
    assert list((tmp_path / "v41jax").iterdir()) == []

"""Flags of a service of several processes, and how the loss of one is noticed."""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from multiprocessing import AuthenticationError

import pytest

from scheduler.runtime_config import EngineConfig
from v41jax import multihost
from v41jax.multihost import Followers, Hosts, follow, hosts_of


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Recorder:
    """A runner that remembers what it was told."""

    def __init__(self):
        self.calls = []

    def warm_up(self, shapes, *, images):
        self.calls.append(("warm_up", shapes, images))

    def load_adjustments(self, slot, row):
        self.calls.append(("load_adjustments", slot, row))

    def execute(self, *arguments):
        self.calls.append(("execute", *arguments))


def test_one_process_needs_no_flags():
    assert hosts_of(EngineConfig()) is None


def test_faults_of_the_flags_are_named_together():
    config = EngineConfig(coordinator="nowhere", num_processes=2, process_id=2, vision="on")
    with pytest.raises(ValueError) as error:
        hosts_of(config)
    for part in ("'nowhere' must read HOST:PORT", "process_id 2 must lie in 0..1", "fewer chips", "vision 'on'"):
        assert part in str(error.value)
    remote = EngineConfig(coordinator="10.0.0.1:8476", num_processes=2, mesh={"data": 1, "model": 2})
    with pytest.raises(ValueError, match="is not this machine: set V41JAX_HOSTS_SECRET"):
        hosts_of(remote)
    with pytest.raises(ValueError, match="num_processes 2, process_id 0 needs a coordinator"):
        hosts_of(EngineConfig(num_processes=2))
    with pytest.raises(ValueError, match="process_id 1 needs a coordinator"):
        hosts_of(EngineConfig(process_id=1))


def test_an_empty_secret_is_none(monkeypatch):
    remote = EngineConfig(coordinator="10.0.0.1:8476", num_processes=2, mesh={"data": 1, "model": 2})
    monkeypatch.setenv(multihost.SECRET_VARIABLE, "")
    with pytest.raises(ValueError, match="is not this machine: set V41JAX_HOSTS_SECRET"):
        hosts_of(remote)
    monkeypatch.setenv(multihost.SECRET_VARIABLE, "known")
    assert hosts_of(remote).secret == b"known"


def test_a_follower_does_what_process_0_does_in_order():
    hosts = Hosts(f"127.0.0.1:{free_port()}", 2, 1)
    runner, sizes = Recorder(), []
    thread = threading.Thread(target=follow, args=(hosts, lambda given: (sizes.append(given), runner)[1], None))
    thread.start()
    followers = Followers(hosts)
    followers.send("build", {"num_pages": 3})
    followers.send("warm_up", ("a",), False)
    followers.send("load_adjustments", 1, [0.5])
    followers.send("execute", "shape", "batch", "sampling", None, None)
    followers.close()
    thread.join(10)
    assert not thread.is_alive()
    assert sizes == [{"num_pages": 3}]
    assert [call[0] for call in runner.calls] == ["warm_up", "load_adjustments", "execute"]
    assert runner.calls[2][1:3] == ("shape", "batch")


def test_a_follower_hears_signs_of_life_during_a_long_step(monkeypatch):
    monkeypatch.setattr(multihost, "BEAT_S", 0.05)
    monkeypatch.setattr(multihost, "SILENCE_S", 1.0)
    hosts = Hosts(f"127.0.0.1:{free_port()}", 2, 1)
    lost, runner = [], Recorder()
    runner.warm_up = lambda shapes, *, images: time.sleep(3.0)
    thread = threading.Thread(target=follow, args=(hosts, lambda given: runner, None, lost.append))
    thread.start()
    followers = Followers(hosts, lost.append)
    followers.send("build", {})
    followers.send("warm_up", (), False)
    followers.send("load_adjustments", 1, [0.5])
    thread.join(3.5)
    followers.close()
    thread.join(10)
    assert lost == []
    assert runner.calls == [("load_adjustments", 1, [0.5])]


def test_the_end_of_a_connection_is_the_loss_of_a_process():
    hosts = Hosts(f"127.0.0.1:{free_port()}", 2, 1)
    lost, gone = [], threading.Event()

    def follower():
        connection = multihost._connect(hosts)
        connection.send_bytes(multihost.pickle.dumps(1))
        gone.wait(10)
        connection.close()

    thread = threading.Thread(target=follower)
    thread.start()
    noticed = threading.Event()
    Followers(hosts, on_lost=lambda reason: (lost.append(reason), noticed.set()))
    gone.set()
    assert noticed.wait(10)
    thread.join(10)
    assert lost[0].startswith("process 1 was lost")


def test_strangers_at_the_port_do_not_end_the_wait_for_followers():
    hosts = Hosts(f"127.0.0.1:{free_port()}", 2, 1)
    made = []
    waiting = threading.Thread(target=lambda: made.append(Followers(hosts)))
    waiting.start()
    with pytest.raises(AuthenticationError):
        multihost._connect(dataclasses.replace(hosts, secret=b"guessed"))
    socket.create_connection(hosts.address).close()
    follower = threading.Thread(target=follow, args=(hosts, lambda given: Recorder(), None))
    follower.start()
    waiting.join(10)
    made[0].close()
    follower.join(10)
    assert not follower.is_alive()


def test_a_follower_that_fails_is_lost_at_once_though_its_process_goes_on():
    hosts = Hosts(f"127.0.0.1:{free_port()}", 2, 1)
    lost, noticed, failures, runner = [], threading.Event(), [], Recorder()
    runner.warm_up = lambda shapes, *, images: 1 // 0

    def follower():
        try:
            follow(hosts, lambda given: runner, None, lost.append)
        except ZeroDivisionError as error:
            failures.append(error)

    thread = threading.Thread(target=follower)
    thread.start()
    followers = Followers(hosts, on_lost=lambda reason: (lost.append(reason), noticed.set()))
    followers.send("build", {})
    followers.send("warm_up", (), False)
    thread.join(10)
    assert failures
    assert noticed.wait(10)
    assert lost[0].startswith("process 1 was lost")
    followers.close()


def test_a_process_that_joined_others_still_ends_when_it_is_told_to():
    program = (
        "from v41jax.multihost import Hosts, join\n"
        f"join(Hosts('127.0.0.1:{free_port()}', 1, 0))\n"
        "print('joined', flush=True)\n"
        "import time; time.sleep(60)"
    )
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, env={**os.environ, "JAX_PLATFORMS": "cpu"}, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"joined\n"
        process.terminate()
        try:
            assert process.wait(10) == -signal.SIGTERM
        finally:
            process.kill()

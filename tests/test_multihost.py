"""Orders of process 0 and how the loss or failure of a process is noticed."""

from __future__ import annotations

import dataclasses
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from v41jax import multihost
from v41jax.host_channel import SecretError, reach
from v41jax.host_joining import Meeting, listen
from v41jax.host_options import Hosts, HostsError
from v41jax.multihost import Followers, Model, follow, refuse

SECRET = b"known"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Recorder:
    """A runner that remembers what it was told."""

    def __init__(self):
        self.calls = []

    def warm_up(self, shapes, *, images, drafts):
        self.calls.append(("warm_up", shapes, images, drafts))

    def load_adjustments(self, slot, row):
        self.calls.append(("load_adjustments", slot, row))

    def execute(self, *arguments):
        self.calls.append(("execute", *arguments))


class Losses(list):
    """What a process was told of others, and when."""

    def __init__(self):
        super().__init__()
        self.noticed = threading.Event()

    def __call__(self, reason):
        self.append(reason)
        self.noticed.set()


class Service:
    """Two or more processes of one service, as threads of this one."""

    def __init__(self, processes=2):
        self.hosts = Hosts(f"127.0.0.1:{free_port()}", processes, 0, SECRET)
        self.meeting = Meeting((self.hosts.address,), SECRET)
        self.lost, self.of_followers = Losses(), Losses()
        self.errors = []
        self.threads = []

    def follower(self, load, shared=None, process=1):
        """Starts one; what it raises is in `errors`."""

        def run():
            try:
                follow(self.hosts_of(process), shared or {}, load, self.meeting, self.of_followers)
            except Exception as error:
                self.errors.append(error)

        self.threads.append(threading.Thread(target=run))
        self.threads[-1].start()

    def hosts_of(self, process):
        return dataclasses.replace(self.hosts, process=process)

    def lead(self, shared=None):
        return Followers(self.hosts, shared or {}, listen(self.hosts), SECRET, self.lost)

    def join(self):
        for thread in self.threads:
            thread.join(10)
            assert not thread.is_alive()


def loaded(runner):
    """Loads a model whose runner is this one."""
    return lambda: Model(lambda options: runner)


def test_a_follower_does_what_process_0_does_in_order():
    service, runner, options = Service(), Recorder(), []
    service.follower(lambda: Model(lambda given: (options.append(given), runner)[1]))
    followers = service.lead()
    followers.send("build", {"num_pages": 3})
    followers.send("warm_up", ("a",), False, (1,))
    followers.send("load_adjustments", 1, [0.5])
    followers.send("execute", "shape", "batch", "sampling", None, None)
    followers.close()
    service.join()
    assert service.errors == service.lost == service.of_followers == []
    assert options == [{"num_pages": 3}]
    assert [call[0] for call in runner.calls] == ["warm_up", "load_adjustments", "execute"]
    assert runner.calls[0][1:] == (("a",), False, (1,))
    assert runner.calls[2][1:3] == ("shape", "batch")


def test_signs_of_life_are_heard_during_a_long_load_and_a_long_step(monkeypatch):
    monkeypatch.setattr(multihost, "BEAT_S", 0.05)
    monkeypatch.setattr(multihost, "SILENCE_S", 0.5)
    monkeypatch.setattr(multihost, "LOADING_SILENCE_S", 0.5)
    service, runner = Service(), Recorder()
    runner.warm_up = lambda shapes, *, images, drafts: time.sleep(1.0)
    service.follower(lambda: (time.sleep(1.0), Model(lambda options: runner))[1])
    followers = service.lead()
    followers.send("build", {})
    followers.send("warm_up", (), False, ())
    followers.send("load_adjustments", 1, [0.5])
    time.sleep(2.5)
    followers.close()
    service.join()
    assert service.errors == service.lost == service.of_followers == []
    assert runner.calls == [("load_adjustments", 1, [0.5])]


@pytest.mark.parametrize("works", [False, True])
def test_silence_is_a_loss_sooner_once_the_other_has_loaded(monkeypatch, works):
    monkeypatch.setattr(multihost, "BEAT_S", 0.05)
    monkeypatch.setattr(multihost, "SILENCE_S", 0.3)
    monkeypatch.setattr(multihost, "LOADING_SILENCE_S", 2.0)
    service = Service()

    def stuck():
        channel = reach_when_open(service)
        channel.send(b"[1, {}, []]")
        channel.send(pickle.dumps(("loaded",) if works else None))
        service.lost.noticed.wait(10)
        channel.close()

    thread = threading.Thread(target=stuck)
    thread.start()
    began = time.monotonic()
    service.lead()
    assert service.lost.noticed.wait(10)
    assert (time.monotonic() - began < 1.5) == works
    assert service.lost[0].startswith("process 1 was lost (silent for")
    thread.join(10)


def test_a_process_that_says_nothing_after_it_came_is_missed_and_does_not_keep_process_0_from_ending(monkeypatch):
    monkeypatch.setattr(multihost, "BEAT_S", 0.05)
    monkeypatch.setattr(multihost, "SILENCE_S", 0.3)
    monkeypatch.setattr(multihost, "LOADING_SILENCE_S", 0.3)
    service, made = Service(), []
    waiting = threading.Thread(target=lambda: made.append(service.lead()))
    waiting.start()
    channel = reach_when_open(service)
    channel.send(b"[1, {}, []]")
    waiting.join(10)
    assert service.lost.noticed.wait(10)
    assert service.lost[0].startswith("process 1 was lost (silent for")
    threading.Thread(target=made[0].send, args=("execute", bytes(64 << 20)), daemon=True).start()
    time.sleep(0.2)  # more than the connection holds: the send waits for a reader
    began = time.monotonic()
    made[0].close()
    assert time.monotonic() - began < 5
    channel.close()


def test_a_process_that_fails_while_it_loads_is_missed_at_once_and_says_why():
    service = Service()
    service.follower(lambda: 1 // 0)
    followers = service.lead()
    assert service.lost.noticed.wait(10)
    service.join()
    assert isinstance(service.errors[0], ZeroDivisionError)
    assert service.lost[0].startswith("process 1 failed (ZeroDivisionError")
    followers.close()


def test_a_process_that_is_lost_while_another_has_not_come_is_missed():
    service = Service(processes=3)

    def lead():
        with pytest.raises(HostsError):
            service.lead()

    waiting = threading.Thread(target=lead)
    waiting.start()
    channel = reach_when_open(service)
    channel.send(b"[1, {}, []]")
    channel.receive()  # a sign of life: it is known
    channel.close()
    assert service.lost.noticed.wait(10)
    assert service.lost[0].startswith("process 1 was lost")
    service.follower(loaded(Recorder()), {"dtype": "other"}, process=2)
    service.join()
    waiting.join(10)


def reach_when_open(service):
    for _ in range(100):
        try:
            return reach(service.hosts.address, SECRET)
        except ConnectionRefusedError:
            time.sleep(0.05)
    raise TimeoutError


def test_processes_with_other_options_or_another_model_are_refused_everywhere(monkeypatch):
    monkeypatch.setattr(multihost, "REFUSAL_S", 0.5)
    service = Service(processes=4)
    mine = {"dtype": "float32", "mesh": {"data": 1}, "bytes of model.safetensors": 7}
    service.follower(loaded(Recorder()), mine)
    service.follower(loaded(Recorder()), {**mine, "dtype": "bfloat16"}, process=2)
    with pytest.raises(HostsError) as error:
        service.lead(mine)
    assert error.value.faults == ("process 2 has dtype 'bfloat16', process 0 'float32'",)
    service.join()
    assert [one.faults for one in service.errors] == [error.value.faults] * 2
    assert service.lost == service.of_followers == []


@pytest.mark.parametrize("refusing", [0, 1])
def test_a_process_that_cannot_serve_ends_those_that_could(monkeypatch, refusing):
    monkeypatch.setattr(multihost, "REFUSAL_S", 3.0)
    service = Service()
    mine = {"dtype": "float32"}
    if refusing:
        thread = threading.Thread(target=refuse, args=(service.hosts_of(1), ["mesh", "vision"]))
        thread.start()
        with pytest.raises(HostsError) as error:
            service.lead(mine)
        thread.join(10)
        assert not thread.is_alive()
        assert error.value.faults == ("process 1: mesh", "process 1: vision")
    else:
        service.follower(loaded(Recorder()), mine)
        refuse(service.hosts, ["mesh"])
        service.join()
        assert service.errors[0].faults == ("process 0: mesh",)
    assert service.lost == service.of_followers == []


def test_a_process_that_ends_does_not_take_the_place_of_what_process_0_refuses(monkeypatch):
    monkeypatch.setattr(multihost, "REFUSAL_S", 1.0)
    ended = []
    monkeypatch.setattr(os, "_exit", ended.append)
    service = Service(processes=3)
    refusing = threading.Thread(target=refuse, args=(service.hosts, ["mesh"]))
    refusing.start()
    channel = reach_when_open(service)
    channel.send(b"[1, {}, []]")
    channel.receive()  # a sign of life: it is known
    channel.close()
    refusing.join(10)
    assert not refusing.is_alive() and ended == []


def test_two_processes_with_one_number_are_refused(monkeypatch):
    monkeypatch.setattr(multihost, "REFUSAL_S", 0.5)
    service = Service(processes=3)
    service.follower(loaded(Recorder()))
    service.follower(loaded(Recorder()))
    with pytest.raises(HostsError, match="two processes have process_id 1: give each of them its own"):
        service.lead()
    service.join()
    assert len(service.errors) == 2


def test_processes_that_wait_for_one_that_never_comes_end_together(monkeypatch):
    monkeypatch.setattr(multihost, "JOIN_S", 1.0)
    service = Service(processes=3)
    service.follower(loaded(Recorder()))
    with pytest.raises(HostsError, match="2 of 3 processes came within 1 s"):
        service.lead()
    service.join()
    assert "2 of 3 processes" in str(service.errors[0])


def test_the_end_of_a_connection_is_the_loss_of_a_process():
    service, gone = Service(), threading.Event()

    def follower():
        channel = reach_when_open(service)
        channel.send(b"[1, {}, []]")
        gone.wait(10)
        channel.close()

    thread = threading.Thread(target=follower)
    thread.start()
    service.lead()
    gone.set()
    assert service.lost.noticed.wait(10)
    thread.join(10)
    assert service.lost[0].startswith("process 1 was lost")


def test_strangers_at_the_port_neither_end_nor_lengthen_the_wait_for_followers():
    service, made = Service(), []
    waiting = threading.Thread(target=lambda: made.append(service.lead()))
    waiting.start()
    reach_when_open(service).close()
    silent = [socket.create_connection(service.hosts.address) for _ in range(3)]
    with pytest.raises(SecretError, match="do not have the same secret"):
        follow(service.hosts, {}, loaded(Recorder()), Meeting((service.hosts.address,), b"guessed"))
    socket.create_connection(service.hosts.address).close()
    began = time.monotonic()
    service.follower(loaded(Recorder()))
    waiting.join(10)
    assert time.monotonic() - began < 5
    made[0].close()
    service.join()
    assert service.errors == service.lost == []
    for one in silent:
        one.close()


def test_a_follower_that_fails_is_lost_at_once_though_its_process_goes_on():
    service, runner = Service(), Recorder()
    runner.warm_up = lambda shapes, *, images, drafts: 1 // 0
    service.follower(loaded(runner))
    followers = service.lead()
    followers.send("build", {})
    followers.send("warm_up", (), False, ())
    service.join()
    assert isinstance(service.errors[0], ZeroDivisionError)
    assert service.lost.noticed.wait(10)
    assert service.lost[0].startswith("process 1 failed (ZeroDivisionError")
    followers.close()


def test_when_process_0_fails_a_follower_hears_it_inside_a_step_that_never_ends(monkeypatch):
    monkeypatch.setattr(multihost, "LAST_WORDS_S", 0.2)
    service, runner, ends = Service(), Recorder(), threading.Event()
    runner.warm_up = lambda shapes, *, images, drafts: ends.wait(20)
    service.follower(loaded(runner))
    followers = service.lead()
    followers.send("build", {})
    followers.send("warm_up", (), False, ())
    followers.fail("RuntimeError: out of memory")
    followers.close()
    assert service.of_followers.noticed.wait(10)
    assert service.lost.noticed.wait(10)
    expected = "process 0 failed (RuntimeError: out of memory)"
    assert service.of_followers == service.lost == [expected]
    ends.set()
    service.join()


def test_a_process_that_joined_others_still_ends_when_it_is_told_to():
    program = (
        "from v41jax.host_joining import join\n"
        "from v41jax.host_options import Hosts\n"
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

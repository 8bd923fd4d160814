"""Options of several processes, and what these must have in common."""

from __future__ import annotations

import pytest

from scheduler.runtime_config import EngineConfig
from v41jax.host_options import SECRET_VARIABLE, HostsError, differences, hosts_faults, hosts_named, hosts_of, shared_of

TWO = {"num_processes": 2, "mesh": {"data": 1, "model": 2}}


@pytest.fixture(autouse=True)
def no_secret(monkeypatch):
    monkeypatch.delenv(SECRET_VARIABLE, raising=False)


def test_one_process_needs_no_flags():
    assert hosts_of(EngineConfig()) is None


def test_faults_of_the_flags_are_named_together():
    config = EngineConfig(coordinator="nowhere", num_processes=2, process_id=2, vision="on")
    with pytest.raises(HostsError) as error:
        hosts_of(config)
    parts = ("'nowhere' must read HOST:PORT", "process_id 2 must lie in 0..1", "fewer chips", "vision 'on'")
    assert len(error.value.faults) == len(parts)
    for part in parts:
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"num_processes": -1}, ["num_processes -1 must be at least 1", "needs a coordinator"]),
        ({"num_processes": 0, "coordinator": "localhost:5"}, ["num_processes 0 must be at least 1"]),
        ({"process_id": 1}, ["process_id 1 must lie in 0..0", "num_processes 1, process_id 1 needs a coordinator"]),
        ({"num_processes": 2}, ["num_processes 2, process_id 0 needs a coordinator"]),
        ({**TWO, "process_id": -1, "coordinator": "localhost:5"}, ["process_id -1 must lie in 0..1"]),
        ({**TWO, "coordinator": "localhost:65535"}, ["with a port from 1 to 65534"]),
        ({**TWO, "coordinator": "localhost:²"}, ["with a port from 1 to 65534"]),
        ({**TWO, "coordinator": "auto"}, ["asks the cluster's environment for num_processes 2, process_id 0: leave"]),
        ({**TWO, "coordinator": "auto", "process_id": 1}, ["for num_processes 2, process_id 1: leave these options"]),
        ({**TWO, "coordinator": "[::1]:5"}, []),
        ({**TWO, "coordinator": "10.0.0.1:8476"}, [f"is not this machine: set {SECRET_VARIABLE}"]),
        ({**TWO, "coordinator": "127.evil.example:8476"}, [f"is not this machine: set {SECRET_VARIABLE}"]),
    ],
)
def test_every_fault_is_one_line(options, expected):
    faults = hosts_faults(EngineConfig(**options))
    assert len(faults) == len(expected), faults
    for part, fault in zip(expected, faults, strict=True):
        assert part in fault


def test_numbers_of_a_cluster_that_was_joined_are_its_own(monkeypatch):
    monkeypatch.setattr("jax.distributed.is_initialized", lambda: True)
    config = EngineConfig(coordinator="auto", process_id=1, **TWO)
    assert hosts_faults(config) == []
    assert hosts_of(config).automatic


def test_who_a_process_is_does_not_depend_on_what_it_cannot_serve():
    wrong = EngineConfig(coordinator="localhost:5", num_processes=2, process_id=1, vision="on")
    assert len(hosts_faults(wrong)) == 2
    assert hosts_named(wrong).process == 1
    for options in ({}, {"coordinator": "nowhere"}, {"coordinator": "localhost:5", "process_id": 2}):
        assert hosts_named(EngineConfig(**options)) is None


def test_an_empty_secret_is_none(monkeypatch):
    remote = EngineConfig(coordinator="10.0.0.1:8476", **TWO)
    monkeypatch.setenv(SECRET_VARIABLE, "")
    with pytest.raises(HostsError, match="is not this machine: set V41JAX_HOSTS_SECRET"):
        hosts_of(remote)
    monkeypatch.setenv(SECRET_VARIABLE, "known")
    assert hosts_of(remote).secret == b"known"


def test_the_steps_port_follows_the_coordinators():
    assert hosts_of(EngineConfig(coordinator="[::1]:5", **TWO)).address == ("::1", 6)


@pytest.fixture
def directory(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"1234")
    (tmp_path / "README.md").write_text("text")
    return tmp_path


def test_what_names_a_process_or_only_process_0_uses_may_differ(directory):
    mine = EngineConfig(coordinator="localhost:5", decode_buckets=(1, 2))
    other = EngineConfig(
        coordinator="127.0.0.1:5",
        process_id=1,
        host_cache_bytes=1,
        disk_cache_dir="/elsewhere",
        vision="off",
        decode_buckets=(1, 2),
    )
    assert differences(shared_of(mine, directory), {1: shared_of(other, directory)}) == []


def test_every_difference_is_named_with_both_values(directory):
    config = EngineConfig(dtype="float32", max_num_seqs=4)
    mine = shared_of(config, directory)
    theirs = shared_of(EngineConfig(dtype="bfloat16", max_num_seqs=4, mesh={"model": 2, "data": 1}), directory)
    (directory / "config.json").write_text("{ }")
    (directory / "model.safetensors").unlink()
    moved = shared_of(config, directory, "stored")
    lines = differences(mine, {1: theirs, 3: theirs, 2: moved})
    assert lines[0] == "process 2 has bytes of config.json 3, process 0 2"
    assert lines[1] == "process 2 has bytes of model.safetensors None, process 0 4"
    assert lines[2].startswith("process 2 has content of config.json '")
    assert lines[3:] == [
        "processes 1, 3 have dtype 'bfloat16', process 0 'float32'",
        "processes 1, 3 have mesh {'data': 1, 'model': 2}, process 0 {'data': 1, 'model': 1}",
        "process 2 has weights 'stored', process 0 None",
    ]


def test_many_differences_are_counted():
    lines = differences({}, {1: {f"file {number:02}": number for number in range(30)}})
    assert len(lines) == 21
    assert lines[-1] == "and 10 more differences"

"""The engine on meshes with data shards, and over two processes, against the engine on one device: tokens, hits,
preemption, drafts, tiers; and its end when a process is lost."""

from __future__ import annotations

import json
import socket
import time

import pytest

from tests.mesh.processes import finish, start
from tests.mesh.shards import OF_ONE_CHUNK
from tests.mesh.small_model import write_checkpoint
from v41jax.multihost import LOST_EXIT_CODE

PROGRAM = "tests.mesh.shards"
ONE = "1x1:images:long"
LONG = "2x4:experts:long:ragged"
SMALL = "4x2:images:small"
DRAFTS = "2x2:experts:long:drafts:tiers:warm"
MESHES = (LONG, SMALL, DRAFTS)


WITHIN_S = 30


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("shards") / "checkpoint"
    write_checkpoint(path)
    return path


@pytest.fixture(scope="module")
def served(checkpoint):
    lines = finish(start(PROGRAM, checkpoint, ONE, *MESHES)).splitlines()
    return dict(zip((ONE, *MESHES), map(json.loads, lines), strict=True))


@pytest.mark.parametrize("mesh", MESHES)
def test_every_request_gets_what_one_device_gives_it(served, mesh):
    expected, found = served[ONE]["requests"], served[mesh]["requests"]
    assert set(found) == {"first", "images" if mesh == SMALL else "long"}
    for group, requests in found.items():
        for wanted, request in zip(expected[group], requests, strict=True):
            for field in ("tokens", "reason", "scores"):
                assert request[field] == wanted[field]
    ended = [request["reason"] for request in found.get("long", ())]
    assert ended.count("aborted") == (mesh != SMALL)


@pytest.mark.parametrize("mesh", MESHES)
def test_every_shard_runs_requests_of_its_own(served, mesh):
    data, model = mesh.split(":")[0].split("x")
    assert served[mesh]["summary"]["mesh"] == f"data={data},model={model}"
    shards = served[mesh]["statistics"]["shards"]
    assert len(shards) == int(data)
    assert all(shard["counters"]["finished"] for shard in shards)
    assert all(shard["pages_used"] == 0 for shard in shards)
    slots = 1 if mesh == SMALL else 2
    assert [shard["slots_free"] for shard in shards] == [slots] * int(data)


def test_a_runner_says_how_rows_reach_their_experts(served):
    chosen = {mesh: served[mesh]["summary"]["operations"].get("expert_exchange", []) for mesh in MESHES}
    assert chosen[LONG] and all(line.startswith("ragged (") for line in chosen[LONG])
    assert chosen[DRAFTS] and all(line.startswith("gather (") for line in chosen[DRAFTS])
    assert chosen[SMALL] == [], "experts cut over model are on every data shard"


def test_prefixes_are_reused_and_requests_preempted(served):
    assert served[LONG]["statistics"]["preemptions"] > 0
    assert served[LONG]["statistics"]["hit_tokens"] > 0
    cached = [request["cached"] for request in served[SMALL]["requests"]["first"]]
    assert cached[:5] == [0] * 5 and max(cached[5:]) >= 64


def test_drafts_are_accepted_and_nothing_is_compiled_late(served):
    statistics = served[DRAFTS]["statistics"]
    assert statistics["accepted_tokens"] > 200
    assert 3 * statistics["steps"] < 2 * served[LONG]["statistics"]["steps"]
    assert statistics["recompiles_after_warm_up"] == 0


def test_a_draft_call_leaves_the_pools_of_every_chip_where_they_lie(served):
    assert served[DRAFTS]["drafting"]["calls"] > 20
    assert served[DRAFTS]["drafting"]["moved"] == 0


def test_a_page_that_one_shard_stored_is_a_hit_for_another(served):
    shared = served[DRAFTS]["shared"]
    first, *others, second = shared["homes"]
    assert others == [first] * len(others) and second != first
    assert shared["cached"] == [0, 96]
    assert shared["tokens"][0] == shared["tokens"][1]
    assert served[DRAFTS]["transfers"]["pages_adopted"] >= 3


@pytest.fixture
def leader(request, checkpoint):
    """Process 0 of two with four devices each that serve on the mesh of the parameter, and process 1; `@cluster` has
    them find each other by the variables of Open MPI."""
    mesh, _, cluster = request.param.partition("@")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    secret = {"V41JAX_HOSTS_SECRET": "" if cluster else "of the tests"}
    processes = []
    for process in (0, 1):
        named = ("auto",) if cluster else (f"127.0.0.1:{port}", process)
        variables = open_mpi(process, port) if cluster else {}
        processes.append(start(PROGRAM, checkpoint, mesh, "--hosts", *named, devices=4, **secret, **variables))
    yield processes
    for process in processes:
        process.kill()
        process.wait()


def open_mpi(process, port):
    """What `mpirun -n 2` tells a process, and JAX's coordinator takes this port."""
    return {
        "OMPI_MCA_orte_hnp_uri": "1314521088.0;tcp://127.0.0.1:43370",
        "OMPI_COMM_WORLD_SIZE": 2,
        "OMPI_COMM_WORLD_RANK": process,
        "OMPI_COMM_WORLD_LOCAL_RANK": process,
        "JAX_COORDINATOR_PORT": port,
    }


def said(processes):
    """What process 0 prints; the CPU's collectives write lines of their own about who is connected."""
    line = next((line for line in processes[0].stdout if line.startswith("{")), "")
    assert line, [process.communicate(timeout=60)[1] for process in processes]
    return json.loads(line)


def check_rounds(found, served):
    expected = [served[ONE]["requests"]["first"][number] for number in OF_ONE_CHUNK]
    for requests in found["rounds"]:
        for wanted, request in zip(expected[-len(requests) :], requests, strict=True):
            for field in ("tokens", "reason", "scores"):
                assert request[field] == wanted[field]


@pytest.mark.parametrize("leader", ["2x4:experts:drafts:tiers", "4x2:small:fails"], indirect=True)
def test_two_processes_serve_data_shards_with_the_tokens_of_one_device(leader, served, request):
    found = said(leader)
    check_rounds(found, served)
    if "fails" in request.node.callspec.id:
        check_failure(leader)
    else:
        assert [process.wait(60) for process in leader] == [0, 0]
    shards = found["statistics"]["shards"]
    # Both processes hold shards that served something.
    halves = shards[: len(shards) // 2], shards[len(shards) // 2 :]
    assert all(sum(shard["counters"]["finished"] for shard in half) for half in halves)
    assert found["rounds"][1][0]["cached"] == 32, "a page is found again on its shard"
    if "drafts" in request.node.callspec.id:
        assert found["statistics"]["accepted_tokens"] >= 10
        assert found["rounds"][2][0]["cached"] == 32, "one process's page was a hit for the other"
        assert found["statistics"]["transfers"]["pages_adopted"] == 1


def check_failure(processes):
    """A step that failed in process 0 alone ended both, which say so."""
    began = time.monotonic()
    errors = [process.communicate(timeout=2 * WITHIN_S)[1] for process in processes]
    assert time.monotonic() - began < WITHIN_S
    assert [process.returncode for process in processes] == [LOST_EXIT_CODE] * 2
    for error in errors:
        assert "HostLostError: process 0 failed (StepFailedError: RuntimeError: only here)" in error


@pytest.mark.parametrize("leader", ["1x8:stays@cluster"], indirect=True)
def test_two_processes_share_one_replica_and_notice_a_loss(leader, served):
    check_rounds(said(leader), served)
    leader[1].kill()
    began = time.monotonic()
    _, errors = leader[0].communicate(timeout=2 * WITHIN_S)
    assert time.monotonic() - began < WITHIN_S
    assert leader[0].returncode == LOST_EXIT_CODE
    assert "HostLostError: process 1 was lost" in errors

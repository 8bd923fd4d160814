"""The engine on meshes with data shards against the engine on one device: tokens, hits, preemption, drafts, tiers."""

from __future__ import annotations

import json

import pytest

from tests.mesh.processes import finish, start
from tests.mesh.small_model import write_checkpoint

PROGRAM = "tests.mesh.shards"
ONE = "1x1:images:long"
LONG = "2x4:experts:long:ragged"
SMALL = "4x2:images:small"
DRAFTS = "2x2:experts:long:drafts:tiers:warm"
MESHES = (LONG, SMALL, DRAFTS)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    path = tmp_path_factory.mktemp("shards") / "checkpoint"
    write_checkpoint(path)
    lines = finish(start(PROGRAM, path, ONE, *MESHES)).splitlines()
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


def test_a_page_that_one_shard_stored_is_a_hit_for_another(served):
    shared = served[DRAFTS]["shared"]
    first, *others, second = shared["homes"]
    assert others == [first] * len(others) and second != first
    assert shared["cached"] == [0, 96]
    assert shared["tokens"][0] == shared["tokens"][1]
    assert served[DRAFTS]["transfers"]["pages_adopted"] >= 3

"""The engine on a mesh of virtual devices against the engine on one device."""

from __future__ import annotations

import json

import pytest

from tests.mesh.model import write_checkpoint
from tests.mesh.processes import finish, start

PROGRAM = "tests.mesh.serving"
MESHES = ("4:experts", "8")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("serving") / "checkpoint"
    write_checkpoint(path)
    return path


@pytest.fixture(scope="module")
def served(checkpoint):
    lines = finish(start(PROGRAM, checkpoint, "1", *MESHES)).splitlines()
    return dict(zip(("1", *MESHES), map(json.loads, lines), strict=True))


@pytest.mark.parametrize("mesh", MESHES)
def test_served_tokens_are_those_of_one_device(served, mesh):
    assert served[mesh]["tokens"] == served["1"]["tokens"]
    assert served[mesh]["cached"] == served["1"]["cached"]
    assert served["1"]["cached"][2] > 0, "the last prompt reuses pages of the first"


def test_a_device_holds_its_part_of_the_weights(served):
    assert served["8"]["weights"] < served["4:experts"]["weights"] < served["1"]["weights"] / 2
    assert served["8"]["summary"]["mesh"] == "data=1,model=8"
    assert served["4:experts"]["summary"]["experts"] == "model"

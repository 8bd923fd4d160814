"""The engine on a mesh of virtual devices against the engine on one device."""

from __future__ import annotations

import json

import pytest

from tests.mesh.processes import finish, start
from tests.mesh.small_model import write_checkpoint

SERVED = ("1", "4:experts", "8")
"""Meshes the engine serves on: `MODEL`, with whole experts where it says so."""


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """What `tests.mesh.serving` prints for each mesh of `SERVED`."""
    path = tmp_path_factory.mktemp("serving") / "checkpoint"
    write_checkpoint(path)
    lines = finish(start("tests.mesh.serving", path, *SERVED)).splitlines()
    return dict(zip(SERVED, map(json.loads, lines), strict=True))


@pytest.mark.parametrize("mesh", SERVED[1:])
def test_served_tokens_are_those_of_one_device(served, mesh):
    assert served[mesh]["tokens"] == served["1"]["tokens"]
    assert served[mesh]["cached"] == served["1"]["cached"]
    assert min(served["1"]["cached"][2:]) > 0, "the last prompts reuse pages of the first"


def test_a_device_holds_its_part_of_the_weights(served):
    assert served["8"]["weights"] < served["4:experts"]["weights"] < served["1"]["weights"] / 2
    assert served["8"]["summary"]["mesh"] == "data=1,model=8"
    assert served["4:experts"]["summary"]["experts"] == "model"

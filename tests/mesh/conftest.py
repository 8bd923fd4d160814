"""One checkpoint, and one run of the engine, for all tests of meshes."""

from __future__ import annotations

import json

import pytest

from tests.mesh.model import write_checkpoint
from tests.mesh.processes import finish, start

SERVED = ("1", "4:experts", "8")
"""Meshes the engine serves on: `MODEL`, with whole experts where it says so."""


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """Directory of the checkpoint."""
    path = tmp_path_factory.mktemp("mesh") / "checkpoint"
    write_checkpoint(path)
    return path


@pytest.fixture(scope="session")
def served(checkpoint):
    """What `tests.mesh.serving` prints for each mesh of `SERVED`."""
    lines = finish(start("tests.mesh.serving", checkpoint, *SERVED)).splitlines()
    return dict(zip(SERVED, map(json.loads, lines), strict=True))

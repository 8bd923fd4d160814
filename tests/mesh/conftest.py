"""One checkpoint for all tests of meshes."""

from __future__ import annotations

import pytest

from tests.mesh.model import write_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """Directory of the checkpoint."""
    path = tmp_path_factory.mktemp("mesh") / "checkpoint"
    write_checkpoint(path)
    return path

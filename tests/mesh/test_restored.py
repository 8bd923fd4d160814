"""Conversions and tables on meshes of virtual devices."""

from __future__ import annotations

import json

from tests.mesh.processes import finish, start


def test_a_conversion_restores_onto_any_mesh_and_tables_may_lie_in_device_memory(checkpoint, tmp_path):
    counts = json.loads(finish(start("tests.mesh.restored", checkpoint, tmp_path / "out")))
    assert counts["compared"] > 300
    assert counts["cut"] > 100
    assert counts["rows"] > 40, "the Engram tables give the same rows from device memory"

"""What sampling sends on a mesh."""

from __future__ import annotations

import json

from tests.mesh.chosen import OUTPUTS, VOCABULARY
from tests.mesh.processes import finish, start
from v41jax.hlo_collectives import Collective

MESHES = ("2x4", "4x2")


def test_a_filtered_row_is_gathered_on_the_chips_of_its_shard_and_nowhere_else():
    lines = finish(start("tests.mesh.chosen", *MESHES)).splitlines()
    for mesh, line in zip(MESHES, lines, strict=True):
        model = int(mesh.split("x")[1])
        found = [Collective(**entry) for entry in json.loads(line)]
        rows = OUTPUTS * VOCABULARY * 4
        # The sums of probabilities, gathered; the sort takes each row whole to one chip and back, values and ids.
        large = {(one.kind, one.bytes, one.group, one.count) for one in found if one.bytes >= rows // model}
        assert large == {("all-gather", rows, model, 1), ("all-to-all", rows // model, model, 4)}

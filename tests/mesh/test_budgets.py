"""What a plan says fits is what an engine allocates, byte for byte."""

from __future__ import annotations

import dataclasses
import json

import pytest

from checkpoints.synthesize import synthesize
from tests.mesh.budgets import CASES, MEMORY
from tests.mesh.processes import finish, start
from v41jax import plan
from v41jax.chips import CHIPS
from v41jax.plan import Planner
from v41jax.plan_compile import Topology
from v41jax.presets import preset


@pytest.fixture(scope="module")
def allocated(tmp_path_factory):
    """What `tests.mesh.budgets` prints for each case."""
    path = tmp_path_factory.mktemp("budgets") / "pico"
    synthesize(path, preset("pico"), seed=2)
    lines = finish(start("tests.mesh.budgets", path, devices=4)).splitlines()
    return dict(zip(CASES, map(json.loads, lines), strict=True))


@pytest.mark.parametrize("case", CASES)
def test_a_plan_is_what_the_allocator_does(allocated, case, monkeypatch):
    chip = dataclasses.replace(CHIPS["v5e"], memory_bytes=MEMORY)
    monkeypatch.setattr(plan, "chip_of", lambda name: chip)
    planner = Planner(preset("pico"), CASES[case], "v5e:2x2", Topology(4, 1), 256)
    assert planner.faults(planner.asked()) == []
    planned, found = planner.plan(planner.asked()), allocated[case]
    assert dataclasses.asdict(planned.budget) == found["budget"]
    assert (planned.pool_bytes, planned.image_bytes) == (found["pools"], found["images"])
    assert planned.budget.adjustment_bytes == found["adjustments"] > 0
    assert bool(planned.image_bytes) == (case == "packed with images of state")
    drafts = CASES[case].num_speculative_tokens > 0
    assert [name for name, size in planned.held_bytes.items() if size] == (
        ["target", "draft", "tower", "tables"] if drafts else ["target"]
    )
    lies = sum(planned.held_bytes.values()) + found["pools"] + found["images"] + found["adjustments"]
    assert planned.budget.scratch_bytes + lies <= int(0.9 * MEMORY)

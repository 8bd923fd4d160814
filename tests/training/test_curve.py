"""The points of a loss curve out of a run's log."""

from __future__ import annotations

import json

from training.curve import points


def test_phases_that_follow_each_other_are_one_curve() -> None:
    lines = [
        {"phase": "replay", "step": 30, "tokens": 3_000_000, "loss": 2.0},
        {"phase": "target", "step": 10, "tokens": 1_000_000, "loss": 3.0},
        {"phase": "baseline", "step": 10, "tokens": 1_000_000, "loss": 4.0},
        {"phase": "target", "done": True, "steps": 20},
    ]
    assert points(map(json.dumps, lines), ("target", "replay")) == ([1.0, 3.0], [3.0, 2.0])

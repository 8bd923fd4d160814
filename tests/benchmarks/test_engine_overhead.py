"""The benchmark of the engine's host time runs and says what it measured."""

import json

from benchmarks import engine_overhead


def test_a_line_for_each_phase_whose_parts_make_up_the_step(capsys):
    records = engine_overhead.main(["--batches", "2", "--steps", "6", "--prompt", "9", "--profile"])
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == records
    assert [(record["phase"], record["steps"] > 0) for record in records] == [("prefill", True), ("decode", True)]
    for record in records:
        assert record["commit"] and record["device"] and record["jax"]
        assert 0 < record["host_ms"] <= record["host_p90_ms"] + 1e-9
        assert all(record[f"{name}_ms"] >= 0 for name in engine_overhead.PARTS)
        assert record["step_ms"] >= record["dispatch_ms"]
        assert record["profile"][0]["seconds"] > 0

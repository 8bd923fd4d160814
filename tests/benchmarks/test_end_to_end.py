"""The whole-model benchmark runs a cell and counts what the step must read."""

import json

from benchmarks import end_to_end


def test_a_decode_cell_has_times_and_a_bound(capsys):
    end_to_end.main(["--preset", "pico", "--batches", "2", "--contexts", "70", "--prompts", ""])
    compiled, cell = map(json.loads, capsys.readouterr().out.splitlines())
    assert compiled["programs"] == 1 == len(compiled["compile_each_s"])
    assert (cell["phase"], cell["batch"], cell["context"]) == ("decode", 2, 70)
    assert 0 < cell["bytes"] < cell["weight_bytes"] and cell["flops"] > 0
    assert cell["step_ms"] >= cell["host_ms"] > 0 and 0 < cell["fraction"] < 1
    assert cell["tokens_per_s"] > 0

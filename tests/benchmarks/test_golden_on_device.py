"""The golden checks of a device run and say how near an engine of arranged expert codes is."""

import json

from benchmarks import golden_on_device


def test_an_engine_of_arranged_codes_gives_the_recorded_answers(capsys):
    records = golden_on_device.main(["--kernels", "xla", "--checks", "arranged"])
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == records
    exact, rounded, released = records
    assert [(record["mode"], record["dtype"]) for record in records] == [
        ("noquant", "float32"),
        ("noquant", "bfloat16"),
        ("quant", "bfloat16"),
    ]
    for record in records:
        assert record["commit"] and record["device"] and record["jax"]
        assert record["arranged_stacks"] == 2 * 5, "w1 and w3 of every layer"
        assert record["compared_tokens"] == 1 + 2 + 7 + 33 + 64 + 64
    assert exact["largest_difference"] < 5e-5 and exact["same_best_token"] == 1
    assert rounded["median_difference"] < 0.2 and rounded["same_best_token"] > 0.7
    assert released["median_difference"] < 0.6 and released["same_best_token"] > 0.4

"""The kernel benchmark runs from end to end at sizes for a CPU and writes what it promises."""

import json

import pytest

from benchmarks import kernels
from benchmarks.kernel_cases import Case


def test_a_run_writes_a_line_a_variant_and_a_table(tmp_path):
    records = kernels.main(["--size", "smoke", "--operations", "select_topk,index_key_write", "--out", str(tmp_path)])
    lines = [json.loads(line) for line in (tmp_path / "kernels.jsonl").read_text().splitlines()]
    assert [(line["operation"], line["variant"]) for line in lines] == [(r["operation"], r["variant"]) for r in records]
    assert {line["variant"] for line in lines} == {"xla", "pallas"}
    for line in lines:
        assert "error" not in line
        assert line["time_us"] > 0 and line["fraction"] > 0
        assert line["device"] and line["jax"] and line["copy_gb_s"] > 0
    assert "### select_topk" in (tmp_path / "kernels.md").read_text()


def test_a_wrong_variant_has_an_error_and_no_time():
    case = Case(
        "add", "one", 8, 0, lambda count: [(kernels.jax.numpy.ones(4),)] * count,
        {"xla": lambda x: x + 1, "pallas": lambda x: x + 2}, lambda a, b: float(abs(a - b).max()),
    )  # fmt: skip
    right, wrong = kernels.run_case(case, kernels.Ceilings(1e9, 1e9), tune=False)
    assert right["time_us"] > 0
    assert "differs by 1" in wrong["error"] and "time_us" not in wrong


@pytest.mark.parametrize("size", ["smoke", "production"])
def test_shapes_are_unique_within_an_operation(size):
    names = [(case.operation, case.shape) for case in kernels.all_cases(size)]
    assert len(names) == len(set(names))

"""The tables of measured times: what a line says, and which run counts."""

import json

from benchmarks import performance_tables


def record(variant, time, commit="aaa", **others):
    return {
        "device": "D", "jax": "1", "commit": commit, "copy_gb_s": 100.0, "matmul_tflop_s": 2.0, "operation": "add",
        "shape": "one", "variant": variant, "bytes_bound_us": 2.0, "flops_bound_us": 1.0, "bound_us": 2.0,
        "time_us": time, "fraction": 2.0 / time, **others,
    }  # fmt: skip


def write(path, records):
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    return str(path)


def test_a_line_has_both_times_the_bound_and_the_best_other_configuration(tmp_path):
    wrong = {**record("config 3", 1.0), "error": "ValueError: differs"}
    del wrong["time_us"], wrong["fraction"]
    runs = [record("xla", 20.0), record("pallas", 5.0), record("config 1", 8.0), record("config 2", 4.0), wrong]
    text = performance_tables.tables(performance_tables.read([write(tmp_path / "a", runs)]), [])
    assert "| one | 20.0 | 5.0 | 4.0 | 2.0 bytes | 40% | 2: 4.0 (50%) |" in text
    assert "D, JAX 1, commit aaa, ceilings 100 GB/s and 2 TFLOP/s." in text


def test_the_last_file_counts_and_a_commit_can_be_named(tmp_path):
    first, second = write(tmp_path / "a", [record("pallas", 5.0)]), write(tmp_path / "b", [record("pallas", 3.0)])
    text = performance_tables.tables(performance_tables.read([first, f"{second}=bbb"]), ["add"])
    assert "3.0" in text and "5.0" not in text and "commit bbb" in text


def test_a_variant_that_failed_says_so(tmp_path):
    failed = {**record("pallas", 1.0), "error": "x"}
    del failed["time_us"], failed["fraction"]
    text = performance_tables.tables(performance_tables.read([write(tmp_path / "a", [record("xla", 2.0), failed])]), [])
    assert "| one | 2.0 | failed |  | 2.0 bytes |  |  |" in text

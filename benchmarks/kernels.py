"""Times every kernel beside XLA on the device that is there, against bounds measured in the same run.

    python -m benchmarks.kernels --out DIR [--operations a,b] [--tune] [--size smoke] [--budget SECONDS] [--commit HASH]

Writes `kernels.jsonl`, one line a measurement, and `kernels.md`, a table. A variant that is wrong or fails is listed
with what went wrong and has no time. Kernel times are sums of device time; gaps between launches are in the wall time.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

# Kernels of a captured graph may overlap or be hidden from the profiler: every call launches its own.
os.environ.setdefault("XLA_FLAGS", "--xla_gpu_enable_command_buffer=")

import jax

from benchmarks.kernel_cases import SIZES, Case, all_cases
from benchmarks.provenance import commit_hash
from benchmarks.timing import Ceilings, in_place_call, measure_ceilings, time_calls

COLD_BYTES = 200_000_000
"""Input sets are rotated until they hold this much together, several times a last-level cache."""
MOST_SETS = 64


def run_case(case: Case, ceilings: Ceilings, tune: bool) -> Iterator[dict[str, Any]]:
    """Checks and times every variant of a case; yields one record a variant."""
    sets = case.make_sets(min(MOST_SETS, max(1, -(-COLD_BYTES // max(case.bytes_moved, 1)))))
    bytes_bound = case.bytes_moved / ceilings.bytes_per_second * 1e6
    flops_bound = case.flops / ceilings.flops_per_second * 1e6
    expected = None
    variants = {**case.variants, **(case.tuning if tune else {})}

    def compile_variant(function: Callable[..., Any]) -> Any:
        return jax.jit(function, donate_argnums=case.in_place).lower(*sets[0]).compile()

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        programs = {name: pool.submit(compile_variant, function) for name, function in variants.items()}
    for name, program in programs.items():
        record: dict[str, Any] = {
            "operation": case.operation,
            "shape": case.shape,
            "variant": name,
            "bytes": case.bytes_moved,
            "flops": case.flops,
            "bytes_bound_us": bytes_bound,
            "flops_bound_us": flops_bound,
            "bound_us": max(bytes_bound, flops_bound),
        }
        try:
            compiled = program.result()
            found = jax.block_until_ready(in_place_call(compiled, case.in_place, sets[0])(sets[0]))
            if expected is None:
                expected = found
            record["difference"] = float(case.difference(expected, found))
            del found
            if not record["difference"] <= case.tolerance:
                raise ValueError(f"differs by {record['difference']:.3g}, more than {case.tolerance:.3g}")
            timing = time_calls(compiled, sets, case.in_place)
            record.update(
                time_us=timing.microseconds,
                spread=timing.spread,
                wall_us=timing.wall_microseconds,
                clock=timing.clock,
                kernels=timing.kernels,
                calls=timing.calls,
                sets=len(sets),
                fraction=record["bound_us"] / timing.microseconds,
            )
        except Exception as error:  # one variant must not end the run
            record["error"] = f"{type(error).__name__}: {str(error)[:300]}"
        yield record


def markdown(records: list[dict[str, Any]], header: dict[str, Any]) -> str:
    """The records as one table an operation."""
    lines = [
        f"Device {header['device']}, jax {header['jax']}, commit {header['commit']}; measured ceilings "
        f"{header['copy_gb_s']:.0f} GB/s, {header['matmul_tflop_s']:.0f} TFLOP/s. Times are microseconds.",
        "",
    ]
    for operation in dict.fromkeys(record["operation"] for record in records):
        lines += [
            f"### {operation}",
            "",
            "| shape | variant | time | bound | fraction | wall | kernels | difference |",
            "|---|---|---:|---:|---:|---:|---:|---:|",
        ]
        for record in records:
            if record["operation"] != operation:
                continue
            start = f"| {record['shape']} | {record['variant']} |"
            if "error" in record:
                lines.append(f"{start} {record['error'][:90]} | {record['bound_us']:.1f} | | | | |")
                continue
            lines.append(
                f"{start} {record['time_us']:.1f} | {record['bound_us']:.1f} | {record['fraction']:.0%} | "
                f"{record['wall_us']:.1f} | {record['kernels']} | {record['difference']:.1e} |"
            )
        lines.append("")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    """Runs the cases asked for; returns the records it wrote."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--operations", default="", help="comma-separated; all when empty")
    parser.add_argument("--shapes", default="", help="only shapes that contain this text")
    parser.add_argument("--size", choices=SIZES, default="production")
    parser.add_argument("--tune", action="store_true", help="also run every case's other configurations")
    parser.add_argument("--budget", type=float, default=1e9, help="start no case after this many seconds")
    parser.add_argument("--commit", default=None)
    options = parser.parse_args(arguments)
    begin = time.perf_counter()
    options.out.mkdir(parents=True, exist_ok=True)
    ceilings = measure_ceilings(small=options.size == "smoke")
    header = {
        "device": jax.devices()[0].device_kind,
        "platform": jax.default_backend(),
        "jax": jax.__version__,
        "commit": options.commit or commit_hash(),
        "copy_gb_s": ceilings.bytes_per_second / 1e9,
        "matmul_tflop_s": ceilings.flops_per_second / 1e12,
    }
    print(json.dumps(header), flush=True)
    wanted = set(filter(None, options.operations.split(",")))
    records: list[dict[str, Any]] = []
    with (options.out / "kernels.jsonl").open("w") as file:
        for case in all_cases(options.size):
            if (wanted and case.operation not in wanted) or options.shapes not in case.shape:
                continue
            if time.perf_counter() - begin > options.budget:
                print(f"budget spent before {case.operation} {case.shape}", flush=True)
                continue
            for record in run_case(case, ceilings, options.tune):
                records.append(record)
                file.write(json.dumps({**header, **record}) + "\n")
                file.flush()
                result = record.get("error") or f"{record['time_us']:9.1f} us {record['fraction']:5.0%}"
                print(f"{record['operation']:18} {record['shape']:34} {record['variant']:24} {result}", flush=True)
    (options.out / "kernels.md").write_text(markdown(records, header))
    return records


if __name__ == "__main__":
    main()

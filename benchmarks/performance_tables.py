"""Prints the tables of docs/performance.md from what `benchmarks.kernels` wrote.

    python -m benchmarks.performance_tables FILE[=COMMIT] ... [--operations a,b]

COMMIT names the commit of a run on a copy without a repository. Of records of the same operation and shape the last
file's count.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

Records = dict[str, dict[str, dict[str, dict[str, Any]]]]
"""operation -> shape -> variant -> record."""


def read(sources: list[str]) -> Records:
    """The records of all files; a shape that a later file has is that file's alone."""
    records: Records = {}
    for source in sources:
        path, _, commit = source.partition("=")
        fresh: Records = {}
        for line in Path(path).read_text().splitlines():
            record = json.loads(line)
            if commit:
                record["commit"] = commit
            fresh.setdefault(record["operation"], {}).setdefault(record["shape"], {})[record["variant"]] = record
        for operation, shapes in fresh.items():
            records.setdefault(operation, {}).update(shapes)
    return records


def time_of(record: dict[str, Any] | None) -> str:
    """Its time in microseconds, or what went wrong."""
    if record is None:
        return ""
    return f"{record['time_us']:.1f}" if "time_us" in record else "failed"


def row(shape: str, variants: dict[str, dict[str, Any]]) -> str:
    """One line of a table."""
    plain, kernel = variants.get("xla"), variants.get("pallas")
    timed = {name: record for name, record in variants.items() if name.startswith("config") and "time_us" in record}
    best = min(timed, key=lambda name: timed[name]["time_us"], default=None)
    shown = kernel or next(iter(variants.values()))
    limit = "bytes" if shown["bytes_bound_us"] >= shown["flops_bound_us"] else "flops"
    gain = (
        f"{plain['time_us'] / kernel['time_us']:.1f}" if plain and kernel and "time_us" in {*plain} & {*kernel} else ""
    )
    fraction = f"{kernel['fraction']:.0%}" if kernel and "fraction" in kernel else ""
    other = f"{best.removeprefix('config ')}: {time_of(timed[best])} ({timed[best]['fraction']:.0%})" if best else ""
    return (
        f"| {shape} | {time_of(plain)} | {time_of(kernel)} | {gain} | {shown['bound_us']:.1f} {limit} | {fraction} | "
        f"{other} |"
    )


def tables(records: Records, operations: list[str]) -> str:
    """Markdown: a table per operation, with the runs its lines come from."""
    lines = []
    for operation, shapes in records.items():
        if operations and operation not in operations:
            continue
        runs = dict.fromkeys(
            f"{r['device']}, JAX {r['jax']}, commit {r['commit']}, ceilings {r['copy_gb_s']:.0f} GB/s and "
            f"{r['matmul_tflop_s']:.0f} TFLOP/s"
            for variants in shapes.values()
            for r in variants.values()
        )
        lines += [f"### {operation}", "", *[f"{run}." for run in runs], ""]
        lines += ["| shape | XLA | kernel | XLA / kernel | bound | of bound | best other configuration |"]
        lines += ["|---|---:|---:|---:|---:|---:|---|"]
        lines += [row(shape, variants) for shape, variants in shapes.items()] + [""]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", nargs="+", metavar="FILE[=COMMIT]")
    parser.add_argument("--operations", default="", help="comma-separated; all when empty")
    options = parser.parse_args(arguments)
    print(tables(read(options.sources), list(filter(None, options.operations.split(",")))))


if __name__ == "__main__":
    main()

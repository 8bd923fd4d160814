"""Prints what the compilers say about every kernel on every target, as the tables of docs/kernels.md.

    python -m benchmarks.compile_report [--targets v5e,gfx942] [--only TEXT]

Nothing runs: TPU kernels are compiled by libtpu, GPU kernels by Triton and the vendors' assemblers, at production
shapes. The kernels are those the compile gates of `tests/compile_gates` check.
"""

from __future__ import annotations

import argparse
import importlib
import os
import pkgutil
from collections.abc import Iterable, Iterator

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from tests import compile_gates
from tests.compile_gates import gpu, tpu
from tests.compile_gates.fused_builds import fused_builds

KIB = 1024


def builds(route: str) -> Iterator:
    """The builds of every module of the gates that lists some for "tpu" or "gpu"."""
    for module in sorted(pkgutil.iter_modules(compile_gates.__path__), key=lambda module: module.name):
        if module.name.endswith("_builds"):
            listed = getattr(
                importlib.import_module(f"{compile_gates.__name__}.{module.name}"), f"{route}_builds", None
            )
            yield from listed() if listed else ()


def first_line(error: Exception) -> str:
    """What a compiler said, short enough for a table."""
    return (str(error).splitlines() or [type(error).__name__])[0][:80].replace("|", "/")


def tpu_rows(targets: Iterable[str], only: str) -> Iterator[str]:
    """Lines: kernel, generation, VMEM, HBM temporaries, copies of a pool."""
    for build in builds("tpu"):
        for generation in targets if only in build.name else ():
            try:
                built = tpu.compile_for_tpu(build.function, build.arguments, generation, donate=build.donated)
            except Exception as error:  # a refusal is what the table is for
                yield f"| {build.name} | {generation} | refused: {first_line(error)} | | |"
                continue
            copies = sum(len(built.copies_of(pool)) for pool in build.pools)
            yield (
                f"| {build.name} | {generation} | {sum(built.vmem_bytes) / KIB:,.0f} | "
                f"{built.temporary_bytes / KIB:,.0f} | {copies} |"
            )


def fused_rows(targets: Iterable[str], only: str) -> Iterator[str]:
    """Lines: operation without a kernel, generation, bytes the compiler expects to move, least bytes, their ratio."""
    for build in fused_builds():
        for generation in targets if only in build.name else ():
            moved = tpu.compile_for_tpu(build.function, build.arguments, generation).accessed_bytes
            yield (
                f"| {build.name} | {generation} | {moved / 1e6:,.2f} | {build.least_bytes / 1e6:,.2f} | "
                f"{moved / build.least_bytes:.2f} |"
            )


def gpu_rows(targets: Iterable[str], only: str) -> Iterator[str]:
    """Lines: call, kernel, target, warps, shared memory, registers, spills."""
    for build in builds("gpu"):
        for target in targets if only in build.name else ():
            try:
                kernels = gpu.compile_for_gpu(build.function, build.arguments, target)
            except Exception as error:
                yield f"| {build.name} | | {target} | refused: {first_line(error)} | | | |"
                continue
            for kernel in kernels:
                yield (
                    f"| {build.name} | {kernel.name} | {target} | {kernel.num_warps} | "
                    f"{kernel.shared_bytes / KIB:.1f} | {kernel.registers} | {kernel.spills} |"
                )


def main(arguments: list[str] | None = None) -> None:
    """Prints the tables, a line as soon as it is known."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", default=",".join([*tpu.GENERATIONS, *gpu.TARGETS]))
    parser.add_argument("--only", default="", help="only builds whose name contains this text")
    options = parser.parse_args(arguments)
    wanted = options.targets.split(",")
    generations = [target for target in tpu.GENERATIONS if target in wanted]
    if generations:
        print("| kernel at shape | generation | VMEM KiB | HBM temporaries KiB | pool copies |")
        print("|---|---|---:|---:|---:|")
        for row in tpu_rows(generations, options.only):
            print(row, flush=True)
        print()
        print("| operation of XLA | generation | bytes it moves, MB | least bytes, MB | ratio |")
        print("|---|---|---:|---:|---:|")
        for row in fused_rows(generations, options.only):
            print(row, flush=True)
        print()
    targets = [target for target in gpu.TARGETS if target in wanted]
    if targets:
        print("| call at shape | kernel | target | warps | shared KiB | registers | spilled bytes |")
        print("|---|---|---|---:|---:|---:|---:|")
        for row in gpu_rows(targets, options.only):
            print(row, flush=True)


if __name__ == "__main__":
    main()

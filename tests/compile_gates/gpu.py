"""Compiles Pallas kernels of the Triton route to AMD and NVIDIA machine code, on a machine that has no GPU.

JAX's lowering for ROCm or CUDA holds each kernel's Triton IR, and Triton's own compiler turns that into a code object.
The Triton inside jaxlib makes the binary that runs: registers and shared memory read here are indicative, legality
carries over.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
from jaxlib.mlir import ir
from jaxlib.mlir._mlir_libs import _jax_mlir_ext
from jaxlib.triton import dialect as triton_dialect

from pallas_kernels import backend

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

TARGETS = ("gfx942", "gfx950", "sm_90")
SHARED_LIMIT = {"gfx942": 65_536, "gfx950": 163_840, "sm_90": 232_448}
"""Shared memory one program may take, bytes."""


@dataclasses.dataclass(frozen=True)
class GpuBuild:
    """What the compiler says about one kernel on one target.

    Attributes:
      name: name of the kernel.
      target: "gfx942", "gfx950" or "sm_90".
      num_warps: warps (wavefronts) of one program.
      shared_bytes: shared memory of one program.
      registers: vector registers of one thread.
      spills: bytes a thread spills.
      assembly: amdgcn or PTX text.
    """

    name: str
    target: str
    num_warps: int
    shared_bytes: int
    registers: int
    spills: int
    assembly: str


@dataclasses.dataclass(frozen=True)
class TritonKernel:
    """One kernel as JAX hands it to Triton."""

    name: str
    num_warps: int
    num_stages: int
    ir: str


def unavailable() -> str | None:
    """Why nothing can be compiled here, or None; a CI run must have triton."""
    if importlib.util.find_spec("triton") is not None:
        return None
    if os.environ.get("CI"):
        raise RuntimeError("triton is not installed; install the extra 'compile-gates'")
    return "triton is not installed"


def triton_kernels(fn: Callable[..., Any], args: Sequence[Any], platform: str = "rocm") -> list[TritonKernel]:
    """The kernels in `fn(*args)`, lowered for "rocm" or "cuda"; args are arrays or `jax.ShapeDtypeStruct`."""

    def walk(operation: Any) -> Iterator[Any]:
        for region in operation.regions:
            for block in region.blocks:
                for child in block.operations:
                    yield child.operation
                    yield from walk(child.operation)

    # A function of its own: one traced before would keep the target it was traced for.
    module = (
        jax.jit(lambda *operands: fn(*operands))
        .trace(*args)
        .lower(lowering_platforms=(platform,))
        .compiler_ir("stablehlo")
    )
    kernels = []
    for operation in walk(module.operation):
        if operation.name != "stablehlo.custom_call" or "mhlo.backend_config" not in operation.attributes:
            continue
        config = {item.name: item.attr for item in operation.attributes["mhlo.backend_config"]}
        if "ir" not in config:
            continue
        context = ir.Context()
        context.append_dialect_registry(_upstream_dialects())
        triton_dialect.register_dialect(context)
        context.load_all_available_dialects()
        with context:
            text = ir.Module.parse(config["ir"].value_bytes).operation.get_asm()
        kernels.append(TritonKernel(config["name"].value, config["num_warps"].value, config["num_stages"].value, text))
    return kernels


@functools.cache
def _upstream_dialects() -> ir.DialectRegistry:
    registry = ir.DialectRegistry()
    _jax_mlir_ext.register_dialects(registry)
    return registry


def compile_kernel(kernel: TritonKernel, target: str) -> GpuBuild:
    """Compiles one kernel to a code object of `target`; raises what Triton or the assembler says."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import compile as triton_compile

    triton_target = GPUTarget("cuda", int(target[3:]), 32) if target.startswith("sm_") else GPUTarget("hip", target, 64)
    text = kernel.ir
    if triton_target.backend == "cuda":
        # The lowering names ROCm's device functions; CUDA's differ in spelling only.
        text = re.sub(r"__ocml_(\w+)_f32", r"__nv_\1f", text)
    with tempfile.NamedTemporaryFile("w", suffix=".ttir") as file:
        file.write(_simplified(text))
        file.flush()
        built = triton_compile(
            file.name, target=triton_target, options={"num_warps": kernel.num_warps, "num_stages": kernel.num_stages}
        )
    if "ptx" in built.asm:
        assembly = built.asm["ptx"]
        registers, spills = _ptxas_report(assembly, target)
    else:
        assembly = built.asm["amdgcn"]
        registers = int(_first(r"\.vgpr_count:\s*(\d+)", assembly))
        spills = 4 * int(_first(r"\.vgpr_spill_count:\s*(\d+)", assembly))
    return GpuBuild(kernel.name, target, kernel.num_warps, built.metadata.shared, registers, spills, assembly)


def _simplified(text: str) -> str:
    """The passes both pipelines run first, which Triton leaves out for a module that is read from a file.

    Without them a product and a sum stay apart, which doubles the registers of an accumulator.
    """
    from triton._C.libtriton import ir as triton_ir
    from triton._C.libtriton import passes

    context = triton_ir.context()
    triton_ir.load_dialects(context)
    with tempfile.NamedTemporaryFile("w", suffix=".ttir") as file:
        file.write(text)
        file.flush()
        module = triton_ir.parse_mlir_module(file.name, context)
    manager = triton_ir.pass_manager(context)
    passes.common.add_inliner(manager)
    passes.common.add_canonicalizer(manager)
    passes.ttir.add_combine(manager)
    passes.ttir.add_reorder_broadcast(manager)
    passes.common.add_cse(manager)
    passes.common.add_symbol_dce(manager)
    passes.ttir.add_loop_unroll(manager)
    manager.run(module, "make_ttir")
    return str(module)


def compile_for_gpu(fn: Callable[..., Any], args: Sequence[Any], target: str) -> list[GpuBuild]:
    """Compiles every Triton-route kernel in `fn(*args)` for `target`, one of `TARGETS`."""
    platform = "cuda" if target.startswith("sm_") else "rocm"
    with backend.use_target(backend.Target("triton", platform)):
        kernels = triton_kernels(fn, args, platform)
    if not kernels:
        raise ValueError("the function holds no Triton kernel")
    return [compile_kernel(kernel, target) for kernel in kernels]


def _first(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    if match is None:
        raise ValueError(f"the compiler's output has no {pattern}")
    return match.group(1)


def _ptxas_report(ptx: str, target: str) -> tuple[int, int]:
    """Registers of a thread and spilled bytes, from the assembler's report."""
    from triton.backends.nvidia.compiler import get_ptxas

    architecture = _first(r"\.target (sm_\w+)", ptx)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        done = subprocess.run(
            [
                get_ptxas(int(target[3:])).path,
                "-v",
                f"--gpu-name={architecture}",
                str(source),
                "-o",
                str(Path(folder) / "kernel.cubin"),
            ],
            capture_output=True,
            text=True,
        )
    report = done.stderr + done.stdout
    if done.returncode:
        raise RuntimeError(f"ptxas refused the kernel: {report}")
    spilled = sum(map(int, re.findall(r"(\d+) bytes spill (?:stores|loads)", report)))
    return int(_first(r"Used (\d+) registers", report)), spilled

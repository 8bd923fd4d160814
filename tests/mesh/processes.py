"""Processes that see several CPU devices: JAX must be told before it starts, and the tests' own process keeps one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent


def start(
    module: str, *arguments: object, devices: int = 8, exact: bool = False, **environment: object
) -> subprocess.Popen[str]:
    """Starts `python -m module arguments` on virtual devices.

    Args:
      module: to be run.
      arguments: of it.
      devices: that it sees.
      exact: its floats are compared to the bit with what NumPy computes, so loops are fused as users have them.
      environment: variables that are added.

    Returns:
      The process, whose output is piped.
    """
    # Compiling takes most of the time, and the programs are small: LLVM need not optimize them. XLA's newer emitter of
    # fused loops makes contexts for as many threads as there are devices anew for every program, a quarter of the work.
    flags = (
        f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=0 "
        f"--xla_llvm_disable_expensive_passes=true --xla_cpu_use_fusion_emitters={str(exact).lower()}"
    )
    return subprocess.Popen(
        [sys.executable, "-m", module, *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, **{k: str(v) for k, v in environment.items()}},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def finish(process: subprocess.Popen[str], timeout: float = 900) -> str:
    """Standard output of a process that must succeed."""
    out, errors = process.communicate(timeout=timeout)
    assert process.returncode == 0, errors
    return out

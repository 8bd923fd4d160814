"""Processes that see several CPU devices: JAX must be told before it starts, and the tests' own process keeps one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent


def start(module: str, *arguments: object, devices: int = 8, **environment: object) -> subprocess.Popen[str]:
    """Starts `python -m module arguments` on virtual devices; its output is piped, variables are added."""
    # Compiling takes most of the time, and the programs are small: LLVM need not optimize them.
    flags = (
        f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=0 "
        "--xla_llvm_disable_expensive_passes=true"
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

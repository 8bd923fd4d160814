"""Programs as a runner keeps them: how one is compiled, and what is known of it afterwards."""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from v41jax.layers.collectives import Parallel, captured

Options = dict[str, str | bool | int]

CAPTURED = "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE"
"""What may be part of a captured graph: XLA's own list and loops."""

_log = logging.getLogger(__name__)


class Lowered(NamedTuple):
    """A program that is traced and not yet compiled.

    Attributes:
      program: what JAX lowered.
      prepare: makes the program's last arguments of those of the pure function, weights and what is donated apart.
      options: of its compilation, see `compiler_options`; the thread that compiles may not know the target.
    """

    program: Any
    prepare: Callable[..., Sequence[Any]]
    options: Options


@dataclasses.dataclass(frozen=True)
class CompiledStep:
    """One program.

    Attributes:
      prepare: of `Lowered`; it refuses arguments of other shapes or types before anything is donated.
      call: the executable: takes weights, what is donated, and what `prepare` gives.
      seconds: time it took to compile (or to fetch from the persistent cache).
      temporary_bytes: device memory it needs besides arguments and results.
    """

    prepare: Callable[..., Sequence[Any]]
    call: Callable[..., Any]
    seconds: float
    temporary_bytes: int


def compiler_options(parallel: Parallel) -> Options:
    """What XLA is asked of a step, by the names of its options; nothing that `XLA_FLAGS` says already.

    On one NVIDIA GPU a step is one captured graph. XLA by itself captures neither loops nor runs of fewer than five
    operations; a branch among the latter makes the host wait for the device. Kernels of the graph run side by side
    where none needs the other, as those of the shared expert beside the routed ones (XLA's default runs them one after
    the other), and layers of a run follow each other without a condition between them. On a mesh collectives keep
    their order.
    """
    if not captured(parallel):
        return {}
    asked: Options = {
        "xla_gpu_enable_command_buffer": CAPTURED,
        "xla_gpu_graph_min_graph_size": 1,
        "xla_gpu_command_buffer_scheduling_mode": "CONCURRENT",
        "xla_gpu_command_buffer_unroll_loops": True,
    }
    given = os.environ.get("XLA_FLAGS", "")
    return {name: value for name, value in asked.items() if name not in given}


def compiled(lowered: Lowered) -> CompiledStep:
    """Compiles a program; other threads can trace meanwhile."""
    began = time.perf_counter()
    executable = _executable(lowered)
    seconds = time.perf_counter() - began
    return CompiledStep(lowered.prepare, executable, seconds, temporary_bytes(executable))


def _executable(lowered: Lowered) -> Any:
    try:
        return lowered.program.compile(lowered.options)
    except jax.errors.JaxRuntimeError as error:
        # Options and their values come and go with XLA's versions, and are about speed only.
        refused = "No such compile option" in str(error) or "While setting option" in str(error)
        if not lowered.options or not refused:
            raise
        _log.warning("steps are compiled without %s: %s", ", ".join(lowered.options), error)
        return lowered.program.compile()


def temporary_bytes(executable: Any) -> int:
    """Device memory that a compiled program needs besides arguments and results."""
    return int(getattr(executable.memory_analysis(), "temp_size_in_bytes", 0) or 0)

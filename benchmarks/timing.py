"""Timing of compiled functions on one device: kernel times where the profiler gives them, wall time beside.

Every sample runs the function over all its input sets in turn, so that small inputs are not found in the cache.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Timing:
    """Time of one call.

    Attributes:
      microseconds: median over calls; of the sum of kernel times if `clock` is "kernels", else of wall time.
      spread: (90th - 10th percentile) / median of the same.
      wall_microseconds: median wall time of a call in a queue of calls, dispatch included.
      clock: "kernels" or "wall".
      kernels: kernels launched by one call, 0 where unknown.
      calls: how many were timed.
    """

    microseconds: float
    spread: float
    wall_microseconds: float
    clock: str
    kernels: int
    calls: int


@dataclasses.dataclass(frozen=True)
class Ceilings:
    """Rates measured on this device in this run: what bounds are computed from.

    Attributes:
      bytes_per_second: of a large elementwise copy, bytes read plus bytes written.
      flops_per_second: of a large bfloat16 matrix product, random operands.
    """

    bytes_per_second: float
    flops_per_second: float


@functools.cache
def _profiler() -> Any:
    """The kernel-activity interface that jaxlib carries for CUDA, or None."""
    try:
        module = importlib.import_module("jax.experimental.mosaic.gpu.profiler")
        return module.mosaic_gpu_lib._mosaic_gpu_ext
    except Exception:  # absent on a CPU, on ROCm and in builds without it
        return None


def launched_kernels(run: Callable[[], Any]) -> list[tuple[str, float]] | None:
    """Name and microseconds, in launch order, of every kernel that `run` launches; None where they can't be had."""
    profiler = _profiler()
    if profiler is None or jax.default_backend() != "gpu":
        return None
    profiler._cupti_init()
    try:
        jax.block_until_ready(run())
    finally:
        timings = profiler._cupti_get_timings(False)
    return [(name, milliseconds * 1e3) for name, milliseconds in timings] or None


def _summary(samples: Sequence[float]) -> tuple[float, float]:
    ordered = sorted(samples)
    middle = statistics.median(ordered)
    low, high = ordered[len(ordered) // 10], ordered[-1 - len(ordered) // 10]
    return middle, (high - low) / middle if middle else 0.0


def in_place_call(fn: Callable[..., Any], positions: Sequence[int], args: tuple) -> Callable[[tuple], Any]:
    """`fn` as a function of argument tuples, for one that donates the arguments at `positions` and returns them.

    The donated ones are copied from `args` once and then handed from call to call.
    """
    state = [jnp.copy(args[position]) for position in positions]

    def call(args: tuple) -> Any:
        full = list(args)
        for position, value in zip(positions, state):
            full[position] = value
        out = fn(*full)
        if positions:
            state[:] = out
        return out

    return call


def time_calls(
    fn: Callable[..., Any],
    sets: Sequence[tuple],
    in_place: Sequence[int] = (),
    seconds: float = 0.2,
    profile: bool = True,
) -> Timing:
    """Times `fn`, already compiled, over rotating argument tuples for about `seconds` per clock.

    Args:
      fn: of one tuple's arguments.
      sets: argument tuples.
      in_place: positions of donated arguments, which `fn` returns in that order and nothing else.
      seconds: for each of both clocks.
      profile: ask the profiler for kernel times. Once it was asked, XLA launches every kernel of the process by itself
        and no captured graph.
    """
    call = in_place_call(fn, in_place, sets[0])
    for args in sets:
        jax.block_until_ready(call(args))
    start = time.perf_counter()
    jax.block_until_ready(call(sets[0]))
    once = time.perf_counter() - start
    rounds = max(2, min(40, int(seconds / max(once, 1e-5) / len(sets))))
    calls = rounds * len(sets)

    def queue() -> Any:
        out = None
        for _ in range(rounds):
            for args in sets:
                out = call(args)
        return out

    walls = []
    for _ in range(3):
        start = time.perf_counter()
        jax.block_until_ready(queue())
        walls.append((time.perf_counter() - start) / calls * 1e6)
    wall, wall_spread = _summary(walls)
    kernels = launched_kernels(queue) if profile else None
    if kernels is None or len(kernels) % calls:
        return Timing(wall, wall_spread, wall, "wall", 0, 3 * calls)
    each = len(kernels) // calls
    sums = [sum(time for _, time in kernels[i * each : (i + 1) * each]) for i in range(calls)]
    middle, spread = _summary(sums)
    return Timing(middle, spread, wall, "kernels", each, calls)


def measure_ceilings(small: bool = False, profile: bool = True) -> Ceilings:
    """Copy and matrix-product rates of the default device.

    Args:
      small: for a check that finishes on a CPU.
      profile: see `time_calls`.
    """
    elements, width = (2**20, 256) if small else (2**29, 8192)
    copy = jax.jit(lambda x: x ^ 1)
    source = jnp.arange(elements, dtype=jnp.int32)
    copied = time_calls(copy, [(source,)], profile=profile)
    del source
    left, right = (jax.random.normal(jax.random.key(i), (width, width), jnp.bfloat16) for i in range(2))
    product = time_calls(jax.jit(lambda a, b: a @ b), [(left, right)], profile=profile)
    return Ceilings(8 * elements / (copied.microseconds * 1e-6), 2 * width**3 / (product.microseconds * 1e-6))

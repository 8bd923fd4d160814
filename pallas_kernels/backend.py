"""Where kernels run, the choice between implementations, and every Pallas name that differs by version.

An operation asks `choose` which implementation to run. `xla` is always possible; `pallas` is the Mosaic kernel on a
TPU and the Triton kernel on a GPU, and either of them in interpret mode on a CPU. The target is what JAX's default
device says, unless `use_target` names another one: compilation for a device that is not there, or interpret mode of
one route in a test.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import importlib
import inspect
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

IMPLEMENTATIONS = ("auto", "xla", "pallas")
ROUTES = ("tpu", "triton")


class KernelUnsupportedError(ValueError):
    """`implementation="pallas"` was asked for where the kernel cannot run; the message names operation and reason."""

    def __init__(self, operation: str, reason: str):
        self.operation = operation
        self.reason = reason
        super().__init__(f'{operation}: no Pallas kernel, {reason}; use implementation="auto" or "xla"')


@dataclasses.dataclass(frozen=True)
class Target:
    """Where kernels are compiled for.

    Attributes:
      route: "tpu" (Mosaic) or "triton" (ROCm and CUDA).
      generation: "v5e", "v5p", "v6e", "tpu7x" for a TPU, "cuda" or "rocm" for a GPU, "cpu" in interpret mode.
      interpret: kernels run in interpret mode, as plain JAX operations.
    """

    route: str
    generation: str
    interpret: bool = False


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One Pallas route of an operation at the shapes of a call.

    Attributes:
      unsupported: why the kernel cannot run here, or None.
      preferred: `auto` takes the kernel: it is legal and was measured or is known to be faster than XLA here.
    """

    unsupported: str | None
    preferred: bool = True


@dataclasses.dataclass(frozen=True)
class Choice:
    """What runs: `implementation` is "xla", "tpu" or "triton"; `reason` says why, for the runner's summary."""

    implementation: str
    interpret: bool
    reason: str


_target: contextvars.ContextVar[Target | None] = contextvars.ContextVar("target", default=None)
Choices = dict[str, dict[str, None]]
"""Operation -> "implementation (reason)" of every choice, in order of first use."""
_report: Choices = {}
_recorded: contextvars.ContextVar[Choices] = contextvars.ContextVar("recorded", default=_report)

_TPU_KINDS = (("v5 lite", "v5e"), ("v5e", "v5e"), ("v5", "v5p"), ("v6", "v6e"), ("7", "tpu7x"))


def tpu_generation(device_kind: str) -> str:
    """The generation of a JAX TPU device kind ("TPU v5 lite" -> "v5e"); "unknown" for one this build does not know."""
    kind = device_kind.lower()
    return next((generation for text, generation in _TPU_KINDS if text in kind), "unknown")


def current_target() -> Target:
    """The target of a call made now: `use_target`'s, else the default device's, else interpret mode on the CPU."""
    chosen = _target.get()
    if chosen is not None:
        return chosen
    platform = jax.default_backend()
    if platform == "tpu":
        return Target("tpu", tpu_generation(jax.devices()[0].device_kind))
    if platform in ("gpu", "cuda", "rocm"):
        is_rocm = platform == "rocm" or "rocm" in getattr(jax.devices()[0].client, "platform_version", "").lower()
        return Target("triton", "rocm" if is_rocm else "cuda")
    return Target("triton", "cpu", interpret=True)


def slow_alone(dtype: Any) -> bool:
    """Whether a product of one row of `dtype` takes longer than one of two equal rows on the current target.

    XLA's CPU backend has no kernel for a matrix times one bfloat16 vector: it took three times as long.
    """
    return jnp.dtype(dtype) == jnp.bfloat16 and current_target().generation == "cpu"


@contextlib.contextmanager
def use_target(target: Target) -> Iterator[None]:
    """Traces every operation inside for `target`. A function jitted outside keeps what it was traced with."""
    token = _target.set(target)
    try:
        yield
    finally:
        _target.reset(token)


def choose(operation: str, implementation: str, candidates: Mapping[str, Candidate]) -> Choice:
    """Which implementation of `operation` a call uses on the current target; recorded for `report`.

    Args:
      operation: name of the folder.
      implementation: "auto", "xla" or "pallas".
      candidates: the Pallas routes that exist, by route name. A route that is not there needs none, by what the
        operation's docstring says, and gets the definition under "pallas" too.

    Raises:
      KernelUnsupportedError: "pallas" was asked for and cannot run here.
      ValueError: `implementation` is none of the three.
    """
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation {implementation!r} is none of {', '.join(IMPLEMENTATIONS)}")
    target = current_target()
    candidate = candidates.get(target.route)
    if candidate is None:
        problem: str | None = f"there is none for the route {target.route!r}"
    else:
        problem = candidate.unsupported
    if implementation == "xla":
        choice = Choice("xla", False, "asked for")
    elif implementation == "pallas" and candidate is None:
        choice = Choice("xla", False, f"the {target.route} route needs no kernel")
    elif implementation == "pallas":
        if problem is not None:
            raise KernelUnsupportedError(operation, problem)
        choice = Choice(target.route, target.interpret, "asked for")
    elif problem is not None:
        choice = Choice("xla", False, problem)
    elif target.interpret:
        choice = Choice("xla", False, "interpret mode is slower than XLA")
    elif candidate is not None and not candidate.preferred:
        choice = Choice("xla", False, f"the {target.route} kernel is not known to be faster here")
    else:
        choice = Choice(target.route, False, f"faster on {target.generation}")
    record(operation, f"{choice.implementation} ({choice.reason})")
    return choice


def record(operation: str, line: str) -> None:
    """Adds a choice to `report` and to what `recording` collects; for choices that `choose` does not make."""
    for chosen in (_report, _recorded.get()):
        chosen.setdefault(operation, {})[line] = None


def report() -> dict[str, tuple[str, ...]]:
    """Every operation called since `clear_report`, with the implementations chosen and why, in order of first use."""
    return {operation: tuple(lines) for operation, lines in _report.items()}


@contextlib.contextmanager
def recording(choices: Choices) -> Iterator[None]:
    """Adds what is chosen inside to `choices` too: how a runner learns what its own programs use."""
    token = _recorded.set(choices)
    try:
        yield
    finally:
        _recorded.reset(token)


def clear_report() -> None:
    """Forgets the recorded choices."""
    _report.clear()


def traced_once(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, traced once for arguments of the same shapes on the same target.

    A model calls a kernel in every layer and tracing one takes up to a tenth of a second: a program holds one trace
    that all layers call. Arguments that hold no array are static and must be hashable.
    """
    signature = inspect.signature(function)

    @functools.partial(jax.jit, static_argnums=(0, 1))
    def traced(target: Target, static: tuple[tuple[str, Any], ...], arrays: dict[str, Any]) -> Any:
        with use_target(target):
            return function(**dict(static), **arrays)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        static, arrays = {}, {}
        for name, value in signature.bind(*args, **kwargs).arguments.items():
            holds = any(isinstance(leaf, (jax.Array, np.ndarray)) for leaf in jax.tree.leaves(value))
            (arrays if holds else static)[name] = value
        return traced(current_target(), tuple(static.items()), arrays)

    return call


@functools.cache
def triton() -> types.ModuleType:
    """`jax.experimental.pallas.triton`, present but deprecated from JAX 0.11 and the only way of Pallas to ROCm."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return importlib.import_module("jax.experimental.pallas.triton")


def int_operand(x: jax.Array | int) -> jax.Array:
    """An integer as a kernel reads it: [1] int32."""
    return jnp.asarray(x, jnp.int32).reshape(1)


def with_layer(layer: jax.Array | int | None, *weights: Any) -> tuple[Any, ...]:
    """(`int_operand` of the layer, *weights) where kernels read one layer of stacks [layers, ...].

    Args:
      layer: of the stacks; None where `weights` (arrays or pytrees of them) are one layer's and become stacks of one.
    """
    if layer is None:
        layer, weights = 0, jax.tree.map(lambda weight: weight[None], weights)
    return (int_operand(layer), *weights)


def triton_call(
    kernel: Callable[..., None],
    out_shape: Any,
    *,
    grid: tuple[int, ...],
    num_warps: int,
    num_stages: int,
    interpret: bool,
    name: str,
    input_output_aliases: Mapping[int, int] | None = None,
    after: jax.Array | None = None,
) -> Callable[..., Any]:
    """A `pallas_call` of the Triton route whose operands and results are whole arrays in device memory.

    Args:
      kernel: takes one ref per operand and then one per result.
      out_shape: shape structs of the results.
      grid: programs along each axis; the first varies fastest.
      num_warps: warps of one program.
      num_stages: depth of the software pipeline over loops.
      interpret: run as plain JAX operations.
      name: shown in profiles.
      input_output_aliases: operand to result positions that share memory.
      after: what must be there before the programs start, though they do not read it. Of two kernels that become ready
        at the same moment an H200 often delays one by the time of the other: one that is not urgent lets the other go
        first. Without `input_output_aliases`.
    """
    if after is not None:
        if input_output_aliases:
            raise ValueError(f"{name} starts after an array and has aliases, whose positions that would move")
        call = triton_call(
            lambda _, *refs: kernel(*refs),
            out_shape,
            grid=grid,
            num_warps=num_warps,
            num_stages=num_stages,
            interpret=interpret,
            name=name,
        )
        return functools.partial(call, after)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return pl.pallas_call(
            kernel,
            out_shape=out_shape,
            grid=grid,
            compiler_params=triton().CompilerParams(num_warps=num_warps, num_stages=num_stages),
            interpret=interpret,
            name=name,
            input_output_aliases=dict(input_output_aliases or {}),
        )


@functools.cache
def tpu() -> types.ModuleType:
    """`jax.experimental.pallas.tpu`."""
    return importlib.import_module("jax.experimental.pallas.tpu")


def in_device_memory(x: jax.Array) -> jax.Array:
    """`x` kept in HBM on a TPU: the compiler may otherwise copy a whole operand to VMEM in front of a kernel."""
    pltpu = tpu()
    return pltpu.with_memory_space_constraint(x, pltpu.HBM)


def tpu_call(
    kernel: Callable[..., None],
    out_shape: Any,
    *,
    grid: tuple[Any, ...],
    in_specs: Sequence[Any],
    out_specs: Any,
    interpret: Any,
    name: str,
    scratch_shapes: Sequence[Any] = (),
    num_scalar_prefetch: int = 0,
    vmem_limit_bytes: int | None = None,
    input_output_aliases: Mapping[int, int] | None = None,
) -> Callable[..., Any]:
    """A `pallas_call` of the Mosaic route, its grid walked in order.

    Args:
      kernel: takes prefetched scalars, operands, results and scratch, in this order.
      out_shape: shape structs of the results.
      grid: steps along each axis, the last fastest; may hold traced integers.
      in_specs, out_specs: block specs of the operands past the prefetched ones and of the results.
      interpret: False; True to run as plain JAX operations; or `pltpu.InterpretParams` to simulate a TPU's memory.
      name: shown in profiles.
      scratch_shapes: scratch memory and semaphores.
      num_scalar_prefetch: leading operands that lie in scalar memory and are arguments of every index map.
      vmem_limit_bytes: scoped memory where the default is too little.
      input_output_aliases: operand (prefetched ones counted) to result positions that share memory.
    """
    pltpu = tpu()
    return pl.pallas_call(
        kernel,
        out_shape=out_shape,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=num_scalar_prefetch,
            grid=grid,
            in_specs=list(in_specs),
            out_specs=out_specs,
            scratch_shapes=list(scratch_shapes),
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",) * len(grid), vmem_limit_bytes=vmem_limit_bytes
        ),
        interpret=interpret,
        name=name,
        input_output_aliases=dict(input_output_aliases or {}),
    )

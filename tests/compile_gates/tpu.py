"""Compiles JAX functions for real TPU generations through libtpu, on a machine that has no TPU.

Mosaic really runs: a kernel that is illegal on a generation raises here. What comes back says how much VMEM each kernel
takes and whether XLA put a copy of an operand in front of it.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import math
import os
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

TOPOLOGIES = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}
GENERATIONS = tuple(TOPOLOGIES)
VMEM_BYTES = {"v5e": 128 * 2**20, "v5p": 128 * 2**20, "v6e": 128 * 2**20, "tpu7x": 64 * 2**20}
"""Memory of a core beside its registers."""


@dataclasses.dataclass(frozen=True)
class TpuBuild:
    """What the compiler says about one function on one generation.

    Attributes:
      generation: "v5e", "v5p", "v6e" or "tpu7x".
      vmem_bytes: scoped VMEM of every Pallas kernel, in HLO order.
      temporary_bytes: HBM that the program allocates beside arguments and results.
      accessed_bytes: what the compiler expects all instructions of the program to read and write.
      hlo: the optimized program.
    """

    generation: str
    vmem_bytes: tuple[int, ...]
    temporary_bytes: int
    accessed_bytes: int
    hlo: str

    def copies_of(self, shape: Sequence[int]) -> list[str]:
        """Instructions of the optimized program that copy an array of `shape`: none may exist for a pool."""
        text = ",".join(map(str, shape))
        pattern = re.compile(rf"= \(?\w+\[{text}\][^=]* copy(-start)?\(")
        return [line.strip()[:200] for line in self.hlo.splitlines() if pattern.search(line)]


def unavailable() -> str | None:
    """Why nothing can be compiled here, or None; a CI run must have libtpu."""
    if importlib.util.find_spec("libtpu") is not None:
        return None
    if os.environ.get("CI"):
        raise RuntimeError("libtpu is not installed; install the extra 'compile-gates'")
    return "libtpu is not installed"


@functools.cache
def _sharding(generation: str) -> SingleDeviceSharding:
    # Nothing is attached to, so several test processes may load the library at once.
    os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")
    description = topologies.get_topology_desc(TOPOLOGIES[generation], "tpu")
    return SingleDeviceSharding(description.devices[0])


def compile_for_tpu(
    fn: Callable[..., Any], args: Sequence[Any], generation: str, *, donate: tuple[int, ...] = ()
) -> TpuBuild:
    """Compiles `fn(*args)` for one core of a generation.

    Args:
      fn: a function of arrays whose kernels are not in interpret mode.
      args: pytrees of arrays or `jax.ShapeDtypeStruct`; only shapes and dtypes are read.
      generation: a key of `TOPOLOGIES`.
      donate: positions of donated arguments.

    Raises:
      Whatever Mosaic or XLA says about a program that is illegal on the generation.
    """
    sharding = _sharding(generation)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tuple(args))
    lowered = jax.jit(fn, donate_argnums=donate).trace(*shapes).lower(lowering_platforms=("tpu",))
    compiled = lowered.compile()
    hlo = compiled.as_text()
    vmem = []
    for line in hlo.splitlines():
        if 'custom_call_target="tpu_custom_call"' in line:
            used = re.findall(r'"used_scoped_memory_configs":\[([^\]]*)\]', line)
            sizes = re.findall(r'"memory_space":"1","offset":"\d+","size":"(\d+)"', "".join(used))
            vmem.append(sum(map(int, sizes)))
    memory = compiled.memory_analysis()
    accessed = int(compiled.cost_analysis()["bytes accessed"])
    return TpuBuild(generation, tuple(vmem), int(memory.temp_size_in_bytes), accessed, hlo)


def shape_bytes(x: Any) -> int:
    """Bytes of an array or shape struct."""
    return math.prod(x.shape) * x.dtype.itemsize

"""The kernels that take a row through a chain of small steps, at production shapes."""

from __future__ import annotations

from collections.abc import Iterator

import jax.numpy as jnp

from pallas_kernels.route import triton as route_triton
from tests.compile_gates.index_builds import Build, shape

LAYERS = 5


def route_build(rows: int, experts: int) -> Build:
    """The choice of 6 experts, biases of a run of layers."""

    def route(*arguments):
        *operands, layer = arguments
        options = {"chosen": 6, "temperature": 1.0, "normalize": True, "scale": 1.5}
        return route_triton.route(*operands, layer=layer, **options)

    biases = [shape((LAYERS, experts), jnp.float32)] * 2
    arguments = (shape((rows, experts), jnp.float32), *biases, shape((rows,), jnp.bool_), shape((), jnp.int32))
    return Build(f"route 6 of {experts}, {rows} rows", route, arguments)


def gpu_builds() -> Iterator[Build]:
    """Every Triton-route kernel of these operations."""
    yield route_build(1, 96)
    yield route_build(64, 384)

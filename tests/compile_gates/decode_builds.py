"""The kernels that take a row through a chain of small steps, at production shapes."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import jax.numpy as jnp

from pallas_kernels.route import triton as route_triton
from pallas_kernels.window_key_write import triton as window_triton
from tests.compile_gates.index_builds import Build, shape

LAYERS = 5
WIDTH, ROTATED, RINGS, RING = 512, 64, 40 * 64, 133


def route_build(rows: int, experts: int) -> Build:
    """The choice of 6 experts, biases of a run of layers."""

    def route(*arguments):
        *operands, layer = arguments
        options = {"chosen": 6, "temperature": 1.0, "normalize": True, "scale": 1.5}
        return route_triton.route(*operands, layer=layer, **options)

    biases = [shape((LAYERS, experts), jnp.float32)] * 2
    arguments = (shape((rows, experts), jnp.float32), *biases, shape((rows,), jnp.bool_), shape((), jnp.int32))
    return Build(f"route 6 of {experts}, {rows} rows", route, arguments)


def window_build(rows: int, window_format: str) -> Build:
    """Window keys of `rows` rows to the rings of all layers."""

    def write(*arguments):
        *operands, layer = arguments
        options = {"epsilon": 1e-20, "window_format": window_format}
        return window_triton.window_key_write(*operands, layer=layer, **options)

    integers = functools.partial(shape, dtype=jnp.int32)
    row, stored = (WIDTH + WIDTH // 32, jnp.uint8) if window_format == "fp8" else (WIDTH, jnp.bfloat16)
    arguments = (
        *(shape(size, jnp.bfloat16) for size in ((rows, WIDTH), (LAYERS, WIDTH))),
        *(shape((rows, ROTATED // 2), jnp.float32) for _ in range(2)),
        shape((rows,), jnp.bool_),
        *(integers((rows,)) for _ in range(3)),
        integers(()),
        shape((RINGS, RING, row), stored),
        integers(()),
    )
    return Build(f"window_key_write {window_format} {rows} rows", write, arguments, donated=(9,))


def gpu_builds() -> Iterator[Build]:
    """Every Triton-route kernel of these operations."""
    yield route_build(1, 96)
    yield route_build(64, 384)
    for window_format in ("float", "bf16", "fp8"):
        yield window_build(64, window_format)

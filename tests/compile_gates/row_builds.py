"""The kernels of the small work between products at production shapes, as functions and shape structs for compilers."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import jax.numpy as jnp

from pallas_kernels.grouped_linear import triton as grouped_triton
from pallas_kernels.quantized_rows import triton
from tests.compile_gates.index_builds import Build, shape

WIDTH, LATENT, HIDDEN, STREAMS, LAYERS = 5120, 1280, 2304, 4, 10


def gpu_builds() -> Iterator[Build]:
    """Every Triton-route kernel of `quantized_rows` and `grouped_linear`."""
    made = {"quantize": True}
    dtype = {"dtype": jnp.dtype(jnp.bfloat16)}
    for rows in (1, 64, 128):
        yield Build(
            f"collapsed_rows {rows} rows",
            functools.partial(triton.collapsed_rows, epsilon=1e-20, codes="arranged", **made),
            (
                shape((rows, STREAMS, WIDTH), jnp.bfloat16),
                shape((rows, STREAMS), jnp.float32),
                shape((LAYERS, WIDTH), jnp.bfloat16),
                shape((), jnp.int32),
            ),
        )
    yield Build(
        "normalized_rows 64 rows",
        functools.partial(triton.normalized_rows, epsilon=1e-20, **made, **dtype),
        (shape((10, 64, LATENT), jnp.float32), shape((LAYERS, LATENT), jnp.bfloat16), shape((), jnp.int32)),
    )
    for rows in (64, 128):
        yield Build(
            f"gated_rows {rows} rows",
            functools.partial(triton.gated_rows, limit=10.0, **made, **dtype),
            tuple(shape((7, rows, HIDDEN), jnp.float32) for _ in range(2)),
        )
    for name, counts, groups, outputs, inputs in (("", (1, 64), 8, 1024, 4096), (" of a router", (6,), 1, 384, WIDTH)):
        for rows in counts:
            yield Build(
                f"grouped_linear{name} {rows} rows",
                grouped_triton.grouped_linear,
                (
                    shape((rows, groups, inputs), jnp.bfloat16),
                    shape((LAYERS, groups, outputs, inputs), jnp.bfloat16),
                    shape((), jnp.int32),
                ),
            )

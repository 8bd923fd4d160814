"""Cases of the operations on single rows: the stream mixes and the inputs of linears, at decode's numbers of rows."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.kernel_cases import Case
from pallas_kernels.quantized_rows import QuantizedRows, collapsed_rows, gated_rows, normalized_rows
from pallas_kernels.stream_mixes import stream_mixes

STREAMS, WIDTH, LATENT, HIDDEN, LIMIT, EPSILON = 4, 5120, 1280, 2304, 10.0, 1e-20
LATENT_PARTS, HIDDEN_PARTS = 10, 4
"""Into how many parts the products in front of the norm of `wq_a` and of the SwiGLU are cut at one row."""


def _normal(seed: int, shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def _streams(seed: int, rows: int, width: int) -> jax.Array:
    return _normal(seed, (rows, STREAMS, width), jnp.bfloat16)


def _sets(make: Callable[[int], tuple], count: int) -> list[tuple]:
    return [make(seed) for seed in range(count)]


def largest_difference(expected: Any, found: Any) -> float:
    """Relative to the largest value, of every array both have."""
    if isinstance(expected, QuantizedRows):
        expected, found = expected[:2], found[:2]
    pairs = zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True)
    wide = [(left.astype(jnp.float32), right.astype(jnp.float32)) for left, right in pairs]
    return max(float(jnp.max(jnp.abs(left - right)) / jnp.max(jnp.abs(left))) for left, right in wide)


def _case(
    operation: str, shape: str, moved: int, function: Callable[..., Any], make: Callable[[int], tuple], tolerance: float
) -> Case:
    variants = {name: functools.partial(function, implementation=name) for name in ("xla", "pallas")}
    return Case(operation, shape, moved, 0, functools.partial(_sets, make), variants, largest_difference, tolerance)


def _mixes_case(rows: int, width: int) -> Case:
    coefficients, inner = 2 * STREAMS + STREAMS**2, STREAMS * width
    return _case(
        "stream_mixes",
        f"{rows} rows of {STREAMS} x {width}",
        4 * coefficients * inner + rows * (2 * inner + 4 * coefficients),
        functools.partial(stream_mixes, iterations=20, epsilon=1e-6, norm_epsilon=EPSILON),
        lambda seed: (
            _streams(seed, rows, width),
            _normal(seed, (coefficients, inner)) / inner**0.5,
            _normal(seed, (coefficients,)),
            _normal(seed, (3,)),
        ),
        1e-5,
    )


def _cases(rows: int, width: int, latent: int, hidden: int) -> Iterator[Case]:
    yield _mixes_case(rows, width)
    quantize: dict[str, Any] = {"quantize": True}
    # A rounding that falls the other way moves a value by one step of bfloat16, and then perhaps by one of Q8.
    yield _case(
        "quantized_rows",
        f"collapsed, {rows} rows of {STREAMS} x {width}",
        2 * rows * width * (STREAMS + 2),
        functools.partial(collapsed_rows, epsilon=EPSILON, **quantize),
        lambda seed: (
            _streams(seed, rows, width),
            jax.random.uniform(jax.random.key(seed), (rows, STREAMS)),
            _normal(seed, (width,), jnp.bfloat16),
        ),
        2.0**-3,
    )
    quantize["dtype"] = jnp.dtype(jnp.bfloat16)
    yield _case(
        "quantized_rows",
        f"normalized, {rows} rows of {latent}",
        4 * rows * latent * (LATENT_PARTS + 1),
        functools.partial(normalized_rows, epsilon=EPSILON, **quantize),
        lambda seed: (_normal(seed, (LATENT_PARTS, rows, latent)), _normal(seed, (latent,), jnp.bfloat16)),
        2.0**-3,
    )
    yield _case(
        "quantized_rows",
        f"gated, {rows} rows of {hidden}",
        4 * rows * hidden * (2 * HIDDEN_PARTS + 1),
        functools.partial(gated_rows, limit=LIMIT, **quantize),
        lambda seed: tuple(_normal(seed + part, (HIDDEN_PARTS, rows, hidden)) for part in range(2)),
        2.0**-3,
    )


def cases(size: str) -> Iterator[Case]:
    """The model's widths at 1, 8, 64 and 512 rows, the mixes at 4,096 too; many rows of the others are XLA's."""
    if size == "smoke":
        yield from _cases(3, 64, 64, 96)
        return
    for rows in (1, 8, 64, 512):
        yield from _cases(rows, WIDTH, LATENT, HIDDEN)
    yield _mixes_case(4096, WIDTH)

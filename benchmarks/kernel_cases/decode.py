"""Cases of the operations that take a row through a chain of small steps."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from benchmarks.kernel_cases import Case
from pallas_kernels.route import route

CHOSEN = 6


def _route_sets(rows: int, experts: int, count: int) -> list[tuple]:
    """Logits with biases of five layers; every fourth row is of an image."""
    sets = []
    for index in range(count):
        keys = jax.random.split(jax.random.key(index), 3)
        biases = [jax.random.normal(key, (5, experts)) * 0.1 for key in keys[1:]]
        sets.append((jax.random.normal(keys[0], (rows, experts)) * 2, *biases, jnp.arange(rows) % 4 == 3))
    return sets


def _different_choices(expected: tuple, found: tuple) -> float:
    """Share of other experts, or the largest relative difference of a weight."""
    other = jnp.mean(expected[0] != found[0])
    return float(jnp.maximum(other, jnp.max(jnp.abs(found[1] / expected[1] - 1))))


def _route_case(rows: int, experts: int) -> Case:
    call = functools.partial(route, chosen=CHOSEN, temperature=1.0, normalize=True, scale=1.5, layer=2)
    return Case(
        "route",
        f"{CHOSEN} of {experts}, {rows} rows",
        rows * (4 * experts + 1 + 8 * CHOSEN) + 8 * experts,
        0,
        functools.partial(_route_sets, rows, experts),
        {name: functools.partial(call, implementation=name) for name in ("xla", "pallas")},
        _different_choices,
        2e-6,
    )


def cases(size: str) -> Iterator[Case]:
    """Decode at 1, 8, 64 and 128 rows, prefill at 4,096."""
    for rows in (3,) if size == "smoke" else (1, 8, 64, 128, 4096):
        yield _route_case(rows, 384)

"""`stream_mixes` of many rows as plain arithmetic on one vector per coefficient, what both kernels run."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Array = jax.Array


def coefficients(
    z: Sequence[Array], base: Any, scale: Any, *, streams: int, iterations: int, epsilon: float, unrolled: bool = False
) -> list[Array]:
    """Coefficients of the rows of a block.

    Args:
      z: 2 S + S^2 float32 vectors over rows, base not yet added; see `pallas_kernels.stream_mixes`.
      base, scale: refs or arrays of [2 S + S^2] and [3].
      streams: S.
      iterations, epsilon: of the normalization.
      unrolled: write the alternations one after the other, for a derivative inside a kernel.

    Returns:
      As many vectors: pre, post, and the combination row by row.
    """
    z = [value * scale[min(place // streams, 2)] + base[place] for place, value in enumerate(z)]
    pre = [_sigmoid(value) + epsilon for value in z[:streams]]
    post = [2.0 * _sigmoid(value) for value in z[streams : 2 * streams]]
    rows = [z[first : first + streams] for first in range(2 * streams, len(z), streams)]
    matrix = tuple(value for row in rows for value in _softmax(row, epsilon))

    def columns(value: tuple) -> tuple:
        sums = [_sum(value[column::streams]) + epsilon for column in range(streams)]
        return tuple(entry / sums[place % streams] for place, entry in enumerate(value))

    def step(_: int, value: tuple) -> tuple:
        sums = [_sum(value[row * streams : (row + 1) * streams]) + epsilon for row in range(streams)]
        return columns(tuple(entry / sums[place // streams] for place, entry in enumerate(value)))

    matrix = columns(matrix)
    if unrolled:
        for index in range(iterations - 1):
            matrix = step(index, matrix)
    else:
        matrix = lax.fori_loop(0, iterations - 1, step, matrix)
    return [*pre, *post, *matrix]


def _sum(values: Sequence[Array]) -> Array:
    return functools.reduce(operator.add, values)


def _sigmoid(value: Array) -> Array:
    return 1.0 / (1.0 + jnp.exp(-value))


def _softmax(row: Sequence[Array], epsilon: float) -> list[Array]:
    peak = functools.reduce(jnp.maximum, row)
    powers = [jnp.exp(value - peak) for value in row]
    total = _sum(powers)
    return [power / total + epsilon for power in powers]

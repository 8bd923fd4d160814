"""`stream_mixes` for TPUs: rows lie along the lanes, a coefficient is one vector."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import backend
from pallas_kernels.plane_layouts import LANES
from pallas_kernels.stream_mixes import vectors

Array = jax.Array

SUBLANES = 8
"""Of a vector register: a step takes up to `SUBLANES * LANES` rows, one register a coefficient."""


def coefficients(
    z: Array, base: Array, scale: Array, *, streams: int, iterations: int, epsilon: float, interpret: Any = False
) -> tuple[Array, Array, Array]:
    """`pallas_kernels.stream_mixes` from normalized projections z [N, 2 S + S^2]."""
    count, width = z.shape
    sublanes = min(SUBLANES, -(-count // LANES))
    padded = -(-count // (sublanes * LANES)) * sublanes * LANES
    rows = jnp.pad(z, ((0, padded - count), (0, 0))).T.reshape(width, padded // LANES, LANES)
    pltpu = backend.tpu()

    def kernel(scale_ref, base_ref, z_ref, out_ref):
        columns = [z_ref[place] for place in range(width)]
        values = vectors.coefficients(
            columns, base_ref, scale_ref, streams=streams, iterations=iterations, epsilon=epsilon
        )
        for place, value in enumerate(values):
            out_ref[place] = value

    block = pl.BlockSpec((width, sublanes, LANES), lambda step: (0, step, 0))
    scalars = pl.BlockSpec(memory_space=pltpu.SMEM)
    out = backend.tpu_call(
        kernel,
        jax.ShapeDtypeStruct(rows.shape, jnp.float32),
        grid=(padded // (sublanes * LANES),),
        in_specs=[scalars, scalars, block],
        out_specs=block,
        interpret=interpret,
        name="stream_mixes",
    )(scale, base, rows)
    values = out.reshape(width, padded)[:, :count].T
    pre, post, combination = values[:, :streams], values[:, streams : 2 * streams], values[:, 2 * streams :]
    return pre, post, combination.reshape(count, streams, streams)

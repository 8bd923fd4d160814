"""`stream_mixes` for GPUs: a row's coefficients live in the registers of one thread."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import backend
from pallas_kernels.stream_mixes.vectors import coefficients

Array = jax.Array

ROWS = 32
"""Rows of one program, a warp."""


def stream_mixes(
    z: Array, base: Array, scale: Array, *, streams: int, iterations: int, epsilon: float, interpret: bool = False
) -> tuple[Array, Array, Array]:
    """See `pallas_kernels.stream_mixes`."""
    count, width = z.shape
    triton = backend.triton()

    def kernel(z_ref, base_ref, scale_ref, pre_ref, post_ref, combination_ref):
        row = pl.program_id(0) * ROWS + jnp.arange(ROWS, dtype=jnp.int32)
        live = row < count
        near = jnp.where(live, row, 0)
        columns = [triton.load(z_ref.at[near, place]) for place in range(width)]
        values = coefficients(columns, base_ref, scale_ref, streams=streams, iterations=iterations, epsilon=epsilon)
        # Lanes that are not stored get an index past the end: interpret mode writes their old value there.
        far = jnp.where(live, row, count)
        places = [ref.at[far, stream] for ref in (pre_ref, post_ref) for stream in range(streams)]
        places += [combination_ref.at[far, source, to] for source in range(streams) for to in range(streams)]
        for place, value in zip(places, values, strict=True):
            triton.store(place, value, mask=live)

    shapes = ((count, streams), (count, streams), (count, streams, streams))
    return backend.triton_call(
        kernel,
        [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes],
        grid=(-(-count // ROWS),),
        num_warps=1,
        num_stages=1,
        interpret=interpret,
        name="stream_mixes",
    )(z, base, scale)

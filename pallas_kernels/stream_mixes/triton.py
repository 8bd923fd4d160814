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
        kind = [min(place // streams, 2) for place in range(width)]
        columns = [triton.load(z_ref.at[near, place]) for place in range(width)]
        scales = [(scale_ref[kind[place]], base_ref[place]) for place in range(width)]
        values = coefficients(columns, scales, streams=streams, iterations=iterations, epsilon=epsilon)
        # Lanes that are not stored get an index past the end: interpret mode writes their old value there.
        far = jnp.where(live, row, count)
        for place, value in enumerate(values):
            if kind[place] == 2:
                source, destination = divmod(place - 2 * streams, streams)
                ref = combination_ref.at[far, source, destination]
            else:
                ref = (pre_ref, post_ref)[kind[place]].at[far, place % streams]
            triton.store(ref, value, mask=live)

    shapes = ((count, streams), (count, streams), (count, streams, streams))
    if count == 0:
        return tuple(jnp.zeros(shape, jnp.float32) for shape in shapes)
    return backend.triton_call(
        kernel,
        [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes],
        grid=(-(-count // ROWS),),
        num_warps=1,
        num_stages=1,
        interpret=interpret,
        name="stream_mixes",
    )(z, base, scale)

"""`grouped_linear` for GPUs: outputs are the left operand's rows, and the inner dimension is cut to fill the device."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import backend

Array = jax.Array

MOST_ROWS = 128
"""Rows up to which `auto` takes the kernel; a copy of the weight matters little to more."""
LEAST_INNER = 16
"""The least inner dims of a product on the tensor cores."""


@dataclasses.dataclass(frozen=True)
class Config:
    """How the work is cut.

    Attributes:
      outputs, rows: of one program, at least 16.
      inner: inner dims of one step.
      splits: programs among which the inner dimension is cut, in whole steps.
      num_warps, num_stages: of one program.
    """

    outputs: int
    rows: int
    inner: int
    splits: int
    num_warps: int
    num_stages: int


def preferred(rows: int) -> bool:
    """Whether `auto` takes the kernel for `rows` rows."""
    return rows <= MOST_ROWS


def unsupported(x: Array, weight: Array) -> str | None:
    """Why the kernel cannot run on these arrays, or None."""
    if x.dtype != jnp.bfloat16 or weight.dtype != jnp.bfloat16:
        return f"it multiplies bfloat16, not {x.dtype.name} with {weight.dtype.name}"
    if x.shape[2] % LEAST_INNER:
        return f"{x.shape[2]} inner dims are not a multiple of {LEAST_INNER}"
    if weight.size >= 2**31:
        return f"{weight.size} weight elements do not fit 32-bit offsets"
    return None


def config_for(rows: int, groups: int, outputs: int, inputs: int, generation: str) -> Config:
    """The configuration for x [rows, groups, inputs] and `outputs` outputs of each group."""
    rocm = generation == "rocm"
    tile_rows = min(64, max(16, pl.next_power_of_2(rows)))
    few = tile_rows == 16
    tile_outputs = min(64 if rocm or few else 128, max(16, pl.next_power_of_2(outputs)))
    inner = next(size for size in ((128,) if few else ()) + (64, 32, 16) if inputs % size == 0)
    steps, tiles = inputs // inner, groups * -(-outputs // tile_outputs) * -(-rows // tile_rows)
    wanted = max(1, min(steps, (608 if rocm else 264) // tiles))
    # As many as leave no two programs' work a step apart.
    splits = next(splits for splits in range(wanted, 0, -1) if steps % splits == 0)
    return Config(tile_outputs, tile_rows, inner, splits, 4, 1 if rocm else 4)


@backend.traced_once
def grouped_linear(
    x: Array,
    weight: Array,
    layer: Array | int | None = None,
    *,
    config: Config | None = None,
    interpret: bool = False,
) -> Array:
    """See `pallas_kernels.grouped_linear`; `unsupported` has been asked."""
    layer, weight = backend.with_layer(layer, weight)
    rows, groups, inputs = x.shape
    outputs = weight.shape[2]
    config = config or config_for(rows, groups, outputs, inputs, backend.current_target().generation)
    tiles, steps = -(-outputs // config.outputs), inputs // config.inner // config.splits
    triton = backend.triton()

    def kernel(x_ref, weight_ref, layer_ref, out_ref):
        program = pl.program_id(0)
        tile, program = lax.rem(program, tiles), lax.div(program, tiles)
        group, program = lax.rem(program, groups), lax.div(program, groups)
        split, row_tile = lax.rem(program, config.splits), lax.div(program, config.splits)
        output = tile * config.outputs + jnp.arange(config.outputs, dtype=jnp.int32)
        row = row_tile * config.rows + jnp.arange(config.rows, dtype=jnp.int32)

        def load(ref, count: int, first: Array, *index: Array, limit: int | None = None) -> Array:
            column = first + jnp.arange(config.inner, dtype=jnp.int32)
            shape = (count, config.inner)
            parts = [jnp.broadcast_to(part if part.ndim == 0 else part[:, None], shape) for part in index]
            place = ref.at[(*parts, jnp.broadcast_to(column[None, :], shape))]
            if limit is None:
                return triton.load(place)
            return triton.load(place, mask=parts[0] < limit, other=0.0)

        def step(index: Array, total: Array) -> Array:
            first = (split * steps + index) * config.inner
            near = jnp.minimum(output, outputs - 1)
            codes = load(weight_ref, config.outputs, first, layer_ref[0], group, near)
            values = load(x_ref, config.rows, first, row, group, limit=rows)
            return total + jnp.dot(codes, values.T, preferred_element_type=jnp.float32)

        total = lax.fori_loop(0, steps, step, jnp.zeros((config.outputs, config.rows), jnp.float32)).T
        shape = (config.rows, config.outputs)
        stored = jnp.broadcast_to(row[:, None] < rows, shape) & jnp.broadcast_to(output[None, :] < outputs, shape)
        # Lanes that are not stored get an index past the end: interpret mode writes their old value there.
        place = jnp.where(stored, jnp.broadcast_to(row[:, None], shape), rows)
        column = jnp.broadcast_to(group * outputs + output[None, :], shape)
        triton.store(out_ref.at[jnp.full(shape, split), place, column], total, mask=stored)

    return backend.triton_call(
        kernel,
        jax.ShapeDtypeStruct((config.splits, rows, groups * outputs), jnp.float32),
        grid=(tiles * groups * config.splits * -(-rows // config.rows),),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        interpret=interpret,
        name="grouped_linear",
    )(x, weight, layer)

"""`stream_mixes` for GPUs.

`projection_parts` cuts the inner dimension among programs. Of few rows one program each adds its parts up and
normalizes, which spares launches; of many a row's coefficients live in the registers of one thread.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from pallas_kernels import backend
from pallas_kernels.stream_mixes import vectors

Array = jax.Array

ROWS = 32
"""Rows of one program of `coefficients`, a warp."""
FEW_ROWS = 512
"""Rows up to which a program each finishes them."""
MOST_INNER = 2**16
"""The longest row: its parts are added up in the registers of one program."""


@dataclasses.dataclass(frozen=True)
class Projection:
    """How the projections are cut.

    Attributes:
      rows: of one program, of a tile of the tensor cores.
      inner: inner dims of one step.
      programs: about as many as there are at most: more rows take more steps each.
      num_warps, num_stages: of one program.
    """

    rows: int
    inner: int
    programs: int
    num_warps: int
    num_stages: int


def projection_for(rows: int) -> Projection:
    """How the projections of `rows` rows are cut; 17 to 63 rows a program took ten times as long on an H200."""
    if rows <= FEW_ROWS:
        return Projection(16 if rows <= 32 else 64, 256, 640, 4, 1)
    return Projection(128, 128, 264, 8, 3)


def projects(streams: Array) -> bool:
    """Whether the projections of streams [N, S, D] are a kernel too."""
    _, count, width = streams.shape
    return streams.dtype == jnp.bfloat16 and count * width <= MOST_INNER


@backend.traced_once
def stream_mixes(
    streams: Array,
    fn: Array,
    base: Array,
    scale: Array,
    layer: Array | int | None = None,
    after: Array | None = None,
    *,
    iterations: int,
    epsilon: float,
    norm_epsilon: float,
    config: Projection | None = None,
    interpret: bool = False,
) -> tuple[Array, Array, Array]:
    """See `pallas_kernels.stream_mixes`; `projects` has been asked."""
    rows, count, width = streams.shape
    layer, fn, base, scale = backend.with_layer(layer, fn, base, scale)
    parts = projection_parts(streams.reshape(rows, -1), fn, layer, after, config=config, interpret=interpret)
    outputs, inner, triton = fn.shape[1], count * width, backend.triton()
    options = {"streams": count, "iterations": iterations, "epsilon": epsilon}
    if rows > FEW_ROWS:
        totals = jnp.sum(parts, axis=0)
        norm = jax.lax.rsqrt(totals[:, outputs, None] / inner + norm_epsilon)
        return coefficients(totals[:, :outputs] * norm, base[layer[0]], scale[layer[0]], interpret=interpret, **options)

    def kernel(parts_ref, base_ref, scale_ref, layer_ref, pre_ref, post_ref, combination_ref):
        row, place = pl.program_id(0), layer_ref[0]
        splits, _, columns = parts_ref.shape
        tile = (pl.next_power_of_2(splits), columns)
        split = jnp.broadcast_to(jnp.arange(tile[0], dtype=jnp.int32)[:, None], tile)
        column = jnp.broadcast_to(jnp.arange(columns, dtype=jnp.int32)[None, :], tile)
        there = split < splits
        at = parts_ref.at[jnp.where(there, split, 0), jnp.broadcast_to(row, tile), column]
        totals = jnp.sum(triton.load(at, mask=there, other=0.0), axis=0)
        own = jnp.arange(columns, dtype=jnp.int32)
        sums = [jnp.sum(jnp.where(own == index, totals, 0.0)) for index in range(outputs + 1)]
        norm = jax.lax.rsqrt(sums[outputs] / inner + norm_epsilon)
        values = vectors.coefficients(
            [value * norm for value in sums[:outputs]],
            [base_ref[place, index] for index in range(outputs)],
            [scale_ref[place, index] for index in range(3)],
            **options,
        )
        for target, value in zip(_targets(row, count, pre_ref, post_ref, combination_ref), values, strict=True):
            triton.store(target, value)

    return backend.triton_call(
        kernel,
        _results(rows, count),
        grid=(rows,),
        num_warps=1,
        num_stages=1,
        interpret=interpret,
        name="stream_mixes",
    )(parts, base, scale, layer)


def projection_parts(
    flat: Array,
    fn: Array,
    layer: Array,
    after: Array | None = None,
    *,
    config: Projection | None = None,
    interpret: bool = False,
) -> Array:
    """Parts of the products of rows and of their sums of squares.

    fn's float32 values are split into three bfloat16 values that add up to them, so that the tensor cores multiply
    exactly; the sums are float32.

    Args:
      flat: [N, K] bfloat16.
      fn: [layers, O, K] float32.
      layer: [1] int32.
      after: see `stream_mixes`.
      config: None takes `projection_for`.
      interpret: run as plain JAX operations.

    Returns:
      [splits, N, C] float32 to be summed over splits: column o < O is the product with row o, column O the sum of
      squares, the rest nothing.
    """
    rows, inner = flat.shape
    outputs = fn.shape[1]
    columns = max(16, pl.next_power_of_2(outputs + 1))
    config = config or projection_for(rows)
    tile_rows = config.rows
    tiles, steps = -(-rows // tile_rows), -(-inner // config.inner)
    steps = -(-steps // max(1, config.programs // tiles))
    splits = -(-inner // (steps * config.inner))
    whole = inner % (steps * config.inner) == 0
    triton = backend.triton()

    def kernel(flat_ref, fn_ref, layer_ref, parts_ref):
        program = pl.program_id(0)
        split, tile = program % splits, program // splits
        row = tile * tile_rows + jnp.arange(tile_rows, dtype=jnp.int32)
        column = jnp.arange(columns, dtype=jnp.int32)

        def load(ref, index, limit, place, *leading):
            shape = (index.shape[0], config.inner)
            first, last = (jnp.broadcast_to(part, shape) for part in (index[:, None], place[None, :]))
            there = first < limit if whole else (first < limit) & (last < inner)
            at = ref.at[(*(jnp.broadcast_to(part, shape) for part in leading), first, last)]
            return triton.load(at, mask=there, other=0.0)

        def step(index, sums):
            total, squares = sums
            place = (split * steps + index) * config.inner + jnp.arange(config.inner, dtype=jnp.int32)
            x = load(flat_ref, row, rows, place)
            for part in _bfloat16_parts(load(fn_ref, column, outputs, place, layer_ref[0])):
                total = total + jnp.dot(x, part.T, preferred_element_type=jnp.float32)
            wide = x.astype(jnp.float32)
            return total, squares + jnp.sum(wide * wide, axis=1)

        sums = jnp.zeros((tile_rows, columns), jnp.float32), jnp.zeros((tile_rows,), jnp.float32)
        total, squares = step(0, sums) if steps == 1 else jax.lax.fori_loop(0, steps, step, sums)
        squares = jnp.broadcast_to(squares[:, None], total.shape)
        column = jnp.broadcast_to(column[None, :], total.shape)
        row = jnp.broadcast_to(row[:, None], total.shape)
        there = None
        if rows % tile_rows:
            # Lanes that are not stored get an index past the end: interpret mode writes their old value there.
            there, row = row < rows, jnp.where(row < rows, row, rows)
        at = parts_ref.at[jnp.full(total.shape, split), row, column]
        triton.store(at, jnp.where(column == outputs, squares, total), mask=there)

    return backend.triton_call(
        kernel,
        jax.ShapeDtypeStruct((splits, rows, columns), jnp.float32),
        grid=(splits * tiles,),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        interpret=interpret,
        name="stream_projections",
        after=after,
    )(flat, fn, layer)


def _bfloat16_parts(value: Array) -> list[Array]:
    """Three bfloat16 arrays whose sum is the float32 `value` (exactly, above 2^-110)."""
    parts = []
    for _ in range(3):
        # The upper half of the bits: a cast that is widened again may be removed.
        bits = jax.lax.bitcast_convert_type(value, jnp.int32) & jnp.int32(-0x10000)
        upper = jax.lax.bitcast_convert_type(bits, jnp.float32)
        parts.append(upper.astype(jnp.bfloat16))
        value = value - upper
    return parts


def coefficients(
    z: Array, base: Array, scale: Array, *, streams: int, iterations: int, epsilon: float, interpret: bool = False
) -> tuple[Array, Array, Array]:
    """The same from normalized projections z [N, 2 S + S^2], with base [2 S + S^2] and scale [3]."""
    count, width = z.shape
    triton = backend.triton()

    def kernel(z_ref, base_ref, scale_ref, pre_ref, post_ref, combination_ref):
        row = pl.program_id(0) * ROWS + jnp.arange(ROWS, dtype=jnp.int32)
        live = row < count
        near = jnp.where(live, row, 0)
        columns = [triton.load(z_ref.at[near, place]) for place in range(width)]
        values = vectors.coefficients(
            columns, base_ref, scale_ref, streams=streams, iterations=iterations, epsilon=epsilon
        )
        # Lanes that are not stored get an index past the end: interpret mode writes their old value there.
        far = jnp.where(live, row, count)
        for target, value in zip(_targets(far, streams, pre_ref, post_ref, combination_ref), values, strict=True):
            triton.store(target, value, mask=live)

    return backend.triton_call(
        kernel,
        _results(count, streams),
        grid=(-(-count // ROWS),),
        num_warps=1,
        num_stages=1,
        interpret=interpret,
        name="stream_mixes",
    )(z, base, scale)


def _results(rows: int, streams: int) -> Sequence[jax.ShapeDtypeStruct]:
    shapes = ((rows, streams), (rows, streams), (rows, streams, streams))
    return [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]


def _targets(row: Array, streams: int, pre_ref: object, post_ref: object, combination_ref: object) -> list:
    """Where the coefficients of `row` go, in the order of `vectors.coefficients`."""
    # NumPy's, because the interpreter of Pallas asks every index for its shape.
    each = [np.int32(stream) for stream in range(streams)]
    places = [ref.at[row, stream] for ref in (pre_ref, post_ref) for stream in each]
    return places + [combination_ref.at[row, source, to] for source in each for to in each]

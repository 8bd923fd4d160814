"""The block-scaled linear layer for GPUs: weight tiles are widened in registers on their way to the product.

Outputs are the left operand's rows, so that the tensor cores see whole tiles even for one row of x. When outputs alone
do not fill the device, the inner dimension is cut among programs and their float32 parts are added by a second kernel.
Many rows are multiplied by `triton_widened`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import backend
from pallas_kernels.block_scaled_linear import triton_widened
from pallas_kernels.triton_widening import LANE_GROUP, fp8_operand, packed_instructions, widen_e4m3

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Config:
    """How the work is cut.

    Attributes:
      outputs: outputs of one program, at least 16.
      rows: rows of x of one program, at least 16.
      inner: inner dims of one step, a multiple of `LANE_GROUP`. Scales are copied ahead of their use only where a
        thread has four of them: outputs * inner of at least 4096 per warp.
      splits: programs among which the inner dimension is cut.
      num_warps, num_stages: of one program.
    """

    outputs: int
    rows: int
    inner: int
    splits: int
    num_warps: int
    num_stages: int


def splits_for(inputs: int, outputs: int, tile_outputs: int, inner: int, programs: int) -> int:
    """Cuts of the inner dimension that give about `programs` programs per tile of rows, no two steps of work apart."""
    steps = -(-inputs // inner)
    wanted = max(1, min(steps, round(programs / -(-outputs // tile_outputs))))
    return -(-steps // -(-steps // wanted))


def config_for(rows: int, inputs: int, outputs: int, generation: str, weights: int = 1) -> Config:
    """The configuration for x [rows, inputs] and `outputs` outputs of each of `weights` weights."""
    rocm = generation == "rocm"
    large = inputs * outputs >= 2**24 and not rocm
    tile_rows = min(128 if large else 64, max(16, pl.next_power_of_2(rows)))
    tile_outputs, inner = 64, 128
    if tile_rows == 128:
        inner = 64
    elif large:
        tile_outputs = 128
    elif tile_rows == 16 and not rocm:
        inner = 256
    while inner > LANE_GROUP and inner // 2 >= inputs:
        inner //= 2
    programs = 608 if rocm else 264
    if large and outputs < 132 * tile_outputs:
        # Outputs alone leave multiprocessors idle: as many programs as fit them at once.
        programs = {16: 528, 64: 132}.get(tile_rows, programs)
    wanted = max(1, programs // (weights * -(-rows // tile_rows)))
    splits = splits_for(inputs, outputs, tile_outputs, inner, wanted)
    return Config(tile_outputs, tile_rows, inner, splits, 4, 1 if rocm else 3)


MOST_ROWS = 128
"""Rows up to which weights are widened in registers; more are worth a widened weight in memory."""
LEAST_WEIGHT = 2**21
"""Weight elements below which XLA computes the product of one row. It widens the weight to memory first, in a launch
more; at 2^22 elements it was measured to be slower."""


def preferred(rows: int, weight: int, generation: str) -> bool:
    """Whether `auto` takes a kernel for `rows` rows and `weight` weight elements: where it won on an H200."""
    if rows > MOST_ROWS:
        return generation == "cuda"
    return rows > 1 or weight >= LEAST_WEIGHT


def unsupported(x: Array, codes: Array) -> str | None:
    """Why the kernel cannot run on these arrays, or None."""
    if x.dtype != jnp.bfloat16:
        return f"it computes in bfloat16, not {x.dtype.name}"
    if codes.size >= 2**31:
        return f"{codes.size} weight bytes do not fit 32-bit offsets"
    return None


def _product(
    x_ref: object,
    codes_ref: object,
    scales_ref: object,
    layer: Array,
    out_ref: object,
    program: Array,
    *,
    config: Config,
    cuda: bool,
) -> None:
    """One tile of outputs and rows over one split of the inner dimension."""
    triton = backend.triton()
    rows = x_ref.shape[0]
    _, outputs, inputs = codes_ref.shape
    output_tiles = -(-outputs // config.outputs)
    first_output = (program % output_tiles) * config.outputs
    split = (program // output_tiles) % config.splits
    first_row = (program // (output_tiles * config.splits)) * config.rows
    output = first_output + jnp.arange(config.outputs, dtype=jnp.int32)
    row = first_row + jnp.arange(config.rows, dtype=jnp.int32)
    near_output = jnp.minimum(output, outputs - 1)
    steps = -(-inputs // (config.inner * config.splits))
    whole = steps * config.splits * config.inner == inputs

    def load_x(first: Array) -> Array:
        # Rows that are not there cost no traffic.
        column = first + jnp.arange(config.inner, dtype=jnp.int32)
        shape = (config.rows, config.inner)
        place = x_ref.at[jnp.broadcast_to(row[:, None], shape), jnp.broadcast_to(column[None, :], shape)]
        there = jnp.broadcast_to(row[:, None] < rows, shape)
        if not whole:
            there &= jnp.broadcast_to(column[None, :] < x_ref.shape[1], shape)
        return triton.load(place, mask=there, other=0.0)

    def load(ref: object, index: Array, first: Array, count: int) -> Array:
        column = first + jnp.arange(count, dtype=jnp.int32)
        shape = (index.shape[0], count)
        leading = jnp.broadcast_to(layer, shape)
        place = ref.at[leading, jnp.broadcast_to(index[:, None], shape), jnp.broadcast_to(column[None, :], shape)]
        if whole:
            return triton.load(place)
        return triton.load(place, mask=jnp.broadcast_to(column[None, :] < ref.shape[2], shape), other=0)

    def step(index: Array, total: Array) -> Array:
        block = split * steps + index
        codes = load(codes_ref, near_output, block * config.inner, config.inner)
        scales = load(scales_ref, lax.div(near_output, 32), block * (config.inner // 32), config.inner // 32)
        x = load_x(block * config.inner)
        return total + jnp.dot(widen_e4m3(codes, scales, cuda), x.T, preferred_element_type=jnp.float32)

    total = lax.fori_loop(0, steps, step, jnp.zeros((config.outputs, config.rows), jnp.float32)).T
    # Lanes that are not stored get an index past the end: interpret mode writes their old value there, to nothing.
    shape = (config.rows, config.outputs)
    stored = jnp.broadcast_to(row[:, None] < rows, shape) & jnp.broadcast_to(output[None, :] < outputs, shape)
    place = jnp.where(stored, jnp.broadcast_to(row[:, None], shape), rows)
    column = jnp.broadcast_to(output[None, :], shape)
    if config.splits == 1:
        triton.store(out_ref.at[place, column], total.astype(out_ref.dtype), mask=stored)
    else:
        triton.store(out_ref.at[jnp.full(shape, split), place, column], total, mask=stored)


def block_scaled_linear(
    x: Array,
    codes: Array,
    scales: Array,
    layer: Array | int | None = None,
    *,
    config: Config | None = None,
    interpret: bool = False,
) -> Array:
    """See `pallas_kernels.block_scaled_linear`; `unsupported` has been asked."""
    [product] = block_scaled_linears(x, [(codes, scales)], layer, config=config, interpret=interpret)
    return product


@backend.traced_once
def block_scaled_linears(
    x: Array,
    weights: Sequence[tuple[Array, Array]],
    layer: Array | int | None = None,
    lanes: Array | None = None,
    *,
    parts: bool = False,
    config: Config | None = None,
    interpret: bool = False,
) -> tuple[Array, ...]:
    """See `pallas_kernels.block_scaled_linear`; `unsupported` has been asked."""
    layer, *weights = backend.with_layer(layer, *weights)
    (rows, inputs), count = x.shape, len(weights)
    outputs = weights[0][0].shape[1]
    if rows == 0:
        return (jnp.zeros((1, 0, outputs) if parts else (0, outputs), x.dtype),) * count
    weights = [
        (codes if codes.dtype == jnp.uint8 else lax.bitcast_convert_type(codes, jnp.uint8), scales)
        for codes, scales in weights
    ]
    if config is None and rows > MOST_ROWS:
        products = [triton_widened.block_scaled_linear(x, *weight, layer, interpret=interpret) for weight in weights]
        return tuple(product[None] if parts else product for product in products)
    config = config or config_for(rows, inputs, outputs, backend.current_target().generation, count)
    operand = fp8_operand(x, -(-inputs // LANE_GROUP) * LANE_GROUP) if lanes is None else lanes
    operands = [part for weight in weights for part in weight]
    programs = -(-outputs // config.outputs) * config.splits * -(-rows // config.rows)
    cuda = packed_instructions() and not interpret

    def kernel(x_ref: object, layer_ref: object, *refs: object) -> None:
        program, layer = pl.program_id(0), layer_ref[0]

        def product(index: int) -> None:
            codes_ref, scales_ref, out_ref = refs[2 * index], refs[2 * index + 1], refs[2 * count + index]
            _product(x_ref, codes_ref, scales_ref, layer, out_ref, program - index * programs, config=config, cuda=cuda)

        if count == 1:
            product(0)
            return
        for index in range(count):
            pl.when(lax.div(program, programs) == index)(functools.partial(product, index))

    shape = (rows, outputs) if config.splits == 1 else (config.splits, rows, outputs)
    products = backend.triton_call(
        kernel,
        [jax.ShapeDtypeStruct(shape, x.dtype if config.splits == 1 else jnp.float32)] * count,
        grid=(programs * count,),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        interpret=interpret,
        name="block_scaled_linear",
    )(operand, layer, *operands)
    if config.splits == 1:
        return tuple(product[None] if parts else product for product in products)
    return tuple(product if parts else jnp.sum(product, axis=0).astype(x.dtype) for product in products)

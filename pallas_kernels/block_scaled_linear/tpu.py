"""The block-scaled linear layer for TPUs: weight tiles stream through VMEM in their stored codes.

A scale belongs to 32 outputs and 32 inner dims. For few rows it goes to the rows of x, once for each 32 outputs: the
rows are then a few more for the matrix unit, which few rows leave idle, and a weight needs its cast only. For many rows
it goes to the weights. Both are exact, because a scale is a power of two.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import backend
from pallas_kernels.arithmetic import decode_e8m0, round_to_bfloat16

Array = jax.Array

BLOCK = 32
"""Outputs and inner dims of one scale."""
LANES = 128
ROW_TILE = 16
"""Rows of a bfloat16 register tile."""
MOST_INNER = 2048
"""Inner dims of one step."""
WHOLE_INNER = 4096
"""Inner dims that one step takes where they cannot be cut into multiples of `LANES`."""
VMEM_BYTES = 48 * 2**20


@dataclasses.dataclass(frozen=True)
class Config:
    """How the work is cut.

    Attributes:
      rows: rows of x of one block, a multiple of 16.
      outputs: outputs of one block, a multiple of 128 or all of them.
      inner: inner dims of one step, a multiple of 128 that divides them, or all of them.
      scale_rows: scales go to the rows of x instead of the weights.
    """

    rows: int
    outputs: int
    inner: int
    scale_rows: bool


def inner_step(inputs: int, most: int) -> int:
    """The largest multiple of 128 up to `most` that divides `inputs`, or `inputs` where there is none."""
    return next((size for size in range(most, 0, -LANES) if inputs % size == 0), inputs)


def config_for(rows: int, inputs: int, outputs: int) -> Config:
    """The configuration for x [rows, inputs] and `outputs` outputs."""
    padded = -(-rows // ROW_TILE) * ROW_TILE
    return Config(min(padded, 128), min(outputs, 512), inner_step(inputs, MOST_INNER), rows <= ROW_TILE)


MOST_ROWS = 128
"""Rows up to which `auto` takes the kernel: the weight's bytes decide there, of which XLA moves about five times as
many, because it writes the widened weight and reads it again (kernel chapter, "FP8 block-scaled linear")."""


def preferred(rows: int) -> bool:
    """Whether `auto` takes the kernel for `rows` rows."""
    return rows <= MOST_ROWS


def unsupported(x: Array, codes: Array) -> str | None:
    """Why the kernel cannot run on these arrays, or None."""
    if x.dtype != jnp.bfloat16:
        return f"it computes in bfloat16, not {x.dtype.name}"
    inputs = codes.shape[1]
    if inner_step(inputs, MOST_INNER) > WHOLE_INNER:
        return f"{inputs} inner dims are more than {WHOLE_INNER} and have no divisor that is a multiple of {LANES}"
    return None


def block_scaled_linear(
    x: Array, codes: Array, scales: Array, *, config: Config | None = None, interpret: Any = False
) -> Array:
    """See `pallas_kernels.block_scaled_linear`; `unsupported` has been asked."""
    (rows, inputs), outputs = x.shape, codes.shape[0]
    if rows == 0:
        return jnp.zeros((0, outputs), x.dtype)
    config = config or config_for(rows, inputs, outputs)
    if codes.dtype == jnp.uint8:
        codes = lax.bitcast_convert_type(codes, jnp.float8_e4m3fn)
    if not interpret:
        codes = backend.in_device_memory(codes)
    padded = jnp.pad(x, ((0, -rows % config.rows), (0, 0)))
    output_tiles, steps = pl.cdiv(outputs, config.outputs), inputs // config.inner
    blocks, groups = config.outputs // BLOCK, config.inner // BLOCK
    powers = decode_e8m0(scales.astype(jnp.int32)).astype(jnp.bfloat16)
    powers = jnp.pad(powers, ((0, output_tiles * blocks - powers.shape[0]), (0, 0)))
    powers = powers.reshape(output_tiles, blocks, steps, groups).transpose(0, 2, 1, 3)
    spread = jnp.repeat(jnp.eye(groups, dtype=jnp.bfloat16), BLOCK, axis=1)
    pltpu = backend.tpu()
    out = backend.tpu_call(
        _kernel(config, steps),
        jax.ShapeDtypeStruct((padded.shape[0], outputs), x.dtype),
        grid=(padded.shape[0] // config.rows, output_tiles, steps),
        in_specs=[
            pl.BlockSpec((1, 1, blocks, groups), lambda row, output, step: (output, step, 0, 0)),
            pl.BlockSpec(spread.shape, lambda row, output, step: (0, 0)),
            pl.BlockSpec((config.rows, inputs), lambda row, output, step: (row, 0)),
            pl.BlockSpec((config.outputs, config.inner), lambda row, output, step: (output, step)),
        ],
        out_specs=pl.BlockSpec((config.rows, config.outputs), lambda row, output, step: (row, output)),
        scratch_shapes=[pltpu.VMEM((config.rows, config.outputs), jnp.float32)],
        vmem_limit_bytes=VMEM_BYTES,
        interpret=interpret,
        name="block_scaled_linear",
    )(powers, spread, padded, codes)
    return out[:rows]


def _kernel(config: Config, steps: int) -> Any:
    def kernel(powers_ref, spread_ref, x_ref, codes_ref, out_ref, total_ref):
        step = pl.program_id(2)

        @pl.when(step == 0)
        def _():
            total_ref[...] = jnp.zeros(total_ref.shape, jnp.float32)

        inner = slice(None) if steps == 1 else pl.ds(pl.multiple_of(step * config.inner, LANES), config.inner)
        x = x_ref[:, inner]
        # One-hot columns: every inner dim gets its block's power of two, exactly. A NaN reaches its outputs only.
        powers = _dot(powers_ref[0, 0], spread_ref[...], 0)
        for first in range(0, config.outputs, LANES):
            count = min(LANES, config.outputs - first)
            weight = codes_ref[first : first + count, :].astype(jnp.bfloat16)
            mine = powers[first // BLOCK : (first + count) // BLOCK]
            product = (_scaled_rows if config.scale_rows else _scaled_weights)(x, weight, mine)
            total_ref[:, first : first + count] += product

        @pl.when(step == steps - 1)
        def _():
            out_ref[...] = round_to_bfloat16(total_ref[...]).astype(out_ref.dtype)

    return kernel


def _dot(left: Array, right: Array, contract: int) -> Array:
    """left [M, K] times right, whose axis `contract` is K, in float32."""
    return lax.dot_general(left, right, (((1,), (contract,)), ((), ())), preferred_element_type=jnp.float32)


def _scaled_weights(x: Array, weight: Array, powers: Array) -> Array:
    """x [rows, inner] times weight [outputs, inner], scaled by powers [outputs / 32, inner] first."""
    blocks, inner = powers.shape
    spread = jnp.broadcast_to(powers[:, None, :], (blocks, BLOCK, inner)).reshape(weight.shape)
    return _dot(x, (weight.astype(jnp.float32) * spread).astype(jnp.bfloat16), 1)


def _scaled_rows(x: Array, weight: Array, powers: Array) -> Array:
    """The same; x is scaled for each 32 outputs, and each of them takes its part of the product."""
    blocks, rows = powers.shape[0], x.shape[0]
    wide = x.astype(jnp.float32)
    stacked = jnp.concatenate([(wide * powers[block : block + 1]).astype(jnp.bfloat16) for block in range(blocks)])
    products = _dot(stacked, weight, 1)
    owner = lax.div(lax.broadcasted_iota(jnp.int32, (rows, weight.shape[0]), 1), BLOCK)
    result = products[:rows]
    for block in range(1, blocks):
        result = jnp.where(owner == block, products[block * rows : (block + 1) * rows], result)
    return result

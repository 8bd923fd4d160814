"""The block-scaled linear layer of many rows on GPUs: a kernel widens the weight to memory, XLA multiplies."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import backend
from pallas_kernels.rounding import round_to
from pallas_kernels.triton_widening import e4m3_values, packed_instructions

Array = jax.Array

BLOCK = 32
"""Outputs and inputs that share a scale; outputs of one program."""
MOST_INNER = 256
"""The most inner dims of one program."""


def block_scaled_linear(x: Array, codes: Array, scales: Array, layer: Array | int, *, interpret: bool) -> Array:
    """x [N, K] bfloat16 times the weight of a layer of codes [layers, O, K] uint8 -> [N, O], rounded once."""
    weight = widened(codes, scales, layer, interpret=interpret)
    product = jnp.einsum("nk,ok->no", x, weight, preferred_element_type=jnp.float32)
    return round_to(product, x.dtype)


@backend.traced_once
def widened(codes: Array, scales: Array, layer: Array | int, *, interpret: bool = False) -> Array:
    """The values of one layer of codes [layers, O, K] uint8 and scales [layers, O / 32, K / 32]: [O, K] bfloat16."""
    _, outputs, inputs = codes.shape
    inner = BLOCK
    while inner < MOST_INNER and inputs % (2 * inner) == 0:
        inner *= 2
    tiles, groups = inputs // inner, inner // BLOCK
    cuda = packed_instructions() and not interpret
    triton = backend.triton()

    def kernel(codes_ref: object, scales_ref: object, layer_ref: object, out_ref: object) -> None:
        block, tile = lax.div(pl.program_id(0), tiles), lax.rem(pl.program_id(0), tiles)
        rows, columns = pl.ds(block * BLOCK, BLOCK), pl.ds(tile * inner, inner)
        stored = triton.load(codes_ref.at[layer_ref[0], rows, columns])
        powers = triton.load(scales_ref.at[layer_ref[0], block, pl.ds(tile * groups, groups)])
        powers = jnp.broadcast_to(powers[None, :], (BLOCK, groups))
        triton.store(out_ref.at[rows, columns], e4m3_values(stored, powers, cuda))

    return backend.triton_call(
        kernel,
        jax.ShapeDtypeStruct((outputs, inputs), jnp.bfloat16),
        grid=(outputs // BLOCK * tiles,),
        num_warps=4,
        num_stages=1,
        interpret=interpret,
        name="widen_e4m3",
    )(codes, scales, backend.int_operand(layer))

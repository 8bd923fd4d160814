"""What the kernels of the routed experts for GPUs have in common: outputs, loads, masked stores, the activation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import backend
from pallas_kernels.arithmetic import fake_q8_group, swiglu
from pallas_kernels.grouped_experts.arrangement import by_code
from pallas_kernels.grouped_experts.types import Order
from pallas_kernels.grouped_experts.widening import OPERAND_POWER

Array = jax.Array


def operand_of(x: Array, order: Order, cuda: bool) -> Array:
    """x [N, K] bfloat16 as the other operand of widened weights of `order`: as `by_code` has it, at their power."""
    operand = by_code(x, order)
    return operand * jnp.bfloat16(2.0**OPERAND_POWER) if cuda else operand


class Tiled(Protocol):
    """How a product is cut: outputs, num_warps and num_stages of one program."""

    outputs: int
    num_warps: int
    num_stages: int


def call_tiles(
    kernel: Callable[..., None], tile: Tiled, blocks: int, results: tuple[int, int], *, interpret: bool, name: str
) -> Callable[..., Array]:
    """A launch of `kernel` with a program for each tile of the outputs of each block (`own_outputs`).

    results: pairs and outputs of the bfloat16 array that it fills.
    """
    return backend.triton_call(
        kernel,
        jax.ShapeDtypeStruct(results, jnp.bfloat16),
        grid=(blocks * -(-results[1] // tile.outputs),),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        interpret=interpret,
        name=name,
    )


def own_outputs(count: int, outputs: int) -> tuple[Array, Array]:
    """Block of this program and its `count` of the block's `outputs` outputs, some of them perhaps past the end."""
    tiles, program = -(-outputs // count), pl.program_id(0)
    return lax.div(program, tiles), lax.rem(program, tiles) * count + jnp.arange(count, dtype=jnp.int32)


def present_outputs(output: Array, outputs: int, count: int) -> Array | None:
    """Which of a program's `count` outputs there are; None for all."""
    return None if outputs % count == 0 else output < outputs


def load_rows(
    ref: object, index: Array, first: Array, count: int, leading: Array | None = None, live: Array | None = None
) -> Array:
    """ref[(leading,) index, first : first + count] as [len(index), count]; rows that are not `live` are 0 and cost no
    traffic.

    first: of all rows, or [len(index)].
    """
    shape = (index.shape[0], count)
    first = jnp.broadcast_to(first[:, None] if first.ndim else first, shape)
    place = [jnp.broadcast_to(index[:, None], shape), first + jnp.arange(count, dtype=jnp.int32)[None, :]]
    if leading is not None:
        place.insert(0, jnp.broadcast_to(leading, shape))
    if live is None:
        return backend.triton().load(ref.at[tuple(place)])
    return backend.triton().load(ref.at[tuple(place)], mask=jnp.broadcast_to(live[:, None], shape), other=0.0)


def store_rows(ref: object, values: Array, row: Array, live: Array, column: Array, present: Array | None) -> None:
    """ref[row, column] = values [columns, rows], turned so that columns are contiguous.

    Lanes that are not stored get an index past the end: interpret mode writes their old value there, to nothing. The
    index of a column is left as it is where it can be: the compiler then sees neighbours and stores them together.

    live: which rows are stored; present: which columns, None for all.
    """
    shape = (row.shape[0], column.shape[0])
    stored = jnp.broadcast_to(live[:, None], shape)
    row = jnp.where(live, row, ref.shape[0])
    if present is not None:
        stored = stored & jnp.broadcast_to(present[None, :], shape)
        column = jnp.where(present, column, ref.shape[1])
    at = ref.at[jnp.broadcast_to(row[:, None], shape), jnp.broadcast_to(column[None, :], shape)]
    backend.triton().store(at, values.T, mask=stored)


def activated(
    gate: Array, up: Array, routing: Array, *, swiglu_limit: float, quantize_hidden: bool, cuda: bool
) -> Array:
    """Hidden values [outputs, rows] bfloat16 as the second product's operand, from float32 sums of whole groups."""
    gate, up = (part.astype(jnp.bfloat16).astype(jnp.float32) for part in (gate, up))
    hidden = (routing * swiglu(gate, up, swiglu_limit)).astype(jnp.bfloat16)
    if quantize_hidden:
        groups = hidden.reshape(hidden.shape[0] // 32, 32, hidden.shape[1])
        hidden = fake_q8_group(groups, axis=1).reshape(hidden.shape)
    return hidden * jnp.bfloat16(2.0**OPERAND_POWER) if cuda else hidden

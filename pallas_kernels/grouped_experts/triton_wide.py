"""The routed experts of many rows for GPUs: weights are widened into memory once, then multiplied as bfloat16.

A product that widens its weights does so again for every block of rows. From about two hundred rows an expert on it is
cheaper to write the wide weights and read them back, for a few experts at a time so that they take little memory. A
product then takes both operands straight from shared memory, as tensor cores need it to run at full rate.
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
from pallas_kernels.arithmetic import fake_q8
from pallas_kernels.grouped_experts.arrangement import CODES, GROUP_WORDS, place_of_word, words_of
from pallas_kernels.grouped_experts.blocks import Blocks
from pallas_kernels.grouped_experts.triton_parts import load_rows, operand_of, store_rows, swiglu
from pallas_kernels.grouped_experts.types import ExpertWeights, Order
from pallas_kernels.grouped_experts.widening import widen_words

Array = jax.Array

MOST_AT_ONCE = 16
"""Experts whose wide weights exist at a time: 1.1 GB of the release's."""
WIDENED_OUTPUTS, WIDENED_WORDS = 64, 64
"""What one program widens."""


@dataclasses.dataclass(frozen=True)
class WideConfig:
    """How a product is cut.

    Attributes:
      rows: rows of a block, at least 16.
      outputs: outputs of one program.
      inner: dims of one step, at least 16, which divide both inner widths.
      num_warps, num_stages: of one program.
    """

    rows: int
    outputs: int
    inner: int
    num_warps: int
    num_stages: int


def wide_config(width: int, hidden: int, generation: str) -> WideConfig:
    """The configuration for experts of [hidden, width]."""
    inner = next(size for size in (64, 32, 16) if width % size == 0 and hidden % size == 0)
    if generation == "rocm":
        return WideConfig(64, 64, inner, 4, 1)
    return WideConfig(128, 256, inner, 8, 4)


def _widen_kernel(
    words_ref: object, scales_ref: object, first_ref: object, out_ref: object, *, order: Order, cuda: bool
) -> None:
    """Wide values of a few outputs of one expert, in the order of `by_code` of released words."""
    triton = backend.triton()
    _, outputs, width = words_ref.shape
    columns, rows = -(-width // WIDENED_WORDS), -(-outputs // WIDENED_OUTPUTS)
    program = pl.program_id(0)
    local = program // (columns * rows)
    output = (program // columns % rows) * WIDENED_OUTPUTS + jnp.arange(WIDENED_OUTPUTS, dtype=jnp.int32)
    word = (program % columns) * WIDENED_WORDS + jnp.arange(WIDENED_WORDS, dtype=jnp.int32)
    expert = first_ref[0] + local
    whole = outputs % WIDENED_OUTPUTS == 0 and width % WIDENED_WORDS == 0

    def at(ref: object, leading: Array, column: Array, last: int) -> tuple[object, Array | None]:
        shape = (WIDENED_OUTPUTS, column.shape[0])
        leading, row, place = (jnp.broadcast_to(part, shape) for part in (leading, output[:, None], column[None, :]))
        if whole:
            return ref.at[leading, row, place], None
        inside = (row < outputs) & (place < last)
        # Lanes that are not there get an index past the end: interpret mode writes their old value there, to nothing.
        return ref.at[leading, jnp.where(inside, row, outputs), place], inside

    def load(ref: object, column: Array) -> Array:
        place, inside = at(ref, expert, column, ref.shape[-1])
        return triton.load(place, mask=inside, other=None if whole else 0)

    scales = load(scales_ref, lax.div(word, GROUP_WORDS))
    for code, values in enumerate(widen_words(load(words_ref, place_of_word(word, order)), scales, order, cuda)):
        column = code * width + word
        if not whole:
            column = jnp.where(word < width, column, CODES * width)
        place, inside = at(out_ref, local, column, CODES * width)
        triton.store(place, values, mask=inside)


def _product_kernel(
    x_ref: object,
    x_row_ref: object,
    expert_ref: object,
    begin_ref: object,
    end_ref: object,
    pair_ref: object,
    first_ref: object,
    weight_ref: object,
    _: object,
    out_ref: object,
    *,
    config: WideConfig,
) -> None:
    """Products of one block's rows with a tile of outputs, at their pairs, if the block's expert is wide now.

    x_row_ref: [P] the row of x of every pair.
    """
    triton = backend.triton()
    held, outputs, width = weight_ref.shape
    tiles = -(-outputs // config.outputs)
    program = pl.program_id(0)
    block = program // tiles
    output = (program % tiles) * config.outputs + jnp.arange(config.outputs, dtype=jnp.int32)
    local = triton.load(expert_ref.at[block]) - first_ref[0]

    @pl.when((local >= 0) & (local < held))
    def _() -> None:
        begin = triton.load(begin_ref.at[block])
        position = begin + jnp.arange(config.rows, dtype=jnp.int32)
        live = position < triton.load(end_ref.at[block])
        pair = triton.load(pair_ref.at[jnp.where(live, position, begin)])
        row, near = triton.load(x_row_ref.at[pair]), jnp.minimum(output, outputs - 1)

        def step(index: Array, total: Array) -> Array:
            weight = load_rows(weight_ref, near, index * config.inner, config.inner, local)
            x = load_rows(x_ref, row, index * config.inner, config.inner)
            return total + jnp.dot(weight, x.T, preferred_element_type=jnp.float32)

        total = lax.fori_loop(0, width // config.inner, step, jnp.zeros((config.outputs, config.rows), jnp.float32))
        present = None if outputs % config.outputs == 0 else output < outputs
        store_rows(out_ref, total.astype(out_ref.dtype), pair, live, output, present)


def expert_outputs(
    x: Array,
    routing: Array,
    blocks: Blocks,
    weights: Sequence[ExpertWeights],
    *,
    experts: int,
    first: Array | int,
    chosen: int,
    config: WideConfig,
    swiglu_limit: float,
    quantize_hidden: bool,
    cuda: bool,
    interpret: bool,
) -> Array:
    """What every (row, expert) pair's expert gives, [P, D] bfloat16; zero for pairs that are not served.

    Args:
      x: [N, D] bfloat16.
      routing: [P] float32, of the pairs.
      blocks: of `config.rows` rows.
      weights: gate, up and down, [layers * experts, ...].
      experts: of one layer.
      first: the layer's first expert.
      chosen: pairs of a row.
      config: tiles.
      swiglu_limit, quantize_hidden: see `pallas_kernels.grouped_experts`.
      cuda: CUDA's packed instructions may be used.
      interpret: run as plain JAX operations.
    """
    count, pairs = blocks.expert.shape[0], blocks.pair.shape[0]
    held = max(size for size in range(1, MOST_AT_ONCE + 1) if experts % size == 0)
    pair = jnp.arange(pairs, dtype=jnp.int32)

    def widened(weight: ExpertWeights, start: Array) -> Array:
        words = words_of(weight.packed)
        _, outputs, width = words.shape
        return backend.triton_call(
            functools.partial(_widen_kernel, order=weight.order, cuda=cuda),
            jax.ShapeDtypeStruct((held, outputs, CODES * width), jnp.bfloat16),
            grid=(held * -(-outputs // WIDENED_OUTPUTS) * -(-width // WIDENED_WORDS),),
            num_warps=4,
            num_stages=1,
            interpret=interpret,
            name="grouped_experts_widen",
        )(words, weight.scales, start)

    def product(weight: ExpertWeights, rows: Array, x_row: Array) -> Array:
        """Rows [.., K] by pair -> [P, O] bfloat16."""
        lists = (blocks.expert, blocks.first, blocks.end, blocks.pair)
        outputs = weight.packed.shape[1]

        def some_experts(index: Array, out: Array) -> Array:
            start = jnp.reshape(first + index * held, 1).astype(jnp.int32)
            operands = (rows, x_row, *lists, start, widened(weight, start), out)
            return backend.triton_call(
                functools.partial(_product_kernel, config=config),
                jax.ShapeDtypeStruct(out.shape, out.dtype),
                grid=(count * -(-outputs // config.outputs),),
                num_warps=config.num_warps,
                num_stages=config.num_stages,
                interpret=interpret,
                name="grouped_experts_wide",
                input_output_aliases={len(operands) - 1: 0},
            )(*operands)

        return lax.fori_loop(0, experts // held, some_experts, jnp.zeros((pairs, outputs), jnp.bfloat16))

    *first_weights, down = weights
    operand = operand_of(x, "released", cuda)
    gate, up = (product(weight, operand, pair // chosen) for weight in first_weights)
    hidden = swiglu(gate.astype(jnp.float32), up.astype(jnp.float32), swiglu_limit) * routing[:, None]
    hidden = hidden.astype(jnp.bfloat16)
    if quantize_hidden:
        hidden = fake_q8(hidden)
    return product(down, operand_of(hidden, "released", cuda), pair)

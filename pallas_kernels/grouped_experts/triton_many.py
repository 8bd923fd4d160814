"""The routed experts of many rows for GPUs: products at the rate of the tensor cores, weights widened in registers.

A tile of weights is read as stored, widened in registers and multiplied with enough rows that widening is hidden behind
the product. All codes of a step are one operand, so that a step is one product of four times as many inner dims as it
has words. The other operand lies in the order in which steps meet the codes (`arrangement.by_step`): a step's part of
a row is one contiguous piece, which an asynchronous copy takes to shared memory in whole lines.
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
from pallas_kernels.grouped_experts.arrangement import BLOCK_DIMS, CODES, by_step, words_of
from pallas_kernels.grouped_experts.blocks import Blocks
from pallas_kernels.grouped_experts.triton_parts import activated, load_rows, store_rows
from pallas_kernels.grouped_experts.types import ExpertWeights, Order
from pallas_kernels.grouped_experts.widening import OPERAND_POWER, first_group, groups_of_step, widen_e2m1

Array = jax.Array

LEAST_COPY = 4
"""Bytes of the least asynchronous copy."""
ACTIVATED_ROWS = 32
"""Rows of a program that makes hidden values."""


@dataclasses.dataclass(frozen=True)
class ManyConfig:
    """How a product is cut.

    Attributes:
      rows: rows of a block.
      least: rows of the smallest product, at least 16: a block of few rows is multiplied as the smallest of `rows`,
        `rows` / 2, .. `least` that holds them.
      outputs: outputs of one program.
      inner: words of one step, 16 or 32, which divide the words of both inner widths.
      num_warps, num_stages: of one program.
    """

    rows: int
    least: int
    outputs: int
    inner: int
    num_warps: int
    num_stages: int

    def sizes(self) -> list[int]:
        """Rows of the products, descending."""
        sizes = [self.rows]
        while sizes[-1] > self.least:
            sizes.append(sizes[-1] // 2)
        return sizes


def _widened(words: Array, scales: Array, order: Order, cuda: bool) -> Array:
    """Values [outputs, CODES * inner] bfloat16 of words [outputs, inner], in the order of `by_step`."""
    outputs, inner = words.shape
    first, second, third, fourth = widen_e2m1(words, scales, order, cuda)
    pairs = [jnp.stack(pair, axis=-1) for pair in ((first, third), (second, fourth))]
    return jnp.stack(pairs, axis=-1).transpose(0, 2, 3, 1).reshape(outputs, CODES * inner)


def _product_kernel(
    x_ref: object,
    x_row_ref: object,
    expert_ref: object,
    first_ref: object,
    end_ref: object,
    pair_ref: object,
    words_ref: object,
    scales_ref: object,
    out_ref: object,
    *,
    config: ManyConfig,
    order: Order,
    cuda: bool,
) -> None:
    """Products of one block's rows with a tile of outputs, at their pairs.

    x_row_ref: [P] the row of x of every pair.
    """
    triton, inner = backend.triton(), config.inner
    experts, outputs, width = words_ref.shape
    tiles, steps, groups = -(-outputs // config.outputs), width // inner, groups_of_step(inner, order)
    program = pl.program_id(0)
    block = program // tiles
    output = (program % tiles) * config.outputs + jnp.arange(config.outputs, dtype=jnp.int32)
    near, present = output, None
    if outputs % config.outputs:
        near, present = jnp.minimum(output, outputs - 1), output < outputs
    expert = triton.load(expert_ref.at[block])
    first, end = triton.load(first_ref.at[block]), triton.load(end_ref.at[block])

    def product(rows: int) -> None:
        position = first + jnp.arange(rows, dtype=jnp.int32)
        live = position < end
        pair = triton.load(pair_ref.at[jnp.where(live, position, first)])
        row = triton.load(x_row_ref.at[pair])

        def scales_of(index: Array | int) -> Array:
            return load_rows(scales_ref, near, first_group(jnp.int32(index) * inner, order), groups, expert)

        def multiplied(index: Array, total: Array, scales: Array) -> Array:
            x = load_rows(x_ref, row, index * (CODES * inner), CODES * inner)
            words = load_rows(words_ref, near, index * inner, inner, expert)
            return total + jnp.dot(_widened(words, scales, order, cuda), x.T, preferred_element_type=jnp.float32)

        def step(index: Array, total: Array) -> Array:
            return multiplied(index, total, scales_of(index))

        def step_ahead(index: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            total, scales = carry
            after = scales_of(jnp.minimum(index + 1, steps - 1))
            return multiplied(index, total, scales), after

        total = jnp.zeros((config.outputs, rows), jnp.float32)
        if groups < LEAST_COPY:
            # Too few bytes for an asynchronous copy: a step would wait for them, so they are read a step ahead.
            total, _ = lax.fori_loop(0, steps, step_ahead, (total, scales_of(0)))
        else:
            total = lax.fori_loop(0, steps, step, total)
        store_rows(out_ref, total.astype(out_ref.dtype), pair, live, output, present)

    sizes, held = config.sizes(), jnp.minimum(end - first, config.rows)
    for size, smaller in zip(sizes, [*sizes[1:], 0], strict=True):
        pl.when((expert < experts) & (held > smaller) & (held <= size))(functools.partial(product, size))


def _activate_kernel(
    gate_ref: object,
    up_ref: object,
    routing_ref: object,
    out_ref: object,
    *,
    dims: int,
    inner: int,
    order: Order,
    activation: dict,
) -> None:
    """Hidden values of a few pairs and `dims` dims, as the product with weights of `order` reads them."""
    pairs, _ = gate_ref.shape
    pair = pl.program_id(1) * ACTIVATED_ROWS + jnp.arange(ACTIVATED_ROWS, dtype=jnp.int32)
    live, near, first = pair < pairs, jnp.minimum(pair, pairs - 1), pl.program_id(0) * dims
    gate, up = (load_rows(ref, near, first, dims).T for ref in (gate_ref, up_ref))
    routing = backend.triton().load(routing_ref.at[near])[None, :]
    hidden = by_step(activated(gate, up, routing, **activation).T, inner, order).T
    store_rows(out_ref, hidden, pair, live, first + jnp.arange(dims, dtype=jnp.int32), None)


def expert_outputs(
    x: Array,
    routing: Array,
    blocks: Blocks,
    weights: Sequence[ExpertWeights],
    *,
    chosen: int,
    config: ManyConfig,
    swiglu_limit: float,
    quantize_hidden: bool,
    cuda: bool,
    interpret: bool,
) -> Array:
    """What every (row, expert) pair's expert gives, [P, D] bfloat16; anything for pairs that are not served.

    Args:
      x: [N, D] bfloat16.
      routing: [P] float32, of the pairs.
      blocks: of `config.rows` rows.
      weights: gate, up and down, [E, ...].
      chosen: pairs of a row.
      config: tiles.
      swiglu_limit, quantize_hidden: see `pallas_kernels.grouped_experts`.
      cuda: CUDA's packed instructions may be used.
      interpret: run as plain JAX operations.
    """
    gate, up, down = weights
    pairs = blocks.pair.shape[0]
    pair = jnp.arange(pairs, dtype=jnp.int32)
    lists = (blocks.expert, blocks.first, blocks.end, blocks.pair)

    def product(weight: ExpertWeights, rows: Array, x_row: Array) -> Array:
        """Rows [.., K] by pair -> [P, O] bfloat16."""
        outputs = weight.packed.shape[1]
        return backend.triton_call(
            functools.partial(_product_kernel, config=config, order=weight.order, cuda=cuda),
            jax.ShapeDtypeStruct((pairs, outputs), jnp.bfloat16),
            grid=(blocks.expert.shape[0] * -(-outputs // config.outputs),),
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            interpret=interpret,
            name="grouped_experts_many",
        )(rows, x_row, *lists, words_of(weight.packed), weight.scales)

    operand = by_step(x, config.inner, gate.order)
    if cuda:
        operand = operand * jnp.bfloat16(2.0**OPERAND_POWER)
    products = [product(weight, operand, pair // chosen) for weight in (gate, up)]
    width = gate.packed.shape[1]
    dims = BLOCK_DIMS if width % BLOCK_DIMS == 0 else CODES * config.inner
    activation = {"swiglu_limit": swiglu_limit, "quantize_hidden": quantize_hidden, "cuda": cuda}
    hidden = backend.triton_call(
        functools.partial(_activate_kernel, dims=dims, inner=config.inner, order=down.order, activation=activation),
        jax.ShapeDtypeStruct((pairs, width), jnp.bfloat16),
        grid=(width // dims, -(-pairs // ACTIVATED_ROWS)),
        num_warps=4,
        num_stages=1,
        interpret=interpret,
        name="grouped_experts_activate",
    )(*products, routing)
    return product(down, hidden, pair)

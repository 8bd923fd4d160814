"""The routed experts for GPUs: one kernel for gate, up and activation, one for down, widening weights in registers.

A block is a few rows of one expert: (row, expert) pairs are put in the order of experts and cut into blocks. Weights
are widened one code of their 16-bit words after the other, so x and the hidden values are in the order of `by_code`.
Very few pairs are multiplied by `triton_pairs`, very many by `triton_many`.
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
from pallas_kernels.grouped_experts import triton_blocks, triton_pairs
from pallas_kernels.grouped_experts.arrangement import BLOCK_DIMS, CODES, place_by_code, words_of
from pallas_kernels.grouped_experts.blocks import Blocks, blocks_of
from pallas_kernels.grouped_experts.triton_many import ManyConfig, expert_outputs
from pallas_kernels.grouped_experts.triton_pairs import MOST_PAIRS, PairConfig
from pallas_kernels.grouped_experts.triton_parts import (
    activated,
    call_tiles,
    load_rows,
    operand_of,
    own_outputs,
    present_outputs,
    store_rows,
)
from pallas_kernels.grouped_experts.types import ExpertWeights, Order
from pallas_kernels.grouped_experts.widening import first_group, groups_of_step, widen_e2m1
from pallas_kernels.triton_widening import packed_instructions

Array = jax.Array

LEAST_MANY = {"rocm": 64, "cuda": 17}
"""Rows an expert from which on they are multiplied by `triton_many`."""
LEAST_INNER = 16
"""The least inner dims of a product on the tensor cores."""


@dataclasses.dataclass(frozen=True)
class Tile:
    """How one of the two products is cut.

    Attributes:
      outputs: outputs of one program (for the first kernel: of each of its two matrices), a multiple of 32.
      inner: words of one step, a multiple of `LEAST_INNER` that divides the words of the inner width.
      num_warps, num_stages: of one program.
    """

    outputs: int
    inner: int
    num_warps: int
    num_stages: int


@dataclasses.dataclass(frozen=True)
class Config:
    """rows: rows of a block, at least 8 on NVIDIA GPUs and 16 on AMD ones; hidden, down: the two products."""

    rows: int
    hidden: Tile
    down: Tile


AnyConfig = Config | ManyConfig | PairConfig


def config_for(pairs: int, experts: int, width: int, hidden: int, generation: str) -> AnyConfig:
    """The configuration for `pairs` (row, expert) pairs over `experts` experts of [hidden, width]."""
    if pairs <= MOST_PAIRS:
        return triton_pairs.config_for(width, hidden, generation)
    rocm = generation == "rocm"
    mean, least = -(-pairs // experts), 32 * (hidden // 32)

    def tile(outputs: int, dims: int, most: int, warps: int, stages: int = 3) -> Tile:
        inner = LEAST_INNER
        while inner < most and dims // CODES % (2 * inner) == 0:
            inner *= 2
        return Tile(outputs, inner, warps, 1 if rocm else stages)

    if mean >= LEAST_MANY["rocm" if rocm else "cuda"]:
        return many_config(mean, width, hidden, generation)
    # A block should hold all rows of nearly every expert: one that takes a second block is read twice.
    fewest, most = (16, 64) if rocm else (8, 16)
    rows = min(most, max(fewest, pl.next_power_of_2(2 * mean)))
    if rows > 16:
        return Config(rows, tile(min(64, least), width, 64, 4), tile(64, hidden, 64, 4))
    # Measured on an H200 at 1, 8, 32, 64, 128 and 256 rows: products of 32 outputs and two warps wait for no warp
    # group, and blocks of eight rows leave room for more of them on a multiprocessor.
    if rows == 8:
        return Config(rows, tile(32, width, 64, 2, stages=4), tile(32, hidden, 64, 2))
    return Config(rows, tile(32, width, 64, 2), tile(64, hidden, 64, 2))


def many_config(mean: int, width: int, hidden: int, generation: str) -> ManyConfig:
    """The configuration for `mean` rows an expert."""
    inner = 2 * LEAST_INNER if width % BLOCK_DIMS == 0 == hidden % BLOCK_DIMS else LEAST_INNER
    if generation == "rocm":
        return ManyConfig(rows=64, least=64, outputs=64, inner=LEAST_INNER, num_warps=4, num_stages=1)
    # Measured on an H200 at 32, 64, 256 and 512 rows an expert.
    if mean >= 192:
        return ManyConfig(rows=128, least=32, outputs=256, inner=inner, num_warps=8, num_stages=3)
    return ManyConfig(rows=64 if mean >= 32 else 32, least=16, outputs=128, inner=inner, num_warps=4, num_stages=3)


def unsupported(x: Array, w1: object, w2: object) -> str | None:
    """Why the kernel cannot run on these arrays, or None."""
    if not isinstance(w1, ExpertWeights) or not isinstance(w2, ExpertWeights):
        return unsupported_sizes(x.dtype) or "it reads packed weights, not dequantized ones"
    return unsupported_sizes(x.dtype, w1.inputs, w2.inputs)


def unsupported_sizes(dtype: jnp.dtype, *inputs: int) -> str | None:
    """Why the kernel cannot run on activations of `dtype` and packed weights of these inner widths, or None."""
    if dtype != jnp.bfloat16:
        return f"it computes in bfloat16, not {dtype.name}"
    for dims in inputs:
        if dims % (CODES * LEAST_INNER):
            return f"{dims} inner dims are not a multiple of {CODES * LEAST_INNER}"
    return None


def _product(
    weights: list[tuple],
    expert: Array,
    output: Array,
    x_ref: object,
    x_row: Array,
    live: Array,
    tile: Tile,
    order: Order,
    cuda: bool,
) -> list[Array]:
    """Sums [outputs, rows] of every (words, scales) ref pair with rows `x_row` of x, in the order of `by_code`.

    live: which rows are wanted; order: of the codes of all of them.
    """
    width = weights[0][0].shape[-1]

    def step(index: Array, totals: tuple) -> tuple:
        first = index * tile.inner
        parts = [load_rows(x_ref, x_row, code * width + first, tile.inner, live=live).T for code in range(CODES)]
        results = []
        for total, (words_ref, scales_ref) in zip(totals, weights, strict=True):
            words = load_rows(words_ref, output, first, tile.inner, expert)
            groups = groups_of_step(tile.inner, order)
            scales = load_rows(scales_ref, output, first_group(first, order), groups, expert)
            for values, part in zip(widen_e2m1(words, scales, order, cuda), parts, strict=True):
                total = total + jnp.dot(values, part, preferred_element_type=jnp.float32)
            results.append(total)
        return tuple(results)

    start = tuple(jnp.zeros((tile.outputs, x_row.shape[0]), jnp.float32) for _ in weights)
    return list(lax.fori_loop(0, width // tile.inner, step, start))


def _hidden_kernel(
    x_ref: object,
    weights_ref: object,
    expert_ref: object,
    first_ref: object,
    end_ref: object,
    pair_ref: object,
    gate_words: object,
    gate_scales: object,
    up_words: object,
    up_scales: object,
    out_ref: object,
    *,
    config: Config,
    chosen: int,
    order: Order,
    next_order: Order,
    activation: dict,
) -> None:
    """A block's rows for a tile of outputs: hidden values in the order of `by_code`.

    order, next_order: of the codes of these weights and of those that read the hidden values.
    """
    triton, tile = backend.triton(), config.hidden
    experts, outputs, _ = gate_words.shape
    block, output = own_outputs(tile.outputs, outputs)
    expert = triton.load(expert_ref.at[block])

    @pl.when(expert < experts)
    def _() -> None:
        position = triton.load(first_ref.at[block]) + jnp.arange(config.rows, dtype=jnp.int32)
        live = position < triton.load(end_ref.at[block])
        pair = triton.load(pair_ref.at[jnp.where(live, position, 0)])
        near = jnp.minimum(output, outputs - 1)
        refs = [(gate_words, gate_scales), (up_words, up_scales)]
        sums = _product(refs, expert, near, x_ref, lax.div(pair, chosen), live, tile, order, activation["cuda"])
        hidden = activated(*sums, triton.load(weights_ref.at[pair])[None, :], **activation)
        store_rows(
            out_ref,
            hidden,
            position,
            live,
            place_by_code(output, outputs, next_order),
            present_outputs(output, outputs, tile.outputs),
        )


def _down_kernel(
    hidden_ref: object,
    expert_ref: object,
    first_ref: object,
    end_ref: object,
    pair_ref: object,
    words_ref: object,
    scales_ref: object,
    out_ref: object,
    *,
    config: Config,
    order: Order,
    cuda: bool,
) -> None:
    """Expert outputs of one block for one tile of outputs, at the pairs' own places."""
    triton, tile = backend.triton(), config.down
    experts, outputs, _ = words_ref.shape
    block, output = own_outputs(tile.outputs, outputs)
    expert = triton.load(expert_ref.at[block])

    @pl.when(expert < experts)
    def _() -> None:
        position = triton.load(first_ref.at[block]) + jnp.arange(config.rows, dtype=jnp.int32)
        live = position < triton.load(end_ref.at[block])
        position = jnp.where(live, position, triton.load(first_ref.at[block]))
        pair = triton.load(pair_ref.at[position])
        near = jnp.minimum(output, outputs - 1)
        [total] = _product([(words_ref, scales_ref)], expert, near, hidden_ref, position, live, tile, order, cuda)
        store_rows(
            out_ref, total.astype(out_ref.dtype), pair, live, output, present_outputs(output, outputs, tile.outputs)
        )


@backend.traced_once
def grouped_experts(
    x: Array,
    expert_ids: Array,
    weights: Array,
    w1: ExpertWeights,
    w3: ExpertWeights,
    w2: ExpertWeights,
    *,
    swiglu_limit: float,
    quantize_hidden: bool,
    valid: Array,
    layers: int = 1,
    layer: Array | int = 0,
    codes: Array | None = None,
    config: AnyConfig | None = None,
    interpret: bool = False,
) -> Array:
    """See `pallas_kernels.grouped_experts`; `unsupported` was asked, weights are [layers * E, ...]."""
    rows, chosen = expert_ids.shape
    total, hidden_width, _ = w1.packed.shape
    pairs, width, experts = rows * chosen, x.shape[1], total // layers
    if pairs == 0:
        return jnp.zeros((rows, width), jnp.float32)
    config = config or config_for(pairs, experts, width, hidden_width, backend.current_target().generation)
    cuda = packed_instructions() and not interpret
    served = valid[:, None] & (expert_ids >= 0) & (expert_ids < experts)
    options = {
        "swiglu_limit": swiglu_limit,
        "quantize_hidden": quantize_hidden,
        "cuda": cuda,
        "interpret": interpret,
    }
    matrices, routing = (w1, w3, w2), weights.reshape(-1)
    if isinstance(config, PairConfig):
        operands = (x, routing, expert_ids, valid, matrices)
        place = {"experts": experts, "layer": layer}
        outputs = triton_pairs.expert_outputs(*operands, codes=codes, config=config, **place, **options)
        return _combine(outputs.reshape(rows, chosen, width), served)
    if triton_blocks.pays(pairs, experts):
        lists = (expert_ids, valid, layer, experts, total, config.rows)
        blocks = triton_blocks.blocks_of_layer(*lists, interpret=interpret)
    else:
        ids = jnp.where(served, expert_ids + layer * experts, total)
        blocks = blocks_of(ids.reshape(-1), total, config.rows)
    operands = (x, routing, blocks, matrices)
    if isinstance(config, ManyConfig):
        outputs = expert_outputs(*operands, chosen=chosen, config=config, **options)
    else:
        outputs = _expert_outputs(*operands, codes=codes, chosen=chosen, config=config, **options)
    return _combine(outputs.reshape(rows, chosen, width), served)


def _expert_outputs(
    x: Array,
    routing: Array,
    blocks: Blocks,
    weights: Sequence[ExpertWeights],
    *,
    codes: Array | None,
    chosen: int,
    config: Config,
    swiglu_limit: float,
    quantize_hidden: bool,
    cuda: bool,
    interpret: bool,
) -> Array:
    """As `triton_many.expert_outputs`, for few rows.

    codes: `operand_of` x in the order of the gate's weights where that exists already.
    """
    gate, up, down = weights
    hidden_width, pairs = gate.packed.shape[1], blocks.pair.shape[0]
    lists = (blocks.expert, blocks.first, blocks.end, blocks.pair)

    def call(kernel: object, tile: Tile, outputs: int, name: str, *operands: Array) -> Array:
        count = blocks.expert.shape[0]
        return call_tiles(kernel, tile, count, (pairs, outputs), interpret=interpret, name=name)(*operands)

    activation = {"swiglu_limit": swiglu_limit, "quantize_hidden": quantize_hidden, "cuda": cuda}
    hidden = call(
        functools.partial(
            _hidden_kernel,
            config=config,
            chosen=chosen,
            order=gate.order,
            next_order=down.order,
            activation=activation,
        ),
        config.hidden,
        hidden_width,
        "grouped_experts_hidden",
        operand_of(x, gate.order, cuda) if codes is None else codes,
        routing,
        *lists,
        words_of(gate.packed),
        gate.scales,
        words_of(up.packed),
        up.scales,
    )
    return call(
        functools.partial(_down_kernel, config=config, order=down.order, cuda=cuda),
        config.down,
        x.shape[1],
        "grouped_experts_down",
        hidden,
        *lists,
        words_of(down.packed),
        down.scales,
    )


def _combine(outputs: Array, served: Array) -> Array:
    """Sums outputs [N, k, D] in float32, one column of experts after the other; those not served count as zero."""
    total = jnp.zeros((outputs.shape[0], outputs.shape[2]), jnp.float32)
    for column in range(outputs.shape[1]):
        total += jnp.where(served[:, column, None], outputs[:, column].astype(jnp.float32), 0)
    return total

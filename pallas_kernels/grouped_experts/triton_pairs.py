"""The routed experts of very few (row, expert) pairs on GPUs: every pair is a block of its own, and nothing is ordered.

A pair's product has one row where the tensor cores take eight or more. The others hold the same row's other inner dims:
column c of the operand is part c of the row, the weights are read as rows (part, output), and the wanted sums are those
in which both parts are the same. So a step is cut among as many warps as weights of few outputs can feed, without a
second launch that adds parts up.
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
from pallas_kernels.grouped_experts.arrangement import BLOCK_WORDS, CODES, place_by_code, words_of
from pallas_kernels.grouped_experts.triton_parts import (
    activated,
    call_tiles,
    load_rows,
    operand_of,
    own_outputs,
    present_outputs,
)
from pallas_kernels.grouped_experts.types import ExpertWeights, Order
from pallas_kernels.grouped_experts.widening import first_group, groups_of_step, widen_e2m1

Array = jax.Array

MOST_PAIRS = 12
"""(row, expert) pairs up to which ordering them would cost more than reading an expert twice."""


@dataclasses.dataclass(frozen=True)
class PairTile:
    """How one of the two products is cut.

    Attributes:
      outputs: outputs of one program (for the first kernel: of each of its two matrices), a multiple of 32.
      parts: parts of the inner width of one program, a power of two up to `columns`.
      inner: words of one step of a part; divides the words of a part.
      num_warps, num_stages: of one program.
    """

    outputs: int
    parts: int
    inner: int
    num_warps: int
    num_stages: int


@dataclasses.dataclass(frozen=True)
class PairConfig:
    """columns: of a product, at least 8 on NVIDIA GPUs and 16 on AMD ones; hidden, down: tiles."""

    columns: int
    hidden: PairTile
    down: PairTile


def config_for(width: int, hidden: int, generation: str) -> PairConfig:
    """The configuration for experts of [hidden, width]."""
    rocm = generation == "rocm"

    def tile(dims: int, parts: int) -> PairTile:
        words, inner = dims // CODES, 16
        # A part is whole blocks of arranged words.
        parts = parts if words % (parts * BLOCK_WORDS) == 0 else 1
        while inner < 64 and words // parts % (2 * inner) == 0:
            inner *= 2
        return PairTile(32, parts, inner, 2 * parts, 1 if rocm else 3)

    return PairConfig(16 if rocm else 8, tile(width, 2), tile(hidden, 1))


def _sums(
    weights: Sequence[tuple[object, object]],
    expert: Array,
    output: Array,
    x_ref: object,
    row: Array,
    tile: PairTile,
    columns: int,
    order: Order,
    cuda: bool,
) -> list[Array]:
    """Sums [outputs] float32 of every (words, scales) ref pair with row `row` of x, which is in the order of `by_code`.

    Outputs past the last one give its sums.
    """
    _, outputs, width = weights[0][0].shape
    output = jnp.minimum(output, outputs - 1)
    of_part = width // tile.parts
    column = jnp.arange(columns, dtype=jnp.int32)
    here = column < tile.parts
    x_row = jnp.broadcast_to(row, (columns,))
    x_first = jnp.where(here, column, 0) * of_part
    part = lax.div(jnp.arange(tile.parts * tile.outputs, dtype=jnp.int32), tile.outputs)
    rows = jnp.broadcast_to(output[None, :], (tile.parts, tile.outputs)).reshape(tile.parts * tile.outputs)

    def step(index: Array, totals: tuple) -> tuple:
        first = index * tile.inner
        operands = [
            load_rows(x_ref, x_row, code * width + first + x_first, tile.inner, live=here).T for code in range(CODES)
        ]
        results = []
        for total, (words_ref, scales_ref) in zip(totals, weights, strict=True):
            words = load_rows(words_ref, rows, part * of_part + first, tile.inner, expert)
            groups = groups_of_step(tile.inner, order)
            scales = load_rows(scales_ref, rows, first_group(part * of_part + first, order), groups, expert)
            for values, operand in zip(widen_e2m1(words, scales, order, cuda), operands, strict=True):
                total = total + jnp.dot(values, operand, preferred_element_type=jnp.float32)
            results.append(total)
        return tuple(results)

    start = tuple(jnp.zeros((tile.parts * tile.outputs, columns), jnp.float32) for _ in weights)
    totals = lax.fori_loop(0, of_part // tile.inner, step, start)
    same = part[:, None] == column[None, :]
    wanted = [jnp.sum(jnp.where(same, total, 0.0), axis=1) for total in totals]
    return [jnp.sum(total.reshape(tile.parts, tile.outputs), axis=0) for total in wanted]


def _expert_of(pair: Array, ids_ref: object, valid_ref: object, layer_ref: object, chosen: int, experts: int) -> tuple:
    """The pair's expert among those of all layers, and whether it is served."""
    triton = backend.triton()
    name = triton.load(ids_ref.at[pair])
    served = triton.load(valid_ref.at[lax.div(pair, chosen)]) & (name >= 0) & (name < experts)
    return name + layer_ref[0] * experts, served


def _store(ref: object, pair: Array, place: Array, present: Array | None, values: Array) -> None:
    """ref[pair, place] = values where present; what is not stored gets a place past the end."""
    if present is not None:
        place = jnp.where(present, place, ref.shape[1])
    backend.triton().store(ref.at[pair, place], values, mask=present)


def _hidden_kernel(
    x_ref: object,
    routing_ref: object,
    ids_ref: object,
    valid_ref: object,
    layer_ref: object,
    gate_words: object,
    gate_scales: object,
    up_words: object,
    up_scales: object,
    out_ref: object,
    *,
    config: PairConfig,
    chosen: int,
    experts: int,
    order: Order,
    next_order: Order,
    activation: dict,
) -> None:
    """A pair's tile of hidden values, placed as `by_code` has it for the weights that read them, of `next_order`."""
    tile, outputs = config.hidden, gate_words.shape[1]
    pair, output = own_outputs(tile.outputs, outputs)
    expert, served = _expert_of(pair, ids_ref, valid_ref, layer_ref, chosen, experts)

    @pl.when(served)
    def _() -> None:
        refs = [(gate_words, gate_scales), (up_words, up_scales)]
        row = lax.div(pair, chosen)
        # Asked for here: nothing is read ahead of the barriers of the products.
        routing = backend.triton().load(routing_ref.at[pair])
        gate, up = _sums(refs, expert, output, x_ref, row, tile, config.columns, order, activation["cuda"])
        hidden = activated(gate[:, None], up[:, None], routing, **activation)
        place = place_by_code(output, outputs, next_order)
        _store(out_ref, pair, place, present_outputs(output, outputs, tile.outputs), hidden.reshape(tile.outputs))


def _down_kernel(
    hidden_ref: object,
    ids_ref: object,
    valid_ref: object,
    layer_ref: object,
    words_ref: object,
    scales_ref: object,
    out_ref: object,
    *,
    config: PairConfig,
    chosen: int,
    experts: int,
    order: Order,
    cuda: bool,
) -> None:
    """A pair's tile of outputs."""
    tile, outputs = config.down, words_ref.shape[1]
    pair, output = own_outputs(tile.outputs, outputs)
    expert, served = _expert_of(pair, ids_ref, valid_ref, layer_ref, chosen, experts)

    @pl.when(served)
    def _() -> None:
        [total] = _sums([(words_ref, scales_ref)], expert, output, hidden_ref, pair, tile, config.columns, order, cuda)
        _store(out_ref, pair, output, present_outputs(output, outputs, tile.outputs), total.astype(out_ref.dtype))


def expert_outputs(
    x: Array,
    routing: Array,
    expert_ids: Array,
    valid: Array,
    weights: Sequence[ExpertWeights],
    *,
    experts: int,
    layer: Array | int,
    codes: Array | None,
    config: PairConfig,
    swiglu_limit: float,
    quantize_hidden: bool,
    cuda: bool,
    interpret: bool,
) -> Array:
    """Expert outputs [N k, D] bfloat16 of every pair; those of pairs that are not served hold anything.

    Args:
      x: [N, D] bfloat16.
      routing: [N k] float32.
      expert_ids: [N, k] int32, of this layer; ids outside 0 .. experts - 1 are not served.
      valid: [N] bool.
      weights: gate, up and down, [layers * experts, ...].
      experts: of a layer.
      layer: whose experts they are.
      codes: `operand_of` x in the order of the gate's weights where that exists already.
      config: of both products.
      swiglu_limit, quantize_hidden: see `pallas_kernels.grouped_experts`.
      cuda: widen by CUDA's instructions.
      interpret: run as plain JAX operations.
    """
    gate, up, down = weights
    chosen, pairs, hidden_width = expert_ids.shape[1], expert_ids.size, gate.packed.shape[1]
    chosen_experts = (expert_ids.reshape(-1), valid, backend.int_operand(layer))
    known = {"config": config, "chosen": chosen, "experts": experts}

    def call(kernel: object, tile: PairTile, outputs: int, name: str, *operands: Array) -> Array:
        return call_tiles(kernel, tile, pairs, (pairs, outputs), interpret=interpret, name=name)(*operands)

    activation = {"swiglu_limit": swiglu_limit, "quantize_hidden": quantize_hidden, "cuda": cuda}
    hidden_kernel = functools.partial(
        _hidden_kernel, order=gate.order, next_order=down.order, activation=activation, **known
    )
    hidden = call(
        hidden_kernel,
        config.hidden,
        hidden_width,
        "pair_experts_hidden",
        operand_of(x, gate.order, cuda) if codes is None else codes,
        routing,
        *chosen_experts,
        words_of(gate.packed),
        gate.scales,
        words_of(up.packed),
        up.scales,
    )
    return call(
        functools.partial(_down_kernel, order=down.order, cuda=cuda, **known),
        config.down,
        x.shape[1],
        "pair_experts_down",
        hidden,
        *chosen_experts,
        words_of(down.packed),
        down.scales,
    )

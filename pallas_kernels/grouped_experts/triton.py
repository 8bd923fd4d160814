"""The routed experts for GPUs: one kernel for gate, up and activation, one for down, widening weights in registers.

A block is a few rows of one expert: (row, expert) pairs are put in the order of experts and cut into blocks. With very
few rows every pair is a block of its own. Weights are widened one code of their 16-bit words after the other, so x and
the hidden values are kept in the order of `by_code`.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import backend
from pallas_kernels.arithmetic import fake_q8_group
from pallas_kernels.grouped_experts.types import ExpertWeights
from pallas_kernels.grouped_experts.widening import CODES, GROUP_WORDS, by_code, widen_e2m1, words_of
from pallas_kernels.triton_widening import packed_instructions

Array = jax.Array

MOST_UNSORTED = 12
"""(row, expert) pairs up to which every pair is a block: ordering them would cost more than reading an expert twice."""
LEAST_INNER = 16
"""The least inner dims of a product on the tensor cores."""
MOST_COMPARED = 1024
"""Pairs up to which they are ordered by comparing all with all, a few fused kernels where a sort is many."""


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
    """rows: rows of a block, at least 16; hidden, down: the two products."""

    rows: int
    hidden: Tile
    down: Tile


def config_for(pairs: int, experts: int, width: int, hidden: int, generation: str) -> Config:
    """The configuration for `pairs` (row, expert) pairs over `experts` experts of [hidden, width]."""
    stages = 1 if generation == "rocm" else 3

    def inner(dims: int, most: int) -> int:
        size = LEAST_INNER
        while size < most and dims // CODES % (2 * size) == 0:
            size *= 2
        return size

    mean = -(-pairs // experts)
    if mean >= 64:
        rows = 64 if generation == "rocm" else 128
        warps, outputs, most = (4, 64, 16) if generation == "rocm" else (8, 128, 16)
    else:
        rows = 16 if pairs <= MOST_UNSORTED else min(64, max(16, 1 << (mean - 1).bit_length()))
        warps, outputs, most = 4, 64, 32
    return Config(
        rows,
        Tile(min(outputs, 32 * (hidden // 32)), inner(width, most), warps, stages),
        Tile(outputs, inner(hidden, most), warps, stages),
    )


def unsupported(x: Array, w1: object, w2: object) -> str | None:
    """Why the kernel cannot run on these arrays, or None."""
    if x.dtype != jnp.bfloat16:
        return f"it computes in bfloat16, not {x.dtype.name}"
    if not isinstance(w1, ExpertWeights) or not isinstance(w2, ExpertWeights):
        return "it reads packed weights, not dequantized ones"
    for part in (w1.packed, w2.packed):
        inputs = 2 * part.shape[-1]
        if inputs % (CODES * LEAST_INNER):
            return f"{inputs} inner dims are not a multiple of {CODES * LEAST_INNER}"
    return None


@dataclasses.dataclass(frozen=True)
class _Blocks:
    """Which rows of which expert every block holds.

    Attributes:
      expert: [B] int32; the number of experts for a block that holds nothing.
      first, end: [B] int32, sorted positions of the block's first row and of the end of its expert's rows.
      pair: [P] int32, the (row, expert) pair at each sorted position.
    """

    expert: Array
    first: Array
    end: Array
    pair: Array


def _blocks(ids: Array, experts: int, rows: int) -> _Blocks:
    """Blocks of the pairs ids [P], where pairs that are not served have the id `experts`."""
    pairs = ids.shape[0]
    position = jnp.arange(pairs, dtype=jnp.int32)
    if pairs <= MOST_UNSORTED:
        return _Blocks(ids, position, position + 1, position)
    expert = jnp.arange(experts, dtype=jnp.int32)
    if pairs <= MOST_COMPARED:
        earlier = (ids[None, :] < ids[:, None]) | (
            (ids[None, :] == ids[:, None]) & (position[None, :] < position[:, None])
        )
        place = jnp.sum(earlier, axis=1, dtype=jnp.int32)
        pair = jnp.sum(jnp.where(place[None, :] == position[:, None], position[None, :], 0), axis=1, dtype=jnp.int32)
        ends = jnp.sum(ids[None, :] <= expert[:, None], axis=1, dtype=jnp.int32)
        starts = jnp.sum(ids[None, :] < expert[:, None], axis=1, dtype=jnp.int32)
    else:
        pair = jnp.argsort(ids, stable=True).astype(jnp.int32)
        sizes = jnp.zeros(experts, jnp.int32).at[ids].add(1, mode="drop")
        ends = jnp.cumsum(sizes)
        starts = ends - sizes
    counts = -(-(ends - starts) // rows)
    until = jnp.sum(jnp.where(expert[None, :] <= expert[:, None], counts[None, :], 0), axis=1, dtype=jnp.int32)
    index = jnp.arange(min(experts, pairs) + pairs // rows, dtype=jnp.int32)
    owner = jnp.sum(until[None, :] <= index[:, None], axis=1, dtype=jnp.int32)
    near = jnp.minimum(owner, experts - 1)
    return _Blocks(owner, starts[near] + (index - until[near] + counts[near]) * rows, ends[near], pair)


def _load(ref: object, index: Array, first: Array, count: int, leading: Array | None = None) -> Array:
    """ref[(leading,) index, first : first + count] as [len(index), count]."""
    shape = (index.shape[0], count)
    column = first + jnp.arange(count, dtype=jnp.int32)
    place = [jnp.broadcast_to(index[:, None], shape), jnp.broadcast_to(column[None, :], shape)]
    if leading is not None:
        place.insert(0, jnp.broadcast_to(leading, shape))
    return backend.triton().load(ref.at[tuple(place)])


def _product(
    weights: list[tuple], expert: Array, output: Array, x_ref: object, x_row: Array, tile: Tile, cuda: bool
) -> list[Array]:
    """Sums [outputs, rows] of every (words, scales) ref pair with rows `x_row` of x, in the order of `by_code`."""
    width = weights[0][0].shape[-1]

    def step(index: Array, totals: tuple) -> tuple:
        first = index * tile.inner
        parts = [_load(x_ref, x_row, code * width + first, tile.inner).T for code in range(CODES)]
        results = []
        for total, (words_ref, scales_ref) in zip(totals, weights, strict=True):
            groups = tile.inner // GROUP_WORDS
            words = _load(words_ref, output, first, tile.inner, expert)
            scales = _load(scales_ref, output, index * groups, groups, expert)
            for values, part in zip(widen_e2m1(words, scales, cuda), parts, strict=True):
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
    hidden_ref: object,
    *,
    config: Config,
    chosen: int,
    swiglu_limit: float,
    quantize_hidden: bool,
    cuda: bool,
) -> None:
    """Hidden values of one block for one tile of outputs, in the order of `by_code`."""
    triton, tile = backend.triton(), config.hidden
    experts, outputs, _ = gate_words.shape
    tiles = -(-outputs // tile.outputs)
    program = pl.program_id(0)
    block = program // tiles
    output = (program % tiles) * tile.outputs + jnp.arange(tile.outputs, dtype=jnp.int32)
    expert = triton.load(expert_ref.at[block])

    @pl.when(expert < experts)
    def _() -> None:
        position = triton.load(first_ref.at[block]) + jnp.arange(config.rows, dtype=jnp.int32)
        live = position < triton.load(end_ref.at[block])
        pair = triton.load(pair_ref.at[jnp.where(live, position, 0)])
        routing = triton.load(weights_ref.at[pair])
        near = jnp.minimum(output, outputs - 1)
        refs = [(gate_words, gate_scales), (up_words, up_scales)]
        gate, up = _product(refs, expert, near, x_ref, lax.div(pair, chosen), tile, cuda)
        gate, up = (part.astype(jnp.bfloat16).astype(jnp.float32) for part in (gate, up))
        if swiglu_limit > 0:
            gate = jnp.minimum(gate, swiglu_limit)
            up = jnp.minimum(jnp.maximum(up, -swiglu_limit), swiglu_limit)
        hidden = routing[None, :] * (gate / (1.0 + jnp.exp(-gate)) * up)
        hidden = hidden.astype(jnp.bfloat16)
        if quantize_hidden:
            groups = hidden.reshape(tile.outputs // 32, 32, config.rows)
            hidden = fake_q8_group(groups, axis=1).reshape(tile.outputs, config.rows)
        column = lax.rem(output, CODES) * (outputs // CODES) + lax.div(output, CODES)
        _store(hidden_ref, hidden, position, live, column, output < outputs)


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
    cuda: bool,
) -> None:
    """Expert outputs of one block for one tile of outputs, at the pairs' own places."""
    triton, tile = backend.triton(), config.down
    experts, outputs, _ = words_ref.shape
    tiles = -(-outputs // tile.outputs)
    program = pl.program_id(0)
    block = program // tiles
    output = (program % tiles) * tile.outputs + jnp.arange(tile.outputs, dtype=jnp.int32)
    expert = triton.load(expert_ref.at[block])

    @pl.when(expert < experts)
    def _() -> None:
        position = triton.load(first_ref.at[block]) + jnp.arange(config.rows, dtype=jnp.int32)
        live = position < triton.load(end_ref.at[block])
        position = jnp.where(live, position, triton.load(first_ref.at[block]))
        pair = triton.load(pair_ref.at[position])
        near = jnp.minimum(output, outputs - 1)
        [total] = _product([(words_ref, scales_ref)], expert, near, hidden_ref, position, tile, cuda)
        _store(out_ref, total.astype(jnp.bfloat16), pair, live, output, output < outputs)


def _store(ref: object, values: Array, row: Array, live: Array, column: Array, present: Array) -> None:
    """ref[row, column] = values [columns, rows], turned so that columns are contiguous.

    Lanes that are not stored get an index past the end: interpret mode writes their old value there, to nothing.
    """
    shape = (row.shape[0], column.shape[0])
    stored = jnp.broadcast_to(live[:, None], shape) & jnp.broadcast_to(present[None, :], shape)
    place = jnp.where(stored, jnp.broadcast_to(row[:, None], shape), ref.shape[0])
    backend.triton().store(ref.at[place, jnp.broadcast_to(column[None, :], shape)], values.T, mask=stored)


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
    codes: Array | None = None,
    config: Config | None = None,
    interpret: bool = False,
) -> Array:
    """See `pallas_kernels.grouped_experts`; `unsupported` was asked, chosen experts lie in one of `layers` parts."""
    rows, chosen = expert_ids.shape
    experts, hidden_width, _ = w1.packed.shape
    pairs, width = rows * chosen, x.shape[1]
    if pairs == 0:
        return jnp.zeros((rows, width), jnp.float32)
    config = config or config_for(pairs, experts // layers, width, hidden_width, backend.current_target().generation)
    cuda = packed_instructions() and not interpret
    served = valid[:, None] & (expert_ids >= 0) & (expert_ids < experts)
    ids = jnp.where(served, expert_ids, experts)
    blocks = _blocks(ids.reshape(-1), experts, config.rows)
    lists = (blocks.expert, blocks.first, blocks.end, blocks.pair)
    count = blocks.expert.shape[0]

    def call(kernel: object, tile: Tile, outputs: int, name: str, *operands: Array) -> Array:
        return backend.triton_call(
            kernel,
            jax.ShapeDtypeStruct((pairs, outputs), jnp.bfloat16),
            grid=(count * -(-outputs // tile.outputs),),
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            interpret=interpret,
            name=name,
        )(*operands)

    hidden = call(
        functools.partial(
            _hidden_kernel,
            config=config,
            chosen=chosen,
            swiglu_limit=swiglu_limit,
            quantize_hidden=quantize_hidden,
            cuda=cuda,
        ),
        config.hidden,
        hidden_width,
        "grouped_experts_hidden",
        by_code(x) if codes is None else codes,
        weights.reshape(-1),
        *lists,
        words_of(w1.packed),
        w1.scales,
        words_of(w3.packed),
        w3.scales,
    )
    outputs = call(
        functools.partial(_down_kernel, config=config, cuda=cuda),
        config.down,
        width,
        "grouped_experts_down",
        hidden,
        *lists,
        words_of(w2.packed),
        w2.scales,
    )
    return _combine(outputs.reshape(rows, chosen, width), ids, served)


def _combine(outputs: Array, ids: Array, served: Array) -> Array:
    """Sums outputs [N, k, D] in float32 in ascending expert id; pairs that are not served count as zero.

    Ranks come from comparisons, which join the sum in one kernel where a sort would be several.
    """
    chosen = ids.shape[1]
    column = jnp.arange(chosen)
    before = (ids[:, None, :] < ids[:, :, None]) | (
        (ids[:, None, :] == ids[:, :, None]) & (column[None, None, :] < column[None, :, None])
    )
    rank = jnp.sum(before, axis=2)
    total = jnp.zeros((outputs.shape[0], outputs.shape[2]), jnp.float32)
    for place in range(chosen):
        source = jnp.sum(jnp.where(rank == place, column, 0), axis=1)
        term = jnp.take_along_axis(outputs, source[:, None, None], axis=1)[:, 0].astype(jnp.float32)
        kept = jnp.take_along_axis(served, source[:, None], axis=1)
        total += jnp.where(kept, term, 0)
    return total

"""Sparse attention of up to 128 query rows that read every row from the pools, for NVIDIA GPUs.

A program scores 64 heads with all dims of a tile of rows and sums one of `cuts` parts of the dims, so that 128 threads
hold the sums without spilling and their warp group multiplies nothing twice. What decides the time is latency: which
row of the plane an entry is, is looked up once and written to scratch, and where the pipeline is deep enough it is
read a tile ahead, so that the copies of rows into shared memory wait for nothing. Few query rows cut their list, too;
the sums are then joined by the kernel of `joining`, as those of `triton`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import backend
from pallas_kernels.arithmetic import by_residue, in_words
from pallas_kernels.sparse_attention import row_widening
from pallas_kernels.sparse_attention.row_math import LOG2_E, rotated, row_of, shares
from pallas_kernels.sparse_attention.xla import SCORE_FLOOR
from pallas_kernels.triton_widening import packed_instructions

Array = jax.Array

HEADS = 64
"""Heads of a program: the rows of a warp group's product."""

MOST_ROWS = 128
"""Query rows up to which these kernels were timed."""
PROGRAMS = 132
"""Programs that run at once: one on a multiprocessor."""


@dataclasses.dataclass(frozen=True)
class Config:
    """How the work is cut.

    Attributes:
      keys: rows of one tile.
      cuts: programs that share a list and each sum a part of the dims.
      splits: pieces of the list.
      num_warps, num_stages: of a program. From three stages on, row numbers are read a tile ahead.
    """

    keys: int
    cuts: int
    splits: int
    num_warps: int
    num_stages: int


def config_for(rows: int, heads: int, listed: int, packed: bool) -> Config | None:
    """What was timed to be fastest, or None where the kernel of `triton` is; shapes only, no contents.

    Args:
      rows, heads: of the queries.
      listed: most keys of a row.
      packed: rows are stored as FP4 and FP8.
    """
    blocks = rows * (heads // HEADS)
    if rows > MOST_ROWS or blocks < (45 if packed else 5):
        return None
    if 2 * blocks > PROGRAMS:
        return Config(keys=64, cuts=1, splits=1, num_warps=8, num_stages=2)
    tiles = -(-listed // 64)
    share = -(-tiles // min(tiles, PROGRAMS // (2 * blocks)))
    splits = -(-tiles // share)
    if packed:
        return Config(keys=64, cuts=2, splits=splits, num_warps=4, num_stages=3)
    if splits == 1:
        return Config(keys=32, cuts=2, splits=1, num_warps=4, num_stages=3)
    return Config(keys=64, cuts=2, splits=splits, num_warps=4, num_stages=2)


def fits(
    query: Array, selected: Array, main: Array | None, ring: Array, in_forward: Array, window: int, packed: bool
) -> bool:
    """Whether the kernel can run on these arrays, of which `triton.unsupported` found nothing to say.

    packed: rows are stored as FP4 and FP8; else none is.
    """
    words = not packed or (ring.shape[2] % 4 == 0 and (not selected.shape[1] or main.shape[2] % 2 == 0))
    return (
        words
        and query.shape[1] % HEADS == 0
        and query.shape[2] >= 256
        and not in_forward.shape[0]
        and window <= ring.shape[1]
    )


@dataclasses.dataclass(frozen=True)
class _Geometry:
    """Static sizes the kernel needs beyond the shapes of its refs."""

    width: int
    window: int
    selected: int
    page_rows: int
    ring: int
    scale: float
    packed: bool


@dataclasses.dataclass(frozen=True)
class _Source:
    """A list of rows of one plane: how many, and where each lies."""

    plane: object
    count: Array
    locate: object
    widen: object
    scale_words: int


def _load(ref: object) -> Array:
    return backend.triton().load(ref)


def _columns(plane: object, rows: Array, start: Array | int, count: int) -> Array:
    """Columns start .. start + count - 1 of `rows`, [keys, count]."""
    shape = (rows.shape[0], count)
    columns = start + jnp.arange(count, dtype=jnp.int32)
    return _load(plane.at[jnp.broadcast_to(rows[:, None], shape), jnp.broadcast_to(columns[None, :], shape)])


def _pieces(source: _Source, rows: Array, part: Array, size: int, width: int) -> Iterator[Array]:
    """Part `part` of `size` dims of `rows`: one piece [keys, size], or the four of `row_widening`."""
    if source.widen is None:
        yield _columns(source.plane, rows, part * size, size)
        return
    words = size // row_widening.PIECES
    scales = size // source.scale_words
    yield from source.widen(
        _columns(source.plane, rows, part * words, words),
        _columns(source.plane, rows, width // row_widening.PIECES + part * scales, scales),
        packed_instructions(),
    )


def _times_plus(values: Array, factor: float, bias: Array) -> Array:
    """values * factor + bias, rounded once on CUDA, whose compiler is not allowed to join the two."""
    if not packed_instructions():
        return values * jnp.float32(factor) + bias
    [result] = backend.triton().elementwise_inline_asm(
        "fma.rn.f32 $0, $1, $2, $3;",
        args=[values, jnp.full(values.shape, factor, jnp.float32), jnp.broadcast_to(bias, values.shape)],
        constraints="=f,f,f,f",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(values.shape, jnp.float32)],
    )
    return result


def _exp2(x: Array) -> Array:
    """2^x; on CUDA a result below float32's normal numbers is zero, which spares three instructions."""
    if not packed_instructions():
        return jnp.exp2(x)
    [result] = backend.triton().elementwise_inline_asm(
        "ex2.approx.ftz.f32 $0, $1;",
        args=[x],
        constraints="=f,f",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, jnp.float32)],
    )
    return result


def _barrier() -> None:
    """What the program wrote to device memory before is seen by all its threads after."""
    if packed_instructions():
        backend.triton().debug_barrier()


def _kernel(
    query_ref: object,
    sink_ref: object,
    selected_ref: object,
    counts_ref: object,
    main_ref: object,
    tables_ref: object,
    batch_ref: object,
    slots_ref: object,
    ring_ref: object,
    positions_ref: object,
    floor_ref: object,
    cos_ref: object,
    sin_ref: object,
    offset_ref: object,
    layer_ref: object,
    *out_refs: object,
    config: Config,
    geometry: _Geometry,
) -> None:
    """One part of the dims of one split of 64 heads of one query row."""
    program = pl.program_id(0)
    cuts, splits, keys = config.cuts, config.splits, config.keys
    width, size = geometry.width, geometry.width // cuts
    head_blocks = query_ref.shape[1] // HEADS
    own, rest = lax.rem(program, cuts), lax.div(program, cuts)
    first_head, rest = lax.rem(rest, head_blocks) * HEADS, lax.div(rest, head_blocks)
    split, row = lax.rem(rest, splits), lax.div(rest, splits)
    heads = pl.ds(first_head, HEADS)
    live, request, position, lowest = row_of(row, batch_ref, positions_ref, floor_ref, geometry.window)
    slot = offset_ref[0] + _load(slots_ref.at[request])
    turn = lax.rem(lowest, geometry.ring)

    def in_ring(index: Array) -> Array:
        # A window is no longer than a ring, so that it turns once at most.
        place = turn + index
        return slot * geometry.ring + jnp.where(place >= geometry.ring, place - geometry.ring, place)

    widen = (row_widening.window_pieces, row_widening.main_pieces) if geometry.packed else (None, None)
    sources = [_Source(ring_ref, jnp.where(live, position + 1 - lowest, 0), in_ring, widen[0], 128)]
    if geometry.selected:
        *out_refs, rows_ref = out_refs
        count = jnp.where(live, _load(counts_ref.at[row]), 0)
        listed = rows_ref.shape[1]
        index = jnp.arange(listed, dtype=jnp.int32)
        # Places past the end repeat a listed row: its values are finite and its weight will be zero.
        entry = _load(selected_ref.at[row, jnp.where(index < count, index, 0)])
        entry = jnp.where(count > 0, entry, 0)
        page = _load(tables_ref.at[request, lax.div(entry, geometry.page_rows)])
        found = page * geometry.page_rows + lax.rem(entry, geometry.page_rows)
        backend.triton().store(rows_ref.at[program, index], found)

        def in_main(index: Array) -> Array:
            return _load(rows_ref.at[program, jnp.minimum(index, listed - 1)])

        sources.append(_Source(main_ref, count, in_main, widen[1], 32))
    parts = [lax.rem(own + cut, cuts) for cut in range(cuts)]
    count_pieces = row_widening.PIECES if geometry.packed else 1
    piece = size // count_pieces
    query = [
        [_load(query_ref.at[row, heads, pl.ds(part * size + p * piece, piece)]) for p in range(count_pieces)]
        for part in parts
    ]
    scale = geometry.scale * LOG2_E * (2.0**row_widening.ROW_POWER if geometry.packed else 1.0)

    def accumulate(source: _Source, tile: Array, rows: Array, state: tuple) -> tuple:
        """One step of the online softmax. state: peak [H], total [H], sums of the own pieces [H, piece]."""
        peak, total, sums = state
        valid = tile * keys + jnp.arange(keys, dtype=jnp.int32) < source.count
        scores, values = jnp.zeros((HEADS, keys), jnp.float32), []
        for cut, part in enumerate(parts):
            # A piece is laid down for both products before the next is widened: all four would not fit the registers.
            pieces = [(k, k.T) for k in _pieces(source, rows, part, size, width)]
            values = [k for k, _ in pieces] if cut == 0 else values
            for q, (_, columns) in zip(query[cut], pieces, strict=True):
                scores += jnp.dot(q, columns, preferred_element_type=jnp.float32)
        scores = _times_plus(scores, scale, jnp.where(valid, 0.0, -jnp.inf)[None, :])
        new_peak = jnp.maximum(peak, jnp.max(scores, axis=1))
        weights = _exp2(scores - new_peak[:, None])
        shrink = _exp2(peak - new_peak)
        total = total * shrink + jnp.sum(weights, axis=1)
        rounded = weights.astype(jnp.bfloat16)
        sums = tuple(
            s * shrink[:, None] + jnp.dot(rounded, k, preferred_element_type=jnp.float32)
            for s, k in zip(sums, values, strict=True)
        )
        return new_peak, total, sums

    state = (
        jnp.full((HEADS,), SCORE_FLOOR, jnp.float32),
        jnp.zeros((HEADS,), jnp.float32),
        tuple(jnp.zeros((HEADS, piece), jnp.float32) for _ in range(count_pieces)),
    )
    spots = jnp.arange(keys, dtype=jnp.int32)
    bounds = shares([source.count for source in sources], keys, split, splits)
    for number, (source, (first, last)) in enumerate(zip(sources, bounds, strict=True)):
        if number == 0:

            def near(tile: Array, state: tuple, source: _Source = source) -> tuple:
                index = tile * keys + spots
                rows = source.locate(jnp.where(index < source.count, index, 0))
                return accumulate(source, tile, rows, state)

            state = lax.fori_loop(first, last, near, state)
            continue
        _barrier()
        if config.num_stages < 3:

            def far(tile: Array, state: tuple, source: _Source = source) -> tuple:
                return accumulate(source, tile, source.locate(tile * keys + spots), state)

            state = lax.fori_loop(first, last, far, state)
            continue

        def ahead(tile: Array, carry: tuple, source: _Source = source) -> tuple:
            state, rows = carry
            following = source.locate((tile + 1) * keys + spots)
            return accumulate(source, tile, rows, state), following

        state, _ = lax.fori_loop(first, last, ahead, (state, source.locate(first * keys + spots)))
    peak, total, sums = state
    if geometry.packed:
        sums = tuple(s * jnp.float32(2.0**row_widening.ROW_POWER) for s in sums)
    whole = pl.ds(parts[0] * size, size)
    if splits > 1:
        sums_ref, peak_ref, total_ref = out_refs
        # The parts add scores in another order: each keeps the peak and total that belong to its sums.
        backend.triton().store(peak_ref.at[row, split * cuts + own, heads], peak)
        backend.triton().store(total_ref.at[row, split * cuts + own, heads], total)
        result = row_widening.woven(list(sums)) if geometry.packed else sums[0]
        backend.triton().store(sums_ref.at[row, split, heads, whole], result)
        return
    [out_ref] = out_refs
    head = first_head + jnp.arange(HEADS, dtype=jnp.int32)
    sink = _load(sink_ref.at[jnp.full((HEADS,), layer_ref[0]), head])
    total = total + jnp.exp2(sink * jnp.float32(LOG2_E) - peak)
    # A row without a request has no sums, but its sink may be minus infinity.
    quotient = jnp.where(live, 1.0 / total, 0.0)[:, None]
    values = [(s * quotient).astype(jnp.bfloat16) for s in sums]
    backend.triton().store(out_ref.at[row, heads, whole], row_widening.woven(values) if geometry.packed else values[0])
    turned = 2 * cos_ref.shape[1]

    # Only these dims are taken apart into pairs, which costs a dozen instructions each.
    @pl.when(own == cuts - 1)
    def rotate_back() -> None:
        _barrier()
        block = out_ref.at[row, heads, pl.ds(width - turned, turned)]
        backend.triton().store(block, rotated(_load(block), 0, turned, cos_ref, sin_ref, row, back=True))


def partial_sums(
    query: Array,
    sink: Array,
    selected: Array,
    selected_counts: Array,
    main: Array | None,
    block_tables: Array,
    batch_ids: Array,
    slots: Array,
    ring: Array,
    positions: Array,
    window_floor: Array,
    cos: Array,
    sin: Array,
    *,
    window: int,
    scale: float,
    packed: bool,
    ring_offset: Array | int,
    layer: Array,
    config: Config,
    interpret: bool,
) -> list[Array]:
    """Attention of `fits` arguments, or its split sums.

    Args:
      query: rotated.
      sink, layer: of `backend.with_layer`.
      packed: rows are stored as FP4 and FP8; else all are bfloat16.

    Returns:
      [result [N, H, d]], or with splits S and cuts C: sums [N, S, H, d] and the peaks and totals [N, S C, H] that
      belong to them, float32.
    """
    rows, heads, width = query.shape
    chosen = selected.shape[1]
    page_rows, ring_rows = main.shape[1] if chosen else 1, ring.shape[1]
    if packed:
        ring = in_words(ring, jnp.uint32)
        main = in_words(main, jnp.uint16) if chosen else main
        parts = query.reshape(rows, heads, config.cuts, width // config.cuts)
        query = by_residue(parts, row_widening.PIECES).reshape(query.shape)
    one_row = jnp.zeros((1, 1), jnp.int32)
    programs = rows * config.splits * config.cuts * (heads // HEADS)
    if config.splits == 1:
        out_shape = [jax.ShapeDtypeStruct(query.shape, query.dtype)]
    else:
        sums = (rows, config.splits, heads, width)
        totals = jax.ShapeDtypeStruct((rows, config.splits * config.cuts, heads), jnp.float32)
        out_shape = [jax.ShapeDtypeStruct(sums, jnp.float32), totals, totals]
    scratch = [jax.ShapeDtypeStruct((programs, pl.next_power_of_2(chosen)), jnp.int32)] if chosen else []
    geometry = _Geometry(width, window, chosen, page_rows, ring_rows, scale, packed)
    results = backend.triton_call(
        functools.partial(_kernel, config=config, geometry=geometry),
        [*out_shape, *scratch],
        grid=(programs,),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        interpret=interpret,
        name="sparse_attention_decode",
    )(
        query,
        sink,
        selected if chosen else one_row,
        selected_counts,
        main.reshape(-1, main.shape[2]) if chosen else one_row,
        block_tables,
        batch_ids,
        slots,
        ring.reshape(-1, ring.shape[2]),
        positions,
        window_floor,
        cos,
        sin,
        backend.int_operand(ring_offset),
        layer,
    )
    return results[: len(out_shape)]

"""Sparse attention for GPUs: one program walks the listed rows of one query row, read from their pools in place.

All heads of a program share each tile of rows. With few query rows the list is cut among several programs, and a
second kernel joins their partial sums. Packed rows are widened in registers, so nothing is written but the result and
the partial sums. What is computed is apart from how rows are found: `_Source` objects know where rows lie.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import backend
from pallas_kernels.arithmetic import decode_e8m0, scaled_e2m1, scaled_e4m3
from pallas_kernels.rotation import rotate
from pallas_kernels.sparse_attention import decode
from pallas_kernels.sparse_attention.joining import Cut, finish, join
from pallas_kernels.sparse_attention.row_math import LOG2_E, rotated, row_of, shares
from pallas_kernels.sparse_attention.xla import SCORE_FLOOR

Array = jax.Array

SIGNED_OFFSETS = (2**31, 2**32)
"""Bytes of a byte array for which the lowering keeps 32-bit offsets although they no longer fit a signed integer."""


@dataclasses.dataclass(frozen=True)
class Config:
    """How the work is cut.

    Attributes:
      keys: rows of one tile.
      heads: heads of one program.
      parts: how many pieces of the latent width a tile is loaded in; more pieces need less shared memory at a time.
      splits: programs among which the list of one query row is cut.
      num_warps, num_stages: of the program that walks the list.
      joined: heads of one program that joins splits.
      apart: the products of query and keys stand in a loop of their own, see `_scores`, and the rows of the main plane
        are located before the kernel.
    """

    keys: int
    heads: int
    parts: int
    splits: int
    num_warps: int
    num_stages: int
    joined: int = 4
    apart: bool = False


MOST_ROTATED = 32
"""Heads of a program up to which it rotates its query; with more, registers that hold the sums would be spilled."""

FEW_ROWS = 4
"""Query rows up to which a program takes 16 heads and few keys: many programs, and accumulators that fit the registers.
One row is bound by launches: two of them against the seven of XLA's chain."""

MANY_ROWS = 512
"""Query rows from which on they fill a device several times over and products count."""


def config_for(rows: int, heads: int, width: int, listed: int, generation: str) -> Config:
    """The configuration for `rows` query rows of `heads` heads over at most `listed` keys; shapes only, no contents."""
    block = max(16, pl.next_power_of_2(heads))
    if generation == "rocm":
        # 64 KiB of shared memory: the latent width goes through it in four pieces.
        base = Config(keys=32, heads=min(32, block), parts=4, splits=1, num_warps=4, num_stages=1)
        programs = 304
    else:
        base = Config(keys=64, heads=min(64, block), parts=1, splits=1, num_warps=8, num_stages=2)
        programs = 132
        if rows <= FEW_ROWS:
            # Not 64 keys and ten splits: with the rotation of the query the whole model was slower with those.
            base = Config(keys=32, heads=16, parts=1, splits=1, num_warps=8, num_stages=1, joined=1)
            programs = 160
        elif rows <= 2 * FEW_ROWS:
            base = dataclasses.replace(base, num_stages=1, joined=1)
        elif rows >= MANY_ROWS:
            base = dataclasses.replace(base, num_stages=1, apart=True)
    while width < 64 * base.parts:
        base = dataclasses.replace(base, parts=base.parts // 2)
    used = max(1, rows * -(-heads // base.heads))
    return dataclasses.replace(base, splits=max(1, min(-(-listed // base.keys), programs // used)))


def unsupported(query: Array, main: Array | None, ring: Array, cos: Array) -> str | None:
    """Why the kernel cannot run on these arrays, or None."""
    width = query.shape[-1]
    if query.dtype != jnp.bfloat16:
        return f"it computes in bfloat16, not {query.dtype.name}"
    if width < 64 or width & (width - 1):
        return f"the latent width {width} is not a power of two of at least 64"
    if 2 * cos.shape[-1] > width:
        return f"{2 * cos.shape[-1]} rotated dims exceed the latent width {width}"
    for name, plane in (("main", main), ("ring", ring)):
        if plane is not None and plane.dtype == jnp.uint8 and SIGNED_OFFSETS[0] <= plane.size <= SIGNED_OFFSETS[1]:
            return f"the {name} plane has {plane.size} bytes; offsets between 2 and 4 GiB do not fit the lowering"
    return None


@dataclasses.dataclass(frozen=True)
class _Source:
    """A list of rows of one plane: how many, where each lies, and how its bytes become values.

    ahead: where the rows of a tile lie is found a tile ahead, because it is read from memory.
    """

    plane: object
    storage: str
    count: Array
    locate: object
    ahead: bool = False

    def listed(self, first: Array, config: Config) -> tuple[Array, Array]:
        """Places first .. first + keys - 1 of the list, and which of them there are."""
        index = first + jnp.arange(config.keys, dtype=jnp.int32)
        return index, index < self.count

    def rows(self, first: Array, config: Config) -> Array:
        """Where these places lie in the plane."""
        index, valid = self.listed(first, config)
        # Places past the end repeat a listed row: its values are finite and its weight will be zero.
        return self.locate(jnp.where(valid, index, 0))

    def values(self, rows: Array, config: Config, width: int) -> list[Array]:
        """`rows` as `parts` bfloat16 pieces [keys, width / parts]."""
        size = width // config.parts
        return [_load_values(self.plane, self.storage, rows, p * size, size, width) for p in range(config.parts)]


def _load_values(plane: object, storage: str, rows: Array, start: int, size: int, width: int) -> Array:
    """Dims start .. start + size - 1 of `rows` as bfloat16 [keys, size]."""
    keys = rows.shape[0]

    def load(column: int, count: int) -> Array:
        columns = column + jnp.arange(count, dtype=jnp.int32)
        shape = (keys, count)
        return backend.triton().load(
            plane.at[jnp.broadcast_to(rows[:, None], shape), jnp.broadcast_to(columns[None, :], shape)]
        )

    if storage == "fp4":
        packed = load(start // 2, size // 2).astype(jnp.uint16)
        scales = scaled_e4m3(load(width // 2 + start // 16, size // 16).astype(jnp.uint16)) * 2.0**22

        def widen(codes: Array) -> Array:
            grouped = scaled_e2m1(codes).reshape(keys, size // 16, 8) * scales[:, :, None]
            return grouped.reshape(keys, size // 2).astype(jnp.bfloat16)

        return jnp.stack([widen(packed), widen(packed >> 4)], axis=-1).reshape(keys, size)
    if storage == "fp8":
        values = scaled_e4m3(load(start, size).astype(jnp.uint16)).reshape(keys, size // 32, 32)
        scales = decode_e8m0(load(width + start // 32, size // 32).astype(jnp.int32)) * 2.0**8
        return (values * scales[:, :, None]).reshape(keys, size).astype(jnp.bfloat16)
    return load(start, size)


def _scores(query: list[Array], pieces: list[Array], once: Array | None) -> Array:
    """Products of the pieces of query and keys, [H, keys] float32.

    once: 1, or None. In one block with the product of the weights, Triton lets every warp group compute all scores, so
    that the weights need not move between groups. In a loop of `once` rounds the groups share the work; it also keeps
    the loads of a tile from being pipelined, which they are not to any use with one tile in shared memory beside the
    query.
    """

    def product(total: Array | None) -> Array:
        parts = [jnp.dot(q, k.T, preferred_element_type=jnp.float32) for q, k in zip(query, pieces, strict=True)]
        return functools.reduce(jnp.add, parts if total is None else [total, *parts])

    if once is None:
        return product(None)
    start = jnp.zeros((query[0].shape[0], pieces[0].shape[0]), jnp.float32)
    return lax.fori_loop(0, once, lambda _, total: product(total), start)


def _accumulate(
    query: list[Array], state: tuple, pieces: list[Array], valid: Array, scale: float, once: Array | None
) -> tuple:
    """One step of the online softmax. state: peak [H], total [H], sums of `parts` pieces [H, size]; once: `_scores`."""
    peak, total, sums = state
    scores = _scores(query, pieces, once)
    scores = jnp.where(valid[None, :], scores * jnp.float32(scale * LOG2_E), -jnp.inf)
    new_peak = jnp.maximum(peak, jnp.max(scores, axis=1))
    weights = jnp.exp2(scores - new_peak[:, None])
    shrink = jnp.exp2(peak - new_peak)
    total = total * shrink + jnp.sum(weights, axis=1)
    rounded = weights.astype(jnp.bfloat16)
    sums = tuple(
        s * shrink[:, None] + jnp.dot(rounded, k, preferred_element_type=jnp.float32)
        for s, k in zip(sums, pieces, strict=True)
    )
    return new_peak, total, sums


def _walk_kernel(
    query_ref: object,
    sink_ref: object,
    selected_ref: object,
    counts_ref: object,
    main_ref: object,
    tables_ref: object,
    batch_ref: object,
    slots_ref: object,
    ring_ref: object,
    fresh_ref: object,
    positions_ref: object,
    floor_ref: object,
    from_ref: object,
    own_ref: object,
    cos_ref: object,
    sin_ref: object,
    offset_ref: object,
    layer_ref: object,
    *out_refs: object,
    config: Config,
    geometry: _Geometry,
) -> None:
    """One split of one block of heads of one query row."""
    program = pl.program_id(0)
    head_blocks = -(-query_ref.shape[1] // config.heads)
    first_head = (program % head_blocks) * config.heads
    split = (program // head_blocks) % config.splits
    row = program // (head_blocks * config.splits)
    width, size = geometry.width, geometry.width // config.parts
    present = first_head + jnp.arange(config.heads, dtype=jnp.int32) < query_ref.shape[1]
    query = [
        backend.triton().load(
            query_ref.at[row, pl.ds(first_head, config.heads), pl.ds(p * size, size)],
            mask=jnp.broadcast_to(present[:, None], (config.heads, size)),
            other=0.0,
        )
        for p in range(config.parts)
    ]
    if geometry.rotate_query:
        query = [
            rotated(part, p * size, width, cos_ref, sin_ref, row, back=False)
            if (p + 1) * size > geometry.still
            else part
            for p, part in enumerate(query)
        ]
    live, request, position, lowest = row_of(row, batch_ref, positions_ref, floor_ref, geometry.window)
    sources = []
    if geometry.selected:

        def in_main(index: Array) -> Array:
            entry = backend.triton().load(selected_ref.at[row, index])
            if config.apart:
                return entry
            page = backend.triton().load(tables_ref.at[request, lax.div(entry, geometry.page_rows)])
            return page * geometry.page_rows + lax.rem(entry, geometry.page_rows)

        count = jnp.where(live, backend.triton().load(counts_ref.at[row]), 0)
        sources.append(_Source(main_ref, geometry.main_format, count, in_main, ahead=config.apart))
    fresh_from = backend.triton().load(from_ref.at[row]) if geometry.fresh else position + 1
    fresh_from = jnp.minimum(jnp.maximum(fresh_from, lowest), position + 1)
    slot = offset_ref[0] + backend.triton().load(slots_ref.at[request])
    sources.append(
        _Source(
            ring_ref,
            geometry.window_format,
            jnp.where(live, fresh_from - lowest, 0),
            lambda index: slot * geometry.ring + lax.rem(lowest + index, geometry.ring),
        )
    )
    if geometry.fresh:
        own = backend.triton().load(own_ref.at[row])
        sources.append(
            _Source(
                fresh_ref,
                "float",
                jnp.where(live, position + 1 - fresh_from, 0),
                lambda index: own - (position - fresh_from) + index,
            )
        )

    once = live.astype(jnp.int32) if config.apart else None
    state = (
        jnp.full((config.heads,), SCORE_FLOOR, jnp.float32),
        jnp.zeros((config.heads,), jnp.float32),
        tuple(jnp.zeros((config.heads, size), jnp.float32) for _ in range(config.parts)),
    )
    bounds = shares([source.count for source in sources], config.keys, split, config.splits)
    for source, (first, last) in zip(sources, bounds, strict=True):

        def added(tile: Array, state: tuple, rows: Array, source: _Source = source) -> tuple:
            _, valid = source.listed(tile * config.keys, config)
            return _accumulate(query, state, source.values(rows, config, width), valid, geometry.scale, once)

        def step(tile: Array, state: tuple, source: _Source = source) -> tuple:
            return added(tile, state, source.rows(tile * config.keys, config))

        def step_ahead(tile: Array, carry: tuple, source: _Source = source) -> tuple:
            state, rows = carry
            after = source.rows((tile + 1) * config.keys, config)
            return added(tile, state, rows), after

        if source.ahead:
            state, _ = lax.fori_loop(first, last, step_ahead, (state, source.rows(first * config.keys, config)))
        else:
            state = lax.fori_loop(first, last, step, state)
    peak, total, sums = state
    if config.splits == 1:
        refs = (sink_ref, layer_ref, cos_ref, sin_ref, live, out_refs[0])
        finish(refs, row, first_head, config.heads, peak, total, sums, width)
        return
    sums_ref, peak_ref, total_ref = out_refs
    heads = pl.ds(first_head, config.heads)
    backend.triton().store(peak_ref.at[row, split, heads], peak, mask=present)
    backend.triton().store(total_ref.at[row, split, heads], total, mask=present)
    for piece, part in enumerate(sums):
        backend.triton().store(sums_ref.at[row, split, heads, pl.ds(piece * size, size)], part, mask=present[:, None])


@dataclasses.dataclass(frozen=True)
class _Geometry:
    """Static sizes the kernel needs beyond the shapes of its refs; `still` dims are not rotated."""

    width: int
    still: int
    rotate_query: bool
    window: int
    selected: int
    page_rows: int
    ring: int
    fresh: int
    scale: float
    main_format: str
    window_format: str


def _located(selected: Array, block_tables: Array, batch_ids: Array, page_rows: int) -> Array:
    """Rows of the main plane [N, K] of selected entries; some row for entries and requests that are none."""
    entry = jnp.maximum(selected, 0)
    tables = block_tables[jnp.maximum(batch_ids, 0)]
    return jnp.take_along_axis(tables, entry // page_rows, axis=1) * page_rows + entry % page_rows


@backend.traced_once
def sparse_attention(
    query: Array,
    sink: Array,
    selected: Array,
    selected_counts: Array,
    main: Array | None,
    block_tables: Array,
    batch_ids: Array,
    slots: Array,
    ring: Array,
    in_forward: Array,
    positions: Array,
    window_floor: Array,
    in_forward_from: Array,
    in_forward_row: Array,
    cos: Array,
    sin: Array,
    *,
    window: int,
    scale: float,
    main_format: str,
    window_format: str,
    ring_offset: Array | int = 0,
    layer: Array | int | None = None,
    rotate_query: bool = False,
    config: Config | decode.Config | None = None,
    interpret: bool = False,
) -> Array:
    """See `pallas_kernels.sparse_attention`; `unsupported` has been asked."""
    rows, heads, width = query.shape
    if rows == 0:
        return query
    listed = selected.shape[1] + window
    generation = backend.current_target().generation
    packed = (main_format, window_format) == ("fp4", "fp8")
    plain = not {"fp4", "fp8"} & {main_format, window_format}
    fits = (plain or packed) and decode.fits(query, selected, main, ring, in_forward, window, packed)
    if config is None and generation == "cuda" and fits:
        config = decode.config_for(rows, heads, listed, packed)
    if isinstance(config, decode.Config):
        query = rotate(query, cos, sin) if rotate_query else query
        layer, sink = backend.with_layer(layer, sink.astype(jnp.float32))
        results = decode.partial_sums(
            query,
            sink,
            selected,
            selected_counts,
            main,
            block_tables,
            batch_ids,
            slots,
            ring,
            positions,
            window_floor,
            cos,
            sin,
            window=window,
            scale=scale,
            packed=packed,
            ring_offset=ring_offset,
            layer=layer,
            config=config,
            interpret=interpret,
        )
        if config.splits == 1:
            return results[0]
        cut = Cut(heads=1, splits=config.splits, cuts=config.cuts)
        return join(results, sink, layer, batch_ids, cos, sin, query, cut, interpret)
    config = config or config_for(rows, heads, width, listed, generation)
    if rotate_query and config.heads > MOST_ROTATED:
        query, rotate_query = rotate(query, cos, sin), False
    layer, sink = backend.with_layer(layer, sink)
    # Arrays of no elements stand for lists that are not there; the kernel never reads the stand-ins.
    one_row = jnp.zeros((1, 1), jnp.int32)
    geometry = _Geometry(
        width=width,
        still=width - 2 * cos.shape[1],
        rotate_query=rotate_query,
        window=window,
        selected=selected.shape[1],
        page_rows=main.shape[1] if selected.shape[1] else 1,
        ring=ring.shape[1],
        fresh=in_forward.shape[0],
        scale=scale,
        main_format=main_format,
        window_format=window_format,
    )
    if config.apart and geometry.selected:
        selected = _located(selected, block_tables, batch_ids, geometry.page_rows)
    flat_main = main.reshape(-1, main.shape[2]) if geometry.selected else one_row
    operands = (
        query,
        sink.astype(jnp.float32),
        selected if geometry.selected else one_row,
        selected_counts,
        flat_main,
        block_tables,
        batch_ids,
        slots,
        ring.reshape(-1, ring.shape[2]),
        in_forward if geometry.fresh else one_row,
        positions,
        window_floor,
        in_forward_from,
        in_forward_row,
        cos,
        sin,
        backend.int_operand(ring_offset),
        layer,
    )
    head_blocks = -(-heads // config.heads)
    out = jax.ShapeDtypeStruct((rows, heads, width), query.dtype)
    if config.splits == 1:
        out_shape: object = [out]
    else:
        partial = (rows, config.splits, heads)
        out_shape = [
            jax.ShapeDtypeStruct((*partial, width), jnp.float32),
            jax.ShapeDtypeStruct(partial, jnp.float32),
            jax.ShapeDtypeStruct(partial, jnp.float32),
        ]
    results = backend.triton_call(
        functools.partial(_walk_kernel, config=config, geometry=geometry),
        out_shape,
        grid=(rows * config.splits * head_blocks,),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        interpret=interpret,
        name="sparse_attention_walk",
    )(*operands)
    if config.splits == 1:
        return results[0]
    cut = Cut(heads=config.joined, splits=config.splits, cuts=1)
    return join(results, operands[1], layer, batch_ids, cos, sin, query, cut, interpret)

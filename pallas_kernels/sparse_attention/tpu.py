"""Sparse attention for TPUs: a grid step is one query row, whose listed rows are fetched from their pool one by one.

A copy cannot address a single row of 16-bit or 8-bit elements, so a pool is read as words of 32 bits that hold the same
lane of two or four neighbouring rows; the listed row is then taken out of its words. The copies of the next query row
are under way while this one is computed. Window rows come as ordinary blocks: the slot's whole ring, and the two
aligned blocks of this forward's rows that hold the window; neighbouring query rows share them without another fetch.

All keys of a query row are decoded to VMEM once, so one maximum serves the whole softmax, and packed rows give the
result of bfloat16 rows to the bit. Every group of keys is a `_Section`: which of its keys exist, and how to get them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import backend
from pallas_kernels.arithmetic import (
    decode_e2m1,
    decode_e4m3,
    decode_e8m0,
    float_from_bits,
    round_to_bfloat16,
)
from pallas_kernels.sparse_attention.xla import SCORE_FLOOR
from pallas_kernels.stored_rows import LANES, whole_lanes

Array = jax.Array

TILE = 128
"""Selected rows fetched and decoded together; also the lanes of a register."""
UNIT = 8
"""Copies between two checks of the count."""
MOST_SELECTED = 2048
VMEM_BYTES = 48 * 2**20
VALUES_OF_MAIN_SCALE, VALUES_OF_WINDOW_SCALE = 16, 32


def unsupported(
    query: Array, main: Array | None, ring: Array, selected: Array, in_forward: Array, window: int
) -> str | None:
    """Why the kernel cannot run on these arrays, or None."""
    if query.dtype != jnp.bfloat16:
        return f"it computes in bfloat16, not {query.dtype.name}"
    if query.shape[-1] % 64:
        return f"the latent width {query.shape[-1]} is not a multiple of 64"
    if main is not None and main.shape[1] % rows_of_word(main.dtype):
        return f"pages of {main.shape[1]} rows do not fill words of {rows_of_word(main.dtype)} rows"
    if selected.shape[1] > MOST_SELECTED:
        return f"{selected.shape[1]} selected rows are more than {MOST_SELECTED}"
    if window > TILE + 1 and in_forward.shape[0]:
        return f"a window of {window} is longer than two blocks of {TILE} rows of this forward show"
    tile = rows_of_tile(ring.dtype)
    if ring.shape[1] % tile:
        return f"rings of {ring.shape[1]} rows would be copied; give them {-(-ring.shape[1] // tile) * tile}"
    for name, plane in (("main", main), ("ring", ring)):
        if plane is not None and plane.shape[-1] % LANES and plane.shape[-1] != query.shape[-1]:
            width = plane.shape[-1]
            return f"{name} rows of {width} bytes would be copied; hold them {whole_lanes(width)} wide (pad_to_lanes)"
    if ring.dtype == jnp.float32 or (main is not None and main.dtype == jnp.float32):
        return "it reads bfloat16 or packed rows, not float32"
    return None


def rows_of_word(dtype: jnp.dtype) -> int:
    """Neighbouring rows whose elements share a word of 32 bits."""
    return 4 // jnp.dtype(dtype).itemsize


def rows_of_tile(dtype: jnp.dtype) -> int:
    """Rows of a block of which every ring must hold whole ones: the compiler would turn others to save padding."""
    return 32 if dtype == jnp.uint8 else 8


def words_of(plane: Array) -> Array:
    """[rows, row] of 8-bit or 16-bit elements -> [rows / n, row] int32: what a TPU kernel sees without moving a byte.

    The first of the n rows is in the low bits.
    """
    count = rows_of_word(plane.dtype)
    bits = plane if plane.dtype == jnp.uint8 else lax.bitcast_convert_type(plane, jnp.uint16)
    parts = bits.reshape(-1, count, plane.shape[1]).astype(jnp.uint32)
    shift = jnp.arange(count, dtype=jnp.uint32) * (32 // count)
    return lax.bitcast_convert_type(jnp.sum(parts << shift[None, :, None], axis=1, dtype=jnp.uint32), jnp.int32)


@dataclasses.dataclass(frozen=True)
class _Section:
    """Keys first .. first + length - 1 of a query row.

    Attributes:
      first, length: multiples of `TILE`.
      needed: whether any of them exists, bool scalar.
      exists: index below `length`, int32 array -> bool array.
      load: () -> [at most length, d] bfloat16, zero where a key does not exist.
    """

    first: int
    length: int
    needed: Array
    exists: Callable[[Array], Array]
    load: Callable[[], Array]

    @property
    def place(self) -> slice:
        """Where they lie."""
        return slice(self.first, self.first + self.length)


@dataclasses.dataclass(frozen=True)
class _Shapes:
    """What the kernel is built from.

    Attributes:
      window_format, main_format: how rows are stored.
      ring: rows of a ring.
      fresh: rows of this forward are read too.
      tiles: of selected rows.
      rotated: dims that are rotated back, the last ones.
      scale: of the scores.
    """

    window_format: str
    main_format: str
    ring: int
    fresh: bool
    tiles: int
    rotated: int
    scale: float

    @property
    def ring_length(self) -> int:
        """Keys of the ring's section."""
        return pl.cdiv(self.ring, TILE) * TILE

    @property
    def fresh_length(self) -> int:
        """Keys of the two sections of this forward's rows."""
        return 2 * TILE * self.fresh

    @property
    def keys(self) -> int:
        """Keys of all sections."""
        return self.ring_length + self.fresh_length + TILE * self.tiles


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
    interpret: Any = False,
) -> Array:
    """See `pallas_kernels.sparse_attention`; `unsupported` has been asked."""
    rows, heads, width = query.shape
    if rows == 0:
        return query
    request, live = jnp.maximum(batch_ids, 0), batch_ids >= 0
    shapes = _Shapes(
        window_format,
        main_format,
        ring.shape[1],
        in_forward.shape[0] > 0,
        pl.cdiv(selected.shape[1], TILE),
        2 * cos.shape[1],
        scale,
    )
    pltpu = backend.tpu()
    lowest = jnp.maximum(jnp.maximum(window_floor, positions - window + 1), 0)
    scalars = [
        jnp.where(live, jnp.minimum(selected_counts, selected.shape[1]), 0),
        jnp.where(live, slots[request], -1),
        positions,
        jnp.where(live, lowest, positions + 1),
        in_forward_from,
        in_forward_row,
    ]

    def of_row(row, *_):
        return row, 0, 0

    def next_row(row, *_):
        return jnp.minimum(row + 1, rows - 1), 0, 0

    def whole(row, *_):
        return 0, 0

    if ring.dtype == jnp.uint16:
        ring = lax.bitcast_convert_type(ring, jnp.bfloat16)
    if not interpret:
        ring = backend.in_device_memory(ring)
    turned = min(width, whole_lanes(shapes.rotated))
    operands: list[tuple[Array, Any]] = [
        (query, pl.BlockSpec((1, heads, width), of_row)),
        (jnp.broadcast_to(sink[:, None], (heads, TILE)), pl.BlockSpec((heads, TILE), whole)),
        *[(x[:, None, :], pl.BlockSpec((1, 1, turned), of_row)) for x in _rotation(cos, sin, turned)],
        (ring, pl.BlockSpec((1, *ring.shape[1:]), lambda row, counts, slots, *_: (jnp.maximum(slots[row], 0), 0, 0))),
    ]
    if shapes.fresh:
        padded = jnp.pad(in_forward.astype(query.dtype), ((0, -in_forward.shape[0] % TILE), (0, 0)))
        for back in (1, 0):

            def block(row, counts, slots, positions, lowest, origin, own, back=back):
                return jnp.clip(lax.div(own[row], TILE) - back, 0, padded.shape[0] // TILE - 1), 0

            operands.append((padded, pl.BlockSpec((TILE, width), block)))
    if window_format == "fp8":
        spread = _spread(width, VALUES_OF_WINDOW_SCALE)
        operands.append((spread, pl.BlockSpec(spread.shape, whole)))
    scratch = [
        pltpu.VMEM((shapes.keys, width), jnp.bfloat16),
        pltpu.VMEM((heads, shapes.keys), jnp.float32),
        pltpu.VMEM((heads, width), jnp.float32),
    ]
    if shapes.tiles:
        padding = ((0, 0), (0, shapes.tiles * TILE - selected.shape[1]))
        pages, per_page, row = main.shape
        entries = jnp.clip(jnp.pad(selected, padding), 0, block_tables.shape[1] * per_page - 1)
        page = jnp.clip(block_tables[request[:, None], entries // per_page], 0, pages - 1)
        lines = page * per_page + entries % per_page
        plane = main.reshape(pages * per_page, row)
        together = rows_of_word(main.dtype)
        listed = lambda index: pl.BlockSpec((1, 1, shapes.tiles * TILE), index, memory_space=pltpu.SMEM)  # noqa: E731
        operands += [
            *[((lines // together)[:, None, :], listed(index)) for index in (of_row, next_row)],
            ((lines % together)[:, None, :], pl.BlockSpec((1, 1, shapes.tiles * TILE), of_row)),
        ]
        if main_format == "fp4":
            even = jnp.repeat(jnp.eye(width // 2, dtype=jnp.bfloat16), 2, axis=1)
            first = (jnp.arange(width) % 2 == 0).astype(jnp.bfloat16)
            for matrix in (even * first, even * (1 - first), _spread(width, VALUES_OF_MAIN_SCALE)):
                operands.append((matrix, pl.BlockSpec(matrix.shape, whole)))
        # The simulation has no view of other bits; there the words are made outside.
        plane = words_of(plane) if interpret else backend.in_device_memory(plane)
        operands.append((plane, pl.BlockSpec(memory_space=pltpu.HBM)))
        scratch += [
            pltpu.VMEM((2, shapes.tiles * TILE, row), jnp.int32),
            pltpu.SemaphoreType.DMA((2, shapes.tiles)),
        ]
    return backend.tpu_call(
        _kernel(shapes, rows),
        jax.ShapeDtypeStruct(query.shape, query.dtype),
        grid=(rows,),
        num_scalar_prefetch=len(scalars),
        in_specs=[spec for _, spec in operands],
        out_specs=pl.BlockSpec((1, heads, width), of_row),
        scratch_shapes=scratch,
        vmem_limit_bytes=VMEM_BYTES,
        interpret=interpret,
        name=f"sparse_attention_{main_format}_{window_format}" if shapes.tiles else f"window_attention_{window_format}",
    )(*scalars, *[operand for operand, _ in operands])


def _rotation(cos: Array, sin: Array, width: int) -> tuple[Array, Array]:
    """Factors [N, width] of a value itself and of its partner, for the inverse rotation of the last adjacent pairs."""
    rotated = 2 * sin.shape[1]
    signs = jnp.where(jnp.arange(rotated) % 2 == 0, 1.0, -1.0)
    padding = ((0, 0), (width - rotated, 0))
    return tuple(jnp.pad(x, padding) for x in (jnp.repeat(cos, 2, axis=1), jnp.repeat(sin, 2, axis=1) * signs))


def _spread(width: int, group: int) -> Array:
    """[width / group, width] bfloat16: a row of scales times this is every value's scale, exactly."""
    return jnp.repeat(jnp.eye(width // group, dtype=jnp.bfloat16), group, axis=1)


def _dot(left: Array, right: Array, contract: int) -> Array:
    """left [M, K] times right, whose axis `contract` is K, in float32."""
    return lax.dot_general(left, right, (((1,), (contract,)), ((), ())), preferred_element_type=jnp.float32)


def _rows(shape: tuple[int, ...]) -> Array:
    return lax.broadcasted_iota(jnp.int32, shape, 0)


def _kernel(shapes: _Shapes, rows: int) -> Callable[..., None]:
    def kernel(counts_ref, slots_ref, positions_ref, lowest_ref, origin_ref, own_ref, *refs):
        refs = list(refs)
        query_ref, sink_ref, cos_ref, sin_ref, ring_ref = (refs.pop(0) for _ in range(5))
        fresh_refs = [refs.pop(0) for _ in range(2 * shapes.fresh)]
        spread_ref = refs.pop(0) if shapes.window_format == "fp8" else None
        row = pl.program_id(0)
        position, lowest, origin = positions_ref[row], lowest_ref[row], origin_ref[row]
        sections = [_ring_section(shapes, ring_ref, spread_ref, position, lowest, origin)]
        for back, ref in zip((1, 0), fresh_refs, strict=False):
            first = shapes.ring_length + TILE * (1 - back)
            sections.append(_fresh_section(first, back, ref, own_ref[row], position, lowest, origin))
        if shapes.tiles:
            pools = [refs.pop(0) for _ in range(3 if shapes.main_format != "fp4" else 6)]
            main_ref = refs.pop(0)
            buffer_ref, semaphores = refs[-2:]
            count = counts_ref[row]
            copies = _Copies(main_ref, buffer_ref, semaphores)
            after = jnp.minimum(row + 1, rows - 1)
            following = jnp.where(row + 1 < rows, counts_ref[after], 0)

            @pl.when(row == 0)
            def _():
                for tile in range(shapes.tiles):
                    copies.start(pools[0], count, 0, tile)

            slot = lax.rem(row, 2)
            for tile in range(shapes.tiles):
                sections.append(_selected_section(shapes, tile, slot, count, copies, pools, following))
        out_ref, keys_ref, scores_ref, total_ref = refs[:4]

        @pl.when(row == 0)
        def _():
            # Places that no section writes: a product reads them against probabilities of zero.
            keys_ref[...] = jnp.zeros(keys_ref.shape, keys_ref.dtype)

        _attend(shapes, sections, query_ref[0], sink_ref, keys_ref, scores_ref, total_ref)
        result = _rotated_back(shapes, total_ref[...], cos_ref[0], sin_ref[0])
        out_ref[0] = jnp.where(slots_ref[row] >= 0, result, 0.0).astype(out_ref.dtype)

    return kernel


def _attend(
    shapes: _Shapes,
    sections: list[_Section],
    query: Array,
    sink_ref: Any,
    keys_ref: Any,
    scores_ref: Any,
    total_ref: Any,
) -> None:
    """Loads the sections and leaves softmax(query keys) keys, with the sink in the denominator, in `total_ref`."""
    scores_ref[...] = jnp.full(scores_ref.shape, -jnp.inf, jnp.float32)
    total_ref[...] = jnp.zeros(total_ref.shape, jnp.float32)
    for section in sections:

        @pl.when(section.needed)
        def _(section=section):
            keys = section.load()
            keys_ref[section.first : section.first + keys.shape[0], :] = keys
            scores = _dot(query, keys_ref[section.place, :], 1) * jnp.float32(shapes.scale)
            index = lax.broadcasted_iota(jnp.int32, scores.shape, 1)
            scores_ref[:, section.place] = jnp.where(section.exists(index), scores, -jnp.inf)

    scores = scores_ref[...]
    peak = jnp.maximum(jnp.max(scores, axis=1, keepdims=True), SCORE_FLOOR)
    weights = jnp.exp(scores - peak)
    denominator = jnp.sum(weights, axis=1, keepdims=True) + jnp.exp(sink_ref[:, :1] - peak)
    scores_ref[...] = round_to_bfloat16(weights)
    for section in sections:

        @pl.when(section.needed)
        def _(section=section):
            total_ref[...] += _dot(scores_ref[:, section.place].astype(jnp.bfloat16), keys_ref[section.place, :], 0)

    total_ref[...] /= denominator


def _rotated_back(shapes: _Shapes, x: Array, cos: Array, sin: Array) -> Array:
    """The inverse rotation of the rounded quotient x [H, d], rounded again; float32 values."""
    x = round_to_bfloat16(x)
    width = cos.shape[1]
    kept, tail = x[:, : x.shape[1] - width], x[:, x.shape[1] - width :]
    # Each value's partner: the next one of an even value, the previous one of an odd value.
    roll = backend.tpu().roll
    lane = lax.broadcasted_iota(jnp.int32, tail.shape, 1)
    partner = jnp.where((lane & 1) == 0, roll(tail, width - 1, 1), roll(tail, 1, 1))
    turned = round_to_bfloat16(tail * cos + partner * sin)
    turned = jnp.where(lane < width - shapes.rotated, tail, turned)
    return turned if width == x.shape[1] else jnp.concatenate([kept, turned], axis=1)


def _masked(rows: Array, exists: Callable[[Array], Array]) -> Array:
    """bfloat16 rows, zero where they do not exist; selected as 32-bit lanes, which every generation has."""
    return jnp.where(exists(_rows(rows.shape)), rows.astype(jnp.float32), 0.0).astype(rows.dtype)


def _ring_section(
    shapes: _Shapes, ring_ref: Any, spread_ref: Any, position: Array, lowest: Array, origin: Array
) -> _Section:
    """Window positions before `origin`, at their places in the slot's ring."""
    newest = lax.rem(position, shapes.ring)

    def exists(index: Array) -> Array:
        held = position - jnp.where(index <= newest, newest - index, newest - index + shapes.ring)
        return (index < shapes.ring) & (held >= lowest) & (held < origin)

    def load() -> Array:
        if shapes.window_format != "fp8":
            return _masked(ring_ref[0], exists)
        codes = ring_ref[0].astype(jnp.int32)
        codes = jnp.where(exists(_rows(codes.shape)), codes, 0)
        width = spread_ref.shape[1]
        powers = decode_e8m0(codes[:, width : width + spread_ref.shape[0]]).astype(jnp.bfloat16)
        return (decode_e4m3(codes[:, :width]) * _dot(powers, spread_ref[...], 0)).astype(jnp.bfloat16)

    return _Section(0, shapes.ring_length, lowest < jnp.minimum(origin, position + 1), exists, load)


def _fresh_section(
    first: int, back: int, ref: Any, own: Array, position: Array, lowest: Array, origin: Array
) -> _Section:
    """Window positions from `origin` on, in the block of this forward's rows `back` before the row's own."""
    block = lax.div(own, TILE) - back
    oldest = jnp.maximum(lowest, origin)

    def exists(index: Array) -> Array:
        distance = own - (block * TILE + index)
        return (distance >= 0) & (position - distance >= oldest)

    def load() -> Array:
        return _masked(ref[...], exists)

    # The nearest row of an older block is its last one.
    nearest = own - (block * TILE + TILE - 1) if back else 0
    needed = (block >= 0) & (position - nearest >= oldest) & (lowest <= position)
    return _Section(first, TILE, needed, exists, load)


@dataclasses.dataclass(frozen=True)
class _Copies:
    """Copies of listed rows, a tile at a time, into one of two buffers."""

    main_ref: Any
    buffer_ref: Any
    semaphores: Any

    def _units(self, count: Array, tile: int) -> Array:
        return pl.cdiv(jnp.clip(count - tile * TILE, 0, TILE), UNIT)

    def start(self, listed_ref: Any, count: Array, slot: Array, tile: int) -> None:
        """Starts on the rows of a tile that are below the count; the last unit repeats the last row."""
        pltpu = backend.tpu()
        words = self.main_ref if self.main_ref.dtype == jnp.int32 else self.main_ref.bitcast(jnp.int32)

        def unit(index: Array, carry: None) -> None:
            for offset in range(UNIT):
                place = tile * TILE + index * UNIT + offset
                word = listed_ref[0, 0, jnp.minimum(place, count - 1)]
                pltpu.make_async_copy(
                    words.at[pl.ds(word, 1)],
                    self.buffer_ref.at[slot, pl.ds(place, 1)],
                    self.semaphores.at[slot, tile],
                ).start()

        lax.fori_loop(0, self._units(count, tile), unit, None)

    def wait(self, count: Array, slot: Array, tile: int) -> None:
        """Waits for what `start` started."""
        pltpu = backend.tpu()

        def unit(index: Array, carry: None) -> None:
            place = self.buffer_ref.at[slot, pl.ds(pl.multiple_of(tile * TILE + index * UNIT, UNIT), UNIT)]
            # Any copy of as many bytes waits for the unit's.
            pltpu.make_async_copy(place, place, self.semaphores.at[slot, tile]).wait()

        lax.fori_loop(0, self._units(count, tile), unit, None)


def _selected_section(
    shapes: _Shapes, tile: int, slot: Array, count: Array, copies: _Copies, pools: list[Any], following: Array
) -> _Section:
    """One tile of selected rows. Starts on the same tile of the next query row, whose buffer is free by now."""
    listed_next, offset_ref, *matrices = pools[1:]
    copies.start(listed_next, following, 1 - slot, tile)

    def exists(index: Array) -> Array:
        return tile * TILE + index < count

    def load() -> Array:
        copies.wait(count, slot, tile)
        words = copies.buffer_ref[slot, tile * TILE : (tile + 1) * TILE]
        # The row's place in its words, turned from lanes to sublanes.
        offset = offset_ref[0, :, tile * TILE : (tile + 1) * TILE]
        offset = jnp.broadcast_to(offset, (TILE, TILE)).T[:, :1]
        words = jnp.where(exists(_rows(words.shape)), words, 0)
        if shapes.main_format != "fp4":
            return float_from_bits(jnp.where(offset == 0, words << 16, words & jnp.int32(-0x10000))).astype(
                jnp.bfloat16
            )
        codes = (words >> (offset * 8)) & 255
        half = matrices[0].shape[0]
        scales = decode_e4m3(codes[:, half : half + matrices[2].shape[0]]).astype(jnp.bfloat16)
        scales = _dot(scales, matrices[2][...], 0)
        low, high = (decode_e2m1(codes[:, :half] >> shift).astype(jnp.bfloat16) for shift in (0, 4))
        # Each product has one term, so that nibbles come to their dims exactly.
        return ((_dot(low, matrices[0][...], 0) + _dot(high, matrices[1][...], 0)) * scales).astype(jnp.bfloat16)

    first = shapes.ring_length + shapes.fresh_length + tile * TILE
    return _Section(first, TILE, tile * TILE < count, exists, load)

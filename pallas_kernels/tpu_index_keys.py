"""Index keys inside Mosaic kernels: lines of 128 keys fetched page by page, and decoded to a matrix operand.

A line is one page of 128 rows or two pages of 64. FP8 pages keep keys on sublanes; FP4 pages have keys on lanes
(`plane_layouts.to_lanes`), so that nibbles unpack to whole vector registers and scales broadcast along sublanes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import backend, plane_layouts
from pallas_kernels.arithmetic import decode_e2m1, even_odd

Array = jax.Array

LINE = 128
"""Keys of a line."""


@dataclasses.dataclass(frozen=True)
class Plane:
    """One owner's plane as a kernel reads it.

    Attributes:
      index_format: "fp8" or "fp4".
      rows: of a page, 128 or 64.
      values: [pages, rows, I] or the lanes layout, uint8.
      scales: [pages, 1, 128] float32 (fp8), [pages, I / 32, 128] uint8 (fp4).
    """

    index_format: str
    rows: int
    values: Array
    scales: Array

    @property
    def pages_per_line(self) -> int:
        """Pages of one line."""
        return LINE // self.rows

    def buffers(self, lines: int, depth: int) -> list[Any]:
        """Scratch for `depth` groups of `lines` lines: values, scales and a semaphore per group."""
        pltpu = backend.tpu()
        return [
            pltpu.VMEM((depth, lines, self.pages_per_line, *self.values.shape[1:]), self.values.dtype),
            pltpu.VMEM((depth, lines, self.pages_per_line, *self.scales.shape[1:]), self.scales.dtype),
            pltpu.SemaphoreType.DMA((depth,)),
        ]


def unsupported_plane(width: int, values: Array, scales: Array | None, index_format: str) -> str | None:
    """Why no Mosaic kernel reads or writes this plane of keys of `width` in place, or None."""
    if index_format not in ("fp8", "fp4") or scales is None:
        return f"it takes fp8 and fp4 planes, not {index_format}"
    if width != LINE:
        return f"keys of width {width} are not of {LINE}"
    if plane_layouts.in_lanes(width, values, scales, index_format) or values.shape[1] == LINE:
        return None
    if values.shape[1] == plane_layouts.FOLD:
        return "pages of 64 logical rows would be copied; hold the plane as plane_layouts.to_lanes gives it"
    return f"pages of {values.shape[1]} rows do not fill lines of {LINE} keys"


def plane_of(width: int, values: Array, scales: Array, index_format: str, interpret: Any) -> Plane:
    """The kernel's view of a supported plane; no byte of it moves.

    A compiler lays a logical FP4 page of 128 rows out with keys on lanes by itself, so that the exchange of its axes is
    free.
    """
    if not plane_layouts.in_lanes(width, values, scales, index_format):
        values, scales = plane_layouts.to_lanes(values, scales, index_format)
    rows = plane_layouts.rows_of(values, scales, index_format)
    if index_format == "fp8":
        scales = scales[:, None, :]
    if not interpret:
        values, scales = backend.in_device_memory(values), backend.in_device_memory(scales)
    return Plane(index_format, rows, values, scales)


def operand_order(operand: Array, index_format: str) -> Array:
    """The query's dimensions in the order `decoded_line` gives those of the keys."""
    return even_odd(operand) if index_format == "fp4" else operand


@dataclasses.dataclass(frozen=True)
class Lines:
    """The lines a grid step reads.

    Attributes:
      count: how many, int32 scalar.
      page_at: (position below count, part of the line) -> page id, read from scalar memory.
    """

    count: Array
    page_at: Callable[[Array, int], Array]


def stream(
    plane: Plane,
    group: int,
    depth: int,
    plane_refs: tuple[Any, Any],
    scratch: tuple[Any, Any, Any],
    consumed_ref: Any,
    now: Lines,
    following: Lines,
    is_first: Array,
    consume: Callable[[Array, Array], None],
) -> None:
    """Brings this step's lines through a ring of `depth` groups of `group` lines, and starts on the next step's.

    Args:
      plane_refs: values and scales in device memory.
      scratch: what `Plane.buffers` asked for.
      consumed_ref: [1] int32 in scalar memory that only this function touches; it outlives the step.
      now, following: this step's lines and the next one's, of which `depth - 1` groups are on their way at the end.
      is_first: nothing has been started before this step.
      consume: (group, slot) -> None, called in order when the group's lines lie in slot `slot` of the buffers; lines
        past the count are some legal line.
    """
    pltpu = backend.tpu()
    *buffers, semaphores = scratch
    ahead = depth - 1

    def copies(slot: Array, page_at: Callable[[int, int], Array]) -> list[Any]:
        return [
            pltpu.make_async_copy(ref.at[page_at(line, part)], buffer.at[slot, line, part], semaphores.at[slot])
            for line in range(group)
            for part in range(plane.pages_per_line)
            for ref, buffer in zip(plane_refs, buffers, strict=True)
        ]

    def start(lines: Lines, index: Array, slot: Array) -> None:
        def page_at(line: int, part: int) -> Array:
            return lines.page_at(jnp.minimum(index * group + line, lines.count - 1), part)

        for copy in copies(slot, page_at):
            copy.start()

    groups, next_groups = pl.cdiv(now.count, group), pl.cdiv(following.count, group)

    @pl.when(is_first)
    def _() -> None:
        consumed_ref[0] = 0

        def first(index: Array, carry: None) -> None:
            start(now, index, index)

        lax.fori_loop(0, jnp.minimum(ahead, groups), first, None)

    base = consumed_ref[0]

    def start_following(begin: Array, end: Array) -> None:
        def early(index: Array, carry: None) -> None:
            start(following, index, lax.rem(base + groups + index, depth))

        lax.fori_loop(begin, jnp.minimum(end, next_groups), early, None)

    def step(index: Array, carry: None) -> None:
        slot = lax.rem(base + index, depth)
        for copy in copies(slot, lambda line, part: 0):
            copy.wait()

        @pl.when(index + ahead < groups)
        def _() -> None:
            start(now, index + ahead, lax.rem(base + index + ahead, depth))

        # Slots that this step leaves unused: all of them at the first group, then one more after each.
        unused = index + ahead - groups
        start_following(jnp.where(index == 0, 0, jnp.maximum(unused, 0)), unused + 1)
        consume(index, slot)

    lax.fori_loop(0, groups, step, None)

    @pl.when(groups == 0)
    def _() -> None:
        start_following(0, ahead)

    consumed_ref[0] = base + groups


def decoded_line(index_format: str, values_ref: Any, scales_ref: Any) -> tuple[Array, Array | None]:
    """One buffered line as a matrix operand.

    Args:
      values_ref, scales_ref: the line's pages, [pages, ...].

    Returns:
      fp8: keys [128, I] bfloat16 and their scale [1, 128] float32. fp4: keys [I, 128] bfloat16, even dimensions first,
      and None.
    """
    pages = values_ref.shape[0]
    if index_format == "fp8":
        codes = jnp.concatenate([values_ref[page] for page in range(pages)], axis=0)
        keys = lax.bitcast_convert_type(codes, jnp.float8_e4m3fn).astype(jnp.bfloat16)
        return keys, _joined(*[scales_ref[page] for page in range(pages)])
    tiles = [values_ref[page].astype(jnp.int32) for page in range(pages)]
    if pages == 1:
        tile = tiles[0]
    else:
        first, second = tiles
        tile = jnp.concatenate([_joined(first, second), _joined(_rolled(first), _rolled(second))], axis=0)
    scales = _joined(*[scales_ref[page].astype(jnp.int32) for page in range(pages)])
    groups = scales.shape[0]
    # A power of two by its exponent: code 0 flushes to 0, code 255 gives infinity or NaN and never a finite number.
    powers = lax.bitcast_convert_type(scales << 23, jnp.float32)
    shape = (tile.shape[0] // groups, LINE)
    spread = jnp.concatenate([jnp.broadcast_to(powers[g : g + 1], shape) for g in range(groups)], axis=0)
    halves = [decode_e2m1(tile) * spread, decode_e2m1(tile >> 4) * spread]
    return jnp.concatenate(halves, axis=0).astype(jnp.bfloat16), None


def _rolled(x: Array) -> Array:
    return backend.tpu().roll(x, LINE // 2, 1)


def _joined(first: Array, second: Array | None = None) -> Array:
    """Lanes 0..63 of `first` followed by lanes 0..63 of `second`."""
    if second is None:
        return first
    lane = lax.broadcasted_iota(jnp.int32, first.shape, 1)
    return jnp.where(lane < LINE // 2, first, _rolled(second))


def products(query: Array, keys: Array, index_format: str) -> Array:
    """Dots of query rows [M, I] with a decoded line: [M, 128] float32."""
    contract = 1 if index_format == "fp8" else 0
    return lax.dot_general(query, keys, (((1,), (contract,)), ((), ())), preferred_element_type=jnp.float32)

"""The key write for TPUs: every page that receives keys is read, changed and written once, in place.

A key is a row of an FP8 page or a lane of an FP4 page, less than a tile in both, so that pages are the unit. The chain
of norm, rotation and quantizer is the plain one, which XLA fuses; the kernel brings the finished codes to their places
by a product with a 0/1 matrix, exact because codes and scales are numbers that bfloat16 holds. Keys are sorted by page
first: no page is visited twice, so reading ahead never meets a write.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import backend, plane_layouts, tpu_index_keys
from pallas_kernels.index_key_write.xla import rotated_key, stored_key
from pallas_kernels.plane_layouts import FOLD, LANES

Array = jax.Array


def unsupported(keys: Array, values: Array, scales: Array | None, index_format: str) -> str | None:
    """Why the kernel cannot run on these shapes, or None."""
    return tpu_index_keys.unsupported_plane(keys.shape[1], values, scales, index_format)


def index_key_write(
    keys: Array,
    norm: Array,
    cos: Array,
    sin: Array,
    requests: Array,
    entries: Array,
    block_tables: Array,
    values: Array,
    scales: Array,
    *,
    epsilon: float,
    index_format: str,
    interpret: Any = False,
) -> tuple[Array, Array]:
    """See the package's docstring; `unsupported` has been asked."""
    count, width = keys.shape
    if count == 0:
        return values, scales
    logical = not plane_layouts.in_lanes(width, values, scales, index_format)
    plane = tpu_index_keys.plane_of(width, values, scales, index_format, interpret)
    rows, row_scales = stored_key(rotated_key(keys, norm, cos, sin, epsilon), index_format)
    live = requests >= 0
    entry = jnp.where(live, entries, 0)
    page = jnp.where(live, block_tables[jnp.where(live, requests, 0), entry // plane.rows], plane.values.shape[0])
    order = jnp.argsort(page, stable=True)
    page, offset, rows, row_scales = (x[order] for x in (page, entry % plane.rows, rows, row_scales))
    total = jnp.sum(live, dtype=jnp.int32)
    place = jnp.arange(count, dtype=jnp.int32)
    opens = (place < total) & (page != jnp.pad(page, (1, 0), constant_values=-1)[:-1])
    runs = jnp.sum(opens, dtype=jnp.int32)
    (begin,) = jnp.nonzero(opens, size=count, fill_value=0)
    begin = jnp.where(place < runs, begin, total).astype(jnp.int32)
    end = jnp.append(begin[1:], total)
    # With nothing to write one page is read and written back as it was.
    run_page = jnp.where(place < runs, page[jnp.minimum(begin, count - 1)], 0)
    padding = -count % LANES

    def lanes(x: Array, value: int = 0) -> Array:
        """[C] or [C, n] to int32 [1 or n, C], padded to whole vectors."""
        x = x[None] if x.ndim == 1 else x.T
        return jnp.pad(x.astype(jnp.int32), ((0, 0), (0, padding)), constant_values=value)

    if index_format == "fp8":
        codes = jnp.pad(rows, ((0, padding), (0, 0)))
        key_scales = jnp.pad(row_scales[None], ((0, 0), (0, padding)))
    else:
        codes, key_scales = lanes(rows), lanes(row_scales)
    plan = (lanes(page, -1), lanes(offset))

    def whole(x: Array) -> pl.BlockSpec:
        return pl.BlockSpec(x.shape, lambda run, *_: (0,) * x.ndim)

    def paged(x: Array) -> pl.BlockSpec:
        return pl.BlockSpec((1, *x.shape[1:]), lambda run, pages, *_: (pages[run], 0, 0))

    operands = (*plan, codes, key_scales)
    planes = (plane.values, plane.scales)
    stored, stored_scales = backend.tpu_call(
        _kernel(plane),
        [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in planes],
        grid=(jnp.maximum(runs, 1),),
        num_scalar_prefetch=3,
        in_specs=[*map(whole, operands), *map(paged, planes)],
        out_specs=[paged(x) for x in planes],
        interpret=interpret,
        name=f"index_key_write_{index_format}",
        input_output_aliases={7: 0, 8: 1},
    )(run_page, begin, end, *operands, *planes)
    # A program that returns exactly the results of an aliased call is refused by the TPU compiler.
    stored, stored_scales = lax.optimization_barrier((stored, stored_scales))
    if index_format == "fp8":
        stored_scales = stored_scales[:, 0, :]
    if logical:
        return plane_layouts.from_lanes(stored, stored_scales, index_format)
    return stored, stored_scales


def _numbers(x: Array) -> Array:
    """Small integers to bfloat16, exact to 256."""
    return x.astype(jnp.int32).astype(jnp.float32).astype(jnp.bfloat16)


def _over_keys(left: Array, right: Array) -> Array:
    """[m, keys] and [n, keys] to [m, n] float32."""
    return lax.dot_general(left, right, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)


def _kernel(plane: tpu_index_keys.Plane):
    rows = plane.rows

    def kernel(
        pages_ref,
        begin_ref,
        end_ref,
        page_ref,
        offset_ref,
        codes_ref,
        key_scales_ref,
        values_ref,
        scales_ref,
        values_out,
        scales_out,
    ):
        run = pl.program_id(0)
        page = pages_ref[run]

        def placed(window, height, shift=0):
            """[height, keys of the window]: 1 where a key's place, `shift` on, is the row's number."""
            here = pl.ds(pl.multiple_of(window * LANES, LANES), LANES)
            number = lax.broadcasted_iota(jnp.int32, (height, LANES), 0)
            mine = (page_ref[:, here] == page) & (offset_ref[:, here] + shift == number)
            return jnp.where(mine, 1.0, 0.0).astype(jnp.bfloat16), here

        ones = jnp.ones((LANES, LANES), jnp.bfloat16)

        def fp8_window(window, carry):
            codes, written, scales, scale_written = carry
            chosen, here = placed(window, rows)
            codes += jnp.dot(chosen, _numbers(codes_ref[here, :]), preferred_element_type=jnp.float32)
            written += jnp.dot(chosen, ones, preferred_element_type=jnp.float32)
            chosen, _ = placed(window, LANES)
            wide = jnp.broadcast_to(key_scales_ref[:, here], (8, LANES)).astype(jnp.bfloat16)
            return codes, written, scales + _over_keys(wide, chosen), scale_written + _over_keys(ones[:8], chosen)

        def fp4_window(window, carry):
            codes, written, scales, scale_written = carry
            height = values_ref.shape[1]
            for part in range(LANES // rows):
                chosen, here = placed(window, LANES, part * FOLD)
                mine = pl.ds(part * height, height)
                codes += _over_keys(_numbers(codes_ref[mine, here]), chosen)
                written += _over_keys(ones[:height], chosen)
                if part == 0:
                    scales += _over_keys(_numbers(key_scales_ref[:, here]), chosen)
                    scale_written += _over_keys(ones[: scales.shape[0]], chosen)
            return codes, written, scales, scale_written

        tile = values_ref.shape[1:]
        scale_rows = 8 if plane.index_format == "fp8" else scales_ref.shape[1]
        start = tuple(jnp.zeros(shape, jnp.float32) for shape in (tile, tile, (scale_rows, LANES), (scale_rows, LANES)))
        first, last = begin_ref[run], end_ref[run]
        codes, written, scales, scale_written = lax.fori_loop(
            lax.div(first, LANES),
            jnp.where(last > first, lax.div(last - 1, LANES) + 1, lax.div(first, LANES)),
            fp8_window if plane.index_format == "fp8" else fp4_window,
            start,
        )

        def merged(written, new, old):
            return jnp.where(written > 0, new.astype(jnp.int32), old.astype(jnp.int32)).astype(jnp.uint8)

        values_out[0] = merged(written, codes, values_ref[0])
        if plane.index_format == "fp8":
            scales_out[0] = jnp.where(scale_written[:1] > 0, scales[:1], scales_ref[0])
        else:
            scales_out[0] = merged(scale_written, scales, scales_ref[0])

    return kernel

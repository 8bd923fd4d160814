"""Exact top-k for TPUs: a threshold search over a row's keys in VMEM, then positions by matrix products.

Scores become int32 keys that order as the scores do. A few rows are searched together, each by bisection on the count
of keys at or above a pivot. Which keys are taken, among them the first of those that tie, follows from running counts,
and so does the place of each in the result: products with triangular 0/1 matrices count, a one-hot matrix of lines and
places carries each line's mask to its places. Nothing is sorted or scattered; counts are exact in bfloat16 with
float32 sums.

Source: kernel chapter, "Top-k 512, candidate blocks, restricted scoring".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import backend
from pallas_kernels.order_keys import LOWEST, next_pivot, order_key

Array = jax.Array

LANES = 128
SEARCH_LINES = 64
"""Lines that one step of a pass reads."""
MOST_LINES = 16_384
"""Lines of 128 scores of a row that VMEM holds beside their keys."""
MOST_PLACES = 2048
LEAST_PREFERRED = 16_384
"""Scores of a row below which XLA's own selection is as good (kernel chapter, decision table)."""
ROWS_LINES = 4096
"""Lines of all rows of one program, while a row has fewer."""
MIB = 2**20


def unsupported(width: int, k: int) -> str | None:
    """Why the kernel cannot run on these shapes, or None."""
    if width > MOST_LINES * LANES:
        return f"a row of {width} scores does not fit VMEM, which holds {MOST_LINES * LANES}"
    if k > MOST_PLACES:
        return f"k is {k}, more than {MOST_PLACES}"
    return None


def select_topk(
    scores: Array,
    visible: Array,
    k: int,
    *,
    candidates: Array | None,
    block_size: int | None,
    interpret: Any = False,
) -> tuple[Array, Array]:
    """See the package's docstring; `unsupported` has been asked."""
    entries = None
    if candidates is not None:
        wide = candidates[:, :, None] * block_size + jnp.arange(block_size, dtype=jnp.int32)
        entries = jnp.where(candidates[:, :, None] >= 0, wide, -1).reshape(scores.shape)

    def keys(scores: Array, columns: Array, bound: Array, entries: Array | None) -> Array:
        place = columns if entries is None else entries
        return order_key(scores, (place >= 0) & (place < bound))

    return select_rows(scores, visible, k, keys, entries, lambda column: column, interpret, "select_topk")


def select_rows(
    scores: Array,
    visible: Array,
    k: int,
    keys: Callable[[Array, Array, Array, Array | None], Array],
    entries: Array | None,
    name: Callable[[Array], Array],
    interpret: Any,
    label: str,
) -> tuple[Array, Array]:
    """The best `k` columns of every row.

    Args:
      scores: [N, M] float32.
      visible: [N] int32.
      keys: (scores [n, 128], columns [n, 128], visible scalar, entries [n, 128] or None) -> int32 keys, `LOWEST` for
        what is not selectable; columns are int32 and pass M in the last lines.
      entries: [N, M] int32, what to return for a column; None returns `name(column)`.
      name: int32 columns -> ids in the same order.

    Returns:
      ids [N, k] int32 in the order of columns, -1 padded; counts [N] int32.
    """
    rows, width = scores.shape
    if rows == 0 or width == 0:
        return jnp.full((rows, k), -1, jnp.int32), jnp.zeros((rows,), jnp.int32)
    lines = pl.cdiv(width, LANES)
    lines += -lines % (LANES if lines > LANES else SEARCH_LINES)
    together = max(1, min(8, ROWS_LINES // lines))
    tiles = pl.cdiv(k, LANES)
    padding = -rows % together

    def lined(x: Array, value: float) -> Array:
        return jnp.pad(x, ((0, padding), (0, lines * LANES - width)), constant_values=value).reshape(-1, lines, LANES)

    pltpu = backend.tpu()
    operands = [lined(scores, 0)] + ([] if entries is None else [lined(entries, -1)])
    held = pl.BlockSpec((together, lines, LANES), lambda step, *_: (step, 0, 0))
    accumulators = 1 if entries is None else 4
    found = backend.tpu_call(
        _kernel(together, lines, width, tiles, k, keys, name, entries is not None),
        jax.ShapeDtypeStruct((rows + padding, tiles + 1, LANES), jnp.int32),
        grid=((rows + padding) // together,),
        num_scalar_prefetch=1,
        in_specs=[held] * len(operands),
        out_specs=pl.BlockSpec((together, tiles + 1, LANES), lambda step, *_: (step, 0, 0)),
        scratch_shapes=[
            pltpu.VMEM((together, lines, LANES), jnp.int32),
            pltpu.VMEM((accumulators, tiles, LANES, LANES), jnp.float32),
            pltpu.VMEM((2, tiles, LANES), jnp.float32),
            pltpu.VMEM((2, together, LANES), jnp.int32),
            pltpu.VMEM((2, together, LANES), jnp.float32),
        ],
        vmem_limit_bytes=(16 + (2 * len(operands) + 1) * together * lines * LANES * 4 // MIB) * MIB,
        interpret=interpret,
        name=label,
    )(jnp.pad(visible, (0, padding)), *operands)[:rows]
    return found[:, :tiles].reshape(rows, -1)[:, :k], found[:, tiles, 0]


def _triangle(keep: Callable[[Array, Array], Array]) -> Array:
    down = lax.broadcasted_iota(jnp.int32, (LANES, LANES), 0)
    across = lax.broadcasted_iota(jnp.int32, (LANES, LANES), 1)
    return keep(down, across).astype(jnp.bfloat16)


def _product(left: Array, right: Array) -> Array:
    return jnp.dot(left.astype(jnp.bfloat16), right.astype(jnp.bfloat16), preferred_element_type=jnp.float32)


def _columns_product(left: Array, right: Array) -> Array:
    """`left.T @ right`."""
    return lax.dot_general(
        left.astype(jnp.bfloat16),
        right.astype(jnp.bfloat16),
        (((0,), (0,)), ((), ())),
        preferred_element_type=jnp.float32,
    )


def _ones(x: Array) -> Array:
    """bool -> float32 1 or 0."""
    return jnp.where(x, 1.0, 0.0)


def _search(keys_ref: Any, together: int, lines: int, k: int) -> tuple[Array, Array, Array, Array]:
    """The threshold of every row of `keys_ref`, each value on all lanes of its row.

    Returns:
      [together, 128]: `above`, the smallest key that is taken whatever its place; `tied`, the key of which only the
      first `needed` are taken; `needed` and the count of all that are taken, float32.
    """

    def over_lines(step: Callable, start: Array) -> list[Array]:
        """Folds `step(accumulator [8, 128], keys [lines, 128], row)` over every row's lines."""

        def body(index, carry):
            place = pl.ds(pl.multiple_of(index * SEARCH_LINES, SEARCH_LINES), SEARCH_LINES)
            return tuple(step(carry[row], keys_ref[row, place, :], row) for row in range(together))

        first = tuple(jnp.full((8, LANES), start) for _ in range(together))
        return lax.fori_loop(0, lines // SEARCH_LINES, body, first)

    def folded(x: Array) -> Array:
        return x.reshape(SEARCH_LINES // 8, 8, LANES)

    def whole(parts, reduce) -> Array:
        """Reduces each [8, 128] to one value, on all lanes of its row."""
        rows = jnp.concatenate([reduce(part, axis=0, keepdims=True) for part in parts], axis=0)
        return jnp.broadcast_to(reduce(rows, axis=1, keepdims=True), (together, LANES))

    def count(pivot: Array) -> Array:
        def step(total, keys, row):
            return total + jnp.sum(folded(_ones(keys >= pivot[row : row + 1, :])), axis=0)

        return whole(over_lines(step, jnp.float32(0)), jnp.sum)

    def smaller(total, keys, row):
        return jnp.minimum(total, jnp.min(folded(jnp.where(keys > LOWEST, keys, 2**31 - 1)), axis=0))

    low = whole(over_lines(smaller, jnp.int32(2**31 - 1)), jnp.min)
    largest = over_lines(lambda total, keys, row: jnp.maximum(total, jnp.max(folded(keys), axis=0)), jnp.int32(LOWEST))
    high = whole(largest, jnp.max) + 1
    valid = count(jnp.full((together, LANES), LOWEST + 1, jnp.int32))
    wanted = jnp.minimum(valid, float(k))

    def unfinished(low, high, at_low):
        return (at_low != wanted) & (low + 1 < high)

    def bisect(state):
        step, low, high, at_low, at_high, _ = state
        pivot = next_pivot(step, low, high)
        found = count(pivot)
        open_ = unfinished(low, high, at_low)
        enough = found >= wanted
        low, at_low = (jnp.where(open_ & enough, new, old) for new, old in ((pivot, low), (found, at_low)))
        high, at_high = (jnp.where(open_ & ~enough, new, old) for new, old in ((pivot, high), (found, at_high)))
        return step + 1, low, high, at_low, at_high, jnp.max(_ones(unfinished(low, high, at_low)))

    # Invariant: at least `wanted` keys are >= low, fewer are >= high.
    start = (jnp.int32(0), low, high, valid, jnp.zeros_like(valid), jnp.max(_ones(unfinished(low, high, valid))))
    _, low, high, at_low, at_high, _ = lax.while_loop(lambda state: state[5] > 0, bisect, start)
    exact = at_low == wanted
    return jnp.where(exact, low, high), low, jnp.where(exact, 0.0, wanted - at_high), wanted


def _kernel(together: int, lines: int, width: int, tiles: int, k: int, keys, name, with_entries: bool):
    block_lines = min(lines, LANES)

    def kernel(visible_ref, scores_ref, *refs):
        entries_ref = refs[0] if with_entries else None
        out_ref, keys_ref, masks_ref, places_ref, limits_ref, counts_ref = refs[-6:]

        bounds = [visible_ref[pl.program_id(0) * together + row] for row in range(together)]
        if entries_ref is None:
            bounds = [jnp.minimum(bound, width) for bound in bounds]

        def make_keys(index, carry):
            first = pl.multiple_of(index * SEARCH_LINES, SEARCH_LINES)
            place = pl.ds(first, SEARCH_LINES)
            line = first + lax.broadcasted_iota(jnp.int32, (SEARCH_LINES, LANES), 0)
            columns = line * LANES + lax.broadcasted_iota(jnp.int32, (SEARCH_LINES, LANES), 1)
            for row in range(together):
                entries = None if entries_ref is None else entries_ref[row, place, :]
                keys_ref[row, place, :] = keys(scores_ref[row, place, :], columns, bounds[row], entries)
            return carry

        lax.fori_loop(0, lines // SEARCH_LINES, make_keys, 0)
        limits_ref[0], limits_ref[1], counts_ref[0], counts_ref[1] = _search(keys_ref, together, lines, k)
        before = _triangle(lambda down, across: down < across)
        after = _triangle(lambda down, across: across < down)[:block_lines, :block_lines]
        upto = _triangle(lambda down, across: across <= down)
        ones = jnp.ones((LANES, LANES), jnp.bfloat16)
        lane_number = lax.broadcasted_iota(jnp.int32, (1, LANES), 1)

        def slots(tile):
            return (tile * LANES + lane_number).astype(jnp.float32)

        def carry_to_places(row, place, chosen, first, here, line):
            """Adds what one block of lines holds for every tile of places."""

            def tile_step(tile, carry):
                slot = slots(tile)
                mine = (first <= slot) & (slot < first + here)
                carried = _ones(mine)
                at = pl.ds(tile, 1)
                masks_ref[0, tile] += _columns_product(chosen, carried)
                places_ref[0, at, :] += jnp.sum(jnp.where(mine, line, 0), axis=0, keepdims=True)
                places_ref[1, at, :] += jnp.sum(jnp.where(mine, first, 0), axis=0, keepdims=True)
                if entries_ref is not None:
                    # Ids in three digits that bfloat16 holds.
                    ids = entries_ref[row, place, :]
                    for digit in range(3):
                        part = ((ids >> (8 * digit)) & 255).astype(jnp.float32)
                        masks_ref[1 + digit, tile] += _columns_product(part, carried)
                return carry

            lax.fori_loop(0, tiles, tile_step, 0)

        def pick_row(row, carry):
            masks_ref[...] = jnp.zeros(masks_ref.shape, jnp.float32)
            places_ref[...] = jnp.zeros(places_ref.shape, jnp.float32)
            at_row = pl.ds(row, 1)
            above, tied = limits_ref[0, at_row, :], limits_ref[1, at_row, :]
            needed, wanted = counts_ref[0, at_row, :], counts_ref[1, at_row, :]

            def block(index, carry):
                taken_before, tied_before = carry
                place = pl.ds(pl.multiple_of(index * block_lines, block_lines), block_lines)
                keys = keys_ref[row, place, :]
                selectable = keys > LOWEST
                over = selectable & (keys >= above)
                ties = selectable & (keys == tied) & (tied < above)
                in_line = _product(_ones(ties), ones)
                rank = _product(_ones(ties), before) + _product(after, in_line) + tied_before
                chosen = _ones(over | (ties & (rank < needed)))
                here = _product(chosen, ones)
                first = _product(after, here) + taken_before
                line = index * block_lines + lax.broadcasted_iota(jnp.int32, here.shape, 0)
                carry_to_places(row, place, chosen, first, here, line.astype(jnp.float32))
                last = block_lines - 1
                return (
                    first[last:, :] + here[last:, :],
                    tied_before + jnp.sum(in_line, axis=0, keepdims=True),
                )

            zero = jnp.zeros((1, LANES), jnp.float32)
            lax.fori_loop(0, lines // block_lines, block, (zero, zero))

            def write_tile(tile, carry):
                slot, at = slots(tile), pl.ds(tile, 1)
                until = _product(upto, masks_ref[0, tile])
                lane = jnp.sum(_ones(until <= slot - places_ref[1, at, :]), axis=0, keepdims=True)
                if entries_ref is None:
                    ids = name((places_ref[0, at, :] * LANES + lane).astype(jnp.int32))
                else:
                    here = lax.broadcasted_iota(jnp.int32, (LANES, LANES), 0).astype(jnp.float32) == lane
                    digits = [
                        jnp.sum(jnp.where(here, masks_ref[1 + digit, tile], 0), axis=0, keepdims=True) * 256.0**digit
                        for digit in range(3)
                    ]
                    ids = sum(digits[1:], digits[0]).astype(jnp.int32)
                out_ref[row, at, :] = jnp.where(slot < wanted, ids, -1)
                return carry

            lax.fori_loop(0, tiles, write_tile, 0)
            out_ref[row, pl.ds(tiles, 1), :] = wanted.astype(jnp.int32)
            return carry

        lax.fori_loop(0, together, pick_row, 0)

    return kernel

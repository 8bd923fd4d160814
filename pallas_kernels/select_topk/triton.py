"""Exact top-k for GPUs by threshold search on order-preserving integers, over as many levels as a row needs.

Scores become int32 keys that order as the scores do, with one lowest key for what is not selectable. A first kernel
reads every score once and writes the maxima of groups, and of groups of groups. A second one, a program a row, picks
the best k groups of the highest level, then the best k members of those groups, down to the scores. That is exact,
ties included: every group that outranks an excluded one holds a member that outranks all of the excluded one's.
Each pick bisects a threshold by counting, first between float values and then between keys, and stops as soon as
exactly enough keys lie at or above it. Nothing is sorted; positions come from one running count.

Source: kernel chapter, "Top-k 512, candidate blocks, restricted scoring".
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import backend
from pallas_kernels.order_keys import LARGEST, LOWEST, next_pivot, order_key

Array = jax.Array

MOST_CAPACITY = 16_384
"""Keys of one program: beyond this they no longer fit its registers."""


@dataclasses.dataclass(frozen=True)
class Config:
    """How the work is cut.

    Attributes:
      capacity: most keys one program holds; a power of two, at least 2k.
      chunk: scores that one program of the first kernel reads; a power of two.
      pick_warps, level_warps: warps of a program of the second and first kernel.
    """

    capacity: int
    chunk: int
    pick_warps: int
    level_warps: int


def config_for(rows: int, width: int, k: int) -> Config:
    """The configuration for `rows` rows of `width` scores."""
    capacity = max(8192, 4 * pl.next_power_of_2(k))
    return Config(capacity=capacity, chunk=4096, pick_warps=16 if rows <= 512 else 8, level_warps=4)


def unsupported(rows: int, width: int, k: int) -> str | None:
    """Why the kernel cannot run on these shapes, or None."""
    config = config_for(rows, width, k)
    if config.capacity > MOST_CAPACITY:
        return f"k of {k} needs {config.capacity} keys in one program, more than {MOST_CAPACITY}"
    return too_many_levels(width, config.capacity // pl.next_power_of_2(k), config.capacity, config.chunk)


def too_many_levels(width: int, ratio: int, capacity: int, chunk: int) -> str | None:
    """The message of `level_sizes` where a row needs more levels than a chunk can make, or None."""
    try:
        level_sizes(width, ratio, capacity, chunk)
    except ValueError as error:
        return str(error)
    return None


def pick(keys: Array, k: int, pinned: bool = False) -> tuple[Array, Array, Array]:
    """The best `k` of 1-D `keys`, ties to the smaller place.

    Args:
      keys: [E] int32.
      k: how many.
      pinned: the search starts at the largest key of a finite score where fewer than k lie beyond it. A pinned key has
        no value to go half-way to.

    Returns:
      chosen [E] bool; the rank by place of every chosen key [E] int32; how many are chosen.
    """
    wanted = jnp.minimum(jnp.sum((keys > LOWEST).astype(jnp.int32)), k)
    valid = jnp.sum((keys > LOWEST).astype(jnp.int32))

    def unfinished(state: tuple) -> Array:
        step, low, high, at_low, _ = state
        del step
        return (at_low != wanted) & (low + 1 < high)

    def bisect(state: tuple) -> tuple:
        step, low, high, at_low, at_high = state
        pivot = next_pivot(step, low, high)
        count = jnp.sum((keys >= pivot).astype(jnp.int32))
        enough = count >= wanted
        return (
            step + 1,
            jnp.where(enough, pivot, low),
            jnp.where(enough, high, pivot),
            jnp.where(enough, count, at_low),
            jnp.where(enough, at_high, count),
        )

    # Invariant: at least `wanted` keys are >= low, fewer are >= high.
    lowest = jnp.min(jnp.where(keys > LOWEST, keys, 2**31 - 1))
    high, at_high = jnp.max(keys) + 1, jnp.int32(0)
    if pinned:
        beyond = jnp.sum((keys > LARGEST).astype(jnp.int32))
        finite = jnp.max(jnp.where(keys <= LARGEST, keys, LOWEST))
        high, at_high = jnp.where(beyond < wanted, finite + 1, high), jnp.where(beyond < wanted, beyond, 0)
    start = (jnp.int32(0), lowest, high, valid, at_high)
    _, low, high, at_low, at_high = lax.while_loop(unfinished, bisect, start)
    exact = at_low == wanted
    above = (keys >= jnp.where(exact, low, high)) & (keys > LOWEST)
    needed = jnp.where(exact, 0, wanted - at_high)
    tied = (keys == low) & ~exact
    # Both running counts in one scan: they stay below 2^16.
    each = above.astype(jnp.int32) + (tied.astype(jnp.int32) << 16)
    before = jnp.cumsum(each) - each
    above_before, tied_before = before & 0xFFFF, before >> 16
    chosen = above | (tied & (tied_before < needed))
    return chosen, above_before + jnp.minimum(tied_before, needed), wanted


def load_row(ref, row: Array, columns: Array, width: int, aligned: int):
    """`ref[row, columns]`, unmasked where no column can lie past `width`: a mask would stop wide loads.

    Args:
      columns: int32 of any shape, ascending by one along the last axis, from a multiple of `aligned`.
      aligned: columns of one run; a divisor of `width` needs no mask.
    """
    if width % aligned == 0:
        return ref[row, columns]
    return backend.triton().load(ref.at[row, columns], mask=columns < width, other=0)


def level_sizes(width: int, ratio: int, capacity: int, chunk: int) -> list[int]:
    """Sizes of the levels above `width` scores, lowest first, each in whole chunks; empty when none is needed."""
    chunks = pl.cdiv(width, chunk)
    sizes: list[int] = []
    per_chunk = chunk
    while (sizes[-1] if sizes else width) > capacity:
        per_chunk //= ratio
        if per_chunk < 1:
            raise ValueError(f"{width} scores need more than {len(sizes)} levels of {ratio} in chunks of {chunk}")
        sizes.append(chunks * per_chunk)
    return sizes


@backend.traced_once
def select_topk(
    scores: Array,
    visible: Array,
    k: int,
    *,
    candidates: Array | None,
    block_size: int | None,
    config: Config | None = None,
    interpret: bool = False,
) -> tuple[Array, Array]:
    """See the package's docstring."""
    rows, width = scores.shape
    if rows == 0 or width == 0:
        return jnp.full((rows, k), -1, jnp.int32), jnp.zeros((rows,), jnp.int32)
    config = config or config_for(rows, width, k)
    ratio = config.capacity // pl.next_power_of_2(k)
    sizes = level_sizes(width, ratio, config.capacity, config.chunk)
    optional = () if candidates is None else (candidates,)

    def leaves(scores_ref, visible_ref, *candidates_ref):
        def read(row, columns, aligned):
            bound = visible_ref[row]
            loaded = load_row(scores_ref, row, columns, width, aligned)
            if not candidates_ref:
                return order_key(loaded, columns < jnp.minimum(bound, width))
            inside = columns < width
            block = candidates_ref[0][row, jnp.where(inside, columns // block_size, 0)]
            seen = inside & (block >= 0) & (block * block_size + columns % block_size < bound)
            return order_key(loaded, seen)

        return read

    def name(row, columns, wanted, scores_ref, visible_ref, *candidates_ref):
        del scores_ref, visible_ref
        if not candidates_ref:
            return columns
        block = candidates_ref[0][row, jnp.where(wanted, columns // block_size, 0)]
        return block * block_size + columns % block_size

    levels = _group_maxima(scores, visible, optional, leaves, sizes, ratio, config, interpret)
    return pick_down(
        (scores, visible, *optional), leaves, name, width, levels, ratio, k, config, interpret, "select_topk"
    )


def _group_maxima(scores, visible, optional, leaves, sizes, ratio, config, interpret) -> list[Array]:
    """Keys of the maxima of groups of `ratio` scores, of groups of `ratio` groups, and so on: one [N, size] a level."""
    if not sizes:
        return []
    rows, width = scores.shape
    plgpu = backend.triton()

    def kernel(*refs):
        operands, outputs = refs[: 2 + len(optional)], refs[2 + len(optional) :]
        chunk, row = pl.program_id(0), pl.program_id(1)
        columns = chunk * config.chunk + jnp.arange(config.chunk, dtype=jnp.int32)

        def write(keys):
            for output in outputs:
                keys = jnp.max(keys.reshape(keys.shape[0] // ratio, ratio), axis=1)
                plgpu.store(output.at[row, pl.ds(chunk * keys.shape[0], keys.shape[0])], keys)

        # With candidates, columns in sight can lie anywhere.
        live = chunk * config.chunk < (width if optional else operands[1][row])

        @pl.when(live)
        def _():
            write(leaves(*operands)(row, columns, config.chunk))

        @pl.when(jnp.logical_not(live))
        def _():
            write(jnp.full((config.chunk,), LOWEST, jnp.int32))

    return backend.triton_call(
        kernel,
        [jax.ShapeDtypeStruct((rows, size), jnp.int32) for size in sizes],
        grid=(pl.cdiv(width, config.chunk), rows),
        num_warps=config.level_warps,
        num_stages=1,
        interpret=interpret,
        name="group_maxima",
    )(scores, visible, *optional)


def pick_down(
    operands, leaves, name, width, levels, ratio, k, config, interpret, label, *, pinned: bool = False
) -> tuple[Array, Array]:
    """Picks the best k groups level by level and then the best k leaves.

    Args:
      operands: arrays that `leaves` and `name` read.
      leaves: refs -> function of (row, columns, aligned) giving the keys of leaf columns, see `load_row`.
      name: (row, columns, wanted, *refs) -> the id written for a chosen leaf column.
      width: leaves of a row.
      levels: group maxima, lowest level first, each [N, size].
      ratio: members of a group.
      k: how many to pick.
      pinned: see `pick`.

    Returns:
      ids [N, k] int32 ascending, -1 padded; counts [N] int32.
    """
    plgpu = backend.triton()
    rows = operands[0].shape[0]
    places = pl.next_power_of_2(k)

    def kernel(*refs):
        leaf_refs, level_refs = refs[: len(operands)], refs[len(operands) : len(operands) + len(levels)]
        ids_ref, counts_ref, *scratch = refs[len(operands) + len(levels) :]
        row = pl.program_id(0)
        place = jnp.arange(places, dtype=jnp.int32)
        readers = [leaves(*leaf_refs), *[level_reader(ref) for ref in level_refs]]
        size = pl.next_power_of_2(level_refs[-1].shape[1] if level_refs else width)
        members = jnp.arange(size, dtype=jnp.int32)
        keys = readers[-1](row, members, size)
        for level in range(len(levels), 0, -1):
            chosen, rank, count = pick(keys, k, pinned)
            groups_ref = scratch[level - 1]
            plgpu.store(groups_ref.at[row, jnp.where(chosen, rank, places)], members, mask=chosen)
            if not interpret:
                plgpu.debug_barrier()
            groups = jnp.where(place < count, groups_ref[row, place], 0)
            members = groups[:, None] * ratio + jnp.arange(ratio, dtype=jnp.int32)[None, :]
            keys = jnp.where((place < count)[:, None], readers[level - 1](row, members, ratio), LOWEST)
            members, keys = members.reshape(-1), keys.reshape(-1)
        chosen, rank, count = pick(keys, k, pinned)
        ids = name(row, members, chosen, *leaf_refs)
        plgpu.store(ids_ref.at[row, jnp.where(chosen, rank, k)], ids, mask=chosen)
        plgpu.store(ids_ref.at[row, place], jnp.full((places,), -1, jnp.int32), mask=(place >= count) & (place < k))
        counts_ref[row] = count

    out = backend.triton_call(
        kernel,
        [
            jax.ShapeDtypeStruct((rows, k), jnp.int32),
            jax.ShapeDtypeStruct((rows,), jnp.int32),
            *[jax.ShapeDtypeStruct((rows, places), jnp.int32) for _ in levels],
        ],
        grid=(rows,),
        num_warps=config.pick_warps,
        num_stages=1,
        interpret=interpret,
        name=label,
    )(*operands, *levels)
    return out[0], out[1]


def level_reader(ref):
    """Reads stored keys of one level, `LOWEST` past its end."""
    size = ref.shape[1]

    def read(row, members, aligned):
        return jnp.where(members < size, load_row(ref, row, members, size, aligned), LOWEST)

    return read

"""The end of sparse attention on GPUs: the sums of splits become results, in one kernel for every way to cut them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import backend
from pallas_kernels.sparse_attention.row_math import LOG2_E, rotated

Array = jax.Array

MANY_SPLITS = 16
"""Splits from which on a program joins `JOINED_DIMS` dims of one head and asks for all splits at once: one after the
other, a few at a time, they take as many round trips of the memory."""
JOINED_DIMS = 128


@dataclasses.dataclass(frozen=True)
class Cut:
    """How sums were cut: among `splits` pieces of the list and `cuts` of the dims. A program joins `heads` of a row."""

    heads: int
    splits: int
    cuts: int


def finish(
    refs: tuple,
    row: Array,
    first_head: Array,
    heads: int,
    peak: Array,
    total: Array,
    sums: tuple,
    width: int,
    start: Array | int = 0,
) -> None:
    """Adds the sink, divides, rounds, rotates back and stores; a row without keys or request stores zeros.

    The pieces of `sums` are the dims from `start` on.
    """
    sink_ref, layer_ref, cos_ref, sin_ref, live, out_ref = refs
    head = first_head + jnp.arange(heads, dtype=jnp.int32)
    present = head < out_ref.shape[1]
    sink = backend.triton().load(sink_ref.at[jnp.full((heads,), layer_ref[0]), jnp.where(present, head, 0)])
    total = total + jnp.exp2(sink * jnp.float32(LOG2_E) - peak)
    for piece, part in enumerate(sums):
        size = part.shape[1]
        quotient = (part / total[:, None]).astype(jnp.bfloat16)
        turned = rotated(quotient, start + piece * size, width, cos_ref, sin_ref, row, back=True)
        backend.triton().store(
            out_ref.at[row, pl.ds(first_head, heads), pl.ds(start + piece * size, size)],
            jnp.where(live, turned, jnp.zeros_like(turned)),
            mask=present[:, None],
        )


def _join_kernel(
    sums_ref: object,
    peak_ref: object,
    total_ref: object,
    sink_ref: object,
    layer_ref: object,
    batch_ref: object,
    cos_ref: object,
    sin_ref: object,
    out_ref: object,
    *,
    heads: int,
    splits: int,
    cuts: int,
    width: int,
) -> None:
    """Joins the splits of a few heads of one query row, for one of `cuts` parts of the dims."""
    program = pl.program_id(0)
    cut, program = lax.rem(program, cuts), lax.div(program, cuts)
    size = width // cuts
    head_blocks = -(-out_ref.shape[1] // heads)
    first_head = (program % head_blocks) * heads
    row = program // head_blocks
    block = pl.ds(first_head, heads)
    present = first_head + jnp.arange(heads, dtype=jnp.int32) < out_ref.shape[1]

    def load(ref: object, split: int) -> Array:
        place = pl.ds(split * cuts + cut, 1)
        return backend.triton().load(ref.at[row, place, block], mask=present[None, :], other=0.0).reshape(heads)

    peaks = [load(peak_ref, s) for s in range(splits)]
    peak = functools.reduce(jnp.maximum, peaks)
    total = jnp.zeros((heads,), jnp.float32)
    sums = jnp.zeros((heads, size), jnp.float32)
    for s in range(splits):
        shrink = jnp.exp2(peaks[s] - peak)
        total += shrink * load(total_ref, s)
        part = backend.triton().load(
            sums_ref.at[row, pl.ds(s, 1), block, pl.ds(cut * size, size)],
            mask=jnp.broadcast_to(present[None, :, None], (1, heads, size)),
            other=0.0,
        )
        sums += shrink[:, None] * part.reshape(heads, size)
    live = backend.triton().load(batch_ref.at[row]) >= 0
    refs = (sink_ref, layer_ref, cos_ref, sin_ref, live, out_ref)
    finish(refs, row, first_head, heads, peak, total, (sums,), width, cut * size)


def _join_many_kernel(
    sums_ref: object,
    peak_ref: object,
    total_ref: object,
    sink_ref: object,
    layer_ref: object,
    batch_ref: object,
    cos_ref: object,
    sin_ref: object,
    out_ref: object,
    *,
    splits: int,
    dims: int,
) -> None:
    """Joins many splits of `dims` dims of one head of one query row."""
    triton = backend.triton()
    heads, width = out_ref.shape[1:]
    pieces = width // dims
    piece, program = lax.rem(pl.program_id(0), pieces), lax.div(pl.program_id(0), pieces)
    head, row = lax.rem(program, heads), lax.div(program, heads)
    split = jnp.arange(pl.next_power_of_2(splits), dtype=jnp.int32)
    there = split < splits
    near = jnp.where(there, split, 0)
    peaks = triton.load(peak_ref.at[row, near, head], mask=there, other=-jnp.inf)
    totals = triton.load(total_ref.at[row, near, head], mask=there, other=0.0)
    shape = (split.shape[0], dims)
    column = piece * dims + jnp.arange(dims, dtype=jnp.int32)
    place = (jnp.broadcast_to(near[:, None], shape), head, jnp.broadcast_to(column[None, :], shape))
    parts = triton.load(sums_ref.at[(row, *place)], mask=jnp.broadcast_to(there[:, None], shape), other=0.0)
    live = triton.load(batch_ref.at[row]) >= 0
    peak = jnp.max(peaks)
    shrink = jnp.exp2(peaks - peak)
    sums = jnp.sum(shrink[:, None] * parts, axis=0)
    refs = (sink_ref, layer_ref, cos_ref, sin_ref, live, out_ref)
    total = jnp.broadcast_to(jnp.sum(shrink * totals), (1,))
    finish(refs, row, head, 1, jnp.broadcast_to(peak, (1,)), total, (sums[None, :],), width, piece * dims)


def join(
    results: Sequence[Array],
    sink: Array,
    layer: Array,
    batch_ids: Array,
    cos: Array,
    sin: Array,
    query: Array,
    cut: Cut,
    interpret: bool,
) -> Array:
    """[N, H, d] like `query` from sums [N, splits, H, d] and their peaks and totals [N, splits cuts, H]."""
    rows, heads, width = query.shape
    if cut.splits >= MANY_SPLITS and cut.cuts == 1:
        dims = min(width, JOINED_DIMS)
        kernel = functools.partial(_join_many_kernel, splits=cut.splits, dims=dims)
        programs, warps = rows * heads * (width // dims), 8
    else:
        kernel = functools.partial(_join_kernel, **dataclasses.asdict(cut), width=width)
        programs, warps = rows * -(-heads // cut.heads) * cut.cuts, 4
    return backend.triton_call(
        kernel,
        jax.ShapeDtypeStruct(query.shape, query.dtype),
        grid=(programs,),
        num_warps=warps,
        num_stages=1,
        interpret=interpret,
        name="sparse_attention_join",
    )(*results, sink, layer, batch_ids, cos, sin)

"""`quantized_rows` for GPUs: a row stays in registers from its parts to its quantized values.

Many rows: one program a row. Few rows: one program a block of columns, since quantizing a long row takes one
multiprocessor longer than the launch; where a row is normalized, each of its programs sums the squares of all of it.

What is computed (functions on blocks of columns) is apart from how columns are fetched and stored. A block of columns
is [groups, 32], so that a group of Q8 is a row of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import backend
from pallas_kernels.arithmetic import Q8_GROUP, fake_q8_group, round_to_bfloat16, swiglu
from pallas_kernels.grouped_experts.arrangement import CODES, place_by_code
from pallas_kernels.grouped_experts.types import Order
from pallas_kernels.grouped_experts.widening import OPERAND_POWER
from pallas_kernels.quantized_rows.types import QuantizedRows
from pallas_kernels.triton_widening import LANE_GROUP, packed_instructions, place_in_lanes

Array = jax.Array

MOST_ROWS = 512
"""Rows up to which `auto` takes the kernel. It is there to spare launches: XLA's fusions of many rows move no more."""
MOST_WIDTH = 2**14
"""The widest row: all of it lies in the registers of one program."""
BLOCK = 1024
"""Columns of a block."""
MOST_SPLIT = 64
"""Rows up to which every block of a row is a program of its own."""
WARPS = 8


def preferred(rows: int) -> bool:
    """Whether `auto` takes the kernel for `rows` rows."""
    return rows <= MOST_ROWS


def unsupported(width: int, quantize: bool) -> str | None:
    """Why the kernel cannot make rows of `width`, or None."""
    if width > MOST_WIDTH:
        return f"rows of {width} are wider than {MOST_WIDTH}"
    if quantize and width % Q8_GROUP:
        return f"rows of {width} are not whole groups of {Q8_GROUP}"
    return None


@backend.traced_once
def collapsed_rows(
    streams: Array,
    pre_mix: Array,
    weight: Array,
    layer: Array | int | None = None,
    *,
    epsilon: float,
    quantize: bool,
    codes: Order | None = None,
    interpret: bool = False,
) -> QuantizedRows:
    """See `pallas_kernels.quantized_rows`; `unsupported` has been asked."""
    rows, count, width = streams.shape
    dtype = streams.dtype

    def make(columns: _Columns, streams_ref, pre_ref, weight_ref, layer_ref) -> list[Array]:
        factors = [pre_ref[columns.row, stream] for stream in range(count)]

        def block(first: int) -> Array:
            total = columns.load(streams_ref, first, columns.row, 0).astype(jnp.float32) * factors[0]
            for stream in range(1, count):
                total += columns.load(streams_ref, first, columns.row, stream).astype(jnp.float32) * factors[stream]
            return _round(total, dtype)

        weights = _weights(columns, weight_ref, layer_ref[0])
        return _normalized([block(first) for first in columns.all], weights, columns, epsilon, dtype)

    layer, weight = backend.with_layer(layer, weight)
    operands = streams, pre_mix, weight, layer
    return _call(make, "collapsed_rows", rows, width, dtype, quantize, codes, interpret, *operands)


@backend.traced_once
def normalized_rows(
    parts: Array,
    weight: Array,
    layer: Array | int | None = None,
    *,
    epsilon: float,
    quantize: bool,
    dtype: jnp.dtype,
    interpret: bool = False,
) -> QuantizedRows:
    """See `pallas_kernels.quantized_rows`; `unsupported` has been asked."""
    _, rows, width = parts.shape

    def make(columns: _Columns, parts_ref, weight_ref, layer_ref) -> list[Array]:
        weights = _weights(columns, weight_ref, layer_ref[0])
        values = [_summed(parts_ref, columns, first, dtype) for first in columns.all]
        return _normalized(values, weights, columns, epsilon, dtype)

    layer, weight = backend.with_layer(layer, weight)
    return _call(make, "normalized_rows", rows, width, dtype, quantize, None, interpret, parts, weight, layer)


@backend.traced_once
def summed_rows(parts: Array, *, quantize: bool, dtype: jnp.dtype, interpret: bool = False) -> QuantizedRows:
    """See `pallas_kernels.quantized_rows`; `unsupported` has been asked."""
    _, rows, width = parts.shape

    def make(columns: _Columns, parts_ref) -> list[Array]:
        return [_summed(parts_ref, columns, first, dtype) for first in columns.own]

    return _call(make, "summed_rows", rows, width, dtype, quantize, None, interpret, parts)


@backend.traced_once
def gated_rows(
    gate: Array, up: Array, *, limit: float, quantize: bool, dtype: jnp.dtype, interpret: bool = False
) -> QuantizedRows:
    """See `pallas_kernels.quantized_rows`; `unsupported` has been asked."""
    _, rows, width = gate.shape

    def make(columns: _Columns, gate_ref, up_ref) -> list[Array]:
        return [
            _round(
                swiglu(_summed(gate_ref, columns, first, dtype), _summed(up_ref, columns, first, dtype), limit), dtype
            )
            for first in columns.own
        ]

    return _call(make, "gated_rows", rows, width, dtype, quantize, None, interpret, gate, up)


class _Columns:
    """The columns of one row, block by block.

    Attributes:
      row: of the program.
      all: first column of every block of the row.
      own: first column of every block that the program stores.
      shape: of a block, [groups, 32].
    """

    def __init__(self, width: int, *, split: bool):
        size = _block_size(width)
        self.row = pl.program_id(0)
        self.width = width
        self.all = range(0, width, size)
        self.own: Sequence[Array | int] = [pl.program_id(1) * size] if split else self.all
        self.shape = (size // Q8_GROUP, Q8_GROUP)

    def own_of(self, values: list[Array]) -> list[Array]:
        """Those of all blocks' values that belong to `own`."""
        if self.own is self.all:
            return values
        own = values[0]
        for block, value in enumerate(values[1:], 1):
            own = jnp.where(pl.program_id(1) == block, value, own)
        return [own]

    def inside(self, first: Array | int, width: int) -> bool:
        """Whether a block is known to lie within a row of `width`."""
        size = self.shape[0] * Q8_GROUP
        return first + size <= width if isinstance(first, int) else width % size == 0

    def place(self, first: Array | int) -> Array:
        """Columns of the block at `first`."""
        group = lax.broadcasted_iota(jnp.int32, self.shape, 0)
        return first + group * Q8_GROUP + lax.broadcasted_iota(jnp.int32, self.shape, 1)

    def load(self, ref: object, first: Array | int, *leading: Array | int) -> Array:
        """A block of ref[leading], zero past the row's end."""
        place = self.place(first)
        index = tuple(jnp.broadcast_to(jnp.asarray(part, jnp.int32), self.shape) for part in leading)
        if self.inside(first, self.width):
            return backend.triton().load(ref.at[(*index, place)])
        return backend.triton().load(ref.at[(*index, place)], mask=place < self.width, other=0.0)

    def store(self, ref: object, first: Array | int, values: Array, order: Callable[[Array], Array]) -> None:
        """Stores a block where `order` says; what lies past the row's end but not past `ref`'s is zero."""
        place = self.place(first)
        if self.inside(first, ref.shape[1]):
            # No mask, and an index without a choice: the compiler then sees neighbours and stores them together.
            row = jnp.broadcast_to(self.row, self.shape)
            backend.triton().store(ref.at[row, order(place)], values.astype(ref.dtype))
            return
        there = place < ref.shape[1]
        # Lanes that are not stored get an index past the end: interpret mode writes their old value there.
        row = jnp.where(there, jnp.broadcast_to(self.row, self.shape), ref.shape[0])
        backend.triton().store(ref.at[row, jnp.where(there, order(place), 0)], values.astype(ref.dtype), mask=there)


def _call(
    make: Callable[..., list[Array]],
    name: str,
    rows: int,
    width: int,
    dtype: jnp.dtype,
    quantize: bool,
    codes: Order | None,
    interpret: bool,
    *operands: Array,
) -> QuantizedRows:
    """Launches `make`, which gives the rounded blocks of a row, and what follows for all calls."""
    codes = codes if width % CODES == 0 else None
    split = rows <= MOST_SPLIT
    power = 2.0**OPERAND_POWER if packed_instructions() and not interpret else 1.0
    widths = [width, width, -(-width // LANE_GROUP) * LANE_GROUP, *([] if codes is None else [width])]

    def kernel(*refs) -> None:
        operand_refs, (rounded_ref, quantized_ref, lanes_ref, *codes_ref) = refs[: len(operands)], refs[len(operands) :]
        columns = _Columns(width, split=split)
        for first, rounded in zip(columns.own, make(columns, *operand_refs), strict=True):
            quantized = fake_q8_group(rounded) if quantize else rounded
            columns.store(rounded_ref, first, rounded, lambda place: place)
            columns.store(quantized_ref, first, quantized, lambda place: place)
            columns.store(lanes_ref, first, quantized, place_in_lanes)
            for ref in codes_ref:
                columns.store(ref, first, quantized * power, lambda place: place_by_code(place, width, codes))

    results = backend.triton_call(
        kernel,
        [jax.ShapeDtypeStruct((rows, columns), dtype) for columns in widths],
        grid=(rows, -(-width // _block_size(width))) if split else (rows,),
        num_warps=WARPS,
        num_stages=1,
        interpret=interpret,
        name=name,
    )(*operands)
    return QuantizedRows(*results)


def _block_size(width: int) -> int:
    return min(BLOCK, max(LANE_GROUP, pl.next_power_of_2(width)))


def _summed(ref: object, columns: _Columns, first: Array | int, dtype: jnp.dtype) -> Array:
    """A block of the sum of ref's parts [P, N, K], rounded to `dtype`, as float32."""
    total = columns.load(ref, first, 0, columns.row).astype(jnp.float32)
    for part in range(1, ref.shape[0]):
        total += columns.load(ref, first, part, columns.row).astype(jnp.float32)
    return _round(total, dtype)


def _weights(columns: _Columns, ref: object, layer: Array) -> list[Array]:
    """The norm's weight of the program's blocks. Asked for first: nothing is read ahead of a sum among warps."""
    return [columns.load(ref, first, layer).astype(jnp.float32) for first in columns.own]


def _normalized(
    values: list[Array], weights: list[Array], columns: _Columns, epsilon: float, dtype: jnp.dtype
) -> list[Array]:
    """All blocks of a row -> the program's normalized blocks, rounded to `dtype`."""
    square = values[0] * values[0]
    for value in values[1:]:
        square += value * value
    scale = lax.rsqrt(jnp.sum(jnp.sum(square, axis=1), axis=0) / columns.width + epsilon)
    own = columns.own_of(values)
    return [_round(weight * (value * scale), dtype) for weight, value in zip(weights, own, strict=True)]


def _round(value: Array, dtype: jnp.dtype) -> Array:
    """float32 values rounded to `dtype`, as float32."""
    return round_to_bfloat16(value) if dtype == jnp.bfloat16 else value

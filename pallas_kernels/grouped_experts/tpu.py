"""The routed experts for TPUs: blocks of rows of one expert, whose packed matrices stream through VMEM tile by tile.

(row, expert) pairs are put in the order of experts and cut into blocks that hold rows of one expert only. How many
blocks there are is a traced number, so an expert nobody chose costs nothing. One kernel serves all three matrices; the
activation and its quantizer lie between two of its calls and are those of the definition. Low and high nibbles are the
even and odd inner dims, which the other operand keeps apart.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import backend
from pallas_kernels.arithmetic import decode_e2m1, decode_e8m0, fake_q8, round_to_bfloat16
from pallas_kernels.grouped_experts import xla
from pallas_kernels.grouped_experts.types import ExpertWeights

Array = jax.Array

LANES = 128
BYTES_OF_SCALE = 16
ROW_TILE = 16
"""Rows of a bfloat16 register tile."""
MOST_ROWS = 256
"""Rows of a block: with more, an expert of a prefill is rarely widened twice."""
OUTPUTS = 256
"""Outputs of a tile: 640 KiB of packed weights at the model's width."""
MOST_INNER = 512
"""Packed bytes widened at once."""
WHOLE_INNER = 1024
"""Packed bytes widened at once where they cannot be cut into multiples of `LANES`."""
VMEM_BYTES = 48 * 2**20


def inner_step(packed: int) -> int:
    """The largest multiple of 128 bytes up to `MOST_INNER` that divides the packed width, or all of it."""
    return next((size for size in range(MOST_INNER, 0, -LANES) if packed % size == 0), packed)


def unsupported(x: Array, w1: object, w2: object) -> str | None:
    """Why the kernel cannot run on these arrays, or None."""
    if x.dtype != jnp.bfloat16:
        return f"it computes in bfloat16, not {x.dtype.name}"
    if not isinstance(w1, ExpertWeights) or not isinstance(w2, ExpertWeights):
        return "it reads packed weights, not dequantized ones"
    if "arranged" in (w1.order, w2.order):
        return "it reads packed weights in the released order, not arranged ones"
    for part in (w1.packed, w2.packed):
        if inner_step(part.shape[-1]) > WHOLE_INNER:
            return f"{2 * part.shape[-1]} inner dims are more than {2 * WHOLE_INNER} and not a multiple of {2 * LANES}"
    return None


def block_rows(pairs: int, experts: int) -> int:
    """Rows of a block: about the mean number of rows an expert gets."""
    mean = -(-pairs // experts)
    return min(MOST_ROWS, max(ROW_TILE, pl.next_power_of_2(mean)))


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Which rows of which expert every block holds.

    Attributes:
      rows: of a block.
      used: blocks that hold rows, int32 scalar or int.
      expert: [B] int32, some expert for a block that is not used.
      pair: [B * rows] int32, the (row, expert) pair at each place; some pair where the block has fewer.
      place: [P] int32, where each pair lies; meaningless for a pair that is not served.
    """

    rows: int
    used: Array | int
    expert: Array
    pair: Array
    place: Array


def blocks_of(ids: Array, experts: int, rows: int, layers: int = 1) -> Blocks:
    """Blocks of the pairs ids [P], where pairs that are not served have the id `experts`.

    The others lie in one of `layers` equal parts of the experts, which bounds how many blocks there can be.
    """
    pairs = ids.shape[0]
    order = jnp.argsort(ids, stable=True).astype(jnp.int32)
    rank = jnp.zeros(pairs, jnp.int32).at[order].set(jnp.arange(pairs, dtype=jnp.int32))
    sizes = jnp.zeros(experts, jnp.int32).at[ids].add(1, mode="drop")
    starts = jnp.cumsum(sizes) - sizes
    counts = -(-sizes // rows)
    until = jnp.cumsum(counts)
    index = jnp.arange(min(experts // layers, pairs) + pairs // rows, dtype=jnp.int32)
    expert = jnp.minimum(jnp.searchsorted(until, index, side="right"), experts - 1).astype(jnp.int32)
    first = starts[expert] + (index - until[expert] + counts[expert]) * rows
    position = jnp.clip(first[:, None] + jnp.arange(rows, dtype=jnp.int32), 0, pairs - 1)
    own = jnp.minimum(ids, experts - 1)
    place = (until - counts)[own] * rows + rank - starts[own]
    return Blocks(rows, until[-1], expert, order[position.reshape(-1)], place)


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
    interpret: Any = False,
) -> Array:
    """See `pallas_kernels.grouped_experts`; `unsupported` has been asked."""
    rows, chosen = expert_ids.shape
    experts = w1.packed.shape[0]
    served = valid[:, None] & (expert_ids >= 0) & (expert_ids < experts)
    if rows == 0 or chosen == 0:
        return jnp.zeros(x.shape, jnp.float32)
    ids = jnp.where(served, expert_ids, experts)
    blocks = blocks_of(ids.reshape(-1), experts, block_rows(rows * chosen, experts // layers), layers)
    values = _halves(x)[:, blocks.pair // chosen]
    gate, up = (product(values, weight, blocks, interpret) for weight in (w1, w3))
    hidden = xla.activate(gate, up, weights.reshape(-1)[blocks.pair], swiglu_limit, x.dtype)
    if quantize_hidden:
        hidden = fake_q8(hidden)
    outputs = product(_halves(hidden), w2, blocks, interpret)
    return xla.sum_of_pairs(outputs, blocks.place.reshape(rows, chosen), served)


def _halves(x: Array) -> Array:
    """[n, K] -> [2, n, K / 2], even and odd members."""
    return jnp.stack([x[:, 0::2], x[:, 1::2]])


def product(values: Array, weight: ExpertWeights, blocks: Blocks, interpret: Any) -> Array:
    """values [2, B * rows, K / 2] times each block's expert matrix: [B * rows, O] bfloat16."""
    _, outputs, packed_width = weight.packed.shape
    inner = inner_step(packed_width)
    # XLA lays scales out with outputs on lanes by itself, so that the exchange of their axes moves nothing.
    packed, scales = weight.packed, jnp.swapaxes(weight.scales, 1, 2)
    if not interpret:
        packed, scales = backend.in_device_memory(packed), backend.in_device_memory(scales)
    groups = scales.shape[1]
    spread = jnp.repeat(jnp.eye(inner // BYTES_OF_SCALE, dtype=jnp.bfloat16), BYTES_OF_SCALE, axis=1)
    tile = min(outputs, OUTPUTS)
    return backend.tpu_call(
        _kernel(inner),
        jax.ShapeDtypeStruct((values.shape[1], outputs), jnp.bfloat16),
        grid=(jnp.maximum(blocks.used, 1), pl.cdiv(outputs, tile)),
        num_scalar_prefetch=1,
        in_specs=[
            pl.BlockSpec(spread.shape, lambda block, output, expert: (0, 0)),
            pl.BlockSpec((2, blocks.rows, packed_width), lambda block, output, expert: (0, block, 0)),
            pl.BlockSpec((1, tile, packed_width), lambda block, output, expert: (expert[block], output, 0)),
            pl.BlockSpec((1, groups, tile), lambda block, output, expert: (expert[block], 0, output)),
        ],
        out_specs=pl.BlockSpec((blocks.rows, tile), lambda block, output, expert: (block, output)),
        vmem_limit_bytes=VMEM_BYTES,
        interpret=interpret,
        name="grouped_experts",
    )(blocks.expert, spread, values, packed, scales)


def _kernel(inner: int) -> Any:
    def kernel(expert_ref, spread_ref, values_ref, packed_ref, scales_ref, out_ref):
        powers = decode_e8m0(scales_ref[0].astype(jnp.int32))
        total = jnp.zeros(out_ref.shape, jnp.float32)
        for first in range(0, packed_ref.shape[2], inner):
            mine = powers[first // BYTES_OF_SCALE : (first + inner) // BYTES_OF_SCALE]
            # One-hot columns: every byte gets its group's power of two, exactly.
            spread = _dot(mine.astype(jnp.bfloat16), spread_ref[...], 0, 0)
            codes = packed_ref[0, :, first : first + inner].astype(jnp.int32)
            for half, nibbles in enumerate((codes, codes >> 4)):
                matrix = (decode_e2m1(nibbles) * spread).astype(jnp.bfloat16)
                total += _dot(values_ref[half, :, first : first + inner], matrix, 1, 1)
        out_ref[...] = round_to_bfloat16(total).astype(out_ref.dtype)

    return kernel


def _dot(left: Array, right: Array, contract_left: int, contract_right: int) -> Array:
    return lax.dot_general(
        left, right, (((contract_left,), (contract_right,)), ((), ())), preferred_element_type=jnp.float32
    )

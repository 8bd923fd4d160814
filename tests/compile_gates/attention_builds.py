"""Attention and the stored-weight products at production shapes, as functions and shape structs for compilers."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.block_scaled_linear import tpu as linear_tpu
from pallas_kernels.block_scaled_linear import triton as linear_triton
from pallas_kernels.grouped_experts import ExpertWeights, Order, triton_blocks
from pallas_kernels.grouped_experts import tpu as experts_tpu
from pallas_kernels.grouped_experts import triton as experts_triton
from pallas_kernels.grouped_experts.arrangement import arranged
from pallas_kernels.sparse_attention import tpu as attention_tpu
from pallas_kernels.sparse_attention import triton as attention_triton
from pallas_kernels.stored_rows import whole_lanes
from tests.compile_gates.index_builds import Build, shape

HEADS, WIDTH, ROTATED, SELECTED, WINDOW, RING, PAGE_ROWS, PAGES, COLUMNS = 64, 512, 64, 512, 128, 133, 128, 4096, 1024
HIDDEN_WIDTH, EXPERT_WIDTH, CHOSEN, EXPERTS = 5120, 2304, 6, 48


def attention_arguments(rows: int, packed: bool, fresh: int, requests: int = 64) -> tuple:
    """Operands of `sparse_attention`."""
    integer, bf16 = jnp.int32, jnp.bfloat16
    main = (WIDTH // 2 + WIDTH // 16, jnp.uint8) if packed else (WIDTH, bf16)
    ring = (WIDTH + WIDTH // 32, jnp.uint8) if packed else (WIDTH, bf16)
    return (
        shape((rows, HEADS, WIDTH), bf16), shape((HEADS,), jnp.float32), shape((rows, SELECTED), integer),
        shape((rows,), integer), shape((PAGES, PAGE_ROWS, main[0]), main[1]), shape((requests, COLUMNS), integer),
        shape((rows,), integer), shape((requests,), integer), shape((requests, RING, ring[0]), ring[1]),
        shape((fresh, WIDTH), bf16), *(shape((rows,), integer) for _ in range(4)),
        *(shape((rows, ROTATED // 2), jnp.float32) for _ in range(2)),
    )  # fmt: skip


def attention_options(packed: bool) -> dict[str, Any]:
    """Keywords of `sparse_attention`."""
    formats = ("fp4", "fp8") if packed else ("bf16", "bf16")
    return {"window": WINDOW, "scale": WIDTH**-0.5, "main_format": formats[0], "window_format": formats[1]}


def expert_arguments(rows: int, order: Order = "released") -> tuple:
    """Operands of `grouped_experts`, `valid` last."""

    def matrix(outputs: int, inputs: int) -> ExpertWeights:
        packed, scales = (shape((EXPERTS, outputs, inputs // size), jnp.uint8) for size in (2, 32))
        return ExpertWeights(packed if order == "released" else jax.eval_shape(arranged, packed), scales)

    up = matrix(EXPERT_WIDTH, HIDDEN_WIDTH)
    return (
        shape((rows, HIDDEN_WIDTH), jnp.bfloat16),
        shape((rows, CHOSEN), jnp.int32),
        shape((rows, CHOSEN), jnp.float32),
        up,
        up,
        matrix(HIDDEN_WIDTH, EXPERT_WIDTH),
        shape((rows,), jnp.bool_),
    )


def linear_arguments(rows: int, outputs: int, inputs: int) -> tuple:
    """Operands of `block_scaled_linear`."""
    return (
        shape((rows, inputs), jnp.bfloat16),
        shape((outputs, inputs), jnp.float8_e4m3fn),
        shape((outputs // 32, inputs // 32), jnp.uint8),
    )


def gpu_builds() -> Iterator[Build]:
    """Every Triton-route kernel of these operations."""
    for name, rows, packed, fresh in (
        ("bf16 1 rows", 1, False, 0),
        ("packed 1 rows", 1, True, 0),
        ("bf16 8 rows", 8, False, 0),
        ("bf16 64 rows", 64, False, 0),
        ("packed 64 rows", 64, True, 0),
        ("bf16 128 rows", 128, False, 0),
        ("packed 128 rows", 128, True, 0),
        ("bf16 4096 rows", 4096, False, 4096),
    ):
        yield Build(
            f"sparse_attention {name}",
            functools.partial(attention_triton.sparse_attention, rotate_query=True, **attention_options(packed)),
            attention_arguments(rows, packed, fresh),
        )
    # 192 and 640: what lies between few rows an expert and many, 24 and 80 of them.
    both: tuple[Order, ...] = ("released", "arranged")
    for rows, orders in ((1, both), (64, both), (192, both[1:]), (640, both[1:]), (4096, both)):

        def experts(*arguments: Any) -> jax.Array:
            *operands, valid = arguments
            return experts_triton.grouped_experts(*operands, swiglu_limit=10.0, quantize_hidden=True, valid=valid)

        for order in orders:
            name = f"grouped_experts {rows} rows" + (", arranged" if order == "arranged" else "")
            yield Build(name, experts, expert_arguments(rows, order))
    # The most pairs times experts that a program compares.
    yield Build(
        "expert_blocks 48 pairs of 384",
        _expert_blocks,
        (shape((8, 6), jnp.int32), shape((8,), jnp.bool_)),
    )
    for rows, outputs, inputs in ((1, 32_768, 1280), (64, 5120, 8192), (1024, 2304, 5120)):
        yield Build(
            f"block_scaled_linear {rows} rows, {inputs} -> {outputs}",
            linear_triton.block_scaled_linear,
            linear_arguments(rows, outputs, inputs),
        )
    yield Build("block_scaled_linear of two weights, 1 rows", _pair, linear_arguments(1, EXPERT_WIDTH, HIDDEN_WIDTH))


def _expert_blocks(ids: Any, valid: Any) -> tuple:
    blocks = triton_blocks.blocks_of_layer(ids, valid, 3, 384, 5 * 384, 8)
    return blocks.expert, blocks.first, blocks.end, blocks.pair


def _pair(x: Any, codes: Any, scales: Any) -> tuple:
    return linear_triton.block_scaled_linears(x, [(codes, scales), (codes, scales)], parts=True)


def tpu_builds() -> Iterator[Build]:
    """Every Mosaic kernel of these operations; packed rows are padded to whole lanes, rings to whole tiles."""
    for name, rows, packed, fresh in (
        ("bf16 64 rows", 64, False, 0),
        ("packed 64 rows", 64, True, 64),
        ("bf16 4096 rows", 4096, False, 4096),
    ):
        arguments = list(attention_arguments(rows, packed, fresh))
        ring, tile = arguments[8], attention_tpu.rows_of_tile(arguments[8].dtype)
        arguments[8] = shape((ring.shape[0], pl.cdiv(RING, tile) * tile, ring.shape[2]), ring.dtype)
        for place in (4, 8) if packed else ():
            logical = arguments[place]
            arguments[place] = shape((*logical.shape[:2], whole_lanes(logical.shape[2])), logical.dtype)
        yield Build(
            f"sparse_attention {name}",
            functools.partial(attention_tpu.sparse_attention, **attention_options(packed)),
            tuple(arguments),
            (arguments[4].shape, arguments[8].shape),
            repeated=rows == 4096,
        )

    def experts(*arguments: Any) -> jax.Array:
        *operands, valid = arguments
        return experts_tpu.grouped_experts(*operands, swiglu_limit=10.0, quantize_hidden=True, valid=valid)

    def product(values: jax.Array, weight: ExpertWeights, expert: jax.Array) -> jax.Array:
        blocks = experts_tpu.Blocks(experts_tpu.MOST_ROWS, expert.shape[0], expert, expert, expert)
        return experts_tpu.product(values, weight, blocks, False)

    arguments = expert_arguments(1)
    weights = tuple(part.shape for matrix in arguments[3:6] for part in matrix)
    yield Build("grouped_experts 1 rows", experts, arguments, weights)
    # The blocks of 4,096 rows over 48 experts; their order is XLA's, which takes long to compile a sort.
    used = 4096 * CHOSEN // experts_tpu.MOST_ROWS
    for name, matrix in (("gate", arguments[3]), ("down", arguments[5])):
        values = shape((2, used * experts_tpu.MOST_ROWS, matrix.packed.shape[2]), jnp.bfloat16)
        operands = (values, matrix, shape((used,), jnp.int32))
        yield Build(f"grouped_experts {name} of 4096 rows", product, operands, weights, repeated=True)
    for rows, outputs, inputs in ((1, 32_768, 1280), (64, 5120, 8192)):
        arguments = linear_arguments(rows, outputs, inputs)
        yield Build(
            f"block_scaled_linear {rows} rows, {inputs} -> {outputs}",
            linear_tpu.block_scaled_linear,
            arguments,
            (arguments[1].shape,),
        )

"""Attention and the stored-weight products at production shapes, as functions and shape structs for compilers."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.block_scaled_linear import triton as linear_triton
from pallas_kernels.grouped_experts import ExpertWeights
from pallas_kernels.grouped_experts import triton as experts_triton
from pallas_kernels.sparse_attention import triton as attention_triton

HEADS, WIDTH, ROTATED, SELECTED, WINDOW, RING, PAGE_ROWS, PAGES, COLUMNS = 64, 512, 64, 512, 128, 133, 128, 4096, 1024
HIDDEN_WIDTH, EXPERT_WIDTH, CHOSEN, EXPERTS = 5120, 2304, 6, 48


@dataclasses.dataclass(frozen=True)
class Build:
    """One kernel call to compile: a function that is not in interpret mode and its shape structs."""

    name: str
    function: Callable[..., Any]
    arguments: tuple


def shape(dimensions: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    """A shape struct."""
    return jax.ShapeDtypeStruct(dimensions, dtype)


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


def expert_arguments(rows: int) -> tuple:
    """Operands of `grouped_experts`, `valid` last."""

    def matrix(outputs: int, inputs: int) -> ExpertWeights:
        packed, scales = ((EXPERTS, outputs, inputs // size) for size in (2, 32))
        return ExpertWeights(shape(packed, jnp.uint8), shape(scales, jnp.uint8))

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
        ("bf16 64 rows", 64, False, 0),
        ("packed 64 rows", 64, True, 0),
        ("bf16 4096 rows", 4096, False, 4096),
    ):
        yield Build(
            f"sparse_attention {name}",
            functools.partial(attention_triton.sparse_attention, **attention_options(packed)),
            attention_arguments(rows, packed, fresh),
        )
    for rows in (1, 4096):

        def experts(*arguments: Any) -> jax.Array:
            *operands, valid = arguments
            return experts_triton.grouped_experts(*operands, swiglu_limit=10.0, quantize_hidden=True, valid=valid)

        yield Build(f"grouped_experts {rows} rows", experts, expert_arguments(rows))
    for rows, outputs, inputs in ((1, 32_768, 1280), (64, 5120, 8192)):
        yield Build(
            f"block_scaled_linear {rows} rows, {inputs} -> {outputs}",
            linear_triton.block_scaled_linear,
            linear_arguments(rows, outputs, inputs),
        )

"""Cases of what layers do without a kernel of their own: compression at ratio 2 and the expansion of the streams."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernel_cases import Case
from benchmarks.kernel_cases.rows import largest_difference
from scheduler.batch import CompressionPlan
from v41jax.config import TextConfig
from v41jax.layers.compressor import CompressorWeights, OwnerMemory, compress
from v41jax.layers.hyper_connections import Mixes, expand
from v41jax.layers.rope import build_table, yarn_frequencies
from v41jax.layers.rows import Requests
from v41jax.presets import preset

ROWS_IN_PAGE, RING, RATIO = 128, 8, 2
INDEX_ROW_BYTES = 4
"""Of an index key's scale."""


def _normal(seed: int, shape: tuple[int, ...], dtype: jnp.dtype = jnp.float32) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def _plan(rows: int, decode: bool) -> tuple[CompressionPlan, int]:
    """Every group closes: in decode each request's row closes one with its tail, in prefill two rows of one request
    close one. The plan and the number of requests."""
    row = np.arange(rows, dtype=np.int32)
    if decode:
        position = np.full(rows, 1023, np.int32)
        return CompressionPlan(row, row, position, np.ones(rows, np.int32), row, row, position), rows
    closing, kept = row[1::RATIO], row[-RATIO:]
    nothing = np.zeros_like(closing)
    return CompressionPlan(closing, nothing, closing, nothing, kept, np.zeros_like(kept), kept), 1


def _compression_case(rows: int, decode: bool, text: TextConfig) -> Case:
    plan, requests = _plan(rows, decode)
    closing = len(plan.closing_rows)
    dims, key, width = text.head_dim, text.index_head_dim, text.hidden_size
    pages_each = -(-int(plan.positions.max() + 1) // RATIO // ROWS_IN_PAGE)
    pages = requests * pages_each
    table = build_table(yarn_frequencies(text), max(rows, 1024))
    tables = np.random.default_rng(rows).permutation(pages).reshape(requests, pages_each).astype(np.int32)
    batch = Requests(np.arange(requests, dtype=np.int32), tables)

    def make(count: int) -> list[tuple]:
        tails = (1, requests, RING, dims)
        memory = (
            jnp.ones((pages, ROWS_IN_PAGE, dims), jnp.bfloat16),
            jnp.ones((pages, ROWS_IN_PAGE, key), jnp.uint8),
            jnp.ones((pages, ROWS_IN_PAGE)),
            _normal(1, tails),
            _normal(2, tails),
        )
        return [
            (
                *memory,
                _normal(seed, (rows, width), jnp.bfloat16),
                CompressorWeights(
                    wkv=_normal(seed, (dims, width), jnp.bfloat16) / width**0.5,
                    wgate=_normal(seed + count, (dims, width), jnp.bfloat16) / width**0.5,
                    norm=_normal(seed, (dims,), jnp.bfloat16),
                    wk=_normal(seed, (key, dims), jnp.bfloat16) / dims**0.5,
                    k_norm=_normal(seed, (key,), jnp.bfloat16),
                ),
                jax.tree.map(jnp.asarray, plan),
                jax.tree.map(jnp.asarray, batch),
                jax.tree.map(jnp.asarray, table),
            )
            for seed in range(count)
        ]

    def run(main, values, scales, tail_kv, tail_score, normalized, weights, plan, requests, table) -> tuple:
        memory = OwnerMemory(main, values, scales, tail_kv, tail_score, 0)
        options = {"ratio": RATIO, "text": text, "main_format": "bf16", "index_format": "fp8"}
        return compress(normalized, weights, memory, plan, requests, table, **options)[:5]

    weight_bytes = 2 * (2 * dims * width + key * dims)
    tail_bytes = 2 * 4 * dims * (len(plan.tail_rows) + int(plan.from_tail.sum()))
    stored = closing * (2 * dims + key + INDEX_ROW_BYTES)
    return Case(
        "compression",
        f"{'decode' if decode else 'prefill'}, {rows} rows of {width}",
        weight_bytes + 2 * rows * width + tail_bytes + stored,
        4 * rows * dims * width + 2 * closing * key * dims,
        make,
        {"xla": run},
        largest_difference,
        in_place=(0, 1, 2, 3, 4),
    )


def _expansion_case(rows: int, text: TextConfig) -> Case:
    streams, width = text.hc_mult, text.hidden_size

    def make(count: int) -> list[tuple]:
        return [
            (
                _normal(seed, (rows, width), jnp.bfloat16),
                _normal(seed, (rows, streams, width), jnp.bfloat16),
                Mixes(*(_normal(seed, (rows, *shape)) for shape in ((streams,), (streams,), (streams, streams)))),
            )
            for seed in range(count)
        ]

    return Case(
        "expansion",
        f"{rows} rows of {streams} x {width}",
        2 * rows * width * (2 * streams + 1) + 4 * rows * streams * (1 + streams),
        0,
        make,
        {"xla": expand},
        largest_difference,
    )


def cases(size: str) -> Iterator[Case]:
    """Compression of 1, 8, 64 decode rows and 512, 4,096 rows of a prompt; expansion of the same numbers of rows."""
    small = size == "smoke"
    text = preset("pico" if small else "v4.1-flash-96e").text
    for rows, decode in (
        [(2, True), (6, False)] if small else [(1, True), (8, True), (64, True), (512, False), (4096, False)]
    ):
        yield _compression_case(rows, decode, text)
        yield _expansion_case(rows, text)

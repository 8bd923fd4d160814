"""Cases of sparse attention: decode over bfloat16 and packed rows, and prefill with the window in this forward."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernel_cases import Case
from pallas_kernels.arithmetic import fake_q8
from pallas_kernels.sparse_attention import decode, sparse_attention, triton

HEADS, WIDTH, ROTATED, SELECTED, WINDOW, PAGE_ROWS = 64, 512, 64, 512, 128, 128
FORMATS = {"bf16": ("bf16", "bf16"), "packed": ("fp4", "fp8")}


@dataclasses.dataclass(frozen=True)
class Shape:
    """One attention shape: `fresh` takes the window from this forward's rows, as prefill does."""

    rows: int
    requests: int
    context: int
    heads: int = HEADS
    width: int = WIDTH
    selected: int = SELECTED
    window: int = WINDOW
    fresh: bool = False


def _bytes(shape: tuple[int, ...], key: jax.Array) -> jax.Array:
    """Random codes without NaN: every byte is a positive or negative finite E4M3 and a pair of E2M1 codes."""
    codes = jax.random.randint(key, shape, 0, 256, jnp.uint8)
    return jnp.where((codes & 127) == 127, codes ^ 1, codes)


@functools.cache
def _main(pages: int, width: int, storage: str) -> jax.Array:
    one, two = jax.random.split(jax.random.key(0))
    if storage == "bf16":
        return jax.random.normal(one, (pages, PAGE_ROWS, width), jnp.bfloat16)
    values = _bytes((pages, PAGE_ROWS, width // 2), one)
    scales = jax.random.randint(two, (pages, PAGE_ROWS, width // 16), 40, 56, jnp.uint8)
    return jnp.concatenate([values, scales], axis=-1)


@functools.cache
def _ring(slots: int, ring: int, width: int, storage: str) -> jax.Array:
    one, two = jax.random.split(jax.random.key(1))
    if storage == "bf16":
        return fake_q8(jax.random.normal(one, (slots, ring, width), jnp.bfloat16))
    values = _bytes((slots, ring, width), one)
    scales = jax.random.randint(two, (slots, ring, width // 32), 118, 122, jnp.uint8)
    return jnp.concatenate([values, scales], axis=-1)


def _sets(shape: Shape, storage: str, count: int) -> list[tuple]:
    """Argument tuples: own pages and slots per request, random ascending selections."""
    columns = -(-shape.context // PAGE_ROWS)
    pool_sets = max(1, min(count, 400_000_000 // (shape.requests * columns * PAGE_ROWS * 2 * shape.width)))
    pages = shape.requests * columns
    main_format, window_format = FORMATS[storage]
    main = _main(pages * pool_sets, shape.width, main_format)
    ring = _ring(max(2, shape.requests * pool_sets), shape.window + 5, shape.width, window_format)
    sets = []
    for index in range(count):
        rng = np.random.default_rng(index)
        group = index % pool_sets
        tables = rng.permutation(pages).reshape(shape.requests, columns) + pages * group
        per_request = shape.rows // shape.requests
        positions = shape.context - per_request + np.tile(np.arange(per_request), shape.requests)
        keys = jax.random.uniform(jax.random.key(index), (shape.rows, shape.context - per_request + 1))
        chosen = jnp.sort(jax.lax.top_k(keys, shape.selected)[1], axis=1).astype(jnp.int32)
        angles = rng.random((shape.rows, ROTATED // 2)) * 6
        fresh_rows = shape.rows if shape.fresh else 0
        start = shape.context - per_request if shape.fresh else shape.context
        integers = (
            jnp.asarray(x, jnp.int32)
            for x in (
                np.full(shape.rows, shape.selected),
                tables,
                np.repeat(np.arange(shape.requests), per_request),
                np.arange(shape.requests) + shape.requests * group,
                positions,
                np.zeros(shape.rows),
                np.full(shape.rows, start) if shape.fresh else positions + 1,
                np.arange(shape.rows),
            )
        )
        counts, tables, batch_ids, slots, positions, floor, fresh_from, own = integers
        one, two, three = jax.random.split(jax.random.key(index + 1000), 3)
        sets.append((
            jax.random.normal(one, (shape.rows, shape.heads, shape.width), jnp.bfloat16),
            jax.random.normal(two, (shape.heads,)), chosen, counts, main, tables, batch_ids, slots, ring,
            jax.random.normal(three, (fresh_rows, shape.width), jnp.bfloat16), positions, floor, fresh_from, own,
            jnp.cos(jnp.asarray(angles, jnp.float32)), jnp.sin(jnp.asarray(angles, jnp.float32)),
        ))  # fmt: skip
    return sets


def _relative(expected: jax.Array, found: jax.Array) -> float:
    expected, found = expected.astype(jnp.float32), found.astype(jnp.float32)
    return float(jnp.linalg.norm(expected - found) / jnp.linalg.norm(expected))


def _config(numbers: tuple[int, ...]) -> decode.Config | triton.Config:
    return decode.Config(*numbers) if len(numbers) == 5 else triton.Config(*numbers)


def _case(shape: Shape, storage: str, configs: list[tuple[int, ...]]) -> Case:
    main_format, window_format = FORMATS[storage]
    row = {"bf16": 2 * shape.width, "packed": shape.width // 2 + shape.width // 16}[storage]
    window_row = {"bf16": 2 * shape.width, "packed": shape.width + shape.width // 32}[storage]
    window_row = 2 * shape.width if shape.fresh else window_row
    query = 2 * 2 * shape.heads * shape.width
    options = {
        "window": shape.window,
        "scale": shape.width**-0.5,
        "main_format": main_format,
        "window_format": window_format,
    }
    call = functools.partial(sparse_attention, **options)
    kind = "prefill" if shape.fresh else "decode"
    return Case(
        "sparse_attention",
        f"{kind} {storage} {shape.rows} rows x {shape.selected}+{shape.window}",
        shape.rows * (shape.selected * row + shape.window * window_row + query),
        4 * shape.rows * (shape.selected + shape.window) * shape.heads * shape.width,
        functools.partial(_sets, shape, storage),
        {name: functools.partial(call, implementation=name) for name in ("xla", "pallas")},
        _relative,
        4e-3,
        {
            "config " + " ".join(map(str, config)): functools.partial(
                triton.sparse_attention, **options, config=_config(config)
            )
            for config in configs
        },
    )


def cases(size: str) -> Iterator[Case]:
    """Decode at 1, 8, 64 and 128 rows and prefill at 4,096 and 16,384; the bytes bound counts no reuse of rows."""
    if size == "smoke":
        small = Shape(2, 2, 256, heads=16, width=64, selected=32, window=16)
        for storage in FORMATS:
            yield _case(small, storage, [(16, 16, 1, 2, 4, 1)])
        yield _case(dataclasses.replace(small, rows=4, requests=1, fresh=True), "bf16", [])
        return
    # keys, heads, parts, splits, warps, stages, heads of one join; or keys, cuts, splits, warps, stages
    tuning: dict[int, list[tuple[int, ...]]] = {
        64: [
            (32, 2, 1, 4, 3),
            (32, 2, 1, 4, 4),
            (64, 2, 1, 4, 2),
            (64, 64, 1, 1, 8, 2),
            (64, 64, 1, 3, 8, 2),
            (32, 64, 1, 2, 8, 3),
            (64, 64, 1, 2, 8, 1),
            (64, 32, 1, 1, 8, 2),
            (64, 32, 1, 2, 8, 2),
            (32, 32, 1, 2, 4, 3),
            (64, 16, 1, 1, 4, 2),
            (64, 32, 1, 1, 8, 3),
            (32, 32, 1, 1, 8, 3),
            (32, 32, 1, 2, 8, 2),
            (64, 64, 1, 1, 16, 2),
            (64, 64, 1, 2, 16, 2),
            (32, 64, 1, 2, 16, 3),
            (64, 64, 1, 2, 8, 2, 1),
        ],
        128: [
            (64, 1, 1, 8, 2),
            (32, 2, 1, 4, 4),
            (32, 64, 1, 1, 8, 3),
            (64, 64, 1, 2, 8, 2),
            (64, 32, 1, 1, 8, 2),
            (64, 32, 1, 1, 8, 3),
            (32, 32, 1, 1, 8, 3),
            (32, 32, 1, 1, 4, 3),
            (64, 64, 1, 1, 16, 2),
            (32, 64, 1, 1, 16, 3),
        ],
        8: [
            (64, 2, 5, 4, 2),
            (32, 2, 5, 4, 4),
            (64, 64, 1, 5, 8, 2),
            (64, 32, 1, 10, 4, 2),
            (32, 16, 1, 5, 8, 1, 1),
            (32, 32, 1, 10, 8, 1, 1),
            (64, 32, 1, 10, 8, 1, 1),
            (64, 64, 1, 10, 8, 1, 1),
        ],
        1: [
            (32, 16, 1, 10, 8, 2, 1),
            (32, 16, 1, 20, 4, 1, 1),
            (64, 16, 1, 10, 8, 1, 1),
            (64, 16, 1, 10, 4, 1, 1),
            (32, 32, 1, 20, 8, 1, 1),
            (64, 32, 1, 10, 8, 1, 1),
            (32, 16, 1, 20, 8, 1, 4),
            (64, 64, 1, 10, 8, 1, 1),
        ],
    }
    for rows in (64, 128, 1, 8):
        for storage in FORMATS:
            yield _case(Shape(rows, rows, 8192), storage, tuning.get(rows, []))
    # The last two: products of query and keys apart.
    prefill: list[tuple[int, ...]] = [
        (64, 64, 1, 1, 8, 2),
        (64, 64, 2, 1, 8, 1, 4, True),
        (32, 64, 1, 1, 8, 1, 4, True),
    ]
    yield _case(Shape(4096, 1, 8192, fresh=True), "bf16", prefill)
    yield _case(Shape(4096, 1, 8192, fresh=True), "packed", [])
    yield _case(Shape(16_384, 1, 32_768, fresh=True), "bf16", [])

"""Cases of the index operations: the scorer on both planes, restricted scoring, top-k and candidate selection."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernel_cases import Case
from pallas_kernels.candidate_scores import candidate_scores
from pallas_kernels.candidate_scores import triton as candidate_triton
from pallas_kernels.index_key_write import index_key_write
from pallas_kernels.index_key_write import triton as write_triton
from pallas_kernels.index_scores import index_scores
from pallas_kernels.index_scores import triton as scores_triton
from pallas_kernels.select_candidates import select_candidates
from pallas_kernels.select_topk import select_topk
from pallas_kernels.select_topk import triton as topk_triton

HEADS, WIDTH, ROWS_IN_PAGE = 32, 128, 128
TOPK, BLOCK, CANDIDATES = 512, 8, 2048
ROW_BYTES = {"fp8": WIDTH + 4, "fp4": WIDTH // 2 + 4}
QUERY_BYTES = HEADS * WIDTH * 2 + HEADS * 4
DECODE_CONFIGS = [
    (1, 1, 128, 8, 4, 4),
    (1, 1, 128, 16, 4, 5),
    (1, 1, 64, 16, 4, 4),
    (1, 1, 256, 8, 8, 3),
    (1, 1, 64, 8, 4, 3),
]
VERIFY_CONFIGS = [(6, 4, 64, 8, 4, 2), (2, 2, 64, 8, 4, 2), (6, 2, 128, 8, 8, 2), (3, 2, 64, 16, 4, 2)]
PREFILL_CONFIGS = [
    (8, 4, 64, 16, 4, 2),
    (8, 8, 64, 32, 4, 2, True),
    (4, 4, 64, 64, 4, 2, True),
    (8, 4, 64, 32, 4, 3, True),
]
"""Other `index_scores.triton.Config`s: rows, rows together, keys, tiles, warps, stages, keys decoded first."""
LARGEST_XLA = 2**27
"""Scores past which XLA's form takes too long to be worth device time."""


@functools.lru_cache(maxsize=2)
def _plane(pages: int, index_format: str, seed: int = 0) -> tuple[jax.Array, jax.Array]:
    key = jax.random.key(seed)
    if index_format == "fp8":
        values = jax.random.randint(key, (pages, ROWS_IN_PAGE, WIDTH), 0, 256, jnp.uint8)
        values = jnp.where(values & 0x7F == 0x7F, jnp.uint8(0x7E), values)
        exponents = jax.random.randint(key, (pages, ROWS_IN_PAGE), -12, -4)
        return values, jnp.exp2(exponents.astype(jnp.float32))
    values = jax.random.randint(key, (pages, ROWS_IN_PAGE, WIDTH // 2), 0, 256, jnp.uint8)
    return values, jax.random.randint(key, (pages, ROWS_IN_PAGE, WIDTH // 32), 122, 130, jnp.uint8)


def _query(rows: int, seed: int) -> tuple[jax.Array, jax.Array]:
    one, two = jax.random.split(jax.random.key(seed))
    query = jax.random.normal(one, (rows, HEADS, WIDTH), jnp.bfloat16)
    return query, jax.random.normal(two, (rows, HEADS)) / 64


def _batch(rows: int, requests: int, context: int, index_format: str, count: int, pool_sets: int) -> list[tuple]:
    """Argument tuples of `index_scores`; sets share one pool of `pool_sets` times the pages of a set."""
    columns = context // ROWS_IN_PAGE
    pages = requests * columns
    values, scales = _plane(pages * pool_sets, index_format)
    sets = []
    for index in range(count):
        order = np.random.default_rng(index).permutation(pages) + pages * (index % pool_sets)
        tables = jnp.asarray(order.reshape(requests, columns).astype(np.int32))
        batch_ids = jnp.asarray(np.repeat(np.arange(requests, dtype=np.int32), rows // requests))
        visible = jnp.full((rows,), context, jnp.int32)
        sets.append((*_query(rows, index), visible, batch_ids, tables, values, scales))
    return sets


def _relative(expected: jax.Array, found: jax.Array) -> float:
    peak = jnp.max(jnp.where(jnp.isfinite(expected), jnp.abs(expected), 0))
    differs = jnp.isfinite(expected) != jnp.isfinite(found)
    gap = jnp.where(jnp.isfinite(expected), jnp.abs(expected - found), 0)
    return float(jnp.where(jnp.any(differs), jnp.inf, jnp.max(gap) / peak))


def _mismatches(expected: tuple, found: tuple) -> float:
    return float(sum(jnp.sum(a != b) for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(found))))


def _pool_sets(pool_bytes: int) -> int:
    return max(1, min(64, 400_000_000 // pool_bytes))


def _score_cases(shapes: list[tuple[int, int, int]]) -> Iterator[Case]:
    for rows, requests, context in shapes:
        for index_format in ("fp8", "fp4"):
            plane_bytes = requests * context * ROW_BYTES[index_format]
            call = functools.partial(index_scores, index_format=index_format)
            variants = {"xla": functools.partial(call, implementation="xla")}
            if rows * context > LARGEST_XLA:
                variants = {}
            variants["pallas"] = functools.partial(call, implementation="pallas")
            configs: list[tuple[int, ...]] = []
            if (rows, requests) in ((64, 64), (384, 64), (4096, 1)):
                configs = {64: DECODE_CONFIGS, 384: VERIFY_CONFIGS, 4096: PREFILL_CONFIGS}[rows]
            yield Case(
                "index_scores",
                f"{index_format} {rows} rows of {requests} x {context}",
                plane_bytes + rows * (QUERY_BYTES + 4 * context),
                2 * rows * context * HEADS * WIDTH,
                _maker(rows, requests, context, index_format, _pool_sets(plane_bytes)),
                variants,
                _relative,
                2e-5,
                {
                    "config " + " ".join(map(str, config)): functools.partial(
                        scores_triton.index_scores, index_format=index_format, config=scores_triton.Config(*config)
                    )
                    for config in configs
                },
            )


def _maker(rows: int, requests: int, context: int, index_format: str, pool_sets: int):
    return lambda count: _batch(rows, requests, context, index_format, count, pool_sets)


def _restricted_cases(shapes: list[tuple[int, int, int, int]]) -> Iterator[Case]:
    for rows, requests, context, blocks in shapes:
        for index_format in ("fp8", "fp4"):

            def make(count, rows=rows, requests=requests, context=context, blocks=blocks, index_format=index_format):
                pool_sets = _pool_sets(requests * context * ROW_BYTES[index_format])
                sets = []
                for index, arguments in enumerate(_batch(rows, requests, context, index_format, count, pool_sets)):
                    keys = jax.random.uniform(jax.random.key(index), (rows, context // BLOCK))
                    chosen = jnp.sort(jax.lax.top_k(keys, blocks)[1], axis=1).astype(jnp.int32)
                    sets.append((*arguments, chosen))
                return sets

            call = functools.partial(candidate_scores, block_size=BLOCK, index_format=index_format)
            yield Case(
                "candidate_scores",
                f"{index_format} {rows} rows, {blocks} blocks of {context}",
                rows * (blocks * BLOCK * (ROW_BYTES[index_format] + 4) + QUERY_BYTES + 4 * blocks),
                2 * rows * blocks * BLOCK * HEADS * WIDTH,
                make,
                {name: functools.partial(call, implementation=name) for name in ("xla", "pallas")},
                _relative,
                2e-5,
                {
                    f"config {keys} {tiles} {warps} {stages}": functools.partial(
                        candidate_triton.candidate_scores,
                        block_size=BLOCK,
                        index_format=index_format,
                        config=candidate_triton.Config(keys, tiles, warps, stages),
                    )
                    for keys, tiles, warps, stages in ((64, 1, 4, 2), (64, 4, 4, 2), (128, 1, 4, 2), (128, 4, 4, 3))
                },
            )


def _scores(rows: int, width: int, count: int) -> list[tuple]:
    visible = jnp.full((rows,), width, jnp.int32)
    return [(jax.random.normal(jax.random.key(index), (rows, width)), visible) for index in range(count)]


def _topk_cases(shapes: list[tuple[int, int]], k: int) -> Iterator[Case]:
    for rows, width in shapes:
        variants = {
            name: functools.partial(
                lambda scores, visible, name: select_topk(scores, visible, k, implementation=name), name=name
            )
            for name in ("xla", "pallas")
        }
        configs = [
            (8192, 4096, 8, 4),
            (8192, 4096, 32, 4),
            (8192, 2048, 16, 4),
            (8192, 4096, 16, 8),
            (16384, 4096, 16, 4),
        ]
        yield Case(
            "select_topk",
            f"{k} of {rows} x {width}",
            rows * (4 * width + 4 * k + 8),
            0,
            functools.partial(_scores, rows, width),
            variants,
            _mismatches,
            0.0,
            {
                "config " + " ".join(map(str, config)): functools.partial(
                    lambda scores, visible, config: topk_triton.select_topk(
                        scores, visible, k, candidates=None, block_size=None, config=topk_triton.Config(*config)
                    ),
                    config=config,
                )
                for config in configs
            },
        )


def _candidate_cases(shapes: list[tuple[int, int]], blocks: int) -> Iterator[Case]:
    for rows, width in shapes:
        yield Case(
            "select_candidates",
            f"{blocks} blocks of {rows} x {width}",
            rows * (4 * width + 4 * blocks + 4),
            0,
            functools.partial(_scores, rows, width),
            {
                name: functools.partial(
                    lambda scores, visible, name: select_candidates(
                        scores, visible, blocks, BLOCK, implementation=name
                    ),
                    name=name,
                )
                for name in ("xla", "pallas")
            },
            _mismatches,
        )


def _write_cases(counts: list[int]) -> Iterator[Case]:
    for keys in counts:
        for index_format in ("fp8", "fp4"):

            def make(count, keys=keys, index_format=index_format):
                requests, columns = 64, 64
                values, scales = _plane(requests * columns, index_format)
                tables = jnp.arange(requests * columns, dtype=jnp.int32).reshape(requests, columns)
                sets = []
                for index in range(count):
                    rng = np.random.default_rng(index)
                    entries = rng.permutation(requests * columns * ROWS_IN_PAGE)[:keys].astype(np.int32)
                    request, entry = np.divmod(entries, columns * ROWS_IN_PAGE)
                    angles = jax.random.uniform(jax.random.key(index), (keys, 32)) * 6
                    rows = jax.random.normal(jax.random.key(index), (keys, WIDTH), jnp.bfloat16)
                    plan = (jnp.asarray(request), jnp.asarray(entry))
                    sets.append(
                        (rows, jnp.ones(WIDTH), jnp.cos(angles), jnp.sin(angles), *plan, tables, values, scales)
                    )
                return sets

            call = functools.partial(_write, index_format=index_format)
            yield Case(
                "index_key_write",
                f"{index_format} {keys} keys",
                keys * (2 * WIDTH + 2 * 4 * 32 + 8 + ROW_BYTES[index_format]),
                0,
                make,
                {name: functools.partial(call, implementation=name) for name in ("xla", "pallas")},
                _different_bytes,
                1e-4,
                {
                    f"config {each} {warps}": functools.partial(
                        write_triton.index_key_write,
                        epsilon=1e-20,
                        index_format=index_format,
                        config=write_triton.Config(each, warps),
                    )
                    for each, warps in ((1, 1), (2, 1), (4, 1), (8, 4))
                },
                in_place=(7, 8),
            )


def _write(*arguments: jax.Array, index_format: str, implementation: str) -> tuple:
    return index_key_write(*arguments, epsilon=1e-20, index_format=index_format, implementation=implementation)


def _different_bytes(expected: tuple, found: tuple) -> float:
    return float(jnp.mean(expected[0] != found[0]) + jnp.mean(expected[1] != found[1]))


def cases(size: str) -> Iterator[Case]:
    """Decode, verify and prefill shapes of the model; "smoke" ones finish on a CPU."""
    if size == "smoke":
        yield from _score_cases([(2, 2, 256), (8, 1, 256)])
        yield from _restricted_cases([(2, 2, 256, 8)])
        yield from _topk_cases([(2, 512)], 32)
        yield from _candidate_cases([(2, 512)], 16)
        yield from _write_cases([8])
        return
    decode = [(batch, batch, context) for context in (8192, 131_072) for batch in (1, 8, 64, 128)]
    long = [(batch, batch, 1_048_576) for batch in (1, 8)]
    yield from _score_cases([(64, 64, 65_536), (4096, 1, 8192), *decode, *long, (384, 64, 65_536), (16_384, 1, 16_384)])
    yield from _topk_cases([(64, 65_536), (1, 1_048_576), (4096, 8192)], TOPK)
    yield from _topk_cases([(rows, width) for width in (8192, 131_072) for rows in (1, 8, 64, 128)], TOPK)
    yield from _topk_cases([(8, 1_048_576), (16_384, 16_384)], TOPK)
    yield from _candidate_cases([(64, 65_536), (1, 1_048_576), (64, 131_072), (4096, 32_768)], CANDIDATES)
    yield from _write_cases([1, 64, 4096])
    yield from _restricted_cases(
        [(1, 1, 131_072, CANDIDATES), (64, 64, 131_072, CANDIDATES), (1024, 1, 131_072, CANDIDATES)]
    )

"""The index kernels and the stream mixes at production shapes, as functions and shape structs for the compilers.

Read by the compile gates and by `benchmarks/compile_report.py`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import plane_layouts
from pallas_kernels.candidate_scores import tpu as candidate_tpu
from pallas_kernels.candidate_scores import triton as candidate_triton
from pallas_kernels.index_key_write import tpu as write_tpu
from pallas_kernels.index_key_write import triton as write_triton
from pallas_kernels.index_scores import tpu as scores_tpu
from pallas_kernels.index_scores import triton as scores_triton
from pallas_kernels.select_candidates import tpu as blocks_tpu
from pallas_kernels.select_candidates import triton as blocks_triton
from pallas_kernels.select_topk import tpu as topk_tpu
from pallas_kernels.select_topk import triton as topk_triton
from pallas_kernels.stream_mixes import tpu as mixes_tpu
from pallas_kernels.stream_mixes import triton as mixes_triton

HEADS, WIDTH, PAGE_ROWS = 32, 128, 128
PAGES, COLUMNS = 40_000, 1024


@dataclasses.dataclass(frozen=True)
class Build:
    """One kernel call to compile.

    Attributes:
      name: operation and shape.
      function: of the arguments, not in interpret mode.
      arguments: shape structs.
      pools: shapes that no copy in the program may have.
      donated: positions of arguments that are written in place.
      repeated: another shape of a kernel that has a build of its own; the gates compile it for the oldest and newest
        generation only.
    """

    name: str
    function: Callable[..., Any]
    arguments: tuple
    pools: tuple[tuple[int, ...], ...] = ()
    donated: tuple[int, ...] = ()
    repeated: bool = False


def gated(builds: Iterable[Build], generations: Sequence[str]) -> list[tuple[str, str]]:
    """(name, generation) of what the gates compile, oldest generation first."""
    ends = (generations[0], generations[-1])
    return [(build.name, chosen) for build in builds for chosen in (ends if build.repeated else generations)]


def shape(dimensions: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    """A shape struct."""
    return jax.ShapeDtypeStruct(dimensions, dtype)


def plane(index_format: str, rows: int = PAGE_ROWS, pages: int = PAGES) -> tuple:
    """values and scales of one owner."""
    if index_format == "fp8":
        return shape((pages, rows, WIDTH), jnp.uint8), shape((pages, rows), jnp.float32)
    return shape((pages, rows, WIDTH // 2), jnp.uint8), shape((pages, rows, WIDTH // 32), jnp.uint8)


def lanes_plane(index_format: str, rows: int) -> tuple:
    """values and scales of one owner in the TPU layout."""
    values, scales = plane_layouts.lanes_shapes(PAGES, rows, WIDTH, index_format)
    return shape(values, jnp.uint8), shape(scales, plane_layouts.scale_dtype(index_format))


def scorer_arguments(
    rows: int, requests: int, index_format: str, page_rows: int = PAGE_ROWS, pages: int = PAGES
) -> tuple:
    """Operands of `index_scores`."""
    return (
        shape((rows, HEADS, WIDTH), jnp.bfloat16),
        shape((rows, HEADS), jnp.float32),
        shape((rows,), jnp.int32),
        shape((rows,), jnp.int32),
        shape((requests, COLUMNS), jnp.int32),
        *plane(index_format, page_rows, pages),
    )


def write_arguments(keys: int, index_format: str) -> tuple:
    """Operands of `index_key_write`."""
    return (
        shape((keys, WIDTH), jnp.bfloat16),
        shape((WIDTH,), jnp.float32),
        shape((keys, 32), jnp.float32),
        shape((keys, 32), jnp.float32),
        shape((keys,), jnp.int32),
        shape((keys,), jnp.int32),
        shape((64, COLUMNS), jnp.int32),
        *plane(index_format),
    )


MIXED = {"iterations": 20, "epsilon": 1e-6}


def coefficients_build(function: Callable[..., Any], rows: int) -> Build:
    """One of the kernels of `stream_mixes` that start from projections."""
    streams = 4
    width = 2 * streams + streams**2
    return Build(
        f"stream_mixes of projections, {rows} rows",
        functools.partial(function, streams=streams, **MIXED),
        (shape((rows, width), jnp.float32), shape((width,), jnp.float32), shape((3,), jnp.float32)),
    )


def mixes_build(rows: int) -> Build:
    """`stream_mixes` from the streams, of one layer of ten."""
    layers, streams, width = 10, 4, 5120
    outputs = 2 * streams + streams**2
    weights = ((layers, outputs, streams * width), (layers, outputs), (layers, 3))
    return Build(
        f"stream_mixes {rows} rows",
        functools.partial(mixes_triton.stream_mixes, norm_epsilon=1e-20, **MIXED),
        (
            shape((rows, streams, width), jnp.bfloat16),
            *(shape(dimensions, jnp.float32) for dimensions in weights),
            shape((), jnp.int32),
        ),
    )


def gpu_builds() -> Iterator[Build]:
    """Every Triton-route kernel of these operations."""
    yield mixes_build(1)
    yield mixes_build(4096)
    yield mixes_build(64)
    yield coefficients_build(mixes_triton.coefficients, 4096)
    for index_format in ("fp8", "fp4"):
        for rows, requests, page_rows in ((64, 64, 128), (64, 64, 64), (64, 4, 128), (4096, 1, 128)):
            yield Build(
                f"index_scores {index_format} {rows} rows of {requests}, pages of {page_rows}",
                functools.partial(scores_triton.index_scores, index_format=index_format),
                scorer_arguments(rows, requests, index_format, page_rows),
            )
        yield Build(
            f"candidate_scores {index_format} 64 rows",
            functools.partial(candidate_triton.candidate_scores, block_size=8, index_format=index_format),
            (*scorer_arguments(64, 64, index_format), shape((64, 2048), jnp.int32)),
        )
        yield Build(
            f"index_key_write {index_format} 4096 keys",
            functools.partial(write_triton.index_key_write, epsilon=1e-20, index_format=index_format),
            write_arguments(4096, index_format),
        )
    for rows, width in ((64, 65_536), (1, 1_048_576), (4096, 8192)):
        yield Build(
            f"select_topk 512 of {rows} x {width}",
            lambda scores, visible: topk_triton.select_topk(scores, visible, 512, candidates=None, block_size=None),
            (shape((rows, width), jnp.float32), shape((rows,), jnp.int32)),
        )
    yield Build(
        "select_topk 512 of 64 x 2048 blocks",
        lambda scores, visible, blocks: topk_triton.select_topk(scores, visible, 512, candidates=blocks, block_size=8),
        (shape((64, 16_384), jnp.float32), shape((64,), jnp.int32), shape((64, 2048), jnp.int32)),
    )
    yield Build(
        "select_candidates 2048 of 64 x 131072",
        lambda scores, visible: blocks_triton.select_candidates(scores, visible, 2048, 8),
        (shape((64, 131_072), jnp.float32), shape((64,), jnp.int32)),
    )


def tpu_builds() -> Iterator[Build]:
    """Every Mosaic kernel of these operations; pages of 64 rows are in the TPU layout."""
    yield coefficients_build(mixes_tpu.coefficients, 4096)
    for index_format in ("fp8", "fp4"):
        for rows, requests, page_rows in ((64, 64, 128), (64, 64, 64), (4096, 1, 128)):
            planes = plane(index_format) if page_rows == PAGE_ROWS else lanes_plane(index_format, page_rows)
            yield Build(
                f"index_scores {index_format} {rows} rows, pages of {page_rows}",
                functools.partial(scores_tpu.index_scores, index_format=index_format),
                (*scorer_arguments(rows, requests, index_format)[:-2], *planes),
                tuple(x.shape for x in planes),
                repeated=requests == 1 or page_rows != PAGE_ROWS,
            )
        planes = plane(index_format)
        yield Build(
            f"candidate_scores {index_format} 64 rows",
            functools.partial(candidate_tpu.candidate_scores, block_size=8, index_format=index_format),
            (*scorer_arguments(64, 64, index_format), shape((64, 2048), jnp.int32)),
            tuple(x.shape for x in planes),
        )
        for page_rows in (128, 64):
            planes = plane(index_format) if page_rows == PAGE_ROWS else lanes_plane(index_format, page_rows)
            yield Build(
                f"index_key_write {index_format} 4096 keys, pages of {page_rows}",
                functools.partial(write_tpu.index_key_write, epsilon=1e-20, index_format=index_format),
                (*write_arguments(4096, index_format)[:-2], *planes),
                tuple(x.shape for x in planes),
                (7, 8),
                page_rows != PAGE_ROWS,
            )
    for rows, width in ((64, 65_536), (1, 1_048_576)):
        yield Build(
            f"select_topk 512 of {rows} x {width}",
            lambda scores, visible: topk_tpu.select_topk(scores, visible, 512, candidates=None, block_size=None),
            (shape((rows, width), jnp.float32), shape((rows,), jnp.int32)),
            repeated=rows == 64,
        )
    yield Build(
        "select_topk 512 of 64 x 2048 blocks",
        lambda scores, visible, blocks: topk_tpu.select_topk(scores, visible, 512, candidates=blocks, block_size=8),
        (shape((64, 16_384), jnp.float32), shape((64,), jnp.int32), shape((64, 2048), jnp.int32)),
    )
    yield Build(
        "select_candidates 2048 of 64 x 131072",
        lambda scores, visible: blocks_tpu.select_candidates(scores, visible, 2048, 8),
        (shape((64, 131_072), jnp.float32), shape((64,), jnp.int32)),
    )

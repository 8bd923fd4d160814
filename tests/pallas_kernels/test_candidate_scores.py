"""`candidate_scores` against the float64 oracle: same numbers as the full scan, at the candidates only."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.candidate_scores import candidate_scores, tpu, triton
from pallas_kernels.plane_layouts import to_lanes
from tests.pallas_kernels.index_oracle import index_case, scores_oracle
from tests.pallas_kernels.test_index_scores import FORMATS, assert_scores
from tests.pallas_kernels.tpu_modes import interpretation


def candidates_for(case, blocks, block_size, seed=0):
    """Ascending random blocks, not all visible: some rows full, some with empty places, the last with none."""
    rng = np.random.default_rng(seed)
    total = case.block_tables.shape[1] * case.values.shape[1] // block_size
    candidates = np.full((len(case.query), blocks), -1, np.int32)
    for row in range(len(case.query) - 1):
        count = min(total, [blocks, rng.integers(0, blocks + 1)][row % 2])
        candidates[row, :count] = np.sort(rng.permutation(total)[:count])
    return candidates


def expected_scores(case, candidates, block_size):
    full = scores_oracle(case)
    out = np.full((len(full), candidates.shape[1] * block_size), -np.inf)
    for row in range(len(full)):
        for column in range(out.shape[1]):
            block = candidates[row, column // block_size]
            if block >= 0:
                out[row, column] = full[row, block * block_size + column % block_size]
    return out


@pytest.mark.parametrize("index_format", FORMATS)
def test_scores_equal_the_full_scan_at_the_candidates(index_format):
    case = index_case(9, index_format=index_format, rows=9, requests=2, columns=3)
    candidates = candidates_for(case, 5, 8)
    found = candidate_scores(*case.arrays, jnp.asarray(candidates), block_size=8, index_format=index_format)
    assert_scores(found, expected_scores(case, candidates, 8))


@pytest.mark.parametrize("index_format", ["fp8", "fp4"])
def test_the_gpu_kernel_equals_the_full_scan_at_the_candidates(index_format):
    case = index_case(3, index_format=index_format, rows=5, requests=2, columns=3, heads=16)
    candidates = candidates_for(case, 5, 8)
    found = triton.candidate_scores(
        *case.arrays,
        jnp.asarray(candidates),
        block_size=8,
        index_format=index_format,
        config=triton.Config(keys=16, tiles=2, num_warps=4, num_stages=2),
        interpret=True,
    )
    assert_scores(found, expected_scores(case, candidates, 8))


@pytest.mark.parametrize(("mode", "index_format", "rows_in_page"), [("generic", "fp8", 128), ("simulated", "fp4", 64)])
def test_the_tpu_kernel_equals_the_full_scan_at_the_candidates(mode, index_format, rows_in_page):
    shape = {"rows": 5, "requests": 2, "columns": 5, "heads": 8, "width": 128}
    case = index_case(3, index_format=index_format, rows_in_page=rows_in_page, **shape)
    candidates = candidates_for(case, 20, 8)
    *operands, values, scales = case.arrays
    plane = (values, scales) if rows_in_page == 128 else to_lanes(values, scales, index_format)
    with interpretation(mode) as interpret:
        run = functools.partial(tpu.candidate_scores, block_size=8, index_format=index_format, interpret=interpret)
        found = jax.block_until_ready(jax.jit(run)(*operands, *plane, jnp.asarray(candidates)))
    assert_scores(found, expected_scores(case, candidates, 8))


@pytest.mark.parametrize("implementation", ["xla", "pallas"])
def test_rows_outside_the_candidates_are_never_read(implementation):
    case = index_case(3, index_format="fp8", rows=4, requests=1, columns=4, padding=0, heads=16)
    case.visible[:] = 64
    candidates = np.tile(np.asarray([1, 4, 7, -1], np.int32), (4, 1))
    kept = np.zeros(case.scales.shape, bool)
    kept.reshape(kept.shape[0], -1, 8)[case.block_tables[0, [0, 2, 3]], [1, 0, 1]] = True
    case.scales[~kept] = np.nan
    case.values[~kept] = 0x7F
    case.values[kept] &= 0x3F
    case.scales[kept] = 1
    found = candidate_scores(
        *case.arrays, jnp.asarray(candidates), block_size=8, index_format="fp8", implementation=implementation
    )
    found = np.asarray(found)
    assert np.isfinite(found[:, :24]).all() and np.isneginf(found[:, 24:]).all()


@pytest.mark.parametrize("index_format", FORMATS)
@pytest.mark.parametrize("block_size", [3, 6, 40])
def test_a_block_may_lie_on_several_pages(block_size, index_format):
    case = index_case(9, index_format=index_format, rows=9, requests=2, columns=5)
    candidates = candidates_for(case, 2, block_size)
    found = candidate_scores(
        *case.arrays, jnp.asarray(candidates), block_size=block_size, index_format=index_format, implementation="xla"
    )
    assert_scores(found, expected_scores(case, candidates, block_size))


def test_the_gpu_kernel_follows_a_block_over_several_pages():
    case = index_case(3, index_format="fp8", rows=5, requests=2, columns=5, heads=16)
    candidates = candidates_for(case, 5, 6)
    config = triton.Config(keys=16, tiles=2, num_warps=4, num_stages=2)
    found = triton.candidate_scores(
        *case.arrays, jnp.asarray(candidates), block_size=6, index_format="fp8", config=config, interpret=True
    )
    assert_scores(found, expected_scores(case, candidates, 6))

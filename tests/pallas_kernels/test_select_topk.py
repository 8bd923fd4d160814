"""Every implementation of `select_topk` against a stable NumPy selection."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import backend
from pallas_kernels.select_topk import select_topk, tpu, triton
from tests.pallas_kernels.index_oracle import topk_oracle
from tests.pallas_kernels.selection_cases import KINDS, score_rows
from tests.pallas_kernels.tpu_modes import interpretation


@functools.partial(jax.jit, static_argnums=(2, 3))
def gpu_selection(scores, visible, k, config):
    return triton.select_topk(scores, visible, k, candidates=None, block_size=None, config=config, interpret=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("width", "k"), [(100, 16), (17, 17), (5, 8)])
def test_selection_equals_the_stable_oracle(kind, width, k):
    scores, visible = score_rows(kind, 6, width)
    entries, counts = select_topk(jnp.asarray(scores), jnp.asarray(visible), k)
    expected, expected_counts = topk_oracle(scores, visible, k)
    assert entries.dtype == counts.dtype == np.int32
    np.testing.assert_array_equal(entries, expected)
    np.testing.assert_array_equal(counts, expected_counts)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("width", "k", "config"),
    [(100, 16, triton.Config(128, 32, 4, 4)), (500, 5, triton.Config(32, 64, 4, 4))],
    ids=["one level", "three levels"],
)
def test_the_gpu_kernel_equals_the_stable_oracle(kind, width, k, config):
    scores, visible = score_rows(kind, 4, width)
    entries, counts = gpu_selection(scores, visible, k, config)
    expected, expected_counts = topk_oracle(scores, visible, k)
    np.testing.assert_array_equal(entries, expected)
    np.testing.assert_array_equal(counts, expected_counts)


@functools.partial(jax.jit, static_argnums=(2, 3))
def tpu_selection(scores, visible, k, interpret):
    return tpu.select_topk(scores, visible, k, candidates=None, block_size=None, interpret=interpret)


@pytest.mark.parametrize("kind", KINDS)
def test_the_tpu_kernel_equals_the_stable_oracle(kind):
    scores, visible = score_rows(kind, 3, 700)
    entries, counts = tpu_selection(scores, visible, 130, True)
    expected, expected_counts = topk_oracle(scores, visible, 130)
    np.testing.assert_array_equal(entries, expected)
    np.testing.assert_array_equal(counts, expected_counts)


def test_the_tpu_kernel_carries_counts_over_blocks_of_lines_without_a_race():
    scores, visible = score_rows("few values", 2, 16_500, seed=4)
    scores, visible[:] = np.nan_to_num(scores), (16_500, 16_400)
    with interpretation("simulated") as interpret:
        entries, _ = jax.block_until_ready(tpu_selection(scores, visible, 600, interpret))
    np.testing.assert_array_equal(entries, topk_oracle(scores, visible, 600)[0])


@settings(max_examples=15, deadline=None)
@given(st.lists(st.floats(width=32, allow_nan=True, allow_infinity=True), min_size=64, max_size=64), st.integers(0, 64))
def test_the_gpu_kernel_orders_any_floats(values, bound):
    scores, visible = np.asarray([values], np.float32), np.asarray([bound], np.int32)
    entries, _ = gpu_selection(scores, visible, 8, triton.Config(16, 16, 4, 4))
    np.testing.assert_array_equal(entries, topk_oracle(scores, visible, 8)[0])


def test_a_tie_at_the_threshold_goes_to_the_smaller_entry():
    entries, counts = select_topk(jnp.asarray([[1.0, -0.0, 0.0, 2.0, 0.0]], jnp.float32), jnp.asarray([5]), 3)
    np.testing.assert_array_equal(entries, [[0, 1, 3]])
    assert counts[0] == 3


@pytest.mark.parametrize("route", ["xla", "triton", "tpu"])
def test_columns_of_candidates_are_mapped_to_entries(route):
    rng = np.random.default_rng(1)
    candidates = np.asarray([[0, 2, 5, -1], [1, 3, 4, 6], [-1, -1, -1, -1]], np.int32)
    visible = np.asarray([42, 54, 30], np.int32)
    full = rng.integers(-3, 3, (3, 56)).astype(np.float32)
    scores = np.full((3, 32), np.nan, np.float32)
    masked = np.full_like(full, -np.inf)
    for row in range(3):
        for column in range(32):
            if candidates[row, column // 8] >= 0:
                entry = candidates[row, column // 8] * 8 + column % 8
                scores[row, column] = masked[row, entry] = full[row, entry]
    operands = (jnp.asarray(scores), jnp.asarray(visible), 12)
    selection = {"candidates": jnp.asarray(candidates), "block_size": 8}
    if route == "xla":
        entries, counts = select_topk(*operands, **selection, implementation="xla")
    else:
        with backend.use_target(backend.Target(route, "cpu", interpret=True)):
            entries, counts = select_topk(*operands, **selection, implementation="pallas")
    expected, expected_counts = topk_oracle(masked, visible, 12)
    np.testing.assert_array_equal(entries, expected)
    np.testing.assert_array_equal(counts, expected_counts)


def test_all_shape_faults_are_named_together():
    with pytest.raises(ValueError, match=r"visible \(3,\).*k is 0.*candidates and block_size come together"):
        select_topk(jnp.zeros((2, 8)), jnp.zeros(3, jnp.int32), 0, block_size=8)

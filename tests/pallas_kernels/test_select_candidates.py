"""Every implementation of `select_candidates` against a stable NumPy selection of blocks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.select_candidates import select_candidates, tpu, triton
from pallas_kernels.select_topk.triton import Config
from tests.pallas_kernels.index_oracle import candidates_oracle
from tests.pallas_kernels.selection_cases import KINDS, score_rows


@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def gpu_selection(scores, visible, num_blocks, block_size, config):
    return triton.select_candidates(scores, visible, num_blocks, block_size, config=config, interpret=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("width", "num_blocks", "block_size"), [(96, 5, 8), (50, 4, 8), (13, 9, 2)])
def test_blocks_equal_the_stable_oracle(kind, width, num_blocks, block_size):
    scores, visible = score_rows(kind, 6, width, seed=3)
    found = select_candidates(jnp.asarray(scores), jnp.asarray(visible), num_blocks, block_size)
    assert found.dtype == np.int32
    np.testing.assert_array_equal(found, candidates_oracle(scores, visible, num_blocks, block_size))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("width", "num_blocks", "block_size", "config"),
    [(96, 5, 8, Config(16, 64, 4, 4)), (500, 4, 4, Config(16, 64, 4, 4))],
    ids=["one level", "four levels"],
)
def test_the_gpu_kernel_equals_the_stable_oracle(kind, width, num_blocks, block_size, config):
    scores, visible = score_rows(kind, 4, width, seed=3)
    found = gpu_selection(scores, visible, num_blocks, block_size, config)
    np.testing.assert_array_equal(found, candidates_oracle(scores, visible, num_blocks, block_size))


@functools.partial(jax.jit, static_argnums=(2, 3))
def tpu_selection(scores, visible, num_blocks, block_size):
    return tpu.select_candidates(scores, visible, num_blocks, block_size, interpret=True)


@pytest.mark.parametrize("kind", KINDS)
def test_the_tpu_kernel_equals_the_stable_oracle(kind):
    scores, visible = score_rows(kind, 3, 700, seed=3)
    found = tpu_selection(scores, visible, 20, 8)
    np.testing.assert_array_equal(found, candidates_oracle(scores, visible, 20, 8))


def test_the_newest_block_is_kept_even_when_it_is_the_worst():
    scores = np.asarray([[3, 3, 2, 2, np.inf, np.inf, -9, np.nan]], np.float32)
    np.testing.assert_array_equal(select_candidates(jnp.asarray(scores), jnp.asarray([7]), 2, 2), [[2, 3]])


def test_a_short_context_keeps_every_block():
    scores, _ = score_rows("random", 3, 64)
    scores = np.nan_to_num(scores)
    found = select_candidates(jnp.asarray(scores), jnp.asarray([64, 1, 23], np.int32), 10, 8)
    expected = np.full((3, 10), -1)
    expected[0, :8], expected[1, :1], expected[2, :3] = range(8), range(1), range(3)
    np.testing.assert_array_equal(found, expected)

"""Selection masks against the reference's sorted selections, ties and empty rows included."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from training.selection import best_mask, candidate_mask
from v41jax.reference.selection import select_candidates, select_topk, within_candidates


def scores_with_ties(seed: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    visible = np.array([0, 1, 3, 17, 30, 30])
    scores = np.round(random.normal(size=(6, 30)), 1).astype(np.float32)
    scores[4, 5] = -0.0
    scores[5] = 0.0
    return np.where(np.arange(30) < visible[:, None], scores, -np.inf).astype(np.float32), visible


@pytest.mark.parametrize("count", [1, 4, 12, 30, 50])
def test_the_best_entries_are_those_of_a_sort(count: int) -> None:
    scores, _ = scores_with_ties(count)
    made = np.asarray(best_mask(jnp.asarray(scores), count))
    chosen = select_topk(scores.astype(np.float64), count)
    expected = np.zeros_like(made)
    for row, entries in enumerate(chosen):
        expected[row, entries[entries >= 0]] = True
    np.testing.assert_array_equal(made, expected)


@pytest.mark.parametrize("blocks", [1, 2, 5])
def test_candidate_blocks_are_those_of_the_reference(blocks: int) -> None:
    scores, visible = scores_with_ties(7)
    made = np.asarray(candidate_mask(jnp.asarray(scores), jnp.asarray(visible, jnp.int32), blocks, 4))
    chosen = select_candidates(scores.astype(np.float64), visible, blocks, 4)
    np.testing.assert_array_equal(made, within_candidates(chosen, 4, 30))

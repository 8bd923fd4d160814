"""Distances of tensors, selections and logits on values whose answers are known."""

import math

import numpy as np
import pytest

from v41jax.comparison.metrics import end_distance, row_errors, set_distance, ulp, value_distance


def test_values_one_ulp_apart():
    left = np.full((4, 8), 1.5)
    right = left.copy()
    right[2, 3] += np.spacing(np.float32(1.5))
    found = value_distance(left, right, np.float32)
    assert found.ulps_max == 1 and found.ulps_median == 0
    assert found.max_abs == pytest.approx(2.0**-23)
    assert found.relative_l2 == pytest.approx(2.0**-23 / np.linalg.norm(left))
    assert found.worst_row == pytest.approx(2.0**-23 / np.linalg.norm(left[0]))
    assert found.cosine == pytest.approx(1)
    assert ulp(np.array([1.0]), "bfloat16")[0] == 2.0**-7


def test_a_value_that_is_no_number_on_one_side_is_infinitely_far():
    left, right = np.ones((3, 2)), np.ones((3, 2))
    right[1, 0] = np.nan
    assert row_errors(left, right).tolist() == [0, np.inf, 0]
    assert value_distance(left, right, np.float32).relative_l2 == np.inf
    left[1, 0] = -np.inf  # masked on both sides
    assert row_errors(left, right).max() == 0


def test_a_tiny_row_is_measured_against_the_tensor():
    left = np.array([[1.0, 0], [1e-9, 0]])
    assert row_errors(left, left + np.array([[0.0, 0], [1e-9, 0]]))[1] == pytest.approx(1e-6)


def test_selections_with_their_margins():
    scores = np.array([[4.0, 3, 2, 1], [4, 3, 2, 1]])
    left = np.array([[0, 1], [0, 1]])
    right = np.array([[1, 0], [0, 2]])  # order does not matter, membership does
    found = set_distance(left, right, scores)
    assert found.rows_differing == 1 and found.overlap == 0.75
    assert found.border_margin == pytest.approx(1 / scores[0].std())
    assert found.swapped_gap == pytest.approx(1 / scores[0].std())
    assert math.isnan(set_distance(left, right).swapped_gap)


def test_equal_scores_are_a_gap_where_the_smaller_id_lost():
    scores = np.array([[1.0, 0, 0, -1]])
    smaller, larger = np.array([[0, 1]]), np.array([[0, 2]])
    assert set_distance(smaller, larger, scores).swapped_gap == np.inf
    assert set_distance(smaller, smaller, scores).swapped_gap == 0


def test_a_choice_of_what_may_not_be_chosen_is_infinite():
    scores = np.array([[1.0, 0, -np.inf]])
    assert set_distance(np.array([[0, 1]]), np.array([[0, 2]]), scores).swapped_gap == np.inf
    assert set_distance(np.array([[0, -1]]), np.array([[0, 1]]), scores).swapped_gap == np.inf


def test_logits():
    left = np.log(np.array([[0.5, 0.25, 0.25], [0.8, 0.1, 0.1]]))
    right = np.log(np.array([[0.25, 0.5, 0.25], [0.8, 0.1, 0.1]]))
    found = end_distance(left, right, np.array([0, -1]))
    assert found.rows == 2 and found.top1 == 0.5
    assert found.kl_max == pytest.approx(0.5 * math.log(2) - 0.25 * math.log(2))
    assert found.kl_mean == pytest.approx(found.kl_max / 2)
    assert found.nll_left == pytest.approx(math.log(2)) and found.nll_right == pytest.approx(math.log(4))
    assert found.nll_change == pytest.approx(math.log(2))

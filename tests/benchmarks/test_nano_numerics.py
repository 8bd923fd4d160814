"""Samples, likelihoods and tables of the miniature's numerics."""

import numpy as np
import pytest

from benchmarks.nano_numerics import bits_per_byte, markdown, nats_of, sample


def test_a_sample_reaches_from_the_first_token_to_the_last_and_begins_every_window():
    windows = sample(np.arange(10, 110, dtype=np.uint16), 3, 20)
    assert windows.shape == (3, 21)
    assert windows[:, 0].tolist() == [0, 0, 0]
    assert windows[[0, 1, 2], [1, 1, 20]].tolist() == [10, 50, 109]
    with pytest.raises(ValueError, match="100 tokens are fewer than 6 windows of 20"):
        sample(np.zeros(100, np.uint16), 6, 20)


def test_nats_are_those_of_the_softmax_and_do_not_overflow():
    logits = np.array([[0.0, np.log(3.0)], [1000.0, 1000.0]])
    assert nats_of(logits, np.array([1, 0])) == pytest.approx([np.log(4 / 3), np.log(2)])


def test_bits_are_divided_by_the_bytes_of_tokens_that_have_text():
    # 2 bits over tokens of 3, 1 and 0 bytes.
    assert bits_per_byte(2 * np.log(2), np.array([[2, 1, 0]]), np.array([0, 1, 3])) == pytest.approx(0.5)


def test_every_kind_of_record_is_one_table_without_its_origin():
    records = [
        {"table": "a", "name": "x", "value": 0.25, "commit": "c"},
        {"table": "b", "name": "z", "places": [1, 2], "commit": "c"},
        {"table": "a", "name": "y", "value": 2e-6, "commit": "c"},
    ]
    assert markdown(records).splitlines() == [
        "| name | value |",
        "|---|---:|",
        "| x | 0.2500 |",
        "| y | 2.0e-06 |",
        "",
        "| name | places |",
        "|---|---:|",
        "| z | 1 2 |",
    ]

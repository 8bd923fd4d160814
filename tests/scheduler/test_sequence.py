"""Tokens, placeholders, image positions and histories of one request."""

import math
import re

import numpy as np
import pytest

from scheduler.batch import DEAD
from scheduler.sequence import PLACEHOLDER, ImageSpan, SamplingError, SamplingParams, Sequence


def test_placeholders_never_count_as_finalized():
    item = Sequence("a", [5, 6, 7])
    item.append_placeholder()
    item.append_placeholder()
    assert (item.num_tokens, item.num_finalized_tokens, item.num_output_tokens) == (5, 3, 0)
    assert item.token(3) == PLACEHOLDER
    item.finalize(3, 8)
    assert (item.num_finalized_tokens, item.output_tokens, item.num_placeholders) == (4, (8,), 1)
    item.strip_placeholders()
    assert item.num_tokens == 4


def test_tokens_are_finalized_in_order():
    item = Sequence("a", [5])
    with pytest.raises(RuntimeError, match="position 1"):
        item.finalize(1, 8)
    item.append_placeholder()
    item.append_placeholder()
    with pytest.raises(RuntimeError, match="position 2"):
        item.finalize(2, 8)


def test_the_token_buffer_grows():
    item = Sequence("a", np.arange(100))
    for position in range(100, 500):
        item.append_placeholder()
        item.finalize(position, position)
    assert item.tokens(0, 500).tolist() == list(range(500))


def test_history_is_dead_before_the_start_and_in_images():
    item = Sequence("a", np.arange(10, 30), images=(ImageSpan(4, 3, b"x"),))
    assert item.history(0, 3).tolist() == [DEAD, DEAD, DEAD]
    assert item.history(2, 3).tolist() == [DEAD, 10, 11]
    assert item.history(5, 3).tolist() == [12, 13, DEAD]
    assert item.history(7, 3).tolist() == [DEAD, DEAD, DEAD]
    assert item.history(9, 3).tolist() == [DEAD, 17, 18]
    assert item.history(20, 0).tolist() == []


def test_a_generated_image_token_is_no_image_position():
    item = Sequence("a", [498, 498], images=(ImageSpan(0, 1, b"x"),))
    assert item.image_mask(0, 2).tolist() == [True, False]


def test_partial_compares_with_the_frozen_prefill_end():
    item = Sequence("a", np.arange(10))
    item.num_computed = 10
    item.append_placeholder()
    assert not item.is_partial_prefill  # although one token has no KV
    item.prefill_end = 11
    assert item.is_partial_prefill


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (([],), "empty"),
        (([3, -1],), "token id -1"),
        (([3, 4], None, (ImageSpan(1, 2, b""),)), "image span 1\\+2"),
        (([3, 4, 5], None, (ImageSpan(0, 2, b""), ImageSpan(1, 1, b""))), "image span 1\\+1"),
    ],
)
def test_faulty_requests_are_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        Sequence("a", *arguments)


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("max_tokens", (0, -1, 1.5, True, None)),
        ("temperature", (-0.5, math.nan, math.inf, "1", None)),
        ("top_k", (-1, 2**31, 2.0)),
        ("top_p", (0, -0.1, 1.01, math.nan)),
        ("min_p", (-0.1, 1.01, math.nan)),
        ("seed", (-1, 2**32, 1.0, "3")),
    ],
)
def test_sampling_numbers_outside_their_limits_are_named(field, values):
    for value in values:
        with pytest.raises(SamplingError, match=re.escape(f"{field} {value!r} must be")):
            SamplingParams(**{field: value})


def test_every_sampling_fault_is_reported_at_once_and_the_limits_are_legal():
    with pytest.raises(SamplingError) as caught:
        SamplingParams(max_tokens=0, temperature=-1.0, top_k=-1, top_p=2.0, min_p=2.0, seed=-1)
    assert len(caught.value.faults) == 6
    SamplingParams(max_tokens=1, temperature=1e30, top_k=2**31 - 1, top_p=1e-9, min_p=1, seed=2**32 - 1)
    SamplingParams(max_tokens=np.int64(3), temperature=np.float32(0.5))

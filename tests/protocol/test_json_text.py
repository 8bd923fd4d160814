"""The closed JSON reader and the canonical writer."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from v41jax.protocol.json_text import (
    NESTING_LIMIT,
    Decoded,
    canonical_json,
    decode_json,
    decode_object,
    is_nested_too_deeply,
    quote_fragment,
    unencodable,
)


def nested(depth: int) -> object:
    value: object = 0
    for _ in range(depth):
        value = {"k": value} if depth % 2 else [value]
    return value


def test_null_is_a_value_and_not_a_failure():
    assert decode_json("null") == Decoded(None)
    assert decode_json("nul") is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "NaN",
        "[Infinity]",
        "-Infinity",
        "1e999",
        "[-1e999]",
        '"\\ud800"',
        '{"\\udc00": 1}',
        "1 2",
        "'a'",
        "9" * 5000,
    ],
)
def test_what_a_client_could_not_read_back_is_not_json(text: str):
    assert decode_json(text) is None


@pytest.mark.parametrize("text", ["[" * 100_000, '{"k":' * 100_000, "[" * 100_000 + "]" * 100_000])
def test_deep_text_is_refused_without_an_exception(text: str):
    assert decode_json(text) is None


@pytest.mark.parametrize("offset", [0, 1])
def test_nesting_limit_is_exact(offset: int):
    for depth in (NESTING_LIMIT - offset, NESTING_LIMIT + 1 + offset):
        value = nested(depth)
        assert is_nested_too_deeply(value) == (depth > NESTING_LIMIT)
        assert (decode_json(json.dumps(value)) is None) == (depth > NESTING_LIMIT)


def test_brackets_in_strings_are_no_nesting():
    assert decode_json(json.dumps("[{" * 1000)) == Decoded("[{" * 1000)


def test_surrogate_pairs_are_text():
    assert decode_json('"\\ud83d\\ude00"') == Decoded("😀")
    assert unencodable("😀") is None
    assert unencodable("a\udfff") == "U+DFFF"


def test_canonical_form():
    assert canonical_json({"b": [1, 2.5, None, True], "a": "é二"}) == '{"b": [1, 2.5, null, true], "a": "é二"}'
    with pytest.raises(ValueError):
        canonical_json(float("inf"))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"a": 1}, {"a": 1}),
        ('{"a": 1}', {"a": 1}),
        (json.dumps('{"a": 1}'), {"a": 1}),
        (json.dumps(json.dumps('{"a": 1}')), None),
        ("[]", None),
        (None, None),
        (3, None),
    ],
)
def test_objects_may_be_encoded_up_to_twice(value: object, expected: object):
    assert decode_object(value) == expected


@settings(max_examples=100, deadline=None)
@given(st.lists(st.text(max_size=6), max_size=5))
def test_quoting_pieces_equals_quoting_the_whole(pieces: list[str]):
    assert '"' + "".join(map(quote_fragment, pieces)) + '"' == canonical_json("".join(pieces))


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet='[]{}",:\\u0d81eE+-.tnNaI ', max_size=12))
def test_whatever_is_read_can_be_written_and_sent(text: str):
    decoded = decode_json(text)
    if decoded is not None:
        written = canonical_json(decoded.value)
        written.encode()
        assert decode_json(written) == decoded

"""Ids to text as they arrive: whole characters, stop strings across tokens, special tokens kept or left out."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.helpers.tokenizers import tokenizer
from v41jax.detokenizer import Detokenizer, StopStrings

any_ids = st.lists(
    st.integers(0, 129279)
    | st.sampled_from([token for text in ("🜲", "漢", "é", "👩‍👩‍👧") for token in tokenizer().encode(text)]),
    max_size=15,
)


def pieces(detokenizer: Detokenizer, ids: list[int]) -> list[str]:
    return [*(detokenizer.feed([token]) for token in ids), detokenizer.finish()]


@settings(max_examples=300, deadline=None)
@given(any_ids, st.booleans())
def test_joined_pieces_are_the_whole_text(ids: list[int], skip_special: bool):
    detokenizer = Detokenizer(tokenizer(), skip_special=skip_special)
    assert "".join(pieces(detokenizer, ids)) == tokenizer().decode(ids, skip_special=skip_special)
    assert detokenizer.tokens == len(ids)
    at_once = Detokenizer(tokenizer(), skip_special=skip_special)
    assert at_once.feed(ids) + at_once.finish() == tokenizer().decode(ids, skip_special=skip_special)


@settings(max_examples=200, deadline=None)
@given(st.text(st.characters(codec="utf-8"), max_size=12))
@example("👩‍👩‍👧 漢字🜲")
def test_no_piece_of_valid_text_ends_inside_a_character(text: str):
    """One id a byte is the worst a model can do."""
    ids = [
        next(token for token in range(3, 400) if tokenizer().token_bytes(token) == bytes([byte]))
        for byte in text.encode()
    ]
    parts = pieces(Detokenizer(tokenizer()), ids)
    assert "".join(parts) == text
    assert all(part in text for part in parts)


def test_bytes_that_are_no_character_come_out_once_that_is_certain():
    first, *rest = tokenizer().encode("🜲")
    detokenizer = Detokenizer(tokenizer())
    assert detokenizer.feed([first]) == ""
    assert detokenizer.feed(tokenizer().encode("a")) == "\ufffda"
    assert detokenizer.feed([first]) == ""
    assert detokenizer.finish() == "\ufffd"
    assert rest


def test_end_tokens_have_no_text_even_when_special_tokens_are_kept():
    ids = tokenizer().encode_with_control("a<think>b<｜end▁of▁sentence｜><｜User｜>")
    assert "".join(pieces(tokenizer().detokenizer(), ids)) == "a<think>b"
    assert "".join(pieces(tokenizer().detokenizer(skip_special=True), ids)) == "a<think>b"
    title = tokenizer().encode_with_control("<｜title｜>")
    assert "".join(pieces(tokenizer().detokenizer(), title)) == "<｜title｜>"
    assert "".join(pieces(tokenizer().detokenizer(skip_special=True), title)) == ""


def test_a_stop_string_is_found_across_tokens_and_not_emitted():
    ids = tokenizer().encode("Question: what? Answer: 42\n\nQuestion: why?")
    detokenizer = tokenizer().detokenizer(stop=["\n\nQuestion:", "never"])
    parts = pieces(detokenizer, ids)
    assert "".join(parts) == "Question: what? Answer: 42"
    assert detokenizer.stop == "\n\nQuestion:"
    assert tokenizer().decode(ids[: detokenizer.tokens]).endswith("\n\nQuestion:")
    assert detokenizer.feed(ids) == "" and detokenizer.finish() == ""
    assert detokenizer.tokens < len(ids)


def test_text_that_only_begins_a_stop_string_is_released_at_the_end():
    detokenizer = tokenizer().detokenizer(stop=["stopped"])
    assert detokenizer.feed(tokenizer().encode("a stop")) == "a "
    assert detokenizer.finish() == "stop"
    assert detokenizer.stop is None


def test_a_stop_string_completed_by_the_end_of_the_stream_counts():
    broken = tokenizer().encode("🜲")[0]
    detokenizer = tokenizer().detokenizer(stop=["x\ufffd"])
    assert detokenizer.feed([*tokenizer().encode("ax"), broken]) + detokenizer.finish() == "a"
    assert detokenizer.stop == "x\ufffd"


def test_a_stop_string_may_be_a_control_literal():
    detokenizer = tokenizer().detokenizer(stop=["</think>"])
    assert detokenizer.feed(tokenizer().encode_with_control("why</think>a")) == "why"
    assert detokenizer.stop == "</think>"


def first_complete(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The definition: the shortest beginning of the text that ends in a stop string; there the longest counts."""
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end - len(stop)], stop
    return text, None


@settings(max_examples=500, deadline=None)
@given(
    st.text("abc", max_size=14),
    st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
    st.lists(st.integers(0, 14), max_size=4),
)
@example("abcd", ["bcd", "c"], [1, 2, 3])
def test_stop_strings_do_not_depend_on_the_pieces(text: str, stops: list[str], cuts: list[int]):
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    for parts in ([text[a:b] for a, b in itertools.pairwise(bounds)], list(text), [text]):
        finder = StopStrings(stops)
        emitted, found = "", None
        for part in parts:
            match = finder.feed(part)
            emitted += match.text
            found = match.stop
            if found is not None:
                break
            assert first_complete(text, stops)[0].startswith(emitted)
        if found is None:
            emitted += finder.release()
        assert (emitted, found) == first_complete(text, stops)


@pytest.mark.parametrize("stop", ["a" * 1000, "ab" * 500])
def test_repetitive_stop_strings_stay_cheap(stop: str):
    finder = StopStrings([stop])
    text = stop[:-1] + "x"
    for _ in range(20):
        emitted = "".join(finder.feed(character).text for character in text)
        assert emitted == text

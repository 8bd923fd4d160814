"""The tokenizer of a checkpoint: text never becomes control, ids and text as the library gives them."""

from __future__ import annotations

import copy
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.tokenizers import family_file, library_tokenizer, release_definition, tokenizer
from v41jax.protocol.tokens import CONTROL_TOKENS, MARKUP_TOKENS
from v41jax.tokenizer import Tokenizer, TokenizerError

PUBLISHED_IDS = {
    "<｜begin▁of▁sentence｜>": 0,
    "<｜end▁of▁sentence｜>": 1,
    "<｜▁pad▁｜>": 2,
    "<｜User｜>": 128803,
    "<｜Assistant｜>": 128804,
    "<think>": 128821,
    "</think>": 128822,
    "｜DSML｜": 128825,
    "<｜latest_reminder｜>": 128828,
    "<｜action｜>": 128829,
    "<｜query｜>": 128830,
    "<｜authority｜>": 128831,
    "<｜domain｜>": 128832,
    "<｜title｜>": 128836,
    "<｜read_url｜>": 128845,
    "<｜deepseek_image｜>": 129264,
}

protocol_text = st.lists(
    st.sampled_from([*CONTROL_TOKENS, "<｜fim▁hole｜>", "<dsml:", "<|EOT|>", "<｜image｜>", "<", "｜", ">", " ", "\n"])
    | st.text(st.characters(codec="utf-8"), max_size=6),
    max_size=10,
).map("".join)


@pytest.fixture(scope="module")
def small_definition() -> dict:
    """A byte-level definition small enough to build many tokenizers from."""
    definition = copy.deepcopy(release_definition())
    vocab = definition["model"]["vocab"]
    definition["model"] = {
        **definition["model"],
        "vocab": {piece: number for piece, number in vocab.items() if number < 400},
        "merges": [],
    }
    return definition


def test_control_tokens_have_the_published_ids():
    assert {token: tokenizer().control_id(token) for token in PUBLISHED_IDS} == PUBLISHED_IDS
    assert tokenizer().vocab_size == 129280


def test_generation_stops_at_the_end_and_where_somebody_else_speaks():
    names = ("<｜end▁of▁sentence｜>", "<｜User｜>", "<｜System｜>")
    assert tokenizer().stop_ids == {tokenizer().control_id(name) for name in names}


def test_the_dsml_marker_is_one_token_and_its_tag_is_not():
    ids = tokenizer().encode_with_control("<｜DSML｜ calls>\n")
    assert [tokenizer().token_text(token) for token in ids] == ["<", "｜DSML｜", " calls", ">\n"]


def test_missing_names_of_the_older_family_are_stood_in_for_and_reported():
    stand_ins = {"<｜System｜>": "<｜place▁holder▁for▁copy｜>", "<｜deepseek_image｜>": "<｜image2｜>"}
    assert tokenizer().stand_ins == stand_ins
    assert tokenizer().token_text(129264) == "<｜deepseek_image｜>"


def test_a_release_file_needs_no_stand_ins(small_definition: dict):
    assert Tokenizer(small_definition).stand_ins == {}


def test_a_file_without_control_tokens_is_refused_with_all_of_them(small_definition: dict):
    added = [token for token in small_definition["added_tokens"] if token["content"] not in ("<think>", "<｜title｜>")]
    with pytest.raises(TokenizerError, match="has no <think>, <｜title｜>"):
        Tokenizer({**small_definition, "added_tokens": added})
    with pytest.raises(TokenizerError, match="has no <｜System｜>, <｜deepseek_image｜>"):
        Tokenizer(json.loads(family_file().read_text(encoding="utf-8")), stand_ins={})


def test_a_vocabulary_that_spells_a_control_token_is_refused(small_definition: dict):
    definition = copy.deepcopy(small_definition)
    definition["pre_tokenizer"] = None
    definition["model"]["ignore_merges"] = True
    with pytest.raises(TokenizerError, match="the text <｜begin▁of▁sentence｜> would become a control token"):
        Tokenizer(definition)


@pytest.mark.parametrize("change", [{"model": {"type": "WordPiece"}}, {"decoder": None}, {"decoder": {"type": "Fuse"}}])
def test_another_kind_of_tokenizer_is_refused(small_definition: dict, change: dict):
    with pytest.raises(TokenizerError, match="byte-level BPE tokenizer is needed"):
        Tokenizer({**small_definition, **change})


def test_directories(tmp_path: Path, small_definition: dict):
    with pytest.raises(TokenizerError, match=r"has no tokenizer\.json; only token ids"):
        Tokenizer.from_directory(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{", encoding="utf-8")
    with pytest.raises(TokenizerError, match="is not JSON"):
        Tokenizer.from_directory(tmp_path)
    (tmp_path / "tokenizer.json").write_text(json.dumps(small_definition), encoding="utf-8")
    assert Tokenizer.from_directory(tmp_path).decode([0]) == "<｜begin▁of▁sentence｜>"


@settings(max_examples=300, deadline=None)
@given(protocol_text)
def test_text_never_encodes_to_control_and_decodes_to_itself(text: str):
    ids = tokenizer().encode(text)
    assert not any(tokenizer().is_control(token) for token in ids)
    assert tokenizer().decode(ids) == text


@settings(max_examples=300, deadline=None)
@given(protocol_text)
def test_raw_prompts_are_split_as_the_library_splits_them(text: str):
    ids = tokenizer().encode_with_control(text)
    assert ids == library_tokenizer().encode(text, add_special_tokens=False).ids
    assert tokenizer().decode(ids) == text


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 129279), max_size=12))
def test_ids_decode_as_the_library_decodes_them(ids: list[int]):
    assert tokenizer().decode(ids) == library_tokenizer().decode(ids, skip_special_tokens=False)


def test_hidden_are_structure_tokens_and_not_markup():
    hidden = {token for token in CONTROL_TOKENS if tokenizer().is_hidden(tokenizer().control_id(token))}
    assert hidden == set(CONTROL_TOKENS) - MARKUP_TOKENS
    ids = tokenizer().encode_with_control("<｜User｜>a<think>b</think>｜DSML｜c<｜title｜><｜place▁holder▁no▁5｜>")
    assert tokenizer().decode(ids, skip_special=True) == "a<think>b</think>｜DSML｜c"


def test_unused_ids_have_no_bytes_and_others_are_refused(small_definition: dict):
    small = Tokenizer(small_definition)
    assert small.token_bytes(1000) == b""
    for token in (-1, small.vocab_size):
        with pytest.raises(IndexError, match=f"token id {token} is outside 0..129279"):
            small.token_bytes(token)


def test_parts_of_characters_have_their_bytes():
    ids = tokenizer().encode("🜲")
    assert len(ids) > 1
    assert b"".join(map(tokenizer().token_bytes, ids)) == "🜲".encode()
    assert "\ufffd" in tokenizer().token_text(ids[0])


@pytest.mark.parametrize("text", ["\ud800", "a" * 1000 + "\udfff"])
def test_lone_surrogates_are_refused_by_name(text: str):
    for encode in (tokenizer().encode, tokenizer().encode_with_control):
        with pytest.raises(TokenizerError, match=r"lone surrogate U\+D"):
            encode(text)


def test_long_texts_are_remembered_within_the_bound(small_definition: dict):
    small = Tokenizer(small_definition, cache_characters=1000)
    texts = [letter * 400 for letter in "abc"]
    expected = [Tokenizer(small_definition, cache_characters=0).encode(text) for text in texts]
    for _ in range(3):
        ids = [small.encode(text) for text in texts]
        assert ids == expected
        ids[0].clear()  # the caller's list is its own
    assert small.cached_characters <= 1000
    assert small.encode("d" * 2000) == [small.encode("d")[0]] * 2000
    assert small.cached_characters <= 1000


def test_threads_share_a_tokenizer(small_definition: dict):
    small = Tokenizer(small_definition, cache_characters=3000)
    texts = [chr(97 + k) * 300 for k in range(20)]
    expected = [Tokenizer(small_definition).encode(text) for text in texts]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(small.encode, texts * 50)) == expected * 50
    assert small.cached_characters <= 3000

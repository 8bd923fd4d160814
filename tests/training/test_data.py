"""The corpus: what is held out, how documents become streams, and that the tokenizer serves the protocol."""

from __future__ import annotations

import json

import numpy as np
from tokenizers import Tokenizer

from training.data import BEGIN, END, as_dialogue, byte_lengths, encode, is_held_out, split
from training.sources import plain_text, tidy
from v41jax.protocol.tokens import ASSISTANT, USER
from v41jax.tokenizer import Tokenizer as ServingTokenizer


def test_no_text_is_in_both_parts() -> None:
    found = [(f"book/{number}", f"text {number % 90}") for number in range(300)]
    training, held_out = split(found)
    assert held_out and not {text for _, text in training} & {text for _, text in held_out}
    assert len(training) + len(held_out) == 90
    assert all(is_held_out(name) for name, _ in held_out)


def test_markup_leaves_lines_of_text() -> None:
    assert tidy(plain_text("<head><title>x</title></head><p>one&amp;  two</p><p>three</p>")) == "one& two\n\nthree"


def test_a_stream_begins_and_ends_every_document(tokenizer: Tokenizer) -> None:
    stream = encode(tokenizer, ["The window", "The page"], dialogues=False)
    assert stream.dtype == np.uint16
    assert stream[0] == BEGIN and stream[-1] == END and (stream == BEGIN).sum() == (stream == END).sum() == 2
    assert byte_lengths(tokenizer)[stream].sum() == len("The windowThe page")


def test_a_dialogue_asks_with_the_first_paragraph(tokenizer: Tokenizer) -> None:
    text = "What does a page hold?\n\n" + "It holds rows. " * 20
    made = as_dialogue(text)
    assert made is not None and made.startswith(USER + "What") and ASSISTANT in made
    assert as_dialogue("short") is None
    assert tokenizer.encode(made).ids[0] == tokenizer.token_to_id(USER)


def test_the_runtime_reads_the_tokenizer(tokenizer: Tokenizer) -> None:
    serving = ServingTokenizer(json.loads(tokenizer.to_str()))
    assert serving.decode(serving.encode("The window holds — ünïcode")) == "The window holds — ünïcode"
    assert serving.stand_ins == {}
